"""What differs between a CPU and a GPU. Everything else in the worker is written once."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo.config import EngineConfig, SchedulerConfig
from octavo.core.step import PendingStep, StepPlan
from octavo.memory_budget import (
    FixedMemory,
    KVShape,
    MemoryBudget,
    check_asked_length,
    plan_memory,
)
from octavo.models.config import ModelConfig
from octavo.models.quantization import WeightKernels
from octavo.ops import AttentionBackend, DecodeItems, HostStaging, Staging
from octavo.ops.communicator import Communicator
from octavo.ops.vocabulary import VocabularyShard
from octavo.worker.graphs import Graphs
from octavo.worker.logprobs import FoundScores
from octavo.worker.row_edits import DeviceEdits
from octavo.worker.sampler import Drawer

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """See ModelRunner."""

    def submit(self, plan: StepPlan) -> PendingStep:
        """See Executor.submit."""
        ...


# Called with the numbers of KV blocks and swap blocks, and the graphs to capture.
MakeRunner = Callable[[int, int, Graphs | None], Runner]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Moment:
    """A point in the device's work: the end of what it had been given when this was made."""

    __slots__ = ("_event", "_time")

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        """`event`: recorded just now; None: whatever was called is done."""
        self._event = event
        self._time = perf_counter()

    def wait(self) -> None:
        """Return when the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def is_reached(self) -> bool:
        """Whether the device has reached it."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds of the device's time; both moments must have been reached."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Delivered(NamedTuple):
    """Where the host finds the results of a captured step, when the device has come so far."""

    counter: Tensor  # int64 [1]
    token_ids: Tensor  # int64 [max_num_seqs]
    scores: Tensor | None  # int32 [max_num_seqs, ...]: see PendingTokens.scores


class PendingTokens(ABC):
    """Owns the token drawn last for each row, where the next step finds it before the host does."""

    @abstractmethod
    def fill(self, input_ids: Tensor, rows: Tensor) -> None:
        """Replace input_ids[i], int64 [n], by the token of rows[i], int32, where it is negative."""

    @abstractmethod
    def keep(self, token_ids: Tensor, rows: Tensor, are_edited: bool) -> None:
        """Remember token_ids[i] for rows[i]; int64 and int32 [n]. Only row 0 may repeat.
        are_edited: whether some row has a record (DeviceEdits), where its token is counted."""

    # What follows is called on devices with graphs alone.

    def begin(
        self,
        is_staged: Tensor,
        input_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        draws: Any,
        items: Sequence[DecodeItems],
    ) -> None:
        """Begin a step that computes one token of each sequence.

        If it is staged, as `fill`. Otherwise it continues the step before: the sequences of rows
        other than 0 go on with their last tokens, one position further.

        Args:
            is_staged: int32 [1]; from then on 0.
            input_ids, positions: int64 [n].
            rows: int32 [n].
            draws: of these rows, as Drawer.captured_draws returns them.
            items: see ContinuingBackend.
        """
        raise NotImplementedError

    def stage_results(self, staging: Staging, are_scored: bool) -> Delivered:
        """Put where the next `deliver` writes, and `score` if tokens are scored, and return it, as
        `next_results` does."""
        raise NotImplementedError

    def next_results(self) -> Delivered:
        """Where the `deliver` after the one asked for last writes; some steps later, it is written
        again."""
        raise NotImplementedError

    def score(
        self, logits: Tensor, token_ids: Tensor, numbers: Tensor, kinds: Sequence[int]
    ) -> None:
        """Write scores of drawn tokens, and of the most likely ones, to the host; before `deliver`.

        Args:
            logits: floating [n, vocab_size], the model's own.
            token_ids: int64 [n].
            numbers, kinds: see Drawer.stage_scores.
        """
        raise NotImplementedError

    def scores(
        self, delivered: Delivered, rows: Sequence[int], num_top: Sequence[int]
    ) -> FoundScores:
        """What `score` has written for rows of logits that ask for so many likely tokens."""
        raise NotImplementedError

    def deliver(
        self, token_ids: Tensor, rows: Tensor, counter: Tensor | None, are_edited: bool
    ) -> None:
        """Do what `keep` does, and write counter, int64 [1], and the tokens to the host."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Demand:
    """What determines the memory that an engine needs."""

    config: EngineConfig
    model_config: ModelConfig
    shape: KVShape
    dtype: torch.dtype
    num_ranks: int = 1  # of this engine on this host

    def plan(
        self, fixed: FixedMemory, total: int, kv_cache: int, swap_limit: int | None = None
    ) -> MemoryBudget:
        """See plan_memory. Raises OutOfMemory also if no sequence of the max_model_len that was
        asked for fits. The swap tier is the host's, which its ranks share."""
        swap_space = self.config.cache.swap_space // self.num_ranks
        cache = replace(self.config.cache, swap_space=swap_space)
        if swap_limit is not None:
            swap_limit //= self.num_ranks * self.config.host_share
        budget = plan_memory(cache, self.shape, fixed, total, kv_cache, swap_limit)
        check_asked_length(budget, self.shape, self.config)
        logger.info("memory budget:\n%s", budget)
        return budget


class Device(ABC):
    """One CPU or one GPU: its memory, clock and kernels, and how steps reach it.

    Where nothing else is said here, a device computes in the host's memory, and is done with a step
    when its call returns.
    """

    torch_device: torch.device
    num_ranks = 1
    """Processes of this engine that share the host."""
    is_asynchronous = False
    """Whether steps compute while the host goes on."""
    keeps_tables = False
    """Whether attention reads block tables that stay on the device."""
    computing: AbstractContextManager[object] = nullcontext()
    """A context in which all computation takes place."""

    @abstractmethod
    def adapt(self, config: EngineConfig) -> EngineConfig:
        """The settings, with the device's name and those that follow from it."""

    def resolve_kv_dtype(self, asked: str, dtype: torch.dtype) -> torch.dtype:
        """What keys and values of a model that is computed in `dtype` are cached in.

        Raises:
            ConfigError: the device does not compute with what was asked for.
        """
        return torch.float8_e4m3fn if asked == "fp8" else dtype

    @abstractmethod
    def resolve_backend(self, name: str) -> type[AttentionBackend]:
        """The attention backend of that name; "auto" is the device's fastest.

        Raises:
            ConfigError: there is no such backend, or it does not run here.
        """

    # ---------------------------------------------------------------- memory

    @property
    @abstractmethod
    def name(self) -> str:
        """The device's name, for logs and messages."""

    @abstractmethod
    def weight_kernels(self, dtype: torch.dtype) -> WeightKernels:
        """Which kernels there are for quantized weights of models that compute in `dtype`."""

    @abstractmethod
    def total_memory(self, config: EngineConfig) -> int:
        """Bytes that this process may take for weights, activations and KV."""

    @abstractmethod
    def plan_memory(self, demand: Demand) -> MemoryBudget | None:
        """The budget, before anything large is taken; None if `measure_memory` decides.

        Raises:
            OutOfMemory: what is needed cannot fit; names settings that do.
        """

    def measure_memory(self, demand: Demand, make_runner: MakeRunner) -> MemoryBudget:
        """The budget by the largest steps, run with the loaded model; raises as `plan_memory`."""
        raise NotImplementedError

    def prepare(self, model: nn.Module, config: EngineConfig, communicator: Communicator) -> None:
        """Have a model's kernels get ready, after the largest steps have run, and before the KV
        cache takes the memory; called by all ranks together."""
        return

    @abstractmethod
    def allocate_blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeroed KV blocks to compute with: [num_blocks, ...].

        Raises:
            OutOfMemory: the machine does not give so much.
        """

    def allocate_swap_blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Blocks of the swap tier, in host memory; raises as `allocate_blocks`."""
        return self.allocate_blocks(shape, dtype)

    @abstractmethod
    def settle(self, owns_process: bool) -> None:
        """Called when everything that lives as long as the engine exists, before the first step.

        owns_process: whether settings of the whole process may be changed for the steps.
        """

    @abstractmethod
    def release(self) -> None:
        """Return freed memory to the machine."""

    # ---------------------------------------------------------------- steps

    def moment(self) -> Moment:
        """The end of all work submitted to the device so far."""
        return Moment()

    def staging(self, scheduler: SchedulerConfig, num_shapes: int) -> Staging:
        """A staging for steps of these sizes, and for `num_shapes` shapes of attention layers."""
        return HostStaging()

    @abstractmethod
    def drawer(self, staging: Staging, vocab_size: int) -> Drawer:
        """How tokens are drawn from `vocab_size`; `staging` is the device's own."""

    def edits(
        self, num_rows: int, num_records: int, vocabulary: VocabularyShard
    ) -> DeviceEdits | None:
        """What edits the logits of rows by at most `num_records` records; None if the host edits
        those of all rows."""
        return None

    def pending_tokens(self, num_rows: int, edits: DeviceEdits | None) -> PendingTokens | None:
        """None if the host knows each token before it submits the next step; `edits`: the device's
        own."""
        return None

    def graphs(self, scheduler: SchedulerConfig) -> Graphs | None:
        """Graphs for steps of every size; None if the device has none."""
        return None

    def swapping(self) -> AbstractContextManager[object]:
        """A context in which blocks are copied between the tiers."""
        return nullcontext()

    @abstractmethod
    def copy_blocks(self, blocks: Tensor, copies: Tensor) -> None:
        """Carry out copies that do not depend on each other: int32 [n, 3], BlockCopy's fields."""

    def upload(self, values: NDArray[Any]) -> Tensor:
        """The values where the device computes, for a step that is about to be started."""
        return torch.from_numpy(values)

    def to_host(self, values: Tensor) -> Tensor:
        """A tensor of the host that holds `values` once the device has come so far."""
        return values
