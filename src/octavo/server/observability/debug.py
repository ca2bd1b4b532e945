"""GET /debug/kv: block tables of requests, prefix-cache hits, and why they were not longer."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Response

from octavo.engine.events import Admitted, Preempted
from octavo.engine.snapshot import RequestView, TierView, unpack_ids
from octavo.outputs import RequestOutput
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.listening import Listener
from octavo.server.engine_process.messages import StepReport
from octavo.server.http.context import existing_replica, reply
from octavo.server.http.errors import ApiError
from octavo.server.observability.event_text import LOOKUP_ENDS

KEPT_REQUESTS = 1000  # finished ones that are remembered
KEPT_EVENTS = 32  # admissions and preemptions of one request


class History:
    """The admissions and preemptions of one request."""

    def __init__(self) -> None:
        self.events: deque[Admitted | Preempted] = deque(maxlen=KEPT_EVENTS)
        self.num_prompt_tokens = 0
        self.finish_reasons: list[str] | None = None  # None while it is open


class Lookups(Listener):
    """Stores admissions and preemptions of open requests and of the last ones that ended."""

    def __init__(self) -> None:
        self._histories: dict[str, History] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # the ids, in the order of the ends

    def history(self, request_id: str) -> History | None:
        return self._histories.get(request_id)

    def request_added(self, request: OpenRequest) -> None:
        self._ended.pop(request.request_id, None)  # clients may use an id again
        history = self._histories[request.request_id] = History()
        history.num_prompt_tokens = request.num_prompt_tokens

    def stepped(self, report: StepReport) -> None:
        events: list[Admitted | Preempted] = [*report.admitted, *report.preempted]
        for event in events:
            history = self._histories.get(event.request_id)
            if history is not None:
                history.events.append(event)

    def request_finished(self, request: OpenRequest, output: RequestOutput) -> None:
        self._end(request.request_id, [each.finish_reason for each in output.outputs])

    def request_failed(self, request: OpenRequest, error: Exception) -> None:
        self._end(request.request_id, [f"failed: {type(error).__name__}"])

    def _end(self, request_id: str, reasons: list[str]) -> None:
        history = self._histories.get(request_id)
        if history is None or history.finish_reasons is not None:
            return
        history.finish_reasons = reasons
        self._ended[request_id] = None
        if len(self._ended) > KEPT_REQUESTS:
            oldest, _ = self._ended.popitem(last=False)
            del self._histories[oldest]


def debug_router(client: EngineClient, lookups: Lookups) -> APIRouter:
    router = APIRouter(prefix="/debug", tags=["operation"])

    @router.get("/kv", summary="The KV cache at this moment")
    async def pool(replica: Annotated[int, Depends(existing_replica)]) -> Response:
        snapshot = await client.snapshot(replica)

        def written() -> Response:
            requests = [*snapshot.running, *snapshot.swapped, *snapshot.waiting]
            return reply(
                {
                    "replica": replica,
                    "step": snapshot.step,
                    "block_size": snapshot.block_size,
                    "device": _tier(snapshot.device),
                    "swap": _tier(snapshot.swap),
                    "num_waiting": snapshot.num_waiting,
                    "requests": [_request(view) for view in requests],
                    "pinned_prefixes": [
                        {
                            "name": pin.name,
                            "num_tokens": pin.num_tokens,
                            "block_ids": [*map(unpack_ids, pin.tables)],
                        }
                        for pin in snapshot.pins
                    ],
                }
            )

        # Writing some blocks takes about as long as writing a token.
        num_blocks = snapshot.device.num_blocks + snapshot.swap.num_blocks
        return await client.offload.reply(num_blocks, written)

    @router.get("/kv/{request_id}", summary="One request's block tables and prefix lookups")
    async def one_request(
        request_id: Annotated[str, Path(description="The X-Request-Id of a reply.")],
    ) -> Response:
        history = lookups.history(request_id)
        if history is None:
            raise ApiError(
                404,
                f"no request {request_id[:128]!r} is open, nor among the last {KEPT_REQUESTS} "
                "that ended; of several prompts, each has its number added: ID~0, ID~1",
                "request_id",
                "request_not_found",
            )
        view = await client.inspect(request_id) if history.finish_reasons is None else None
        entry = client.open_requests.get(request_id)
        return reply(
            {
                "request_id": request_id,
                "num_prompt_tokens": history.num_prompt_tokens,
                "finish_reasons": history.finish_reasons,
                "replica": None if entry is None else entry.replica,
                "now": None if view is None else _request(view),
                "history": [_event(event) for event in history.events],
            }
        )

    return router


def _tier(tier: TierView) -> dict[str, int]:
    return {
        "num_blocks": tier.num_blocks,
        "num_held": tier.num_held,
        "num_free": tier.num_free,
        "num_free_cached": tier.num_free_cached,
        "num_shared": sum(count > 1 for count in tier.ref_counts),
    }


def _request(view: RequestView) -> dict[str, Any]:
    """A request without its tokens."""
    return {
        "request_id": view.request_id,
        "status": view.status,
        "method": view.method,
        "priority": view.priority,
        "num_prompt_tokens": view.num_prompt_tokens,
        "num_cached_tokens": view.num_cached_tokens,
        "num_preemptions": view.num_preemptions,
        "seconds_since_arrival": round(time.monotonic() - view.arrival_time, 6),
        "sequences": [
            {
                "seq_id": seq.seq_id,
                "index": seq.index,
                "num_tokens": seq.num_tokens,
                "num_computed_tokens": seq.num_computed_tokens,
                "tier": "device" if seq.on_device else "swap",
                "block_table": [*map(unpack_ids, seq.tables)],
            }
            for seq in view.sequences
        ],
    }


def _event(event: Admitted | Preempted) -> dict[str, Any]:
    values = asdict(event)
    del values["request_id"]
    values["event"] = type(event).__name__.lower()
    values["seconds_ago"] = round(time.monotonic() - values.pop("time"), 6)
    if isinstance(event, Admitted):
        values["explanation"] = LOOKUP_ENDS.get(event.lookup_end, event.lookup_end)
    return values
