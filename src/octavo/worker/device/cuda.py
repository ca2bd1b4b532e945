"""One GPU: steps compute while the host prepares the next ones.

On a CPU the same code runs Triton's kernels through the interpreter and its graphs uncaptured, one
call after the other. Only tests do that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo.config import EngineConfig, SchedulerConfig
from octavo.errors import ConfigError, OutOfMemory
from octavo.layers.base import kernels_of
from octavo.memory_budget import MemoryBudget, format_bytes
from octavo.models.quantization import WeightKernels
from octavo.ops import AttentionBackend, Staging, load_backend, upload
from octavo.ops.communicator import Communicator
from octavo.ops.cuda.block_copy import copy_blocks
from octavo.ops.cuda.tuning import tune
from octavo.ops.vocabulary import VocabularyShard
from octavo.worker.device.base import Demand, Device, MakeRunner, Moment
from octavo.worker.device.cuda_edits import CudaEdits
from octavo.worker.device.cuda_memory import free_memory, measure_memory, release_cached
from octavo.worker.device.cuda_pending import CudaPendingTokens
from octavo.worker.device.cuda_sampling import CudaDrawer
from octavo.worker.graphs import Graphs, graph_sizes, mixed_sizes
from octavo.worker.row_edits import DeviceEdits
from octavo.worker.staging import UploadStaging

FP8_CAPABILITY = (8, 9)  # from which on a GPU converts e4m3
# Kernels have a program for each sequence, or for each work item of one, in the second dimension of
# their grids, which has up to 65,535. Cascade attention has the most, 3 for every 2 sequences.
MOST_SEQS = 40_000
# So have experts for each block of their tokens, of which a token is in up to 16.
MOST_TOKENS = 400_000
MOST_RECORDS = 1024  # of rows with penalties: 0.3 to 0.5 GB; the host edits more of them
HOPPER = 9  # the capability's first number, of GPUs that ops/cuda has quantized products for


class CudaDevice(Device):
    """An NVIDIA GPU of this machine."""

    is_asynchronous = True
    keeps_tables = True

    def __init__(self, torch_device: torch.device, num_ranks: int = 1) -> None:
        """num_ranks: processes that divide the host's memory among them."""
        self.torch_device = torch_device
        self.num_ranks = num_ranks
        self._is_gpu = torch_device.type == "cuda"
        self._total_memory = 0  # bytes that this process may take
        self._taken_before = 0  # bytes that it had taken then: those of other engines
        self._swap_stream: torch.cuda.Stream | None = None
        if self._is_gpu:
            self._swap_stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
            self.computing = _OwnStream(torch_device)

    def adapt(self, config: EngineConfig) -> EngineConfig:
        """See Device.adapt: a large GPU takes larger steps.

        Raises:
            ConfigError: more sequences may run at once, or more tokens be computed, than grids of
                kernels have room for.
        """
        for name, most in (("max_num_seqs", MOST_SEQS), ("max_num_batched_tokens", MOST_TOKENS)):
            asked = getattr(config.scheduler, name)
            if asked > most:
                raise ConfigError(name, f"{asked:,} is more than the {most:,} that a GPU takes")
        memory = torch.cuda.get_device_properties(self.torch_device).total_memory
        return replace(config, device="cuda").for_gpu(memory)

    def resolve_kv_dtype(self, asked: str, dtype: torch.dtype) -> torch.dtype:
        """See Device.resolve_kv_dtype. GPUs before Ada and Hopper have no FP8."""
        if asked == "fp8" and self._is_gpu:
            capability = torch.cuda.get_device_capability(self.torch_device)
            if capability < FP8_CAPABILITY:
                needed, own = (".".join(map(str, each)) for each in (FP8_CAPABILITY, capability))
                raise ConfigError(
                    "kv_cache_dtype",
                    f"fp8 needs a GPU of compute capability {needed} (Ada, Hopper) or more; this "
                    f"one has {own}",
                )
        return super().resolve_kv_dtype(asked, dtype)

    def resolve_backend(self, name: str) -> type[AttentionBackend]:
        backend = load_backend("triton" if name == "auto" else name)
        if name in ("cpu", "reference"):
            raise ConfigError(
                "attention_backend", f"{name!r} does not run on a GPU; there is: triton"
            )
        return backend

    # ---------------------------------------------------------------- memory

    @property
    def name(self) -> str:
        if not self._is_gpu:
            return "Triton's interpreter"
        return torch.cuda.get_device_name(self.torch_device)

    def weight_kernels(self, dtype: torch.dtype) -> WeightKernels:
        capability = torch.cuda.get_device_capability(self.torch_device)
        if dtype == torch.float32:
            return "none"
        if capability[0] == HOPPER:
            return "hopper"
        return "ada" if capability >= FP8_CAPABILITY else "ampere"

    def total_memory(self, config: EngineConfig) -> int:
        """See Device.total_memory: as it was when this was first asked."""
        if not self._total_memory:
            self._total_memory = free_memory(config.cache, self.torch_device)
            self._taken_before = torch.cuda.memory_allocated(self.torch_device)
        return self._total_memory

    def plan_memory(self, demand: Demand) -> None:
        """See Device.plan_memory: only whether the weights fit."""
        total = self.total_memory(demand.config)
        kept = demand.model_config.kept_by(self.weight_kernels(demand.dtype))
        weights = kept.least_weight_bytes(demand.dtype.itemsize)
        if weights > total:
            raise OutOfMemory(
                f"the weights take {format_bytes(weights)} in {demand.dtype}, but this "
                f"process may take {format_bytes(total)}; use a smaller model or dtype, raise "
                "gpu_memory_utilization, or free memory on the device"
            )

    def measure_memory(self, demand: Demand, make_runner: MakeRunner) -> MemoryBudget:
        graphs = self.graphs(demand.config.scheduler) if demand.config.cuda_graphs else None
        total = self.total_memory(demand.config)
        before = self._taken_before
        return measure_memory(demand, make_runner, total, self.torch_device, graphs, before)

    def prepare(self, model: nn.Module, config: EngineConfig, communicator: Communicator) -> None:
        """See Device.prepare: measures which kernels are the fastest, unless a file says it."""
        if self._is_gpu and config.tune_kernels == "auto":
            max_tokens = config.scheduler.max_num_batched_tokens
            tune(kernels_of(model), self.torch_device, max_tokens, communicator)
            release_cached()

    def allocate_blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Kernels read whole tiles and mask what lies after a sequence: that must be finite.
        return torch.zeros(tuple(shape), dtype=dtype, device=self.torch_device)

    def allocate_swap_blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Device.allocate_swap_blocks: pinned, and not zeroed."""
        try:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._is_gpu)
        except RuntimeError as error:
            size = format_bytes(torch.Size(shape).numel() * dtype.itemsize)
            raise OutOfMemory(
                f"{size} of pinned host memory for swapped blocks cannot be had; lower swap_space"
            ) from error

    def settle(self, owns_process: bool) -> None:
        gc.collect()
        if owns_process:
            gc.freeze()  # what has been made lives as long as the engine: nothing to collect in it

    def release(self) -> None:
        release_cached()

    # ---------------------------------------------------------------- steps

    def moment(self) -> Moment:
        if not self._is_gpu:
            return Moment()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return Moment(event)

    def staging(self, scheduler: SchedulerConfig, num_shapes: int) -> UploadStaging:
        most_seqs, most_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        return UploadStaging(self.torch_device, most_seqs, most_tokens, num_shapes)

    def drawer(self, staging: Staging, vocab_size: int) -> CudaDrawer:
        assert isinstance(staging, UploadStaging), "the device's own"
        return CudaDrawer(staging, vocab_size)

    def edits(self, num_rows: int, num_records: int, vocabulary: VocabularyShard) -> CudaEdits:
        most = min(num_records, MOST_RECORDS)
        return CudaEdits(num_rows, most, vocabulary, self.torch_device)

    def pending_tokens(self, num_rows: int, edits: DeviceEdits | None) -> CudaPendingTokens:
        assert isinstance(edits, CudaEdits), "the device's own"
        return CudaPendingTokens(num_rows, self.torch_device, edits)

    def graphs(self, scheduler: SchedulerConfig) -> Graphs:
        sizes = graph_sizes(scheduler.max_num_seqs)
        mixed = mixed_sizes(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        return Graphs(sizes, mixed, self.torch_device)

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """See Device.swapping: behind the steps before, which may still write these blocks, and
        before this one, on a stream of its own."""
        stream = self._swap_stream
        if stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.torch_device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def copy_blocks(self, blocks: Tensor, copies: Tensor) -> None:
        copy_blocks(blocks, copies)

    def upload(self, values: NDArray[Any]) -> Tensor:
        return upload(values, self.torch_device)

    def to_host(self, values: Tensor) -> Tensor:
        if not self._is_gpu:
            return values.clone()  # the next step draws into the same place
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)


class _OwnStream:
    """A context in which a GPU is torch's current one, where Triton launches kernels, on its
    default stream, where the steps before were started; then with the GPU and the stream of before,
    which are the program's own, and may be others in each of its threads.

    It may be entered again inside itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.default_stream(device)
        self._index = self._stream.device_index
        self._before: list[tuple[int, torch.cuda.Stream]] = []

    def __enter__(self) -> None:
        index = torch.cuda.current_device()
        if index != self._index:
            torch.cuda.set_device(self._index)
        stream = torch.cuda.current_stream()
        if stream != self._stream:
            torch.cuda.set_stream(self._stream)
        self._before.append((index, stream))

    def __exit__(self, *error: object) -> None:
        index, stream = self._before.pop()
        if stream != self._stream:
            torch.cuda.set_stream(stream)
        if index != self._index:
            torch.cuda.set_device(index)
