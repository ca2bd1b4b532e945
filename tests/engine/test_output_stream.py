"""What becomes of the engine's results: text, stop strings, ends and whole outputs."""

from __future__ import annotations

import copy
import tracemalloc
from collections import deque
from typing import Any

import pytest

import model_zoo
from octavo import SamplingParams
from octavo.core.decoding import Sampling
from octavo.core.sequence import Request
from octavo.core.step import SamplingSpec, TokenLogprobs
from octavo.engine.local_client import LocalClient, LocalStream
from octavo.engine.output_text import OutputText
from octavo.engine.results import (
    Finished,
    NewTokens,
    PromptScores,
    StepResults,
    error_of,
    report_of,
)
from octavo.engine.tokenizer import Detokenizer, Tokenizer
from octavo.errors import InvalidRequest, LogitsNotFinite, RequestTooLong
from octavo.llm import LLM
from octavo.outputs import SequenceDelta

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(model_zoo.model_directory("gpt2"))


def new_stream(tokenizer: Tokenizer | None, **fields: Any) -> LocalStream:
    params = SamplingParams(**fields)
    method = Sampling(params.n, 100, frozenset(), frozenset())
    request = Request("r", PROMPT, method, SamplingSpec(), arrival_time=1.0)
    request.first_token_time, request.num_cached_tokens, request.num_preemptions = 2.0, 16, 3
    return LocalStream(request, params, tokenizer, "the prompt")


def take(stream: LocalStream, index: int, *values: Any) -> SequenceDelta | None:
    """What tokens add to a sample, with names."""
    added = stream.take_tokens(index, *values)
    if added is None:
        return None
    text, token_ids, reason, stop_reason = added
    return SequenceDelta("r", index, text, token_ids, [], reason, stop_reason)


def test_a_stop_string_ends_a_sample_that_the_engine_goes_on_with(tokenizer: Tokenizer) -> None:
    stream = new_stream(tokenizer, stop="quick", max_tokens=99)
    token_ids = tokenizer.encode("the quick brown fox")
    text, num_taken = "", 0
    for token_id in token_ids:
        delta = take(stream, 0, [token_id])
        if delta is None:
            continue
        assert not text.endswith("q"), "what may begin a stop string is held back"
        text += delta.text
        num_taken += 1
        ended = delta.finish_reason, delta.stop_reason
    assert text == "the "
    assert ended == ("stop", "quick")
    assert stream.has_ended
    output = stream.conclude(9.0).outputs[0]
    assert output.token_ids == token_ids[:num_taken]
    assert "quick" in tokenizer.decode(output.token_ids)
    assert "quick" not in tokenizer.decode(output.token_ids[:-1])
    assert (output.text, output.finish_reason, output.stop_reason) == ("the ", *ended)


@pytest.mark.parametrize("stops", [["ick", "quick"], ["quick", "ick"]])
def test_of_stop_strings_that_end_together_nothing_is_left(
    tokenizer: Tokenizer, stops: list[str]
) -> None:
    stream = new_stream(tokenizer, stop=stops, max_tokens=99)
    take(stream, 0, tokenizer.encode("the quick brown fox"))
    output = stream.conclude(9.0).outputs[0]
    assert (output.text, output.stop_reason) == ("the ", "quick")


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_the_engines_own_end_and_a_stop_string_in_one_step(
    tokenizer: Tokenizer, reason: str
) -> None:
    """A stop string in the last token that may come is what counts; an end token has no text."""
    token_ids = tokenizer.encode("fox")
    stream = new_stream(tokenizer, stop=tokenizer.decode(token_ids[-1:]))
    deltas = [take(stream, 0, [token_id]) for token_id in token_ids[:-1]]
    deltas.append(take(stream, 0, token_ids[-1:], reason, 5 if reason == "stop" else None))
    assert deltas[-1] is not None
    assert deltas[-1].finish_reason == "stop"
    expected = 5 if reason == "stop" else tokenizer.decode(token_ids[-1:])
    assert deltas[-1].stop_reason == expected
    assert stream.conclude(9.0).outputs[0].text == tokenizer.decode(token_ids[:-1])


def test_results_stay_as_they_are(tokenizer: Tokenizer) -> None:
    score = TokenLogprobs(5, -0.5, 1, ((5, -0.5),))
    results = StepResults(
        [PromptScores("r", [score] * 2)],
        NewTokens(
            ["r"] * 3,
            [0] * 3,
            [tokenizer.encode("fox"), [6], [7]],
            [None, "length", None],
            [None] * 3,
            [[score] * 2, [score], []],
        ),
        [Finished("r")],
    )
    before = copy.deepcopy(results)
    stream = new_stream(tokenizer, logprobs=1, prompt_logprobs=1)
    stream.take_prompt_scores(results.prompt_scores[0])
    for _, *row in results.tokens.rows():
        take(stream, *row)
    stream.take_end(results.finished[0])
    output = stream.conclude(9.0)
    assert output.outputs[0].logprobs is None
    assert output.prompt_logprobs is None
    scored = stream.completed(output)
    num_tokens = len(output.outputs[0].token_ids)
    assert scored.outputs[0].logprobs == [score] * num_tokens
    assert scored.outputs[0].cumulative_logprob == -0.5 * num_tokens
    assert scored.prompt_logprobs == [None, score, score]
    assert results == before


def test_an_output_says_what_is_known_of_its_request() -> None:
    stream = new_stream(None, n=2)
    take(stream, 1, [8], "length")
    assert not stream.has_ended
    take(stream, 0, [9], "stop", 9)
    assert stream.has_ended
    output = stream.conclude(9.0)
    assert [(each.index, each.token_ids, each.text) for each in output.outputs] == [
        (0, [9], ""),
        (1, [8], ""),
    ]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == (
        "r",
        "the prompt",
        PROMPT,
    )
    assert (output.num_cached_tokens, output.num_preemptions) == (16, 3)
    assert (output.arrival_time, output.first_token_time, output.finish_time) == (1.0, 2.0, 9.0)


def test_samples_that_are_cut_off_give_what_they_hold_back(tokenizer: Tokenizer) -> None:
    stream = new_stream(tokenizer, n=2, stop="never there")
    take(stream, 0, tokenizer.encode("fox"), "length")
    first = take(stream, 1, tokenizer.encode("nev"))
    assert first is not None
    assert first.text == ""
    stream.deltas = deque()
    stream.cut_off()
    [delta] = stream.deltas
    assert (delta.index, delta.text, delta.finish_reason) == (1, "nev", "abort")
    reasons = [each.finish_reason for each in stream.conclude(9.0).outputs]
    assert reasons == ["length", "abort"]


def test_a_failure_ends_the_samples_that_go_on(tokenizer: Tokenizer) -> None:
    stream = new_stream(tokenizer, n=2)
    take(stream, 1, [8], "length")
    error = LogitsNotFinite("the logits are not finite numbers")
    stream.take_end(Finished("r", error=report_of(error)))
    assert stream.has_ended
    output = stream.conclude(9.0)
    assert [each.finish_reason for each in output.outputs] == ["error", "length"]
    assert output.error == str(stream.error) == str(error)
    assert type(stream.error) is LogitsNotFinite


@pytest.mark.parametrize(
    "error", [InvalidRequest("n", "0 is less than 1"), RequestTooLong("prompt", "9 tokens")]
)
def test_errors_are_the_same_after_they_were_reported(error: InvalidRequest) -> None:
    twin = error_of(report_of(error))
    assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))
    assert str(error_of(report_of(KeyError("x")))) == "KeyError: 'x'"


def test_a_request_that_is_aborted_has_what_there_is() -> None:
    with LLM(str(model_zoo.model_directory("llama3")), num_blocks=16) as llm:
        client: LocalClient = llm.client
        stream = client.make_request(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
        assert client.abort_request(stream) is None, "it was not queued"
        client.add_request(stream)
        for _ in range(3):
            assert client.step() == []
        output = client.abort_request(stream)
        assert output is stream.output is not None
        [sample] = output.outputs
        assert (len(sample.token_ids), sample.finish_reason) == (3, "abort")
        assert client.abort_request(stream) is None
        assert (client.num_open, client.has_unfinished, client.step()) == (0, False, [])
        assert llm.engine.kv.pool.num_held == 0


class Lengths(Detokenizer):
    """Each token is the length of its text."""

    def __init__(self) -> None:
        """Nothing came before."""

    def _follow(self, ending: list[int]) -> None: ...

    def add(self, token_id: int) -> str:
        return "a" * token_id

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_token_more_does_not_copy_the_text_before_it(stop: tuple[str, ...]) -> None:
    """A million characters of it; once or twice the memory for it grows."""
    text = OutputText(Lengths(), stop)
    text.extend([1_000_000], 0, None)
    text.release(False)
    peaks = []
    tracemalloc.start()
    for number in range(9):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        text.extend([1], 1 + number, None)
        text.release(False)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert sorted(peaks)[4] < 10_000
    text.release(True)
    assert text.text == "a" * 1_000_009
