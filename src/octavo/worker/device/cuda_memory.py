"""A GPU's memory: what a step takes is measured by running the largest ones; the rest is KV."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence

import torch
from triton.runtime.errors import OutOfResources

from octavo.config import CacheConfig, EngineConfig
from octavo.core.step import OpenedRow, SamplingSpec, StepPlan, TableWrite
from octavo.errors import ConfigError, OutOfMemory
from octavo.host_memory import host_memory
from octavo.memory_budget import FixedMemory, MemoryBudget, format_bytes
from octavo.models.config import ModelConfig
from octavo.ops.cuda.compilation import compiled_together
from octavo.worker.device.base import Demand, MakeRunner
from octavo.worker.graphs import Graphs

logger = logging.getLogger(__name__)

# What the allocator rounds up and cannot put together again, on top of the measured peak.
_SLACK = 0.1
_SLACK_BYTES = 128 << 20
# A captured graph of some 300 kernels on the device, beside the memory that all graphs share.
_GRAPH_BYTES = 4 << 20
_SWAP_SHARE = 0.5  # of the host's free memory, at most, is pinned
_SHORT = 16  # tokens of a prompt


def free_memory(cache: CacheConfig, device: torch.device) -> int:
    """Bytes that an engine may take: its share of the device, if so much is free."""
    torch.zeros(1, device=device)  # the context is there from now on
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * cache.gpu_memory_utilization)
    if free < share:
        logger.warning(
            "only %s of the device are free, less than the share of %s",
            format_bytes(free),
            format_bytes(share),
        )
    return min(share, free)


def measure_memory(
    demand: Demand,
    make_runner: MakeRunner,
    total: int,
    device: torch.device,
    graphs: Graphs | None,
    taken_before: int = 0,
) -> MemoryBudget:
    """See Device.measure_memory.

    Args:
        total: bytes that this process may take.
        graphs: those that will be captured, of which only the sizes are read.
        taken_before: bytes that other engines of the process had taken when `total` was found.
    """
    weights = torch.cuda.memory_allocated(device) - taken_before
    scheduler = demand.config.scheduler
    try:
        fixed = _measure(demand, make_runner, weights, device, graphs)
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"a step of max_num_batched_tokens={scheduler.max_num_batched_tokens} tokens does not "
            f"fit beside the weights ({format_bytes(weights)}); lower it, or max_num_seqs"
        ) from error
    except OutOfResources as error:
        raise ConfigError(
            "device", f"the model's heads are too large for kernels on this GPU: {error}"
        ) from error
    return demand.plan(fixed, total, total - fixed.total, int(host_memory() * _SWAP_SHARE))


def _measure(
    demand: Demand,
    make_runner: MakeRunner,
    weights: int,
    device: torch.device,
    graphs: Graphs | None,
) -> FixedMemory:
    """What weights, the largest step and the graphs take, by running such a step.

    Before that, a runner of its own compiles the kernels of all steps, in several threads.
    """
    plans = largest_steps(demand.config, demand.model_config, demand.shape.block_sizes)
    at_first = torch.cuda.memory_allocated(device)
    if graphs is not None and device.type == "cuda":
        with compiled_together():
            runner = make_runner(1, 0, Graphs(graphs.sizes, graphs.mixed, device, captures=False))
            for plan in plans:
                runner.submit(plan)
        del runner
        release_cached()
    torch.cuda.reset_peak_memory_stats(device)
    present = torch.cuda.memory_allocated(device)
    workspaces = present - at_first  # which libraries and kernels made then, and keep
    runner = make_runner(1, 0, None)
    before = torch.cuda.memory_allocated(device)
    for plan in plans:
        runner.submit(plan).result()
    peak = torch.cuda.max_memory_allocated(device) - before
    fixed_parts = before - present
    del runner
    release_cached()
    graph_bytes = 0
    if graphs is not None:
        free_before = torch.cuda.mem_get_info(device)[0]
        # Steps of other sizes share what the largest ones take.
        runner = make_runner(1, 0, Graphs(graphs.sizes[-1:], graphs.mixed[-1:], device))
        release_cached()  # what the same steps took before they were captured
        graph_bytes = free_before - torch.cuda.mem_get_info(device)[0] - fixed_parts
        graph_bytes += graphs.num_graphs * _GRAPH_BYTES
        del runner
        release_cached()
    activations = workspaces + fixed_parts + int(peak * (1 + _SLACK)) + _SLACK_BYTES
    return FixedMemory(weights, activations, max(graph_bytes, 0))


def largest_steps(
    config: EngineConfig, model_config: ModelConfig, block_sizes: Sequence[int]
) -> list[StepPlan]:
    """A step of prompts alone, and one that draws for as many sequences as may run; before them, a
    short prompt, whose kernels are perhaps not those of long ones, and are compiled with it; before
    all, in a model with an encoder, one that runs it for as many tokens as it may.

    All their table entries name block 1: what they compute has no meaning.
    """
    scheduler = config.scheduler
    budget, longest = scheduler.max_num_batched_tokens, model_config.max_model_len - 1
    lengths = [min(longest, budget - start) for start in range(0, budget, longest)]
    lengths = lengths[: scheduler.max_num_seqs]
    # A penalty takes the most: all logits are copied in float32.
    spec = SamplingSpec(temperature=1.0, top_p=0.9, repetition_penalty=1.1)

    def plan(
        step_id: int, sizes: list[int], inputs: list[int], closed: list[int], encodes: bool = False
    ) -> StepPlan:
        ids = [1000 * (step_id + 1) + i for i in range(len(sizes))]
        return StepPlan(
            step_id,
            seq_ids=ids,
            num_scheduled_tokens=sizes,
            sampled=ids,
            expanded=[],
            encoded=ids if encodes else [],
            closed=closed,
            opened=[
                OpenedRow(i, (0,) * n, n, 0, spec, 0, 0, encoder_token_ids=(0,) * encoded)
                for i, n, encoded in zip(ids, sizes, inputs, strict=True)
            ],
            table_writes=[
                TableWrite(i, group, 0, (1,) * -(-max(n, encoded) // size))
                for i, n, encoded in zip(ids, sizes, inputs, strict=True)
                for group, size in enumerate(block_sizes)
            ],
        )

    encoder, steps = model_config.encoder, []
    if encoder is not None:
        longest = min(encoder.max_model_len, budget - 1)
        inputs = [min(longest, budget - 1 - start) for start in range(0, budget - 1, longest)]
        inputs = inputs[: scheduler.max_num_seqs]
        steps = [plan(0, [1] * len(inputs), inputs, [], encodes=True)]
    short = [min(_SHORT, lengths[0])]
    for sizes in (short, lengths, [1] * scheduler.max_num_seqs):
        inputs = [0 if encoder is None else 1] * len(sizes)
        steps.append(plan(len(steps), sizes, inputs, steps[-1].seq_ids if steps else []))
    return steps


def release_cached() -> None:
    """Give what was freed back to the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
