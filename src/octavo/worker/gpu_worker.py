"""One GPU: loads the model, measures what a step takes, and gives the rest to the KV cache."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from triton.runtime.errors import OutOfResources

from octavo.config import EngineConfig
from octavo.core.kv.specs import SlidingWindow, group_layers
from octavo.core.step import OpenedRow, PendingStep, SamplingSpec, StepPlan, TableWrite
from octavo.errors import ConfigError, OutOfMemory
from octavo.host_memory import host_memory
from octavo.memory_budget import (
    FixedMemory,
    KVShape,
    MemoryBudget,
    check_asked_length,
    format_bytes,
    plan_memory,
)
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.loader import load_model
from octavo.ops import AttentionBackend, load_backend
from octavo.worker.block_tables import DeviceTables
from octavo.worker.device_kv_cache import DeviceKVCache
from octavo.worker.gpu_runner import GpuParts, GpuRunner
from octavo.worker.graphs import Graphs, graph_sizes, mixed_sizes
from octavo.worker.input_batch import InputBatch
from octavo.worker.staging import DeviceStaging
from octavo.worker.worker import DTYPES, kv_block_shape, make_backend, resolve_backend

logger = logging.getLogger(__name__)

# What the allocator rounds up and cannot put together again, on top of the measured peak.
_SLACK = 0.1
_SLACK_BYTES = 128 << 20
# A captured graph of some 300 kernels on the device, beside the memory that all graphs share.
_GRAPH_BYTES = 4 << 20
_SWAP_SHARE = 0.5  # of the host's free memory, at most, is pinned


class GpuWorker:
    """Owns one device: the model's weights, the KV cache, the rows and the captured graphs."""

    is_asynchronous = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        """Raises ConfigError, ModelError or OutOfMemory, the last with settings that would do."""
        started = time.perf_counter()
        self._config = config
        self._model_config = model_config
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._dtype = DTYPES[config.dtype_for(model_config.dtype)]
        backend_class = resolve_backend(config.attention_backend, "triton")
        if backend_class is not load_backend("triton"):
            name = config.attention_backend
            raise ConfigError(
                "attention_backend", f"{name!r} does not run on a GPU; there is: triton"
            )
        self._backend_class = backend_class
        self.layout = group_layers(model_config.kv_specs())
        block_shape = kv_block_shape(config, model_config, backend_class)
        layer_bytes = math.prod(block_shape[1:]) * self._dtype.itemsize
        self._shape = KVShape(self.layout, config.cache.block_size, layer_bytes)
        total = self._room()
        self._check_weights(total)
        with _refused("the weights", "use a smaller model or dtype"):
            self._model = load_model(
                model_config, self._dtype, self._device, config.load_format, config.seed
            )
        loaded = time.perf_counter()
        fixed = self._measure()
        profiled = time.perf_counter()
        self.budget = self._plan(fixed, total)
        logger.info("memory budget:\n%s", self.budget)
        with _refused("the KV cache and graphs", "lower gpu_memory_utilization or kv_cache_memory"):
            self._runner: GpuRunner | None = self._make_runner(
                self.budget.num_blocks, self.budget.num_swap_blocks, self._graphs()
            )
        gc.collect()
        if config.owns_process:
            gc.freeze()  # what has been made lives as long as the engine: nothing to collect in it
        logger.info(
            "weights took %.1f s, measuring %.1f s, KV cache and graphs %.1f s",
            loaded - started,
            profiled - loaded,
            time.perf_counter() - profiled,
        )

    def submit(self, plan: StepPlan) -> PendingStep:
        assert self._runner is not None, "the worker was shut down"
        return self._runner.submit(plan)

    def shutdown(self) -> None:
        """Let go of weights and KV cache. A second call does nothing."""
        if self._runner is not None:
            torch.cuda.synchronize()
            self._runner = None
            del self._model
            gc.collect()
            torch.cuda.empty_cache()

    # ---------------------------------------------------------------- memory

    def _room(self) -> int:
        """Bytes that this process may take: its share of the device, if so much is free."""
        torch.zeros(1, device=self._device)  # the context is there from now on
        free, total = torch.cuda.mem_get_info(self._device)
        share = int(total * self._config.cache.gpu_memory_utilization)
        if free < share:
            logger.warning(
                "only %s of the device are free, less than the share of %s",
                format_bytes(free),
                format_bytes(share),
            )
        return min(share, free)

    def _check_weights(self, total: int) -> None:
        weights = self._model_config.weight_bytes(self._dtype.itemsize)
        if weights > total:
            raise OutOfMemory(
                f"the weights take {format_bytes(weights)} in {self._dtype}, but this process may "
                f"take {format_bytes(total)}; use a smaller model or dtype, raise "
                "gpu_memory_utilization, or free memory on the device"
            )

    def _graphs(self) -> Graphs | None:
        if not self._config.cuda_graphs:
            return None
        scheduler = self._config.scheduler
        sizes = graph_sizes(scheduler.max_num_seqs)
        mixed = mixed_sizes(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        return Graphs(sizes, mixed, self._device)

    def _measure(self) -> FixedMemory:
        """What weights, the largest step and the graphs take, by running such a step."""
        weights = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            runner = self._make_runner(1, 0, None)
            before = torch.cuda.memory_allocated(self._device)
            for plan in self._largest_steps():
                runner.submit(plan).result()
            peak = torch.cuda.max_memory_allocated(self._device) - before
            fixed_parts = before - weights
            del runner
            _release()
            graphs = 0
            wanted = self._graphs()
            if wanted is not None:
                free_before = torch.cuda.mem_get_info(self._device)[0]
                # Steps of other sizes share what the largest ones take.
                largest = Graphs(wanted.sizes[-1:], wanted.mixed[-1:], self._device)
                runner = self._make_runner(1, 0, largest)
                _release()  # what the same steps took before they were captured
                graphs = free_before - torch.cuda.mem_get_info(self._device)[0] - fixed_parts
                graphs += wanted.num_graphs * _GRAPH_BYTES
                del runner
                _release()
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemory(
                f"a step of max_num_batched_tokens="
                f"{self._config.scheduler.max_num_batched_tokens} tokens does not fit beside the "
                f"weights ({format_bytes(weights)}); lower it, or max_num_seqs"
            ) from error
        except OutOfResources as error:
            raise ConfigError(
                "device", f"the model's heads are too large for kernels on this GPU: {error}"
            ) from error
        activations = fixed_parts + int(peak * (1 + _SLACK)) + _SLACK_BYTES
        return FixedMemory(weights, activations, max(graphs, 0))

    def _plan(self, fixed: FixedMemory, total: int) -> MemoryBudget:
        swap_limit = int(host_memory() * _SWAP_SHARE)
        cache = self._config.cache
        budget = plan_memory(cache, self._shape, fixed, total, total - fixed.total, swap_limit)
        check_asked_length(budget, self._shape, self._config)
        return budget

    def _largest_steps(self) -> list[StepPlan]:
        """A step of prompts alone, and one that draws for as many sequences as may run.

        All their table entries name block 1: what they compute has no meaning.
        """
        scheduler, block_size = self._config.scheduler, self._config.cache.block_size
        budget, longest = scheduler.max_num_batched_tokens, self._model_config.max_model_len - 1
        lengths = [min(longest, budget - start) for start in range(0, budget, longest)]
        lengths = lengths[: scheduler.max_num_seqs]
        count = scheduler.max_num_seqs
        # A penalty takes the most: the logits are copied in float32.
        spec = SamplingSpec(temperature=1.0, top_p=0.9, repetition_penalty=1.1)

        def plan(step_id: int, sizes: list[int], closed: list[int]) -> StepPlan:
            ids = [1000 * (step_id + 1) + i for i in range(len(sizes))]
            return StepPlan(
                step_id,
                seq_ids=ids,
                num_scheduled_tokens=sizes,
                sampled=ids,
                expanded=[],
                closed=closed,
                opened=[
                    OpenedRow(i, (0,) * n, n, 0, spec, 0, 0)
                    for i, n in zip(ids, sizes, strict=True)
                ],
                table_writes=[
                    TableWrite(i, group, 0, (1,) * -(-n // block_size))
                    for i, n in zip(ids, sizes, strict=True)
                    for group in range(len(self.layout.groups))
                ],
            )

        first = plan(0, lengths, [])
        return [first, plan(1, [1] * count, first.seq_ids)]

    def _make_runner(
        self, num_blocks: int, num_swap_blocks: int, graphs: Graphs | None
    ) -> GpuRunner:
        return make_gpu_runner(
            self._config,
            self._model_config,
            self._model,
            self._backend_class,
            (num_blocks, num_swap_blocks),
            graphs,
            self._device,
        )


def make_gpu_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    model: CausalLM,
    backend_class: type[AttentionBackend],
    num_blocks: tuple[int, int],
    graphs: Graphs | None,
    device: torch.device,
) -> GpuRunner:
    """A runner with a KV cache of so many blocks on the device and in the swap tier.

    `device` may be a CPU, where Triton's interpreter runs the kernels (in tests).
    """
    scheduler, block_size = config.scheduler, config.cache.block_size
    layout = group_layers(model_config.kv_specs())
    dtype = next(model.parameters()).dtype
    shapes = {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window)
        for layer in model.attention_layers
    }
    staging = DeviceStaging(
        device, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, len(shapes)
    )
    kv_cache = DeviceKVCache(
        *num_blocks, kv_block_shape(config, model_config, backend_class), dtype, staging, device
    )
    # While rows fork, children are there before their parents have gone; row 0 is padding.
    num_rows = 2 * scheduler.max_num_seqs + 1
    max_blocks = -(-model_config.max_model_len // block_size)
    have_windows = [isinstance(group.spec, SlidingWindow) for group in layout.groups]
    tables = DeviceTables(block_size, have_windows, num_rows, max_blocks, device, staging)
    parts = GpuParts(
        model,
        make_backend(backend_class, model, layout, kv_cache.blocks, block_size),
        kv_cache,
        InputBatch(block_size, len(layout.groups), num_rows, tables, staging),
        tables,
        staging,
        model_config.vocab_size,
        model_config.hidden_size,
        dtype,
        device,
        num_rows,
    )
    return GpuRunner(parts, graphs)


@contextmanager
def _refused(what: str, instead: str) -> Iterator[None]:
    """Say in our words that the device has no room for something, and what may help."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{what} do not fit into what is free on the device (another program may have taken "
            f"memory meanwhile); {instead}, or free some. PyTorch says: {error}"
        ) from error


def _release() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
