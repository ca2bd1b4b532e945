"""Where kernels are tested: in Triton's interpreter on the CPU, or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gluon_emulator import Emulated

from octavo.ops.cuda import (
    attention,
    attention_cascade,
    attention_decode,
    attention_prefill_hopper,
)

HAS_GPU = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="kernels are compiled")),
        pytest.param("cuda", marks=ON_GPU),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _programs_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the interpreter of these tests lets them (triton_interpreter.py)."""
    if not HAS_GPU:
        monkeypatch.setattr(attention_decode, "_may_wait", lambda device: True)


@pytest.fixture(autouse=True)
def _unwritten_memory_is_filled() -> Iterator[None]:
    """What `torch.empty` gives holds NaN, or the largest integers, so that results cannot depend on
    it. On a GPU that would be more kernels in each graph."""
    if HAS_GPU:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)  # without it torch fills nothing
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the interpreter, programs that have nothing to do take as long as others."""
    configs = attention_decode.decode_config, attention_cascade.cascade_config
    if not HAS_GPU:
        for module in (attention, attention_decode, attention_cascade):
            monkeypatch.setattr(module, "MAX_PROGRAMS", 8)
        monkeypatch.setattr(attention, "num_sms", lambda device: 4)
    for config in configs:
        config.cache_clear()
    yield
    for config in configs:
        config.cache_clear()


@pytest.fixture
def emulated_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt kernel of Hopper GPUs, carried out by the emulator of three SMs."""
    kernel = Emulated(attention_prefill_hopper.prefill_hopper_kernel)
    monkeypatch.setattr(attention_prefill_hopper, "prefill_hopper_kernel", kernel)
    monkeypatch.setattr(attention_prefill_hopper, "num_sms", lambda device: 3)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors hold NaN, and the largest integer, so that what a kernel leaves out shows."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
