"""How long a step takes: amounts of work over peak rates, times how well they are reached.

    seconds = step overhead + requests x overhead each + sequences x overhead each
            + max(weights / memory bandwidth, products / FLOPs)       every linear layer; of experts
                                                                      those that are hit
            + KV read / memory bandwidth + attention / FLOPs
            + all-reduces of tensor parallelism + block copies + swaps

Weights and products overlap on a device, so the larger one counts. All other parts follow each
other. The formula never decreases when a step has more of anything, but for the second token of a
model in FP8 with copies, which are read from there on.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import chain

from octavo.config import DTYPE_BYTES
from octavo.errors import ConfigError
from octavo.layers.config import ExpertsConfig
from octavo.models.config import ModelConfig, map_distinct
from octavo.parallel import Shard
from octavo.simulation.gpus import GPU
from octavo.simulation.step_shape import StepShape

REDUCES_PER_LAYER = 2  # all-reduces of a tensor-parallel layer: after attention and after the MLP


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What the data sheet does not say. Efficiencies are fractions of the peak.

    The defaults are those of octavo's kernels on H200s. benchmarks/fit_octavo_software.py fits most
    of them to measured decode steps of dense models on one, two and four (docs/performance.md).
    What these do not tell was measured by itself: attention of prompts, copies of blocks, and what
    a wider block adds to an all-reduce, which is as much for 64 rows as for one. The overhead of a
    sequence is an estimate: it is so small that the steps do not determine it.
    """

    step_overhead: float = 3.1e-4  # s; host and launches
    # s for each layer of a step of several tokens, and for each layer with experts of any step. One
    # token's kernels of other layers begin to read weights before the preceding ones have ended.
    layer_overhead: float = 8.3e-6
    request_overhead: float = 0.0  # s for each request of a step, however many sequences it has
    seq_overhead: float = 2.0e-7  # s for each sequence of a step
    weight_efficiency: float = 0.85  # reading weights
    gemm_efficiency: float = 0.66  # matrix products of linear layers
    kv_efficiency: float = 0.82  # reading KV
    attention_efficiency: float = 0.33  # attention of prompts
    reduce_efficiency: float = 0.48
    reduce_latency: float = 2.8e-6  # s for each round of an all-reduce, of log2(devices) rounds
    # s for each byte of the block that a row is exchanged in, whose numbers are a power of two
    reduce_block_latency: float = 2.1e-10
    copy_efficiency: float = 0.78  # copies of blocks on the device
    swap_efficiency: float = 0.84
    swap_block_latency: float = 0.0  # s for each block swapped
    # Finding a block costs as much as reading this many of its tokens: why blocks may be too small.
    block_lookup_tokens: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            positive = field.name.endswith("_efficiency")
            if not (value > 0 if positive else value >= 0) or value == float("inf"):
                kind = "positive" if positive else "0 or more"
                raise ConfigError(f"coefficients.{field.name}", f"{value} is not {kind}")


# The software of 2023 on A100s, from the paper's own measurements: at low rates a step of OPT-13B
# takes about 30 ms (12: weights and overhead); attention over 256 tokens in blocks of 16 reaches 55
# to 60% of the bandwidth, less a quarter for looking blocks up (18a); 256 tokens are recomputed in
# 36 to 39 ms, and swapped layer by layer, in 80 copies of 2.7 us a block, at 12.6 GB/s (19a).
PAPER_2023 = Coefficients(
    step_overhead=7.0e-3,
    layer_overhead=0.0,
    seq_overhead=5.0e-5,
    weight_efficiency=0.75,
    gemm_efficiency=0.66,
    kv_efficiency=0.60,
    attention_efficiency=0.30,
    reduce_latency=1.5e-5,
    reduce_block_latency=0.0,
    swap_efficiency=0.39,
    swap_block_latency=80 * 2.7e-6,
    block_lookup_tokens=4.0,
)

# How fast the paper's software was: the one cost model of all simulated figures. Five of its
# coefficients are fitted to the steps that the paper's figure 12 implies (octavo_paper has the
# steps, benchmarks/fit_paper_software.py the fit); the others are those of PAPER_2023.
#
# In figure 12 a request has one sequence, so the fit sees only what both cost together.
ONE_SEQUENCE = replace(
    PAPER_2023,
    step_overhead=7.2e-3,
    seq_overhead=3.7e-4,
    kv_efficiency=1.0,  # the bound; looking blocks up still costs a quarter of reading KV
    reduce_latency=6.5e-5,
    reduce_efficiency=1.0,  # the bound
)
# The share of that cost which each sequence has; the rest is the request's. The artifact draws
# tokens request by request and builds its inputs sequence by sequence. With this value, systems
# with parallel sampling (figure 14) break down at 0.9 of the highest rate that the artifact sweeps
# for them, on average, as those of figure 12 do (OPT-13B, Alpaca: 0.88 to 0.90).
SEQ_SHARE = 0.25
PAPER_SOFTWARE = replace(
    ONE_SEQUENCE,
    request_overhead=(1 - SEQ_SHARE) * ONE_SEQUENCE.seq_overhead,
    seq_overhead=SEQ_SHARE * ONE_SEQUENCE.seq_overhead,
)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's amounts, all devices together."""

    weight_bytes: int  # read in every step: all but experts that a router chooses
    token_flops: float  # of linear layers for each token
    logit_flops: float  # for each row of logits
    pair_flops: float  # of attention for each (query, key) pair, all layers
    kv_token_bytes: int
    block_token_bytes: int  # of a token in one KV block, which holds one group of layers
    hidden_bytes: int  # of one token's activations between layers
    num_layers: int
    num_expert_layers: int = 0  # of these, that have experts a router chooses from
    expert_bytes: int = 0  # of all experts that routers choose from
    miss_share: float = 0.0  # of the experts, that one token does not take
    # How many bytes fewer than the weights their copies have, in 12 or 7 bits: the head's, which up
    # to so many rows of logits are multiplied by; and of those of projections in layers, from and
    # up to how many tokens are multiplied by them, with these bytes.
    head_copy_saves: int = 0
    head_copy_rows: int = 0
    copies_save: tuple[tuple[int, int, int], ...] = ()
    expert_copies_save: tuple[tuple[int, int, int], ...] = ()  # the same of all experts

    @classmethod
    def of(
        cls, model: ModelConfig, dtype: str, kv_bytes: int | None = None, num_gpus: int = 1
    ) -> ModelSize:
        """
        Args:
            model: the whole one.
            kv_bytes: of a cached element; None: as many as `dtype` has.
            num_gpus: that divide the model; whether a part has a copy depends on its shape.
        """
        dtype_bytes = DTYPE_BYTES[dtype]
        embeddings = model.head.num_parameters
        element_bytes = kv_bytes or dtype_bytes
        query_sizes = map_distinct(lambda each: each.attention.output.in_features, model.layers)
        dense_bytes, expert_bytes = model.read_bytes(dtype_bytes)
        read = model.num_parameters() - model.num_lookup_parameters()
        active = model.num_active_parameters() - model.num_lookup_parameters()
        experts = model.num_expert_parameters()
        shard = model.sharded(Shard(0, num_gpus))
        head_rows = shard.head.copied_tokens.stop - 1
        saves: Counter[tuple[int, int]] = Counter()
        expert_saves: Counter[tuple[int, int]] = Counter()
        least = 2 if shard.copy_form == "float7" else 1
        for each in chain(*shard.copyable):
            most = each.copied_tokens.stop - 1
            if isinstance(each, ExpertsConfig):
                expert_saves[least, most] += num_gpus * each.copy_saves_of_all
            else:
                saves[least, most] += num_gpus * each.copy_saves(most)
        return cls(
            weight_bytes=dense_bytes,
            token_flops=2.0 * (active - embeddings),
            logit_flops=2.0 * embeddings,
            pair_flops=4.0 * sum(query_sizes),
            kv_token_bytes=sum(model.window_sizes.values()) * element_bytes,
            block_token_bytes=model.kv_layout().token_size * element_bytes,
            hidden_bytes=model.hidden_size * dtype_bytes,
            num_layers=model.num_layers,
            num_expert_layers=sum(isinstance(each.mlp, ExpertsConfig) for each in model.layers),
            expert_bytes=expert_bytes,
            miss_share=(read - active) / experts if experts else 0.0,
            head_copy_saves=num_gpus * shard.head.copy_saves(head_rows),
            head_copy_rows=max(0, head_rows),
            copies_save=_sorted(saves),
            expert_copies_save=_sorted(expert_saves),
        )

    def read_bytes(self, num_tokens: int, num_logits: int) -> float:
        """Bytes of weights that a step of so many tokens and rows of logits reads, if all choices
        of experts are equally likely. Small copies in 12 bits, which only several tokens are
        multiplied by, count for one, too."""
        saved = self.head_copy_saves if num_logits <= self.head_copy_rows else 0
        saved += _saved(self.copies_save, num_tokens)
        experts = self.expert_bytes - _saved(self.expert_copies_save, num_tokens)
        return self.weight_bytes - saved + experts * (1 - self.miss_share**num_tokens)


def _sorted(saves: Counter[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """See ModelSize.copies_save; none that save nothing."""
    return tuple(sorted((*tokens, num_bytes) for tokens, num_bytes in saves.items() if num_bytes))


def _saved(copies_save: tuple[tuple[int, int, int], ...], num_tokens: int) -> int:
    """Bytes that copies save which are read for so many tokens."""
    return sum(num_bytes for least, most, num_bytes in copies_save if least <= num_tokens <= most)


class CostModel:
    """Prices steps of one model on `num_gpus` devices that share every layer."""

    def __init__(
        self,
        size: ModelSize,
        gpu: GPU,
        num_gpus: int = 1,
        block_size: int = 16,
        coefficients: Coefficients | None = None,
    ) -> None:
        self.size = size
        self.gpu = gpu
        self.num_gpus = num_gpus
        self.block_size = block_size
        self.coefficients = c = coefficients or Coefficients()
        bandwidth = gpu.memory_bandwidth * num_gpus
        flops = gpu.flops * num_gpus
        block_bytes = block_size * size.block_token_bytes
        self._weight_byte = 1 / (bandwidth * c.weight_efficiency)
        self._token = size.token_flops / (flops * c.gemm_efficiency)
        self._logits = size.logit_flops / (flops * c.gemm_efficiency)
        self._kv_token = size.kv_token_bytes / (bandwidth * c.kv_efficiency)
        self._kv_token *= 1 + c.block_lookup_tokens / block_size
        self._pair = size.pair_flops / (flops * c.attention_efficiency)
        # A copy reads and writes.
        self._copied_block = 2 * block_bytes / (bandwidth * c.copy_efficiency)
        self._swapped_block = c.swap_block_latency + block_bytes / (
            gpu.host_bandwidth * num_gpus * c.swap_efficiency
        )
        self._reduce_fixed = self._reduce_token = 0.0
        if num_gpus > 1:
            num_reduces = REDUCES_PER_LAYER * size.num_layers
            # A ring passes every byte 2 (n - 1) / n times over each link.
            passed = 2 * (num_gpus - 1) / num_gpus * size.hidden_bytes
            # A small all-reduce goes along a tree: its latency grows with the tree's depth.
            latency = math.log2(num_gpus) * c.reduce_latency
            # A program exchanges a row, and all of them at once: how many there are matters little.
            row_block = 1 << (size.hidden_bytes - 1).bit_length()
            latency += row_block * c.reduce_block_latency
            self._reduce_fixed = num_reduces * latency
            self._reduce_token = num_reduces * passed / (gpu.link_bandwidth * c.reduce_efficiency)

    def compute_seconds(self, shape: StepShape) -> float:
        """A step without its swaps."""
        products = shape.num_tokens * self._token + shape.num_sampled * self._logits
        weights = self.size.read_bytes(shape.num_tokens, shape.num_sampled) * self._weight_byte
        c, size = self.coefficients, self.size
        num_layers = size.num_layers if shape.num_tokens > 1 else size.num_expert_layers
        return (
            c.step_overhead
            + (num_layers * c.layer_overhead if shape.num_tokens else 0.0)
            + shape.num_requests * c.request_overhead
            + shape.num_seqs * c.seq_overhead
            + (max(weights, products) + self._reduce_fixed if shape.num_tokens else 0.0)
            + shape.kv_tokens * self._kv_token
            + shape.attention_pairs * self._pair
            + shape.num_tokens * self._reduce_token
            + shape.num_copied_blocks * self._copied_block
        )

    def swap_seconds(self, shape: StepShape) -> float:
        return shape.num_swapped_blocks * self._swapped_block

    def seconds(self, shape: StepShape) -> float:
        """The whole step."""
        return self.compute_seconds(shape) + self.swap_seconds(shape)
