"""What a reader of a stream finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from octavo.core.step import SamplingSpec
from octavo.engine.prepared import PreparedRequest
from octavo.sampling_params import SamplingParams
from octavo.server.delivery import Delivery
from octavo.server.exchange import Exchange
from octavo.server.journal import OpenRequest, Sample
from octavo.server.messages import Delta
from octavo.server.stream import RequestStream
from server.clients import run


def new_stream(arrival_time: float, delivery: Delivery | None = None, n: int = 1) -> RequestStream:
    request = PreparedRequest([1], SamplingSpec(), 100, n, 0, (), ())
    entry = OpenRequest("r", request, None, arrival_time, [Sample(index) for index in range(n)])
    abort = (lambda _: None) if delivery is None else delivery.abort
    return RequestStream(entry, SamplingParams(n=n), None, abort)


def test_an_idle_server_does_not_ask_for_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = Delivery([])
    delivery.exchange = cast("Exchange", SimpleNamespace(drop=lambda entry: None))
    for arrival_time, end_time in ((0.0, 1.0), (1.5, 2.0), (7200.0, 7200.5)):
        delivery.streams["r"] = stream = new_stream(arrival_time, delivery)
        monkeypatch.setattr("time.monotonic", lambda now=end_time: now)
        stream.abort()
    assert 0.5 < delivery.seconds_per_request < 1


def test_a_slow_reader_finds_one_delta_of_each_sample() -> None:
    async def test() -> None:
        stream = new_stream(0.0, n=3)
        for token, index in ((5, 2), (6, 0), (7, 2), (8, 1)):
            stream.take(Delta("r", index, [token]))
        found = [await anext(stream)]
        stream.take(Delta("r", 2, [9]))
        found += [await anext(stream) for _ in range(3)]
        assert [(each.index, each.token_ids) for each in found] == [  # type: ignore[union-attr]
            (2, [5, 7]),
            (0, [6]),
            (1, [8]),
            (2, [9]),
        ]

    run(test())
