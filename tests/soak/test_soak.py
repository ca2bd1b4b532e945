"""The soak test itself must notice the violations that it looks for."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from triton.runtime import JITFunction

from octavo import BeamSearchParams, SamplingParams
from octavo.outputs import RequestOutput, SequenceOutput, TokenLogprobs
from server.live_server import LiveServer
from soak import kills, malformed, offline
from soak.kills import Answer, Choice, Load, add_reply, make_requests
from soak.malformed import KINDS
from soak.offline import DemoWork, Params, Round, missing
from soak.report import Memory, Report
from soak.rescored import (
    RESULT_KINDS,
    SETTINGS,
    LongWork,
    Result,
    checkpoint,
    compare,
    nothing_is_compiled,
)


def answer_of(*replies: dict[str, object]) -> Answer:
    answer: Answer = {}
    for reply in replies:
        add_reply(answer, reply)
    return answer


def test_a_stream_and_a_whole_reply_compare_by_their_content() -> None:
    scores = {"token_logprobs": [-0.5, -1.0]}
    whole = {"index": 0, "text": "ab", "token_ids": [1, 2], "logprobs": scores}
    ending = {"finish_reason": "length", "stop_reason": None}
    plain = answer_of({"choices": [whole | ending]})
    pieces = [
        {"index": 0, "text": "a", "token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}},
        {"index": 0, "text": "b", "token_ids": [2], "logprobs": {"token_logprobs": [-1.00001]}},
        {"index": 0, "text": "", "token_ids": []} | ending,
    ]
    streamed = answer_of(*({"choices": [piece]} for piece in pieces))
    assert streamed[0].differs_from(plain[0]) is None
    for lost in range(3):
        kept = [piece for number, piece in enumerate(pieces) if number != lost]
        altered = answer_of(*({"choices": [piece]} for piece in kept))
        assert altered[0].differs_from(plain[0]) is not None
    for wrong_number in (-0.6, float("nan")):
        assert Choice(logprobs=[wrong_number]).differs_from(Choice(logprobs=[-0.5])) is not None
    with pytest.raises(RuntimeError, match="gone"):
        answer_of({"error": {"message": "gone"}})


def test_likeliest_tokens_and_usage_are_compared() -> None:
    def answer(top: float, num_tokens: int) -> Answer:
        completion = {"token_logprobs": [-1.0], "top_logprobs": [{"b": -1.0, "a": top}]}
        chat = {"content": [{"logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": top}]}]}
        choices = [{"index": i, "logprobs": each} for i, each in enumerate((completion, chat))]
        usage = {"prompt_tokens": 3, "completion_tokens": num_tokens}
        return answer_of({"choices": choices}, {"choices": [], "usage": usage})

    right = answer(-0.5, 1)
    assert len(right) == 3
    for wrong, indices in ((answer(-0.6, 1), {0, 1}), (answer(-0.5, 2), {kills.USAGE})):
        differ = {index for index in right if wrong[index].differs_from(right[index]) is not None}
        assert differ == indices


def test_an_answer_that_cannot_be_compared_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    server, report = LiveServer("http://localhost", Mock()), Report("part", 10.0)

    async def learn(load: Load) -> None:
        load.expected = [{0: Choice(logprobs=[-0.5])}] * len(load.requests)

    async def ask(load: Load, number: int, is_stream: bool) -> Answer:
        return answer_of({"choices": [{"index": 0, "logprobs": {"token_logprobs": [None]}}]})

    async def let_clients_ask(*_: object) -> None:
        await asyncio.sleep(0)

    async def run() -> None:
        await kills.soak(Load(server, random.Random(1), report), random.Random(1), 0)

    monkeypatch.setattr(Load, "learn", learn)
    monkeypatch.setattr(Load, "ask", ask)
    monkeypatch.setattr(kills, "kill_repeatedly", let_clients_ask)
    asyncio.run(run())
    assert report.num_violations == kills.CONCURRENCY


@pytest.mark.parametrize(("num_held", "num_violations"), [(2, 0), (3, 1)])
def test_blocks_that_no_pin_holds_are_a_violation(num_held: int, num_violations: int) -> None:
    pins = [{"block_ids": [[4, 5]]}, {"block_ids": [[4]]}]
    tiers = {"device": {"num_held": num_held}, "swap": {"num_held": 0}}
    server, report = Mock(), Report("part", 1.0)
    server.get.return_value.json.return_value = {"pinned_prefixes": pins} | tiers
    assert kills.check_blocks(server, report) == 2
    assert report.num_violations == num_violations


def test_an_engine_process_that_dies_of_a_request_is_a_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, report = LiveServer("http://localhost:1", Mock(pid=os.getpid())), Report("part", 1.0)
    found = iter([[os.getpid()], [os.getpid()], [1]])  # the last one has taken its place
    monkeypatch.setattr(malformed, "engines", lambda pid: next(found))
    asyncio.run(malformed.soak(server, 1, 0, report))
    assert report.violations == ["the engine process has died"]
    assert {"rss_mib", "engine_rss_mib"} <= report.counts.keys()


class Client:
    """A client whose requests bring nothing in so many steps; then it has no more of them."""

    def __init__(self, num_steps: float) -> None:
        self._steps_left = num_steps
        self.aborted: list[Any] = []

    @property
    def has_unfinished(self) -> bool:
        return self._steps_left > 0

    def make_request(self, prompt: Any, params: Any, cache_salt: str) -> Any:
        return SimpleNamespace(request_id="one")

    def add_request(self, stream: Any) -> None:
        pass

    def abort_request(self, stream: Any) -> None:
        self.aborted.append(stream.request_id)

    def step(self) -> list[RequestOutput]:
        self._steps_left -= 1
        return []


@pytest.mark.parametrize("num_steps", [3, float("inf")])
def test_a_request_that_is_lost_or_stuck_is_a_violation(
    num_steps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "MAX_STEPS", 10)
    client, report = Client(num_steps), Report("part", 1.0)
    llm: Any = SimpleNamespace(client=client)
    Round(llm, DemoWork(), random.Random(1), report, most=1).run()
    assert report.num_violations == 1
    assert client.aborted == ["one"]


def output_of(*samples: SequenceOutput, **fields: Any) -> RequestOutput:
    return RequestOutput("one", None, [1], list(samples), **fields)


def test_what_a_request_has_not_brought_is_a_violation() -> None:
    score = TokenLogprobs(7, -1.0, {})
    whole = SequenceOutput(0, "ab", [7, 7], "length", logprobs=[score, score])
    params = SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    assert missing(output_of(whole, prompt_logprobs=[None]), params) == ""
    beams = BeamSearchParams(2, max_tokens=2)
    assert missing(output_of(whole, whole), beams) == ""
    wrong: list[tuple[RequestOutput, Params]] = [
        (output_of(whole, prompt_logprobs=[None], error="it is broken"), params),
        (output_of(whole), params),
        (output_of(whole), beams),
        (output_of(whole, prompt_logprobs=[None]), replace(params, n=2)),
        (output_of(replace(whole, token_ids=[7]), prompt_logprobs=[None]), params),
        (output_of(replace(whole, finish_reason="stop"), prompt_logprobs=[None]), params),
        (output_of(replace(whole, logprobs=[score]), prompt_logprobs=[None]), params),
    ]
    assert all(missing(*each) for each in wrong)


def test_a_kernel_that_is_compiled_late_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, report = Mock(arg_names=["out", "SIZE"]), Report("part", 1.0)
    kernel.fn.__name__ = "_store"
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *args: args[1])
    with nothing_is_compiled(report):
        assert JITFunction._do_compile(kernel, "key", {}, 0, {(1,): 16}, {}, {}, False) == "key"
    JITFunction._do_compile(kernel, "key", {}, 0, {(1,): 32}, {}, {}, False)
    assert report.violations == ["_store was compiled while others waited: {'SIZE': 16}"]


def test_every_decoding_method_is_used() -> None:
    fields = {name for _, body in make_requests(random.Random(0)) for name in body}
    assert fields >= {
        "beam_width",
        "n",
        "seed",
        "stop",
        "logprobs",
        "messages",
        "repetition_penalty",
        "structured_outputs",
    }


def test_a_seed_makes_the_same_requests() -> None:
    for make, _ in KINDS:
        made = [[make(random.Random(number)) for number in range(200)] for _ in range(2)]
        assert made[0] == made[1]
        assert len(set(made[0])) > 100


def test_unfinished_work_is_a_violation() -> None:
    report = Report("part", 10.0)
    report.count("kills", 99)
    report.require("kills", 99)
    assert report.num_violations == 0
    report.require("kills", 100)
    assert report.num_violations == 1


@pytest.mark.parametrize(("mib_per_sample", "num_violations"), [(0.0, 0), (0.1, 0), (1.0, 1)])
def test_memory_that_grows_is_a_violation(mib_per_sample: float, num_violations: int) -> None:
    memory, report = Memory("self", 10.0), Report("part", 10.0)
    # Growth at the beginning does not count.
    memory.samples = [(float(t), 100 * (t > 5) + mib_per_sample * t) for t in range(60)]
    memory.check_growth(report)
    assert report.num_violations == num_violations


@pytest.mark.parametrize("name", ["tiny", "tiny-t5"])
def test_results_that_differ_by_more_than_rounding_are_violations(name: str) -> None:
    setting, rng = SETTINGS[name], random.Random(1)
    with checkpoint(setting) as directory, setting.engine(directory, num_ranks=1) as llm:
        work, report = LongWork(setting, llm.engine.model_config), Report("part", 60.0)
        found = Counter[str]()
        while min(found[kind] for kind in RESULT_KINDS) == 0:
            Round(llm, work, rng, report).run()
            found = Counter(each.kind for each in work.results)
        compare(llm, work.results, report)
        for kind in RESULT_KINDS:
            assert report.counts[kind] == found[kind]
            assert report.counts[f"{kind}_differ_rms_1"] < 1e-4
        assert report.num_violations == 0
        for kind in RESULT_KINDS:
            result = next(each for each in work.results if each.kind == kind)
            before = report.num_violations
            compare(llm, [wrong(result)], report)
            assert report.num_violations > before, kind
        before = report.num_violations
        work.results.clear()
        for _ in range(5):
            Round(llm, work, rng, report).run()  # after which something is cached
            blocks = llm.engine.executor._worker.runner.kv_cache.blocks  # type: ignore[attr-defined]
            # What is cached is wrong in the next round: with an encoder, of its inputs alone.
            of_inputs = sorted(llm.engine.kv.encoder_inputs.block_ids())
            blocks[of_inputs or slice(None)] *= -1
        compare(llm, work.results, report)
        assert report.num_violations > before


def wrong(result: Result) -> Result:
    """The same but for its last token, of which the engine says something else."""
    if result.has_misses:
        *others, last = result.token_ids
        return replace(result, token_ids=[*others, last ^ 1])
    return replace(
        result,
        logprobs=[*result.logprobs[:-1], -9.0],
        cumulative_logprob=result.cumulative_logprob - 9.0,
    )
