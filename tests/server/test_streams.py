"""What a reader of a stream finds."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from octavo.core.step import SamplingSpec, TokenLogprobs
from octavo.engine.results import NewTokens, PromptScores, StepResults
from octavo.engine.validation import PreparedRequest
from octavo.outputs import SequenceDelta
from octavo.sampling_params import SamplingParams
from octavo.server.engine_process.delivery import Delivery
from octavo.server.engine_process.fleet import Fleet
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.messages import pack_logprobs, pack_results
from octavo.server.engine_process.stream import MAX_DELTA_TOKENS, RequestStream
from server.clients import run


def new_stream(
    arrival_time: float,
    delivery: Delivery | None = None,
    n: int = 1,
    num_logprobs: int | None = None,
    prompt: Sequence[int] = (1,),
) -> RequestStream:
    spec = SamplingSpec(num_logprobs=num_logprobs)
    request = PreparedRequest(list(prompt), spec, 100, n, 0, (), ())
    entry = OpenRequest("r", request, None, arrival_time)
    ends = Delivery([]) if delivery is None else delivery
    return RequestStream(entry, SamplingParams(n=n, logprobs=num_logprobs), None, ends)


def test_an_idle_server_does_not_ask_for_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = Delivery([])
    fleet = SimpleNamespace(drop=lambda entry: None, tell=lambda entry, command: None)
    delivery.fleet = cast("Fleet", fleet)
    for arrival_time, end_time in ((0.0, 1.0), (1.5, 2.0), (7200.0, 7200.5)):
        delivery.streams["r"] = stream = new_stream(arrival_time, delivery)
        monkeypatch.setattr("time.monotonic", lambda now=end_time: now)
        stream.abort()
    assert 0.5 < delivery.seconds_per_request < 1


def test_a_slow_reader_finds_one_delta_of_each_sample() -> None:
    async def test() -> None:
        stream = new_stream(0.0, n=3)
        results = [(i, [token]) for token, i in ((5, 2), (6, 0), (7, 2), (8, 1))]
        for index, token_ids in results:
            stream.take_tokens(index, token_ids)
        assert [token_ids for _, token_ids in results] == [[5], [6], [7], [8]]
        found = [await anext(stream)]
        stream.take_tokens(2, [9])
        found += [await anext(stream) for _ in range(3)]
        assert [(each.index, each.token_ids) for each in found] == [  # type: ignore[union-attr]
            (2, [5, 7]),
            (0, [6]),
            (1, [8]),
            (2, [9]),
        ]

    run(test())


def scores(token: int) -> list[TokenLogprobs]:
    """Of one token, with the twenty likeliest."""
    return [TokenLogprobs(token, -0.5, 1, tuple((i, -float(i)) for i in range(20)))]


def num_alive() -> int:
    gc.collect()  # garbage of other tests, which might be collected before the next count
    return sum(type(each) is TokenLogprobs for each in gc.get_objects())


def test_what_is_not_read_is_kept_in_few_bytes() -> None:
    """Log-probabilities are many objects; those of streams that are not read would fill the memory,
    and a delta with all of them the connection's buffer."""

    async def test() -> None:
        stream = new_stream(0.0, num_logprobs=20)
        before = num_alive()
        for token in range(1000):
            stream.take_tokens(0, [token], logprobs=list(map(pack_logprobs, scores(token))))
        stream.cut_off()
        stream.conclude(1.0)
        assert num_alive() == before
        deltas = [each async for each in stream if isinstance(each, SequenceDelta)]
        assert max(len(delta.token_ids) for delta in deltas) == MAX_DELTA_TOKENS
        found = [entry for delta in deltas for entry in delta.logprobs]
        assert found == [entry for token in range(1000) for entry in scores(token)]
        [output] = (await stream.result()).outputs
        assert (output.logprobs, output.cumulative_logprob) == (found, -500.0)

    run(test())


def test_scores_of_a_prompt_are_kept_in_few_bytes() -> None:
    """They are kept until the last prompt of a request has ended, which may have hundreds."""

    async def test() -> None:
        stream = new_stream(0.0, prompt=range(1001))
        before = num_alive()
        results = StepResults(
            [PromptScores("r", [each for token in range(1000) for each in scores(token)])],
            NewTokens.none(),
            [],
        )
        packed = pack_results(results)
        del results
        stream.take_prompt_scores(packed.prompt_scores[0])
        stream.cut_off()
        assert stream.conclude(1.0).prompt_logprobs is None
        assert num_alive() == before
        expected = [None, *(each for token in range(1000) for each in scores(token))]
        assert stream.prompt_logprobs == expected
        assert (await stream.result()).prompt_logprobs == expected
        assert stream.num_entries == 1 + 1000

    run(test())
