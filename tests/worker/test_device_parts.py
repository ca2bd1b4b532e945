"""What a runner on a GPU is made of, on a GPU or, interpreted, on this CPU."""

from __future__ import annotations

import random
from threading import Event, Thread
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn

from octavo.config import make_config
from octavo.core.step import BlockCopy, StepPlan
from octavo.errors import ConfigError
from octavo.layers.config import LinearConfig
from octavo.layers.linear import make_linear
from octavo.ops import (
    AttentionBatch,
    LayerPlace,
    LayerSpec,
    PaddedSizes,
    ScoreFunction,
    load_backend,
)
from octavo.ops.communicator import SingleRank
from octavo.ops.cuda import attention_cascade, attention_decode
from octavo.ops.cuda.attention_dequantized import DequantizedBlocks
from octavo.ops.cuda.attention_work_items import cascade_capacity, item_capacity
from octavo.ops.cuda.expert_tiles import max_blocks, tokens_per_tile
from octavo.ops.cuda.sampling import NO_TOKEN
from octavo.ops.cuda.shared_workspace import in_workspace
from octavo.ops.vocabulary import VocabularyShard
from octavo.worker import cascade
from octavo.worker import graphs as worker_graphs
from octavo.worker.block_tables import BlockTables, DeviceTables
from octavo.worker.device import cuda, cuda_memory
from octavo.worker.device.cuda import CudaDevice
from octavo.worker.graphs import Graphs, graph_sizes, mixed_sizes
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_cache import KVCache
from octavo.worker.row_edits import RowEdits
from octavo.worker.sampler import Choice, Sampler, rows_not_finite
from octavo.worker.staging import UploadStaging
from worker.fake_constraints import no_grammars

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MOST_IN_GRID = 65_535  # programs in the second dimension
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def device_tables(
    block_size: int, have_windows: list[bool], num_rows: int, max_blocks: int
) -> BlockTables:
    sizes = [block_size] * len(have_windows)
    on_device = DeviceTables(sizes, have_windows, num_rows, max_blocks, DEVICE, least_saved=0)
    return BlockTables(sizes, num_rows, on_device)


def test_staged_arrays_keep_their_addresses_and_arrive_together() -> None:
    staging = UploadStaging(DEVICE, max_num_seqs=4, max_num_tokens=8, num_bytes=1 << 14)
    seen: dict[str, set[int]] = {"a": set(), "b": set()}
    for step in range(7):
        staging.begin()
        a = staging.put("a", np.arange(step + 1, dtype=np.int64), 10)
        b = staging.put("b", np.full(3, step, np.int32), 3)
        staging.flush()
        assert a.tolist() == list(range(step + 1))
        assert b.tolist() == [step] * 3
        seen["a"].add(a.data_ptr())
        seen["b"].add(b.data_ptr())
    assert [len(addresses) for addresses in seen.values()] == [1, 1]
    assert staging.padded("a", 10).tolist()[:7] == list(range(7))
    with pytest.raises(AssertionError, match="b: 4 values, but room for 3"):
        staging.put("b", np.zeros(4, np.int32), 3)
    with pytest.raises(AssertionError, match="c: no room for 65536 bytes"):
        staging.put("c", np.zeros(1, np.int64), 1 << 13)


@pytest.mark.parametrize("releases", [True, False])
def test_a_step_reads_its_own_arrays_while_later_ones_are_uploaded(releases: bool) -> None:
    staging = UploadStaging(DEVICE, max_num_seqs=4, max_num_tokens=8, num_bytes=1 << 14)
    table = torch.zeros(100, dtype=torch.int64, device=DEVICE)
    read = []
    for step in range(6):
        staging.begin()
        values = staging.put("values", np.full(100, step), 100)
        staging.flush(lambda values=values: table.copy_(values))  # type: ignore[misc]
        if DEVICE.type == "cuda":
            torch.cuda._sleep(2_000_000)  # while the host goes on
        read.append((values.clone(), table.clone()))
        if releases:
            staging.release()
    for step, found in enumerate(read):
        assert all((each == step).all() for each in found)


def test_arrays_that_grow_with_tokens_are_uploaded_when_they_are_long() -> None:
    staging = UploadStaging(DEVICE, max_num_seqs=4, max_num_tokens=500, num_bytes=1 << 14)
    addresses: dict[bool, set[int]] = {False: set(), True: set()}
    for step, length in enumerate([500, 3, 4, 5, 1, 300]):
        staging.begin()
        tokens = staging.put("tokens", np.arange(length) + step, 500, part="tokens")
        others = staging.put("others", np.arange(2) + step, 500, part="tokens")
        rows = staging.put("rows", np.full(2, step), 4)
        # What a step uploads besides the rows of the sequences.
        assert ("tokens" in staging._used) == (length > 4)
        assert staging._used["sequences"][1] <= 3 * 256
        staging.flush()
        assert tokens.tolist() == list(range(step, step + length))
        assert others.tolist() == [step, step + 1]
        assert rows.tolist() == [step] * 2
        addresses[length > 4].add(tokens.data_ptr())
    assert [len(each) for each in addresses.values()] == [1, 1]
    with pytest.raises(AssertionError, match="more: no room for 12000 bytes"):
        staging.put("more", np.zeros(5), 1500, part="tokens")


def test_what_changes_of_blocks_is_uploaded_alone() -> None:
    staging = UploadStaging(DEVICE, max_num_seqs=4, max_num_tokens=500)
    for step, length in enumerate([500, 3, 4, 0]):
        staging.begin()
        if length == 500:  # a step that the host stages; others continue it
            rows = staging.put("rows", np.arange(4), 4)
        changes = staging.put("index", np.arange(length) + step, 500, part="blocks")
        assert ("sequences" in staging._used) == (length == 500)
        assert sum(end - start for start, end in staging._used.values()) <= 8 * (length + 4)
        staging.flush()
        assert changes.tolist() == list(range(step, step + length))
        assert rows.tolist() == [0, 1, 2, 3]
        staging.release()


def test_a_step_that_puts_nothing_uploads_nothing_but_what_it_launches() -> None:
    staging = UploadStaging(DEVICE, max_num_seqs=4, max_num_tokens=8, num_bytes=1 << 14)
    launched = []
    for step in range(9):
        staging.begin()
        if step % 3 == 0:
            values = staging.put("values", np.full(4, step), 4)
        staging.flush(None if step % 3 == 1 else lambda step=step: launched.append(step))  # type: ignore[misc]
        if DEVICE.type == "cuda":
            torch.cuda._sleep(2_000_000)
        assert values.tolist() == [step // 3 * 3] * 4
        staging.release()
    assert launched == [0, 2, 3, 5, 6, 8]


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "num_shapes"),
    [(1, 1, 2), (4096, 4096, 2), (256, 1 << 20, 2), (1, 1, 64), (4096, 1 << 18, 24)],
)
def test_the_largest_step_finds_room_in_the_staging(
    num_seqs: int, num_tokens: int, num_shapes: int
) -> None:
    """Shapes of layers that differ in their windows: what the runner and its parts put."""
    staging = UploadStaging(DEVICE, num_seqs, num_tokens, num_shapes)
    kind = load_backend("triton")
    windows = [None, *range(32, 31 + num_shapes)]
    layers = [
        LayerSpec(i, 64, 8, 16, ScoreFunction(0.25), window=each) for i, each in enumerate(windows)
    ]
    places = [LayerPlace(0, 0), *[LayerPlace(1, 0)] * (num_shapes - 1)]
    cache = torch.zeros(2, 1, *kind.kv_block_shape(16, 8, 16), device=DEVICE)
    backend = kind(layers, places, cache, 16, cache.dtype)
    num_rows = 2 * num_seqs + 1
    tables = device_tables(16, [False, True], num_rows, 4)
    batch = InputBatch(tables, num_rows, staging, no_grammars(num_rows, 100), RowEdits(None))
    sampler = Sampler(CudaDevice(DEVICE).drawer(staging, 100), staging, VocabularyShard.whole(100))
    staging.begin()
    for lens in ([num_tokens], [1] * num_seqs):
        n = len(lens)
        query_lens = torch.tensor(lens, dtype=torch.int32)
        starts = torch.zeros(n + 1, dtype=torch.int32)
        starts[1:] = query_lens.cumsum(0)
        attention = AttentionBatch(
            query_lens=query_lens,
            context_lens=query_lens,
            query_starts=starts,
            positions=torch.zeros(sum(lens), dtype=torch.int64),
            block_tables=[torch.ones(n, 4, dtype=torch.int32, device=DEVICE)] * 2,
            slots=[],
            rows=torch.zeros(n, dtype=torch.int32),
            staging=staging,
            cascade=[None, None],
        )
        backend.plan(attention)
    capacity = DequantizedBlocks(torch.bfloat16, DEVICE).capacity(num_seqs)
    for index in range(num_shapes):  # of an FP8 cache on a Hopper GPU
        name, spans = f"attention.spans.{index}", np.zeros(capacity, np.int32)
        staging.put(name, spans, capacity, part="tokens")
    for name in ("input_ids", "positions"):
        staging.put(name, np.zeros(num_tokens, np.int64), num_tokens)
    for name in ("rows", "logits_indices", "sampled_rows"):
        staging.put(name, np.zeros(num_seqs, np.int64), num_seqs)
    sampler.stage(batch.sampling_batch([], []))
    tables.copy(np.arange(1, num_seqs + 1), np.arange(num_seqs + 1, num_rows))
    tables.write(np.arange(2), *(np.full(2, value) for value in (1, 0, 1)))
    assert tables.stage(staging) is not None
    staging.flush()


def test_rows_that_are_not_finite_are_told_apart() -> None:
    choice = Choice(torch.tensor([4, NO_TOKEN.value, 0]))
    assert rows_not_finite(choice.first_tokens(), choice.candidates()) == [1]
    choice.expand(torch.tensor([[-0.5, -1.0], [torch.nan, torch.nan]]), torch.ones(2, 2))
    assert rows_not_finite(choice.first_tokens(), choice.candidates()) == [1, 4]


@pytest.mark.parametrize("seed", range(5))
def test_tables_on_the_device_follow_those_of_the_host(seed: int) -> None:
    rng = random.Random(seed)
    num_groups, num_rows, columns = 1 + seed % 3, 9, 12
    staging = UploadStaging(DEVICE, num_rows, 16)
    host = BlockTables([1] * num_groups, num_rows)
    device = device_tables(16, [False] * num_groups, num_rows, columns)
    for _ in range(40):
        # As the worker does it: forks, new rows, then entries, of which the last one holds.
        for _ in range(rng.randrange(3)):
            rows = rng.sample(range(1, num_rows), 4)
            children, parents = np.array(rows[:2]), np.array(rows[2:])
            host.copy(children, parents)
            device.copy(children, parents)
        for row in rng.sample(range(1, num_rows), rng.randrange(2)):
            host.clear(row)
            device.clear(row)
        n = rng.randrange(12)
        if n:
            group = np.array([rng.randrange(num_groups) for _ in range(n)])
            where = np.array([rng.randrange(1, num_rows) for _ in range(n)])
            column = np.array([rng.randrange(columns) for _ in range(n)])
            ids = np.array([rng.randrange(1, 100) for _ in range(n)])
            host.write(group, where, column, ids)
            device.write(group, where, column, ids)
        staging.begin()
        update = device.stage(staging)
        staging.flush()
        if update is not None:
            update.carry_out()
        every, ones = np.arange(num_rows), np.ones(num_rows, np.int64)
        step = every, ones, np.full(num_rows, columns), every, np.zeros(num_rows, np.int64)
        expected = host.of_step(*step).block_tables
        for mine, theirs in zip(device.of_step(*step).block_tables, expected, strict=True):
            in_use = theirs != 0  # what is left of a row's earlier owner is never read
            assert torch.equal(mine.cpu()[in_use], theirs[in_use])


@pytest.mark.parametrize("seed", range(8))
def test_shared_keys_are_those_of_the_tables_as_they_are_now(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found is remembered while tables grow; whatever else happens to them is seen."""
    monkeypatch.setattr(cascade, "MIN_KEYS", 64)
    monkeypatch.setattr(cascade, "MIN_SAVING", 1 / 8)
    rng = random.Random(seed)
    block_size, num_rows, columns = 16, 9, 40
    tables = device_tables(block_size, [False], num_rows, columns)
    expected = np.zeros((num_rows, columns), np.int64)
    contexts = np.zeros(num_rows, np.int64)
    fresh = iter(range(1, 10_000))
    zeros = np.zeros(columns, np.int64)  # of the only KV group
    num_found = 0

    def write(row: int, first: int, end: int) -> None:
        ids = np.array([next(fresh) for _ in range(first, end)])
        expected[row, first:end] = ids
        tables.write(zeros[first:end], np.full(end - first, row), np.arange(first, end), ids)

    def open_row(row: int, common: int) -> None:
        """With blocks of a prefix that was found in the cache."""
        tables.clear(row)
        source = rng.randrange(1, num_rows)
        common = min(common, int(contexts[source]) // block_size)
        ids = expected[source, :common].copy()
        expected[row] = 0
        expected[row, :common] = ids
        if common:
            tables.write(zeros[:common], np.full(common, row), np.arange(common), ids)
        write(row, common, common + 2)
        contexts[row] = (common + 1) * block_size + rng.randrange(1, block_size)

    for row in range(1, num_rows):
        open_row(row, 8)
    for _ in range(60):
        happens = rng.choice(["grow"] * 6 + ["fork", "open", "part", "copy"])
        row = rng.randrange(1, num_rows)
        if happens == "open":
            open_row(row, rng.randrange(6, 30))
        elif happens == "fork":
            parent = rng.choice([r for r in range(1, num_rows) if r != row])
            tables.copy(np.array([row]), np.array([parent]))
            expected[row], contexts[row] = expected[parent], contexts[parent]
        elif happens == "part":  # to an extent of its own
            write(row, 0, -(-int(contexts[row]) // block_size))
        elif happens == "copy":  # of the last block, before it is written
            tail = int(contexts[row] - 1) // block_size
            write(row, tail, tail + 1)
        for each in range(1, num_rows):
            if contexts[each] < (columns - 1) * block_size:
                contexts[each] += 1
                tail = int(contexts[each] - 1) // block_size
                if expected[each, tail] == 0:
                    write(each, tail, tail + 1)
        rows = np.array(rng.choice([range(1, num_rows), range(1, num_rows), range(2, 7)]))
        lens = np.ones(len(rows), np.int64)
        if rng.random() < 0.3:
            lens[rng.randrange(len(rows))] = 3
        row_of_token = rows.repeat(lens)
        positions = np.zeros(len(row_of_token), np.int64)
        step = tables.of_step(rows, lens, contexts[rows], row_of_token, positions)
        for keys in step.cascade:
            assert keys is not None
            for i, (begin, end) in enumerate(zip(keys.begins, keys.ends, strict=True)):
                members = keys.members[keys.starts[i] : keys.starts[i + 1]]
                assert (lens[members] == 1).all()
                assert (contexts[rows[members]] > end).all()
                blocks = expected[rows[members], begin // block_size : end // block_size]
                assert (blocks == blocks[0]).all()
                assert blocks.all()
                num_found += 1
    assert num_found > 5


def test_blocks_move_in_the_order_of_the_plan() -> None:
    """Out, in, copies; a copy may read what a swap or another copy has just written."""
    staging = UploadStaging(DEVICE, 4, 16)
    cache = KVCache(9, 9, (2, 3, 4), torch.float32, CudaDevice(DEVICE))
    for block in range(10):
        cache.blocks[block] = block
    plan = StepPlan(
        0, [], [], [], [],
        swap_out=[(1, 4), (2, 5), (3, 9)],
        swap_in=[(5, 7), (4, 8)],
        copies=[BlockCopy(7, 1, 3), BlockCopy(1, 2, 3), BlockCopy(9, 3, 1)],
    )  # fmt: skip
    staging.begin()
    copies = cache.stage(plan.copies, staging)
    staging.flush()
    swapped = cache.move(plan, copies)
    assert swapped is not None
    swapped.wait()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert cache.blocks[:, 0, 0, 0].tolist() == [0, 2, 2, 9, 4, 5, 6, 2, 1, 9]
    assert cache.blocks[3, 1].tolist() == [[9] * 4, [3] * 4, [3] * 4]  # its first token alone
    assert cache.swapped[[4, 5, 9], 1, 2, 3].tolist() == [1, 2, 3]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 100, 256, 300, 1024])
def test_every_batch_has_a_size(max_num_seqs: int) -> None:
    graphs = Graphs(graph_sizes(max_num_seqs), mixed_sizes(max_num_seqs, 2048), DEVICE)
    for n in range(1, max_num_seqs + 1):
        size = graphs.size_for(n)
        assert n <= size <= max_num_seqs
        assert size - n <= max(7, n // 7)  # little of a large batch is padding
    assert graphs.num_graphs < 200
    few, most = min(256, max_num_seqs), max_num_seqs
    assert graphs.mixed_size_for(PaddedSizes(17, 1, 1)) == PaddedSizes(32, min(32, few), 16)
    assert graphs.mixed_size_for(PaddedSizes(1160, few, 1)) == PaddedSizes(1216, few, 16)
    for singles in (few, most):
        size = graphs.mixed_size_for(PaddedSizes(singles + 512, singles, 16))
        assert size is not None
        assert size.num_singles >= singles
    assert graphs.mixed_size_for(PaddedSizes(2049, 1, 1)) is None
    assert graphs.mixed_size_for(PaddedSizes(100, 1, 17)) is None


def test_what_another_engine_of_the_process_has_taken_is_not_taken_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is free when an engine begins is without it already."""
    taken = [400]

    def make_runner(*_: object) -> None:
        taken[0] += 10  # work items and the like

    monkeypatch.setattr(torch, "cuda", MagicMock())
    torch.cuda.memory_allocated = lambda device: taken[0]
    torch.cuda.max_memory_allocated = lambda device: taken[0] + 100
    monkeypatch.setattr(cuda, "free_memory", lambda cache, device: 500)
    monkeypatch.setattr(cuda_memory, "largest_steps", lambda *_: [])
    monkeypatch.setattr(cuda_memory, "release_cached", lambda: None)
    monkeypatch.setattr(cuda_memory, "_SLACK_BYTES", 0)
    device, demand = CudaDevice(torch.device("cpu")), MagicMock()
    demand.config.cuda_graphs = False
    assert device.total_memory(demand.config) == 500
    taken[0] += 200  # weights
    device.measure_memory(demand, make_runner)
    fixed, total, room, _ = demand.plan.call_args.args
    assert (fixed.weights, total, room) == (200, 500, 500 - 200 - 10 - 110)


def test_workspaces_that_outlive_the_compiling_runner_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The largest step finds them when it is measured, so they are no part of its peak."""
    allocated, made = [200], list[bool]()

    def make_runner(num_blocks: int, num_swap_blocks: int, graphs: Graphs | None) -> None:
        if graphs is not None and not graphs.captures:
            made.append(True)
            allocated[0] += 40  # for split sums, and those of cuBLAS

    monkeypatch.setattr(torch, "cuda", MagicMock())
    torch.cuda.memory_allocated = lambda device: allocated[0]
    torch.cuda.max_memory_allocated = lambda device: allocated[0] + 100
    torch.cuda.mem_get_info = lambda device: (1000, 2000)
    monkeypatch.setattr(cuda_memory, "largest_steps", lambda *_: [])
    monkeypatch.setattr(cuda_memory, "release_cached", lambda: None)
    monkeypatch.setattr(cuda_memory, "_SLACK_BYTES", 0)
    monkeypatch.setattr(cuda_memory, "_GRAPH_BYTES", 0)
    device, demand = torch.device("cuda"), MagicMock()
    graphs = Graphs([1], [], device)
    cuda_memory.measure_memory(demand, make_runner, 500, device, graphs)
    assert made == [True]
    fixed, _, room, _ = demand.plan.call_args.args
    assert (fixed.weights, fixed.activations, room) == (200, 40 + 110, 500 - 200 - 150)


def test_a_graph_is_not_launched_while_another_thread_uses_the_workspace() -> None:
    """It may write there, too: between the launch that dequantizes a weight and its product."""
    launched = Event()

    class Graph:
        replay = staticmethod(launched.set)

    graphs: Any = Graphs([1], [], torch.device("cpu"))
    graphs._has_graphs, graphs._graphs = True, {"step": Graph()}
    thread = Thread(target=graphs.run, args=("step", lambda: None))
    with in_workspace:
        thread.start()
        assert not launched.wait(0.05)
    thread.join()
    assert launched.is_set()


def test_of_rare_graphs_only_some_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on to be captured, and rare ones that are not still run."""
    monkeypatch.setattr(worker_graphs, "MOST_RARE", 2)
    graphs: Any = Graphs([1], [], torch.device("cpu"))
    captured, ran = MagicMock(), MagicMock()
    graphs._has_graphs, graphs._capture = True, captured
    for _ in range(3):
        for key in range(4):
            graphs.run(key, ran, is_rare=True)
        graphs.run("step", ran)
    assert captured.call_count == 3  # of two rare ones, and of the step
    # At first, and later those two that were not captured.
    assert ran.call_count == 5 + 2 * 2


def test_steps_of_fewer_tokens_than_the_smallest_budget_are_captured() -> None:
    assert [size.num_tokens for size in mixed_sizes(4, 40)] == [16, 32]


@pytest.mark.parametrize(
    ("capability", "is_served"), [((8, 0), False), ((8, 9), True), ((9, 0), True)]
)
def test_a_gpu_without_fp8_refuses_an_fp8_kv_cache(
    capability: tuple[int, int], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = CudaDevice(DEVICE)
    monkeypatch.setattr(device, "_is_gpu", True)
    assert device.resolve_kv_dtype("auto", torch.bfloat16) == torch.bfloat16
    if is_served:
        assert device.resolve_kv_dtype("fp8", torch.bfloat16) == torch.float8_e4m3fn
        return
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*capability 8\.9 .*this one has 8\.0"):
        device.resolve_kv_dtype("fp8", torch.bfloat16)


def test_a_gpu_refuses_more_sequences_than_grids_of_kernels_have_room_for() -> None:
    splits = max(attention_decode.MAX_PROGRAMS, attention_cascade.MAX_PROGRAMS)
    assert cascade_capacity(cuda.MOST_SEQS, splits) <= MOST_IN_GRID
    assert item_capacity(cuda.MOST_SEQS, splits) <= MOST_IN_GRID
    many = cuda.MOST_SEQS + 1
    config = make_config("demo", max_num_seqs=many, max_num_batched_tokens=many)
    with pytest.raises(ConfigError, match=r"max_num_seqs.* 40,001 is more than the 40,000"):
        CudaDevice(DEVICE).adapt(config)


def test_a_gpu_refuses_more_tokens_than_grids_of_kernels_have_room_for() -> None:
    most, num_experts, top_k = cuda.MOST_TOKENS, 1024, 16
    in_block = tokens_per_tile(most, num_experts, top_k)
    assert max_blocks(most, num_experts, top_k, in_block) <= MOST_IN_GRID
    config = make_config("demo", max_num_batched_tokens=most + 1)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens.* 400,001 is more than"):
        CudaDevice(DEVICE).adapt(config)


class FakeStream(NamedTuple):
    device_index: int
    name: str


class FakeGpus:
    """What torch.cuda knows of current devices and streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.index = 0
        self.streams = {index: FakeStream(index, "default") for index in range(2)}
        self.num_changes = 0
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(device.index, "swap"))
        default = lambda device: FakeStream(device.index, "default")  # noqa: E731
        monkeypatch.setattr(torch.cuda, "default_stream", default)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.index)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.streams[self.index])
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)

    def set_device(self, index: int) -> None:
        self.index = index
        self.num_changes += 1

    def set_stream(self, stream: FakeStream) -> None:
        self.index, self.streams[stream.device_index] = stream.device_index, stream
        self.num_changes += 1

    def current(self) -> tuple[int, FakeStream]:
        return self.index, self.streams[self.index]


def test_kernels_are_launched_on_the_models_gpu_whichever_the_program_has_made_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = FakeGpus(monkeypatch)
    device = CudaDevice(torch.device("cuda", 1))
    gpus.index = 1
    with device.computing:
        assert gpus.current() == (1, FakeStream(1, "default"))
    assert gpus.num_changes == 0
    gpus.index = 0
    with device.computing:
        assert gpus.current() == (1, FakeStream(1, "default"))
        with device.computing:
            assert gpus.index == 1
        assert gpus.index == 1
    assert gpus.current() == (0, FakeStream(0, "default"))


@pytest.mark.parametrize("index", [0, 1])
def test_steps_follow_each_other_on_one_stream_whichever_the_program_has_made_the_current_one(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = FakeGpus(monkeypatch)
    device = CudaDevice(torch.device("cuda", 1))
    gpus.index = index
    gpus.streams = {each: FakeStream(each, "own") for each in range(2)}
    with device.computing, device.computing:
        assert gpus.current() == (1, FakeStream(1, "default"))
    assert gpus.index == index
    assert gpus.streams == {each: FakeStream(each, "own") for each in range(2)}


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_gpu_tunes_the_kernels_of_all_layers_unless_that_is_off(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [make_linear(LinearConfig(16, (32,), bias=False)) for _ in range(2)]
    for layer in layers:
        layer.finalize()
    tuned: list[Any] = []
    monkeypatch.setattr(cuda, "tune", lambda *args: tuned.append(args))
    monkeypatch.setattr(cuda, "release_cached", lambda: None)
    device, ranks = CudaDevice(DEVICE), SingleRank()
    monkeypatch.setattr(device, "_is_gpu", True)
    config = make_config("demo", tune_kernels=mode, max_num_batched_tokens=300)
    device.prepare(nn.Sequential(*layers), config, ranks)
    kernels = [kernel for layer in layers for kernel in layer.kernels()]
    assert len(kernels) == 2
    assert tuned == ([(kernels, DEVICE, 300, ranks)] if mode == "auto" else [])
