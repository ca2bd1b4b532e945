"""A client without an engine behind it, and requests, for tests of what is shown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from octavo.core.step import SamplingSpec
from octavo.engine.events import Admitted, Counters, Event, Gauges
from octavo.engine.output_stream import Sample
from octavo.engine.snapshot import (
    RequestView,
    SequenceView,
    Snapshot,
    TierView,
    pack_ids,
    unpack_ids,
)
from octavo.engine.validation import PreparedRequest
from octavo.errors import Unavailable
from octavo.memory_budget import MemoryBudget
from octavo.outputs import RequestOutput, SequenceOutput
from octavo.sampling_params import BeamSearchParams
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.messages import EngineInfo
from octavo.server.engine_process.replica import find_replica
from octavo.server.engine_process.supervision import Health
from octavo.server.offload import Offload

NUM_BLOCKS, BLOCK_SIZE = 12, 16


def engine_info(**changes: Any) -> EngineInfo:
    values: dict[str, Any] = {
        "model": "demo",
        "pid": 1,
        "max_model_len": 512,
        "max_encoder_len": None,
        "vocab_size": 1000,
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "num_swap_blocks": 4,
        "kv_groups": "2 x full attention",
        "kv_group_names": ("full attention",),
        "max_num_seqs": 64,
        "enable_prefix_caching": True,
        "policy": "fcfs",
        "dtype": "float32",
        "stored_quantization": None,
        "load_quantization": None,
        "weight_copy_bytes": 0,
        "kv_cache_dtype": "float32",
        "device": "cpu",
        "num_ranks": 2,
        "predicts_steps": True,
        "budget": MemoryBudget(1000, 300, 200, 100, 350, 25, BLOCK_SIZE, NUM_BLOCKS, 100, 4),
    }
    return EngineInfo(**(values | changes))


class FakeClient:
    """Says what it is told to say, and counts how often it is asked. It is its only replica."""

    number, num_restarts, load, is_serving, state = 0, 0, 0, True, "ready"
    has_engine = True
    exchange = SimpleNamespace(open={})
    tokenizer = None

    def __init__(self) -> None:
        self.replicas = [self]
        self.info = engine_info()
        self.offload = Offload()
        self.gauges = Gauges(num_free_blocks=NUM_BLOCKS, num_free_swap_blocks=4)
        self.counters = Counters()
        self.health = Health(True, None, "ready", 0)
        self.open_requests: dict[str, OpenRequest] = {}
        self.picture: Snapshot | None = snapshot([])
        self.num_looks = 0
        self.subscribers: list[asyncio.Queue[list[Event]]] = []

    def replica(self, number: int) -> FakeClient:
        return find_replica(self.replicas, number)

    async def snapshot(self, replica: int = 0) -> Snapshot:
        self.replica(replica)
        self.num_looks += 1
        if self.picture is None:
            raise Unavailable("the engine restarts")
        return self.picture

    async def inspect(self, request_id: str) -> RequestView | None:
        assert self.picture is not None
        views = {view.request_id: view for view in self.picture.running}
        return views.get(request_id)

    @contextlib.asynccontextmanager
    async def events(self, replica: int = 0) -> AsyncIterator[AsyncIterator[list[Event]]]:
        queue: asyncio.Queue[list[Event]] = asyncio.Queue()
        self.subscribers.append(queue)

        async def batches() -> AsyncIterator[list[Event]]:
            while True:
                yield await queue.get()

        try:
            yield batches()
        finally:
            self.subscribers.remove(queue)


def snapshot(running: list[RequestView], cached: set[int] | None = None) -> Snapshot:
    """A pool in which the given requests run; `cached` are block ids."""
    sequences = [seq for view in running for seq in view.sequences]
    tables = [unpack_ids(table) for seq in sequences for table in seq.tables]
    counts = [sum(ids.count(b) for ids in tables) for b in range(1, NUM_BLOCKS + 1)]
    is_cached = bytes(int(b in (cached or set())) for b in range(1, NUM_BLOCKS + 1))
    num_free = counts.count(0)
    device = TierView(NUM_BLOCKS, num_free, len(cached or ()), bytes(counts), is_cached)
    swap = TierView(4, 4, 0, bytes(4), bytes(4))
    return Snapshot(1.0, 1, BLOCK_SIZE, device, swap, running, [], [], 0, [])


def view(request_id: str, *tables: list[int], num_tokens: int = 40) -> RequestView:
    """A running request with a sequence for each table."""
    sequences = [
        SequenceView(10 + i, i, num_tokens, num_tokens - 1, True, [pack_ids(table)], 0.0)
        for i, table in enumerate(tables)
    ]
    return RequestView(
        request_id, "running", "sampling", len(tables), 100, 0, 32, 16, 0, 1.0, sequences
    )


def open_request(request_id: str = "r1", n: int = 1, beam_width: int | None = None) -> OpenRequest:
    """A request of 32 tokens that arrived at 10 s."""
    beam = None if beam_width is None else BeamSearchParams(beam_width)
    prepared = PreparedRequest(list(range(32)), SamplingSpec(), 64, n, 0, (), (), beam)
    samples = [] if beam else [Sample(index) for index in range(n)]
    return OpenRequest(request_id, prepared, "a secret prompt", 10.0, samples)


def admitted(request_id: str = "r1", hits: int = 16, end: str = "evicted") -> Admitted:
    return Admitted(10.5, request_id, 32, hits, hits, end, 7, 0)


def output_of(request: OpenRequest, lengths: list[int], finish_time: float) -> RequestOutput:
    outputs = [
        SequenceOutput(index, [0] * length, "secret text", "length")
        for index, length in enumerate(lengths)
    ]
    return RequestOutput(
        request.request_id,
        request.prompt,
        request.request.prompt_token_ids,
        outputs,
        num_preemptions=request.num_preemptions,
        arrival_time=request.arrival_time,
        finish_time=finish_time,
    )
