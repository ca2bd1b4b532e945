"""What a reader of a stream finds."""

from __future__ import annotations

from octavo.core.step import SamplingSpec
from octavo.engine.prepared import PreparedRequest
from octavo.sampling_params import SamplingParams
from octavo.server.journal import OpenRequest, Sample
from octavo.server.messages import Delta
from octavo.server.stream import RequestStream
from server.clients import run


def test_a_slow_reader_finds_one_delta_of_each_sample() -> None:
    async def test() -> None:
        request = PreparedRequest([1], SamplingSpec(), 100, 3, 0, (), ())
        entry = OpenRequest("r", request, None, 0.0, [Sample(index) for index in range(3)])
        stream = RequestStream(entry, SamplingParams(n=3), None, lambda _: None)
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
