"""Batches with scrambled block tables, and what is needed to run them through any backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import (
    AttentionBatch,
    CascadeSegments,
    HeadNorms,
    KVScales,
    LayerPlace,
    LayerSpec,
    RotaryTable,
    ScoreFunction,
    StagingPart,
    load_backend,
    make_backend,
)
from octavo.ops.base import AttentionBackend


@dataclass(frozen=True)
class Case:
    """One layer, and sequences given as (cached tokens, new tokens)."""

    sequences: tuple[tuple[int, int], ...]
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    window: int | None = None
    dtype: torch.dtype = torch.float32
    rotary_dim: int | None = None
    head_norm: bool = False
    seed: int = 0
    interleaved: bool = False  # the pairs of the rotary embedding
    scores: ScoreFunction | None = None  # None: scaled dot products
    kv_scales: KVScales | None = None
    value_norm: bool = False  # beside head_norm

    @property
    def layer(self) -> LayerSpec:
        return LayerSpec(
            layer_id=5,
            num_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scores=self.scores or ScoreFunction(self.head_dim**-0.5),
            window=self.window,
            kv_scales=self.kv_scales,
        )

    def alone(self, index: int) -> Case:
        return replace(self, sequences=(self.sequences[index],))


def some_scores(case: Case, *features: str) -> ScoreFunction:
    """A score function whose features, of those in FEATURES, change the case's results a lot."""
    values = {name: FEATURES[name](case.layer.num_heads) for name in features}
    return ScoreFunction(2 * case.head_dim**-0.5, **values)


# The optional fields of ScoreFunction, each with values for some query heads.
FEATURES: dict[str, Callable[[int], Any]] = {
    "softcap": lambda num_heads: 1.5,
    "alibi_slopes": lambda num_heads: tuple(
        2.0 ** (-3 * (i + 1) / num_heads) for i in range(num_heads)
    ),
    "sinks": lambda num_heads: SimpleNamespace(weight=torch.linspace(-1, 4, num_heads)),
    "relative_bias": lambda num_heads: StepBias(num_heads),
}


class StepBias:
    """A relative bias with a number for each distance up to the last one."""

    max_distance = 20

    def __init__(self, num_heads: int) -> None:
        self.weight = torch.randn(self.max_distance + 1, num_heads, generator=seeded(5)) * 2

    def biases(self, distances: Tensor) -> Tensor:
        """float32 [num_heads, *distances.shape]."""
        return self.weight[(-distances).clamp(0, self.max_distance)].movedim(-1, 0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rotary_table(rotary_dim: int, device: str = "cpu", interleaved: bool = False) -> RotaryTable:
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    angles = torch.arange(4096).float()[:, None] * inverse
    return RotaryTable(angles.cos().to(device), angles.sin().to(device), interleaved)


class DeviceStaging:
    """Uploads each array by itself."""

    max_num_seqs, max_num_tokens = 256, 1 << 17

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def put(
        self, name: str, values: NDArray[np.int32], capacity: int, part: StagingPart = "sequences"
    ) -> Tensor:
        assert values.size <= capacity, name
        return torch.from_numpy(values).to(self._device)


class UnitNorm:
    """A head norm whose weight is not 1."""

    def __init__(self, head_dim: int, dtype: torch.dtype, device: str) -> None:
        self.weight: Tensor | None = torch.linspace(0.5, 1.5, head_dim, device=device).to(dtype)
        self.eps = 1e-5

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        squares = hidden.float().square().mean(-1, keepdim=True)
        normed = hidden.float() * torch.rsqrt(squares + self.eps)
        if self.weight is not None:
            normed = normed * self.weight.float()
        return normed.to(hidden.dtype), hidden


class UnscaledNorm(UnitNorm):
    """A head norm without a weight, as values have it; its epsilon shows."""

    def __init__(self) -> None:
        self.weight = None
        self.eps = 0.3


class Bench:
    """A backend over a KV cache full of NaN, driven by steps of (sequence, new tokens)."""

    def __init__(
        self,
        backend: str,
        case: Case,
        num_layers: int = 2,
        capacity: int = 1024,
        device: str = "cpu",
    ) -> None:
        self.case = case
        self.device = device
        layer, size = case.layer, case.block_size
        kind = load_backend(backend)
        shape = kind.kv_block_shape(size, layer.num_kv_heads, layer.head_dim)
        self.blocks_per_seq = -(-capacity // size)
        num_blocks = 1 + self.blocks_per_seq * len(case.sequences)
        stored = case.dtype if case.kv_scales is None else torch.float8_e4m3fn
        cache = torch.full(
            (num_blocks, num_layers, *shape), float("nan"), dtype=stored, device=device
        )
        places = [LayerPlace(0, num_layers - 1)]
        self.backend: AttentionBackend = make_backend(
            kind, [layer], places, cache, size, case.dtype
        )
        order = (
            torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(case.seed)) + 1
        )
        self.tables = order.view(len(case.sequences), self.blocks_per_seq).int()
        self.computed = [0] * len(case.sequences)
        self.unsound: int | None = None  # a sequence whose inputs are NaN
        self.rotary = None
        if case.rotary_dim is not None:
            self.rotary = rotary_table(case.rotary_dim, device, case.interleaved)
        norm = UnitNorm(case.head_dim, case.dtype, device)
        of_values = UnscaledNorm() if case.value_norm else None
        self.head_norms = HeadNorms(norm, norm, of_values) if case.head_norm else None

    def step(
        self, work: Sequence[tuple[int, int]], cascade: Sequence[CascadeSegments | None] = ()
    ) -> list[Tensor]:
        """Compute the next tokens of some sequences; their attention outputs, one a sequence."""
        case = self.case
        inputs = [self._tokens(seq, self.computed[seq], count) for seq, count in work]
        for seq, count in work:
            self.computed[seq] += count
        lens = torch.tensor([count for _, count in work], dtype=torch.int32)
        contexts = torch.tensor([self.computed[seq] for seq, _ in work], dtype=torch.int32)
        starts = torch.zeros(len(work) + 1, dtype=torch.int32)
        starts[1:] = lens.cumsum(0)
        positions = torch.cat(
            [torch.arange(self.computed[s] - n, self.computed[s]) for s, n in work]
        )
        owner = torch.repeat_interleave(torch.tensor([s for s, _ in work]), lens.long())
        blocks = self.tables[owner, positions // case.block_size].long()
        tables = self.tables[[s for s, _ in work]].clone()
        for i, (seq, count) in enumerate(
            work
        ):  # holes: what no query sees, and what is not there yet
            if case.window is not None:
                gone = max(0, self.computed[seq] - count - case.window + 1) // case.block_size
                tables[i, :gone] = 0
            tables[i, -(-self.computed[seq] // case.block_size) :] = 0
        self.backend.plan(
            AttentionBatch(
                query_lens=lens,
                context_lens=contexts,
                query_starts=starts,
                positions=positions,
                block_tables=[tables.to(self.device)],
                slots=[blocks * case.block_size + positions % case.block_size],
                staging=DeviceStaging(torch.device(self.device)),
                cascade=cascade,
            )
        )
        fused = torch.cat(inputs).to(self.device)
        heads, kv_heads = case.layer.num_heads, case.num_kv_heads
        query, key, value = fused.split([heads, kv_heads, kv_heads], dim=1)
        output = self.backend.forward(
            case.layer.layer_id, query, key, value, self.rotary, self.head_norms
        )
        return list(output.split(lens.tolist()))

    def run(self) -> list[Tensor]:
        """The case as given: a step for the cached tokens; then all new tokens in one batch."""
        cached = [(i, c) for i, (c, _) in enumerate(self.case.sequences) if c]
        if cached:
            self.step(cached)
        return self.step([(i, n) for i, (_, n) in enumerate(self.case.sequences)])

    def read(self, seq: int, token: int) -> tuple[Tensor, Tensor]:
        size = self.case.block_size
        slot = int(self.tables[seq, token // size]) * size + token % size
        return self.backend.read_slot(self.case.layer.layer_id, slot)

    def _tokens(self, seq: int, begin: int, count: int) -> Tensor:
        """Query, key and value of some tokens as one fused projection [count, heads, head_dim]."""
        case = self.case
        heads = case.layer.num_heads + 2 * case.num_kv_heads
        cached, new = case.sequences[seq]
        shape = (max(cached + new, begin + count, 512), heads, case.head_dim)
        generator = torch.Generator().manual_seed(1000 * cached + new)
        inputs = torch.randn(shape, generator=generator).to(case.dtype)[begin : begin + count]
        return torch.full_like(inputs, torch.nan) if seq == self.unsound else inputs


def e4m3_probes(scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(numbers [n, 1, 64], those as torch caches them in an FP8 KV cache): all numbers of e4m3,
    those halfway between two, their neighbours, and numbers of every size."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    halfway = (numbers[1:] + numbers[:-1]) / 2
    near = [halfway * (1 + sign * 2**-20) for sign in (-1, 1)]
    spread = torch.arange(-(2**31), 2**31, 2_097_143).int().view(torch.float32).double()
    special = torch.tensor([math.inf, -math.inf, math.nan, 448.5, 464, 465, 1e38]).double()
    x = (torch.cat([special, numbers, halfway, *near, spread]) * scale).to(dtype)
    x = x[: len(x) // 64 * 64].view(-1, 1, 64)
    return x, KVScales.quantize(x, scale)


def assert_same_e4m3(got: Tensor, expected: Tensor) -> None:
    """To the bit, but for the sign of NaN."""
    is_nan = expected.float().isnan()
    assert got[is_nan].float().isnan().all()
    assert torch.equal(got.view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan])


def check_that_nan_stays_alone(backend: str, case: Case, device: str = "cpu") -> None:
    """Whichever sequence of a batch is NaN, the others' outputs do not change."""
    wanted = Bench(backend, case, capacity=192, device=device).run()
    for unsound in range(len(wanted)):
        bench = Bench(backend, case, capacity=192, device=device)
        bench.unsound = unsound
        for seq, (got, expected) in enumerate(zip(bench.run(), wanted, strict=True)):
            if seq == unsound:
                assert got.isnan().all()
            else:
                assert torch.equal(got, expected), (unsound, seq)
