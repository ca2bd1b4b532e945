"""Attention, swapping and recomputing by the cost model, where nothing was measured."""

from __future__ import annotations

from dataclasses import replace

from octavo.simulation.cost_model import PAPER_SOFTWARE, CostModel, ModelSize
from octavo.simulation.gpus import find_gpu
from octavo.simulation.step_shape import StepShape
from octavo_paper.servers import BLOCK_SIZE, DTYPE, SERVERS

SERVER = SERVERS["opt-13b"]


def cost_model(block_size: int = BLOCK_SIZE, paged: bool = True) -> CostModel:
    """OPT-13B on the paper's A100; not paged: no block has to be looked up."""
    coefficients = PAPER_SOFTWARE if paged else replace(PAPER_SOFTWARE, block_lookup_tokens=0.0)
    size = ModelSize.of(SERVER.config, DTYPE)
    return CostModel(size, find_gpu(SERVER.gpu), SERVER.num_gpus, block_size, coefficients)


def attention_microseconds(batch_size: int, context: int, paged: bool) -> float:
    """One layer's attention while `batch_size` sequences of `context` tokens decode."""
    model = cost_model(paged=paged)
    shape = StepShape(
        num_seqs=batch_size,
        num_tokens=batch_size,
        num_sampled=batch_size,
        kv_tokens=batch_size * context,
        attention_pairs=0,
    )
    without = replace(shape, kv_tokens=0)
    seconds = model.compute_seconds(shape) - model.compute_seconds(without)
    return 1e6 * seconds / SERVER.config.num_layers


def recompute_milliseconds(num_tokens: int, block_size: int) -> float:
    """A prompt of `num_tokens`, alone."""
    shape = StepShape(
        num_seqs=1,
        num_tokens=num_tokens,
        num_sampled=1,
        kv_tokens=num_tokens,
        attention_pairs=num_tokens * (num_tokens + 1) // 2,
    )
    return 1e3 * cost_model(block_size).compute_seconds(shape)


def swap_milliseconds(num_tokens: int, block_size: int) -> float:
    """Out and back in."""
    blocks = -(-num_tokens // block_size)
    shape = StepShape(
        num_seqs=0,
        num_tokens=0,
        num_sampled=0,
        kv_tokens=0,
        attention_pairs=0,
        num_swapped_blocks=2 * blocks,
    )
    return 1e3 * cost_model(block_size).swap_seconds(shape)
