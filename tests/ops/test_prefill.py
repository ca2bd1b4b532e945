"""Prefill attention: new tokens over cached and new keys, with windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_cases import BOUND, attend, distance, make_paged

from octavo.ops import ScoreFunction
from octavo.ops.cuda import attention_prefill
from octavo.ops.cuda.attention_prefill import PrefillConfig, prefill_attention, prefill_config
from octavo.ops.cuda.attention_scores import KernelScores
from octavo.ops.cuda.attention_work_items import Sequences, prefill_items
from octavo.ops.cuda.paged import tile_alignment
from octavo.ops.cuda.tile_sizes import MUCH_SHARED_MEMORY

pytestmark = pytest.mark.usefixtures("poisoned")

# block size, KV heads, group, head size, window
CASES = {
    "cpu": [(8, 1, 3, 16, None), (16, 2, 1, 20, 11)],
    "cuda": [
        (16, 8, 4, 128, None),
        (16, 40, 1, 128, None),
        (32, 2, 2, 64, 100),
        (8, 1, 16, 256, None),
        (1, 2, 4, 80, None),
        (48, 2, 7, 96, 33),
    ],
}
# cached, new
SEQUENCES = {"cpu": [(0, 18), (21, 9)], "cuda": [(0, 1), (0, 700), (500, 513), (33, 2), (1000, 64)]}
DTYPES = {"cpu": [torch.float32], "cuda": list(BOUND)}


@pytest.mark.parametrize("most_items", [None, 2])
def test_prefills(
    device: torch.device, most_items: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, or a few in each launch."""
    if most_items is not None:
        monkeypatch.setattr(attention_prefill, "_MAX_ITEMS", most_items)
    cached, lens = (np.array(x, np.int32) for x in zip(*SEQUENCES[device.type], strict=True))
    starts = (lens.cumsum() - lens).astype(np.int32)
    seqs = Sequences(starts, np.arange(len(lens), dtype=np.int32), cached + lens, lens)
    for block_size, kv_heads, group, dim, window in CASES[device.type]:
        for dtype in DTYPES[device.type]:
            config = PrefillConfig(rows=16, tile=16, num_warps=1, num_stages=1)
            if device.type == "cuda":
                config = prefill_config(dtype, dim, group)
            contexts = (cached + lens).tolist()
            capacity = max(contexts) + 70
            paged = make_paged(contexts, capacity, block_size, kv_heads, dim, dtype, device)
            fused = torch.randn(int(lens.sum()), kv_heads * (group + 2), dim).to(dtype).to(device)
            query = fused[:, : kv_heads * group]
            alignment = tile_alignment(config.tile, block_size)
            items = prefill_items(seqs, window, config.tile, alignment, config.rows // group)
            output = query.new_empty(len(query), kv_heads * group * dim)
            prefill_attention(
                query,
                paged.layer_cache,
                paged.table,
                torch.from_numpy(items.reshape(-1)).to(device),
                output,
                KernelScores.of(ScoreFunction(dim**-0.5), device),
                window,
                config,
            )
            for seq, (start, count) in enumerate(zip(starts, lens, strict=True)):
                keys, values = (x[seq][: contexts[seq]] for x in (paged.keys, paged.values))
                part = slice(start, start + count)
                expected = attend(query[part], keys, values, int(cached[seq]), window)
                assert distance(output[part], expected) < BOUND[dtype]


@pytest.mark.parametrize("shared_memory", [99 << 10, MUCH_SHARED_MEMORY])
@pytest.mark.parametrize("dtype", list(BOUND))
def test_a_tile_holds_a_token_of_any_group(dtype: torch.dtype, shared_memory: int) -> None:
    for dim in (64, 100, 128, 256):
        for group in (1, 3, 8, 33, 64, 65, 71, 128):
            assert prefill_config(dtype, dim, group, shared_memory).rows >= group


@pytest.mark.parametrize("group", [1, 8, 128])
def test_heads_of_256_take_less_where_shared_memory_is_scarce(group: int) -> None:
    """Compiled for sm_89, the usual tiles take 104 KB, and these 68 to 84 of 99."""
    much, little = (
        prefill_config(torch.bfloat16, 256, group, size) for size in (MUCH_SHARED_MEMORY, 99 << 10)
    )
    assert little.rows * little.tile < much.rows * much.tile
