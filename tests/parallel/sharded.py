"""An executor whose workers are the ranks of a group, and models whose heads divide among them."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from ranks import Ranks

import model_zoo
from octavo.config import EngineConfig
from octavo.core.kv.specs import KVLayout
from octavo.core.step import PendingStep, StepPlan, StepResult
from octavo.errors import ConfigError
from octavo.executor.base import KVCapacity
from octavo.memory_budget import MemoryBudget
from octavo.models.config import ModelConfig
from octavo.models.registry import read_model_config
from octavo.ops.communicator import Communicator
from octavo.parallel import Shard
from octavo.registry import EXECUTORS
from octavo.worker.device.cpu import CpuDevice
from octavo.worker.worker import Worker

# Replace fields of a model whose heads do not divide among three ranks; a head keeps its size.
THREE = {
    "hidden_size": 72,
    "n_embd": 72,
    "num_attention_heads": 6,
    "n_head": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 96,
    "ffn_dim": 96,
    **{"d_model": 72, "num_heads": 6, "d_ff": 96},
    **{f"{side}_attention_heads": 6 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")},
}

_workers: dict[int, Worker] = {}  # of this rank
_keys = itertools.count()


@functools.cache
def model_for(name: str, size: int) -> Path | None:
    """The directory of the zoo's model, with other numbers of heads if that makes it divide."""
    directory = model_zoo.model_directory(name)
    if _divides(directory, size):
        return directory
    fields = (model_zoo.MODELS | model_zoo.ENCODER_DECODERS)[name][1]
    overrides = {field: value for field, value in THREE.items() if field in fields}
    changed = model_zoo._session_directory() / f"{name}-of-{size}"
    model_zoo.write_model(name, changed, **overrides)
    if _divides(changed, size):
        return changed
    shutil.rmtree(changed)
    return None


def _divides(directory: Path, size: int) -> bool:
    try:
        read_model_config(directory).sharded(Shard(0, size))
    except ConfigError:
        return False
    return True


@contextmanager
def executor_on(ranks: Ranks | None) -> Iterator[str]:
    """The name of an executor whose workers are those ranks; None: of the usual one."""
    if ranks is None:
        yield "local"
        return
    EXECUTORS.register("ranks", functools.partial(RanksExecutor, ranks))
    try:
        yield "ranks"
    finally:
        EXECUTORS._entries.pop("ranks")


class RanksExecutor:
    """See DeviceExecutor. All ranks must return the same results."""

    is_asynchronous = False

    def __init__(self, ranks: Ranks, config: EngineConfig, model_config: ModelConfig) -> None:
        self.config, self.model_config = config, model_config
        self._ranks = ranks
        self._key = next(_keys)
        made = ranks.call(_make_worker, self._key, config, model_config)
        (budget, layout), *others = made
        assert all(other[0].num_blocks == budget.num_blocks for other in others)
        self.budgets = [budget for budget, _ in made]
        self.capacity = KVCapacity(
            budget.num_blocks,
            budget.num_swap_blocks,
            layout,
            sum(each.block_bytes for each in self.budgets),
            budget,
        )

    def submit(self, plan: StepPlan) -> PendingStep:
        self._ranks.start(_submit, self._key, plan)
        return _Pending(self._ranks)

    def shutdown(self) -> None:
        self._ranks.call(_drop, self._key)


class _Pending:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._outcome: StepResult | None = None

    def result(self) -> StepResult:
        if self._outcome is None:
            first, *others = self._ranks.results()
            for other in others:
                assert _comparable(other) == _comparable(first)
            self._outcome = first
        return self._outcome


def _comparable(result: StepResult) -> str:
    """What is drawn and scored, to the last digit; NaN equals itself."""
    candidates = result.candidates
    arrays = candidates and (candidates.token_ids.tolist(), candidates.logprobs.tolist())
    values = (result.token_ids, result.draws, arrays, result.logprobs, result.prompt_logprobs)
    return repr((*values, sorted(result.errors)))


def _make_worker(
    communicator: Communicator, key: int, config: EngineConfig, model_config: ModelConfig
) -> tuple[MemoryBudget, KVLayout]:
    device = CpuDevice(1)
    config = replace(config, executor="auto")  # this process does not know that of the tests
    worker = Worker(device.adapt(config), model_config, device, communicator)
    _workers[key] = worker
    return worker.budget, worker.layout


def _submit(communicator: Communicator, key: int, plan: StepPlan) -> StepResult:
    return _workers[key].runner.submit(plan).result()


def _drop(communicator: Communicator, key: int) -> None:
    _workers.pop(key).shutdown()


def spoil_embedding(communicator: Communicator, token_id: int) -> bool:
    """Put NaN into this rank's row of a token; whether it holds that."""
    (worker,) = _workers.values()
    embedding = worker.runner._model.embedding
    row = token_id - embedding.start
    is_held = 0 <= row < len(embedding.weight)
    if is_held:
        embedding.weight[row] = torch.nan
    return is_held
