"""A step on a GPU launches as much for a model of several KV groups as for one of a single group.

The fake model runs on this CPU; Triton's kernels are counted instead of computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.config import make_config
from octavo.ops import load_backend
from octavo.ops.communicator import SingleRank
from octavo.ops.cuda import attention as triton_backend
from octavo.worker.device import cuda, cuda_pending, cuda_sampling
from octavo.worker.model_runner import ModelRunner
from worker.fake_model import Driver, FakeModel

DEVICE = torch.device("cpu")
ONE_GROUP: list[int | None] = [None] * 12
SIX_GROUPS: list[int | None] = [None, 20, 20, 20, 20, 20] * 2
KERNELS = {
    triton_backend: ("cascade_attention", "decode_attention", "prefill_attention"),
    cuda: ("copy_blocks",),
    cuda_pending: ("fill_pending", "keep_tokens"),
}
# What gives a tensor another shape or type in the eyes of the host alone.
NO_LAUNCH = {
    *("detach", "lift_fresh", "numpy_T", "resolve_conj", "resolve_neg"),
    *("slice", "split_with_sizes", "to", "unbind", "view"),
}


class Launches(TorchDispatchMode):
    """Counts what a device would be given: operations that PyTorch dispatches, and kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        for module, names in KERNELS.items():
            for name in names:
                monkeypatch.setattr(module, name, self._kernel(name))
        monkeypatch.setattr(triton_backend, "write_kv", self._kernel("write_kv", returned=0))
        monkeypatch.setattr(cuda_sampling, "sample", self._sample)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        if name not in NO_LAUNCH:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def _kernel(self, name: str, returned: int | None = None) -> Any:
        def launch(*args: object, **options: object) -> object:
            self.counts[name] += 1
            return None if returned is None else args[returned]

        return launch

    def _sample(self, logits: torch.Tensor, draws: Any) -> torch.Tensor:
        self.counts["sample"] += 1
        return torch.zeros(len(draws.rows), dtype=torch.int64)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def count_steps(windows: Sequence[int | None], launches: Launches) -> list[Counter[str]]:
    """What each step of a little workload launches: prompts, both, and decodes."""
    model = FakeModel(windows)
    config = make_config("fake", block_size=4, max_num_seqs=16)
    device, backend = cuda.CudaDevice(DEVICE), load_backend("triton")
    parts: tuple[Any, ...] = (config, model.config, model, backend)
    runner = ModelRunner(*parts, (400, 50), device, SingleRank())
    driver = Driver(runner, model.config.kv_layout().block_sizes(4))
    counted = []

    def step(**fields: Any) -> None:
        launches.counts.clear()
        with launches:
            driver.step(**fields)
        counted.append(launches.counts.copy())

    opened = [driver.opened(i, range(5 + 9 * i)) for i in range(3)]
    step(scheduled={0: 5, 1: 14, 2: 10}, opened=opened)
    step(scheduled={0: 1, 1: 1, 2: 13})
    for _ in range(4):
        step(scheduled={0: 1, 1: 1, 2: 1})
    return counted


def test_launches_do_not_grow_with_the_groups(launches: Launches) -> None:
    six = count_steps(SIX_GROUPS, launches)
    one = count_steps(ONE_GROUP, launches)
    assert six == one
    assert all(step["index_copy_"] == 1 for step in six[:2])
    assert six[2]["decode_attention"] == 12


def test_groups_with_layers_of_the_same_shape_share_work_items(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full attention and one window: two lists of work items, whatever the number of groups."""
    planned: list[int | None] = []

    def items(seqs: object, window: int | None, *rest: Any, **options: Any) -> object:
        planned.append(window)
        return decode_items(seqs, window, *rest, **options)  # type: ignore[arg-type]

    decode_items = triton_backend.decode_items
    monkeypatch.setattr(triton_backend, "decode_items", items)
    count_steps(SIX_GROUPS, launches)
    assert planned == [None, 20] * 5  # every step but the first has decodes
