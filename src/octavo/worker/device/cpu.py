"""A CPU: memory is taken when it is written, and a step is done when its call returns."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.errors import ConfigError, OutOfMemory
from octavo.host_memory import host_memory, keep_freed_memory, num_cpus, return_freed_memory
from octavo.memory_budget import (
    FixedMemory,
    MemoryBudget,
    cpu_cache,
    estimate_activations,
    format_bytes,
)
from octavo.models.quantization import WeightKernels
from octavo.ops import AttentionBackend, Staging, load_backend
from octavo.ops.cpu.int8 import has_int8_product
from octavo.worker.device.base import Demand, Device
from octavo.worker.device.cpu_sampling import CpuDrawer


class CpuDevice(Device):
    """The CPUs that this process may use."""

    torch_device = torch.device("cpu")

    def __init__(self, num_threads: int | None = None, num_ranks: int = 1) -> None:
        """
        Args:
            num_threads: with how many torch computes here; None: as many as it does anyway.
            num_ranks: processes that divide these threads and the host's memory among them.

        Raises:
            ConfigError: more threads than CPUs: each would take memory and wait its turn, and
                OpenMP ends the process where it can make no more.
        """
        self.num_ranks = num_ranks
        available = num_cpus()
        if num_threads is not None and num_threads > available:
            raise ConfigError(
                "num_threads",
                f"{num_threads} is more than the {available} CPUs that this process may use",
            )
        if num_ranks > 1:
            num_threads = max(1, (num_threads or torch.get_num_threads()) // num_ranks)
        if num_threads is not None:
            self.computing = _TorchThreads(num_threads)

    def adapt(self, config: EngineConfig) -> EngineConfig:
        """See Device.adapt."""
        return replace(config, device="cpu")

    def resolve_backend(self, name: str) -> type[AttentionBackend]:
        if name == "triton":
            raise ConfigError("attention_backend", "'triton' runs on a GPU, and this is a CPU")
        return load_backend("cpu" if name == "auto" else name)

    @property
    def name(self) -> str:
        return "this CPU"

    def weight_kernels(self, dtype: torch.dtype) -> WeightKernels:
        return "cpu" if has_int8_product() else "none"

    def total_memory(self, config: EngineConfig) -> int:
        return host_memory() // (self.num_ranks * config.host_share)

    def plan_memory(self, demand: Demand) -> MemoryBudget:
        """See Device.plan_memory: by an estimate; weights and both tiers share the host's RAM."""
        model, dtype_bytes = demand.model_config, demand.dtype.itemsize
        kept = model.kept_by(self.weight_kernels(demand.dtype))
        activations = estimate_activations(model, demand.config.scheduler, dtype_bytes)
        fixed = FixedMemory(kept.cpu_weight_bytes(dtype_bytes), activations)
        total = self.total_memory(demand.config)
        return demand.plan(fixed, total, cpu_cache(total, fixed, self.num_ranks))

    def allocate_blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See Device.allocate_blocks. Memory is taken when a block is first written."""
        num_bytes = prod(shape) * dtype.itemsize
        # Fresh anonymous pages are zero without being touched; torch.zeros would write them all.
        try:
            memory = mmap.mmap(-1, num_bytes)
        except (OSError, MemoryError) as error:
            raise OutOfMemory(
                f"{format_bytes(num_bytes)} of host memory for KV blocks cannot be had ({error}); "
                "lower kv_cache_memory, num_blocks or swap_space"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype).view(*shape)

    def release(self) -> None:
        return_freed_memory()

    def settle(self, owns_process: bool) -> None:
        self.release()
        if owns_process:
            keep_freed_memory()

    def drawer(self, staging: Staging, vocab_size: int) -> CpuDrawer:
        return CpuDrawer()

    def copy_blocks(self, blocks: Tensor, copies: Tensor) -> None:
        # A block is one stretch of bytes: a plain loop of memcpy takes a half to a tenth of the
        # time of torch's indexed copies.
        block_bytes = blocks.view(len(blocks), -1).view(torch.uint8).numpy()
        for source, target, _ in copies.tolist():
            np.copyto(block_bytes[target], block_bytes[source])


class _TorchThreads:
    """A context in which torch computes with `count` threads; then with as many as before.

    It may be entered again inside itself.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(torch.get_num_threads())
        if self._before[-1] != self._count:
            torch.set_num_threads(self._count)

    def __exit__(self, *error: object) -> None:
        before = self._before.pop()
        if before != self._count:
            torch.set_num_threads(before)
