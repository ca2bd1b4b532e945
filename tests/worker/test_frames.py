"""How many calls lie between a caller and the attention kernel, where no graph was captured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import model_zoo
from octavo import LLM, SamplingParams
from octavo.config import make_config
from octavo.engine.engine import Engine
from octavo.engine.local_client import LocalClient
from octavo.models.registry import read_model_config
from octavo.ops.cpu.attention import CpuBackend
from octavo.ops.cuda import attention as triton_backend
from worker.test_gpu_runner import CudaExecutor, _plain_sampling, pytestmark  # noqa: F401

MOST_FROM_GENERATE = 12
MOST_FROM_STEP = 9
PARAMS = SamplingParams(temperature=0, max_tokens=3)


def frames_from(caller: Callable[..., Any]) -> int | None:
    """Frames on the stack from `caller` to the function that calls this one, both counted."""
    frame, number = sys._getframe(1), 1
    while frame.f_code is not caller.__code__:  # type: ignore[attr-defined]
        if frame.f_back is None:
            return None
        frame, number = frame.f_back, number + 1
    return number


def test_few_frames_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int | None, int | None]] = set()
    forward = CpuBackend.forward

    def counted(*args: Any) -> Any:
        seen.add((frames_from(LLM.generate), frames_from(Engine.step)))
        return forward(*args)

    monkeypatch.setattr(CpuBackend, "forward", counted)
    with LLM(str(model_zoo.model_directory("llama3")), num_blocks=16, device="cpu") as llm:
        llm.generate([1, 2, 3], PARAMS, use_tqdm=False)
    [(from_generate, from_step)] = seen
    assert from_generate is not None
    assert from_step is not None
    # The backend's own call of its kernel is one more.
    assert from_generate + 1 <= MOST_FROM_GENERATE
    assert from_step + 1 <= MOST_FROM_STEP


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, which is NumPy
def test_few_frames_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the interpreter, where there is no GPU."""
    seen: set[int | None] = set()
    decode_attention = triton_backend.decode_attention

    def counted(*args: Any) -> None:
        seen.add(frames_from(Engine.step))
        decode_attention(*args)

    monkeypatch.setattr(triton_backend, "decode_attention", counted)
    config = make_config(
        str(model_zoo.model_directory("llama3")),
        max_model_len=80,
        max_num_seqs=2,
        max_num_batched_tokens=24,
    )
    model_config = read_model_config(config.model).with_max_model_len(80)
    client = LocalClient(Engine(config, model_config, CudaExecutor(config, model_config, None)))
    client.add_request(client.make_request([1, 2, 3], PARAMS))
    while client.has_unfinished:
        client.step()
    [from_step] = seen
    assert from_step is not None
    assert from_step <= MOST_FROM_STEP
