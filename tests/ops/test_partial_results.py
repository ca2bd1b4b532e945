"""What programs leave for each other in attention: simulated as a GPU carries it out.

Who leaves a result where, and who combines which, follows from a step's work items alone
(attention_decode.py), so it can be looked at for many more steps, and larger ones, than Triton's
interpreter carries out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.random import Generator

from octavo.ops import (
    AttentionBatch,
    CascadeSegments,
    HostStaging,
    KVScales,
    LayerPlace,
    LayerSpec,
    PaddedSizes,
    ScoreFunction,
)
from octavo.ops.cuda import attention, attention_decode
from octavo.ops.cuda.attention import TritonBackend
from octavo.ops.cuda.attention_decode import DecodeConfig, Scratch
from octavo.ops.cuda.attention_decode_cluster import ClusterConfig
from octavo.ops.cuda.attention_prefill import PrefillConfig, PrefillSplits
from octavo.ops.cuda.attention_work_items import Int32s
from octavo.ops.cuda.paged import ITEM_FIELDS, MEMBER_FIELDS, PREFILL_FIELDS
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.worker.cascade import find_segments

pytest.importorskip("triton")

META = torch.device("meta")  # nothing is computed: only the sizes of buffers matter
Interval = tuple[int, int]  # of keys


@dataclass
class Leaving:
    """What the programs of one layer's decodes do, of one KV head."""

    keys: dict[int, list[Interval]]  # of each sequence's token: what its splits take
    written: dict[int, list[int]]  # of each place: the tokens for which programs write it
    combined: dict[int, list[int]]  # of each place: query heads that are taken from it
    num_waiting: int = 0  # programs that wait for later ones


def some_layers(rng: Generator, block_size: int) -> tuple[list[LayerSpec], torch.dtype]:
    """One to three layers of different shapes, and what the cache holds."""
    dtype = torch.float32 if rng.random() < 0.1 else torch.bfloat16
    is_fp8 = dtype != torch.float32 and rng.random() < 0.3
    layers = []
    for i in range(rng.integers(1, 4)):
        num_kv_heads = int(rng.integers(1, rng.choice([3, 5, 17])))
        group, head_dim = (int(rng.choice(c)) for c in ((1, 2, 3, 4, 7, 8, 16), (64, 128, 256)))
        windows = None, None, 1, 50, 300, 1000, 4096
        layers.append(
            LayerSpec(
                layer_id=i,
                num_heads=group * num_kv_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scores=ScoreFunction(head_dim**-0.5),
                window=windows[rng.integers(len(windows))],
                kv_scales=KVScales() if is_fp8 else None,
            )
        )
    if rng.random() < 0.15:
        layers.append(replace(layers[0], layer_id=len(layers), window=None, reads_encoder=True))
    return layers, torch.float8_e4m3fn if is_fp8 else dtype


def some_sequences(rng: Generator, num_seqs: int, block_size: int) -> tuple[Int32s, Int32s]:
    """Block tables, and contexts: some sequences share blocks with earlier ones."""
    own = np.minimum(rng.pareto(1, num_seqs) * 100 + 1, rng.choice([500, 5000, 30_000]))
    contexts = own.astype(np.int32)
    shares = rng.choice([0, 0.5, 1])
    common = np.zeros(num_seqs, np.int64)  # in blocks, with the sequence before
    for i in range(1, num_seqs):
        if rng.random() < shares:
            full = int(contexts[i - 1] - 1) // block_size
            common[i] = full if rng.random() < 0.5 else rng.integers(full + 1)
            contexts[i] = min(common[i] * block_size + own[i] % 1000 + 1, 40_000)
    if shares and rng.random() < 0.5 and num_seqs > 1:  # a long prefix of all
        prefix = int(rng.integers(17, 200))
        common[1:] = np.maximum(common[1:], 0) + prefix
        contexts += np.int32(prefix * block_size)
    width = -(-int(contexts.max()) // block_size)
    tables = np.arange(1, num_seqs * width + 1, dtype=np.int32).reshape(num_seqs, width)
    for i in range(1, num_seqs):
        tables[i, : common[i]] = tables[i - 1, : common[i]]
    return tables, contexts


def some_batch(rng: Generator, layers: list[LayerSpec], block_size: int) -> AttentionBatch:
    """A step of decodes, of prompts, or of both; with padding or without."""
    most = int(rng.choice([2, 3, 8, 80]))
    num_seqs = int(rng.integers(1, most + 1))
    tables, contexts = some_sequences(rng, num_seqs, block_size)
    lens = np.ones(num_seqs, np.int32)
    is_chunk = rng.random(num_seqs) < rng.choice([0, 0, 0.3, 1])
    lens[is_chunk] = np.minimum(rng.integers(1, 600, num_seqs), contexts)[is_chunk]
    cascade: list[CascadeSegments | None] = []
    (singles,) = np.nonzero(lens == 1)
    if len(singles) and rng.random() < 0.7:
        found = find_segments(tables[singles], contexts[singles].astype(np.int64), block_size)
        if found is not None:
            found = found._replace(members=singles[found.members].astype(np.int32))
        elif rng.random() < 0.5:
            found = CascadeSegments.empty()  # as of other steps that are captured
        if found is not None:
            cascade = [None if e.window or e.reads_encoder else found for e in layers]
    padded = None
    if is_chunk.any():
        num_chunks = num_seqs - len(singles)
        if rng.random() < 0.5:
            more = rng.integers(0, 20, 3)
            sizes = int(lens.sum()), len(singles), num_chunks
            padded = PaddedSizes(*(size + int(n) for size, n in zip(sizes, more, strict=True)))
    elif rng.random() < 0.5:
        num_padding = int(rng.integers(1, 9))
        contexts = np.append(contexts, np.zeros(num_padding, np.int32))
        lens = np.append(lens, np.ones(num_padding, np.int32))
    encoder_lens = None
    if any(layer.reads_encoder for layer in layers):
        encoder_lens = torch.from_numpy(np.where(contexts, rng.integers(1, 3000), 0)).int()
    starts = np.zeros(len(lens) + 1, np.int32)
    lens.cumsum(out=starts[1:])
    offsets = np.arange(starts[-1]) - starts[:-1].repeat(lens)
    return AttentionBatch(
        query_lens=torch.from_numpy(lens),
        context_lens=torch.from_numpy(contexts),
        query_starts=torch.from_numpy(starts),
        positions=torch.from_numpy(np.maximum(contexts - lens, 0).repeat(lens) + offsets),
        block_tables=[torch.empty(0)] * len(layers),
        slots=[],
        rows=torch.arange(len(lens), dtype=torch.int32),
        staging=HostStaging(),
        cascade=cascade,
        padded=padded,
        encoder_lens=encoder_lens,
    )


def decodes_of(
    items: Int32s, cascade: tuple[Int32s, Int32s] | None, config: DecodeConfig, group: int
) -> Leaving:
    """What the programs of `items` do on a GPU, and before them those of the cascade."""
    done, is_written = Leaving({}, {}, {}), set[int]()
    if cascade is not None:
        for count, _, begin, end, first, split, _, _ in cascade[0].tolist():
            for token, _, place in cascade[1][first : first + count].tolist():
                done.keys.setdefault(token, []).append((begin, end))
                done.written.setdefault(place + split, []).append(token)
    is_written |= done.written.keys()
    heads = config.collecting(group, 128).heads
    for token, _, begin, end, _, split, num_splits, first_place in items.tolist():
        if token < 0:
            continue
        done.keys.setdefault(token, []).append((begin, end))
        if num_splits <= 1:
            continue
        done.written.setdefault(first_place + split, []).append(token)
        is_written.add(first_place + split)
        num_collecting = min(num_splits, config.most_collecting)
        part = split - (num_splits - num_collecting)
        if part < 0:
            continue
        places = range(first_place, first_place + num_splits)
        # Programs start in the order of their items.
        done.num_waiting += not is_written.issuperset(places)
        while part * heads < group:
            for place in places:
                own = range(part * heads, min(group, (part + 1) * heads))
                done.combined.setdefault(place, []).extend(own)
            part += num_collecting
    return done


def check_keys(intervals: list[Interval], first: int, end: int, slack: int) -> None:
    """Each key from `first` on is in exactly one interval; up to `slack` before it may be."""
    taken = sorted(each for each in intervals if each[0] < each[1])
    if not taken:
        assert first >= end
        return
    assert first - slack <= taken[0][0] <= first
    assert taken[-1][1] == end
    assert all(one[1] == other[0] for one, other in pairwise(taken))


def check_decodes(
    batch: AttentionBatch,
    layer: LayerSpec,
    items: Int32s,
    cascade: tuple[Int32s, Int32s] | None,
    config: DecodeConfig | ClusterConfig,
    scratch: Scratch,
    slack: int,
) -> None:
    group, kv_heads = layer.num_heads // layer.num_kv_heads, layer.num_kv_heads
    if isinstance(config, ClusterConfig):  # whose programs share nothing in global memory
        assert cascade is None
        assert set(items[items[:, 0] >= 0, 6].tolist()) <= {1}
        config = DecodeConfig(config.tile, config.num_warps, 1, 1)
    done = decodes_of(items, cascade, config, group)
    contexts = batch.context_lens if batch.encoder_lens is None else batch.encoder_lens
    if not layer.reads_encoder:
        contexts = batch.context_lens - 1
    singles = torch.nonzero(batch.query_lens == 1)[:, 0]
    of_token = dict(
        zip(batch.query_starts[singles].tolist(), contexts[singles].tolist(), strict=True)
    )
    assert done.keys.keys() == of_token.keys()
    for token, end in of_token.items():
        first = 0 if layer.window is None else max(0, end - layer.window + 1)
        check_keys(done.keys[token], first, end, slack)
    assert all(len(tokens) == 1 for tokens in done.written.values()), "no two write one place"
    assert done.written.keys() == done.combined.keys(), "all is written, and all is combined"
    assert all(sorted(heads) == [*range(group)] for heads in done.combined.values()), "and once"
    num_rows = (max(done.written, default=-1) + 1) * kv_heads * group
    assert num_rows <= scratch.sizes.numel()
    assert num_rows * layer.head_dim <= scratch.means.numel()
    assert done.num_waiting * kv_heads < attention_decode._ROOMY, "others find room"


def check_prompts(
    batch: AttentionBatch,
    layer: LayerSpec,
    items: Int32s,
    config: PrefillConfig | None,
    splits: PrefillSplits,
    slack: int,
) -> None:
    """config: None: items are not split."""
    items = items[items[:, 6] > 0]
    assert len(items) or not (batch.query_lens > 1).any()
    # What a program leaves counts in the first place of its item, where the last one adds up all.
    arrivals, places = dict[int, int](), set[int]()
    for first_place in items[items[:, 9] > 1, 10].tolist():
        arrivals[first_place] = arrivals.get(first_place, 0) + 1
    tokens = list[int]()
    for token in np.unique(items[:, 0]).tolist():
        parts = items[items[:, 0] == token]
        _, _, _, _, _, position, count, end, _, num_splits, first_place = parts[0].tolist()
        assert (parts[:, 5:8] == parts[0, 5:8]).all()
        assert (parts[:, 9:] == parts[0, 9:]).all()
        assert np.array_equal(np.sort(parts[:, 8]), np.arange(num_splits))
        if num_splits > 1:
            assert config is not None
            assert arrivals[first_place] == num_splits
            own = set(range(first_place, first_place + num_splits))
            assert places.isdisjoint(own)
            places |= own
        seq = int(torch.searchsorted(batch.query_starts, token, right=True)) - 1
        tokens += range(token, token + count)
        first, last = 0, end
        if not layer.reads_encoder:
            # Blocks that are converted begin with the first one that the prompt sees.
            left_out = int(batch.context_lens[seq]) - end
            assert position + left_out == batch.positions[token]
            last = position + count
            if layer.window is not None:
                first = max(0, position - layer.window + 1)
        check_keys([(begin, stop) for begin, stop in parts[:, [2, 4]].tolist()], first, last, slack)
        if config is not None and layer.window is None:  # whole tiles are in their own split
            assert (parts[:, 2] <= parts[:, 3]).all()
            assert (parts[:, 3] <= parts[:, 4]).all()
    starts, lens = batch.query_starts.tolist(), batch.query_lens.tolist()
    expected = [
        token
        for start, count in zip(starts[:-1], lens, strict=True)
        if count > 1
        for token in range(start, start + count)
    ]
    assert sorted(tokens) == expected
    if config is not None:
        num_programs = (max(places, default=-1) + 1) * layer.num_kv_heads
        assert num_programs <= splits.arrivals.numel()
        assert 2 * num_programs * config.rows <= splits.sizes.numel()
        dim_pad = max(16, power_of_2(layer.head_dim))
        assert num_programs * config.rows * dim_pad <= splits.sums.numel()


@pytest.mark.parametrize("on_hopper", [False, True])
def test_all_partial_results_are_combined_once_by_programs_that_exist(
    on_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "is_on_hopper", lambda _: on_hopper)
    seen = dict.fromkeys(("several", "cascade", "both", "clusters", "split prompts"), 0)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        block_size = int(rng.choice([16, 16, 8, 48, 128]))
        layers, stored = some_layers(rng, block_size)
        sizes = [e.num_kv_heads * 2 * block_size * e.head_dim for e in layers]
        backend = TritonBackend(
            layers,
            [LayerPlace(i, 0) for i in range(len(layers))],
            torch.empty((2, max(sizes)), dtype=stored, device=META),
            block_size,
            torch.float32 if stored == torch.float32 else torch.bfloat16,
        )
        for _ in range(2):
            batch = some_batch(rng, layers, block_size)
            backend.plan(batch)
            for layer in layers:
                shape = backend._layers[layer.layer_id].shape
                if shape in backend._decodes:
                    items, decode = backend._decodes[shape]
                    shared = None
                    if shape in backend._cascades:
                        launch = backend._cascades[shape]
                        shared = (
                            launch.items.numpy().reshape(-1, ITEM_FIELDS),
                            launch.members.numpy().reshape(-1, MEMBER_FIELDS),
                        )
                    own = items.numpy().reshape(-1, ITEM_FIELDS)
                    slack = max(block_size, decode.tile) if layer.window else 0
                    check_decodes(batch, layer, own, shared, decode, backend._scratch, slack)
                    seen["clusters"] += isinstance(decode, ClusterConfig)
                    if isinstance(decode, DecodeConfig):
                        seen["several"] += decode.most_collecting > 1 and bool(own[:, 5].any())
                    if shared is not None and shared[0].any():
                        seen["cascade"] += 1
                        seen["both"] += isinstance(decode, DecodeConfig) and decode.is_early
                if shape in backend._prefills:
                    prefill = backend._prefills[shape]
                    own = prefill.items.numpy().reshape(-1, PREFILL_FIELDS)
                    config = prefill.config if isinstance(prefill.config, PrefillConfig) else None
                    slack = max(block_size, prefill.config.tile) if layer.window else 0
                    check_prompts(batch, layer, own, config, backend._splits, slack)
                    seen["split prompts"] += bool((own[:, 9] > 1).any())
    if not on_hopper:
        del seen["clusters"]
    assert min(seen.values()) > 2, "all of it is tried"
