"""The soak test itself must notice the violations that it looks for."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from unittest.mock import Mock

import pytest
from triton.runtime import JITFunction

from soak.kills import Answer, Choice, add_reply, make_requests
from soak.malformed import KINDS
from soak.offline import Round
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
    assert Choice(logprobs=[-0.5]).differs_from(Choice(logprobs=[-0.6])) is not None
    with pytest.raises(RuntimeError, match="gone"):
        answer_of({"error": {"message": "gone"}})


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
