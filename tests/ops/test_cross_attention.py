"""Cross-attention: every backend against torch's own attention over whole encoder inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_cases import DeviceStaging, seeded
from test_scores import BACKENDS, TOLERANCE
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops import (
    AttentionBatch,
    EncodedInputs,
    KVScales,
    LayerPlace,
    LayerSpec,
    ScoreFunction,
    cached_dtype,
    load_backend,
    make_backend,
)
from octavo.ops.cuda import attention as triton_backend

pytestmark = pytest.mark.usefixtures("few_programs")

WITH_REFERENCE = [pytest.param("reference", "cpu", id="reference"), *BACKENDS]


@dataclass(frozen=True)
class Crossed:
    """Encoder inputs and, for each, the new decoder tokens that attend to it."""

    encoder_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    kv_scales: KVScales | None = None

    def run(self, name: str, device: str) -> tuple[list[Tensor], list[Tensor]]:
        """What the backend attends to in a cache full of NaN, and what torch does."""
        heads, size = self.num_kv_heads * self.group, self.block_size
        scores = ScoreFunction(0.3, self.softcap)
        cross = LayerSpec(
            *(1, heads, self.num_kv_heads, self.head_dim, scores),
            reads_encoder=True,
            kv_scales=self.kv_scales,
        )
        self_layer = replace(cross, layer_id=0, scores=ScoreFunction(1.0), reads_encoder=False)
        kind = load_backend(name)
        width = -(-max(self.encoder_lens) // size)
        count = len(self.encoder_lens)
        shape = kind.kv_block_shape(size, self.num_kv_heads, self.head_dim)
        stored = cached_dtype([self_layer, cross], self.dtype)
        cache = torch.full((1 + count * width, 1, *shape), torch.nan, dtype=stored)
        places = [LayerPlace(0, 0), LayerPlace(1, 0)]
        layers = [self_layer, cross]
        backend = make_backend(kind, layers, places, cache.to(device), size, self.dtype)
        order = torch.randperm(count * width, generator=seeded(1)) + 1
        tables = order.view(count, width).int()

        lens = torch.tensor(self.encoder_lens, dtype=torch.int32)
        positions = torch.cat([torch.arange(n) for n in self.encoder_lens])
        owner = torch.arange(count).repeat_interleave(lens)
        slots = tables[owner, positions // size].long() * size + positions % size
        block_tables = [tables.to(device)] * 2
        rows = torch.arange(count, dtype=torch.int32)
        starts = _starts(lens)
        backend.plan_encoded(
            EncodedInputs(lens, starts, positions, [slots, slots], block_tables, rows)
        )
        fused = torch.randn(
            (len(positions), 2, self.num_kv_heads, self.head_dim), generator=seeded(2)
        ).to(self.dtype)
        key, value = fused.to(device).unbind(1)
        backend.write_encoded(1, key, value)

        query_lens = torch.tensor(self.query_lens, dtype=torch.int32)
        num_queries = int(query_lens.sum())
        backend.plan(
            AttentionBatch(
                query_lens=query_lens,
                context_lens=query_lens + 7,
                query_starts=_starts(query_lens),
                positions=torch.arange(num_queries),
                block_tables=block_tables,
                slots=[torch.zeros(num_queries, dtype=torch.int64)] * 2,
                staging=DeviceStaging(torch.device(device)),
                encoder_lens=lens,
            )
        )
        query = torch.randn((num_queries, heads, self.head_dim), generator=seeded(3))
        query = query.to(self.dtype)
        got = backend.attend_encoded(1, query.to(device)).cpu().split(list(self.query_lens))
        rounded = list(fused.float().unbind(1))
        if self.kv_scales is not None:
            for side, scale in enumerate((self.kv_scales.key, self.kv_scales.value)):
                rounded[side] = KVScales.quantize(rounded[side], scale).float() * scale
        keys, values = (each.split(list(self.encoder_lens)) for each in rounded)
        wanted = [
            self._expected(q.float(), k, v)
            for q, k, v in zip(query.split(list(self.query_lens)), keys, values, strict=True)
        ]
        return list(got), [each.to(self.dtype) for each in wanted]

    def _expected(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1) for each in (query, key, value))
        k, v = (each.repeat_interleave(self.group, dim=0) for each in (k, v))
        if self.softcap is None:
            attended = F.scaled_dot_product_attention(q, k, v, scale=0.3)
        else:
            scores = self.softcap * torch.tanh(q @ k.transpose(1, 2) * 0.3 / self.softcap)
            attended = scores.softmax(-1) @ v
        return attended.transpose(0, 1).flatten(1)


def _starts(lens: Tensor) -> Tensor:
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    starts[1:] = lens.cumsum(0)
    return starts


CASES = [
    Crossed((1, 16, 17, 300), (1, 1, 1, 1)),
    Crossed((33, 5), (7, 40), group=2, head_dim=80),
    Crossed((48, 1, 70), (1, 20, 3), block_size=48, num_kv_heads=1, group=3),
    Crossed((40, 9), (1, 5), block_size=8, softcap=1.5, num_kv_heads=1),
    Crossed((33, 5), (1, 40), group=2, kv_scales=KVScales(0.02, 0.005)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "16-bit"])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize(("backend", "device"), WITH_REFERENCE)
def test_all_queries_see_all_keys(
    backend: str, device: str, case: Crossed, dtype: torch.dtype
) -> None:
    """Decodes and chunks, lengths of one, of exactly a block, and of one more; keys behind the end
    are NaN."""
    if backend == "triton" and device == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter does not compute in bf16
    fields = {name: getattr(case, name) for name in case.__dataclass_fields__} | {"dtype": dtype}
    got, expected = Crossed(**fields).run(backend, device)
    for each, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(each, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_layer_that_reads_the_encoder_knows_no_distances() -> None:
    for wrong in (
        {"window": 5, "scores": ScoreFunction(1.0)},
        {"scores": ScoreFunction(1.0, alibi_slopes=(0.5,))},
    ):
        with pytest.raises(ValueError, match="layer 3: cross-attention has no window"):
            LayerSpec(3, 1, 1, 16, reads_encoder=True, **wrong)


def test_a_backend_without_cross_attention_is_refused() -> None:
    class Plain:
        score_features = frozenset({"softcap"})

    layer = LayerSpec(3, 1, 1, 16, ScoreFunction(1.0), reads_encoder=True)
    with pytest.raises(ConfigError, match="Plain does not compute cross_attention, which layer 3"):
        make_backend(Plain, [layer], [LayerPlace(0, 0)], torch.zeros(1), 16)


def test_work_items_of_decodes_name_no_new_token() -> None:
    """Otherwise a decode would write its query over the encoder's keys."""
    seqs = triton_backend.Sequences(*np.array([[0, 1], [0, 1], [9, 30], [1, 1]], np.int32))
    items = triton_backend.decode_items(seqs, None, 16, 16, 1, is_causal=False).items
    assert sorted(items[:2, 3].tolist()) == [9, 30]
    assert items[:2, 4].tolist() == [-1, -1]
