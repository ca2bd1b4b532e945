"""The offline API as a user meets it: outputs, streams, prefixes, and the errors of bad input."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

import model_zoo
from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.config import EngineConfig, make_config
from octavo.errors import (
    ConfigError,
    EngineFailed,
    InvalidRequest,
    ModelError,
    OutOfMemory,
    RequestTooLong,
)
from octavo.worker.device import cpu

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        str(model_zoo.model_directory("llama3")), num_blocks=64, max_num_seqs=8, max_model_len=128
    )


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Any:
    """Whatever a test did, no request and no block may remain."""
    yield
    assert not llm.engine.has_unfinished
    assert llm.engine.kv.pool.num_held == llm.engine.kv.num_pinned_blocks
    assert llm.client.num_open == 0


def test_outputs_say_what_was_asked_and_what_came(llm: LLM) -> None:
    text = "The quick brown fox"
    by_text, by_ids = llm.generate(
        [text, llm.tokenizer.encode(text)],  # type: ignore[union-attr]
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        use_tqdm=False,
    )
    assert by_text.prompt == text
    assert by_ids.prompt is None
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids
    [output] = by_text.outputs
    assert output.token_ids == by_ids.outputs[0].token_ids
    assert len(output.token_ids) == 6
    assert output.finish_reason == "length"
    assert output.text == llm.tokenizer.decode(output.token_ids)  # type: ignore[union-attr]
    assert output.logprobs is None
    assert by_text.first_token_time is not None
    assert by_text.arrival_time <= by_text.first_token_time <= by_text.finish_time


def test_a_second_time_the_prompt_is_found_in_the_cache(llm: LLM) -> None:
    prompt = model_zoo.random_token_ids(48, seed=5)
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 47)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    other = llm.generate(prompt, GREEDY, use_tqdm=False, cache_salt="somebody else")
    assert other[0].num_cached_tokens == 0


def test_logprobs_equal_transformers(llm: LLM) -> None:
    prompt = model_zoo.random_token_ids(20, seed=6)
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    [output] = llm.generate(prompt, params, use_tqdm=False)
    [sequence] = output.outputs
    ids = torch.tensor([prompt + sequence.token_ids])
    with torch.inference_mode():
        expected = model_zoo.reference_model("llama3")(ids).logits[0].log_softmax(-1)
    assert sequence.logprobs is not None
    for i, entry in enumerate(sequence.logprobs):
        row = expected[len(prompt) - 1 + i]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert [t for t, _ in entry.top] == row.topk(2).indices.tolist()
    total = sum(entry.logprob for entry in sequence.logprobs)
    assert sequence.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, score in enumerate(output.prompt_logprobs[1:], start=1):
        assert score is not None
        assert score.token_id == prompt[i]
        assert score.logprob == pytest.approx(expected[i - 1, prompt[i]].item(), abs=1e-4)


def test_stop_strings_cut_the_text_where_they_begin(llm: LLM) -> None:
    free = llm.generate("The dog", SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    text = free[0].outputs[0].text
    stop = text[6:9]
    for include in (False, True):
        params = SamplingParams(
            temperature=0,
            max_tokens=24,
            stop=["never there", stop],
            include_stop_str_in_output=include,
        )
        [output] = llm.generate("The dog", params, use_tqdm=False)
        end = text.index(stop) + (len(stop) if include else 0)
        assert output.outputs[0].text == text[:end]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        deltas = list(llm.stream("The dog", params))
        assert "".join(delta.text for delta in deltas) == text[:end]
        assert deltas[-1].finish_reason == "stop"


def test_a_stop_string_in_the_last_token_that_may_come(llm: LLM) -> None:
    free = llm.generate("The dog", SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    stop = free[0].outputs[0].text[6:9]

    def generate(max_tokens: int) -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=stop)
        return llm.generate("The dog", params, use_tqdm=False)[0]

    early = generate(24).outputs
    assert generate(len(early[0].token_ids)).outputs == early


def test_a_stop_string_and_a_stop_token_in_the_same_step(llm: LLM) -> None:
    """The samples that they end are the last ones of their request, in either order."""
    assert llm.tokenizer is not None
    orders: set[int] = set()
    for seed in range(100):
        params = SamplingParams(n=2, seed=seed, max_tokens=6, ignore_eos=True)
        free = llm.generate("The dog", params, use_tqdm=False)[0].outputs
        for one, other in (free, free[::-1]):
            stop = llm.tokenizer.decode(one.token_ids[-1:])
            stop_id = other.token_ids[-1]
            early = [*one.token_ids[:-1], *other.token_ids[:-1]]
            if (
                not stop.isalpha()
                or stop_id in [*early, one.token_ids[-1]]
                or stop in one.text[: -len(stop)] + "|" + other.text
            ):
                continue
            ending = replace(params, max_tokens=20, stop=stop, stop_token_ids=[stop_id])
            [output] = llm.generate("The dog", ending, use_tqdm=False)
            ends = [(each.token_ids, each.finish_reason) for each in output.outputs]
            assert ends == [(each.token_ids, "stop") for each in free]
            assert output.outputs[other.index].stop_reason == stop_id
            assert output.outputs[one.index].stop_reason == stop
            orders.add(one.index)
        if orders == {0, 1}:
            return
    pytest.fail("no seed had such ends")


def test_a_stop_token_ends_the_output_and_is_not_shown(llm: LLM) -> None:
    free = llm.generate("The dog", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    tokens = free[0].outputs[0].token_ids
    stop_id = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop_id])
    [output] = llm.generate("The dog", params, use_tqdm=False)
    [sequence] = output.outputs
    assert sequence.token_ids == tokens[: tokens.index(stop_id) + 1]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", stop_id)
    shown = llm.tokenizer.decode(sequence.token_ids[:-1])  # type: ignore[union-attr]
    assert sequence.text == shown


def test_a_stream_left_early_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream("The dog", SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
    pieces = [next(stream) for _ in range(3)]
    assert [len(piece.token_ids) for piece in pieces] == [1, 1, 1]
    stream.close()  # the fixture looks at what is left


def test_a_forgotten_stream_is_collected_within_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector closes it in the middle of what the scheduler does."""
    [alone] = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    stream = llm.stream([4, 5], SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
    next(stream)
    allocate = llm.engine.kv.allocate

    def collect_and_allocate(*args: Any, **options: Any) -> Any:
        stream.close()
        return allocate(*args, **options)

    monkeypatch.setattr(llm.engine.kv, "allocate", collect_and_allocate)
    [output] = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    assert llm.client.num_open == 0


def test_a_stream_that_another_thread_leaves_waits_for_no_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream([4, 5], SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
    next(stream)
    step, num_open = llm.engine.step, []

    def step_while_it_is_left() -> Any:
        num_open.append(llm.client.num_open)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(stream.close).result(60)
        return step()

    monkeypatch.setattr(llm.engine, "step", step_while_it_is_left)
    llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    assert num_open[:2] == [2, 1], "before the next step it is aborted"


def test_streamed_text_is_the_text(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=40, ignore_eos=True)
    [whole] = llm.generate("東京 😀", params, use_tqdm=False)
    pieces: dict[int, str] = {0: "", 1: ""}
    for delta in llm.stream("東京 😀", params):
        pieces[delta.index] += delta.text
    assert [pieces[0], pieces[1]] == [output.text for output in whole.outputs]


def test_interleaved_calls_do_not_take_from_each_other(llm: LLM) -> None:
    prompts = [model_zoo.random_token_ids(10, seed=i) for i in (1, 2)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    got: list[list[int]] = [[], []]
    for first, second in zip(*streams, strict=True):
        got[0] += first.token_ids
        got[1] += second.token_ids
        if len(got[0]) == 3:
            assert llm.generate(prompts[0], params)[0].outputs[0].token_ids == alone[0]
            llm.unpin_prefix(llm.pin_prefix(model_zoo.random_token_ids(16, seed=3)))
    assert got == alone


def test_calls_from_several_threads_take_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = ["Once upon a time", "One morning", "The king", "In the forest"]
    alone = [llm.generate(each, params)[0].outputs[0].token_ids for each in prompts]
    step, stepping = llm.engine.step, Lock()

    def step_alone() -> Any:
        assert stepping.acquire(blocking=False), "another thread's step is under way"
        try:
            time.sleep(0.001)  # others run meanwhile
            return step()
        finally:
            stepping.release()

    def generated(prompt: str) -> list[int]:
        return llm.generate(prompt, params)[0].outputs[0].token_ids

    def streamed(prompt: str) -> list[int]:
        return [token_id for delta in llm.stream(prompt, params) for token_id in delta.token_ids]

    monkeypatch.setattr(llm.engine, "step", step_alone)
    with ThreadPoolExecutor(len(prompts)) as threads:
        calls = [generated, streamed, generated, streamed]
        started = [threads.submit(call, each) for call, each in zip(calls, prompts, strict=True)]
        assert [each.result(60) for each in started] == alone


def test_beams_come_best_first(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=6, num_return_sequences=2)
    [output] = llm.beam_search("The dog", params, use_tqdm=False)
    assert [beam.index for beam in output.outputs] == [0, 1]
    scores = [beam.score for beam in output.outputs]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert all(beam.text for beam in output.outputs)


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    [output] = llm.chat(messages, GREEDY, use_tqdm=False)
    text = llm.tokenizer.decode(  # type: ignore[union-attr]
        output.prompt_token_ids, skip_special_tokens=True
    )
    assert text == "<user>Hello\n<assistant>"
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2
    with pytest.raises(InvalidRequest, match=r"^conversation 2 of 2: messages\[0\].role: 1 is not"):
        llm.chat([messages, [{"role": 1}]], GREEDY, use_tqdm=False)


def test_a_pinned_prefix_is_computed_once_and_stays(llm: LLM) -> None:
    prefix = model_zoo.random_token_ids(40, seed=7)
    name = llm.pin_prefix(prefix)
    assert llm.engine.kv.num_pinned_blocks == 2
    for i in range(12):  # enough other prompts to evict whatever can be evicted
        llm.generate(model_zoo.random_token_ids(100, seed=100 + i), GREEDY, use_tqdm=False)
    [output] = llm.generate([*prefix[:32], 5, 6], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 32
    # Nor is it forgotten with what is cached for a while.
    other = model_zoo.random_token_ids(40, seed=8)
    llm.generate(other, GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    outputs = llm.generate([other, [*prefix[:32], 5, 6]], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 32]
    with pytest.raises(InvalidRequest, match=f"name: a prefix '{name}' is pinned already"):
        llm.pin_prefix(prefix, name)
    with pytest.raises(InvalidRequest, match=r"no prefix 'x' is pinned; .*: 1$"):
        llm.unpin_prefix("x")
    llm.unpin_prefix(name)
    with pytest.raises(InvalidRequest, match=r"no prefix 'x' is pinned; .*: 0$"):
        llm.unpin_prefix("x")


def test_pinned_prefixes_have_names_of_their_own(llm: LLM) -> None:
    first, second = (llm.pin_prefix(model_zoo.random_token_ids(16, seed=s)) for s in (8, 9))
    llm.unpin_prefix(first)
    third = llm.pin_prefix(model_zoo.random_token_ids(16, seed=10))
    assert third != second
    request = llm.engine.pin_prefix("mine", [1] * 16)  # on its way
    with pytest.raises(InvalidRequest, match="name: a prefix 'mine' is pinned already"):
        llm.engine.pin_prefix("mine", [2] * 16)
    assert llm.engine.abort_request(request.request_id)
    llm.pin_prefix([2] * 16, "mine")
    for name in (second, third, "mine"):
        llm.unpin_prefix(name)


def test_the_name_of_a_pinned_prefix_is_not_looked_for_among_all_of_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks = 0

    class Pins(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            nonlocal num_looks
            num_looks += 1
            return super().__contains__(name)

    monkeypatch.setattr(llm.engine.kv, "pins", Pins())
    names = [llm.pin_prefix([number] * 16) for number in range(1, 6)]
    assert len(set(names)) == 5
    assert num_looks <= 3 * 5
    for name in names:
        llm.unpin_prefix(name)


def test_what_an_interrupt_leaves_waiting_is_ended(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> list[RequestOutput]:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.client, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 5, GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_bad_words_do_not_appear(llm: LLM) -> None:
    free = llm.generate("The dog", SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    tokens = free[0].outputs[0].token_ids
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    word = next(w for t in tokens if tokenizer.encode(w := tokenizer.decode([t]), False) == [t])
    params = SamplingParams(temperature=0, max_tokens=10, bad_words=[word])
    [output] = llm.generate("The dog", params, use_tqdm=False)
    assert tokenizer.encode(word, False)[0] not in output.outputs[0].token_ids


BAD_REQUESTS: list[tuple[Any, Callable[[], Any], str]] = [
    ("", lambda: GREEDY, "prompt: it is empty"),
    ([], lambda: GREEDY, "prompt: it is empty"),
    ([1, 320], lambda: GREEDY, "prompt: token id 320 is outside the vocabulary of 320"),
    ([1, -5], lambda: GREEDY, "prompt: token id -5 is outside the vocabulary of 320"),
    ([1, "x"], lambda: GREEDY, "prompt: 'x' is not a token id"),
    ([None], lambda: GREEDY, "prompt: None is neither text nor a list of token ids"),
    ([b"text"], lambda: GREEDY, "prompt: b'text' is neither text nor a list of token ids"),
    ([1] * 128, lambda: GREEDY, "prompt: 128 tokens leave no room for output .* of 128 tokens"),
    ([1], lambda: SamplingParams(n=0), "n: 0 is less than 1"),
    ([1], lambda: BeamSearchParams(beam_width=0), "beam_width: 0 is less than 1"),
    ([1], lambda: BeamSearchParams(beam_width=-2), "beam_width: -2 is less than 1"),
    ([1], lambda: SamplingParams(temperature=float("nan")), "temperature: nan is not finite"),
    ([1], lambda: SamplingParams(top_p=0), "top_p: 0.0 leaves no token"),
    ([1], lambda: SamplingParams(n=2, temperature=0), r"n: 2 greedy samples .* n must be 1"),
    ([1], lambda: SamplingParams(n=9), r"n: 9 sequences exceed max_num_seqs \(8\)"),
    ([1], lambda: BeamSearchParams(beam_width=9), "beam_width: 9 sequences exceed max_num_seqs"),
    ([1], lambda: SamplingParams(stop_token_ids=[999]), "stop_token_ids: token id 999 is outside"),
    ([1], lambda: SamplingParams(logprobs=21), r"logprobs: 21 is more than max_logprobs \(20\)"),
    ([1], lambda: SamplingParams(min_tokens=9, max_tokens=3), "min_tokens: 9 is more than max_tok"),
    (
        [1],
        lambda: SamplingParams(min_tokens=1, stop_token_ids=range(320)),
        "min_tokens: every token of the vocabulary ends the output",
    ),
]


def generate(llm: LLM, prompts: list[Any], make: Callable[[], Any]) -> None:
    params = make()
    method: Any = llm.generate if isinstance(params, SamplingParams) else llm.beam_search
    method(prompts, [params], use_tqdm=False)


@pytest.mark.parametrize(("prompt", "params", "message"), BAD_REQUESTS)
def test_bad_requests_are_named(
    llm: LLM, prompt: Any, params: Callable[[], Any], message: str
) -> None:
    is_token_ids = isinstance(prompt, list) and prompt[:1] not in ([None], [b"text"])
    prompts = [prompt] if is_token_ids else prompt
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        generate(llm, prompts if isinstance(prompts, list) else [prompts], params)


def test_one_bad_prompt_of_many_is_named_and_none_is_run(llm: LLM) -> None:
    with pytest.raises(RequestTooLong, match=r"prompt 2 of 3: prompt: 200 tokens leave no room"):
        llm.generate([[1, 2], [1] * 200, [3]], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="params: 0 for 2 prompts"):
        llm.generate([[1], [2]], [], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="params: 2 for 3 prompts"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY], use_tqdm=False)


def test_an_interrupted_call_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes in the middle of a step, and takes effect when the step is over."""
    steps = iter(range(5))
    original = llm.engine.executor.submit

    def submit(plan: Any) -> Any:
        if next(steps, None) is None:
            signal.raise_signal(signal.SIGINT)
        return original(plan)

    monkeypatch.setattr(llm.engine.executor, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=50), use_tqdm=False)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    [output] = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 8


def test_an_interrupted_call_takes_nothing_from_a_stream(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream([1, 2, 3], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    token_ids = list(next(stream).token_ids)
    original = llm.engine.executor.submit

    def submit(plan: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return original(plan)

    monkeypatch.setattr(llm.engine.executor, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([4, 5], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    for delta in stream:
        token_ids += delta.token_ids
    assert len(token_ids) == 20


def test_requests_find_names_of_their_own(llm: LLM) -> None:
    short = SamplingParams(max_tokens=1, detokenize=False)
    taken = [llm.client.make_request([1], short, f"request-{i}") for i in range(1000)]
    for stream in taken:
        llm.client.add_request(stream)
    names = {output.request_id for output in llm.generate([[1], [2]], GREEDY, use_tqdm=False)}
    assert len(names) == 2
    assert names.isdisjoint(stream.request_id for stream in taken)


def test_a_conversation_is_cached_for_its_tenant_alone(llm: LLM) -> None:
    messages = [{"role": "user", "content": "How much is the fish in the little red house?"}]
    hits = [
        llm.chat(messages, GREEDY, use_tqdm=False, cache_salt=salt)[0].num_cached_tokens
        for salt in ("one", "two", "one")
    ]
    assert hits[:2] == [0, 0]
    assert hits[2] > 0


def test_an_executor_that_breaks_down_ends_the_engine() -> None:
    broken = LLM(str(model_zoo.model_directory("llama3")), num_blocks=8)

    def submit(plan: Any) -> Any:
        raise RuntimeError("the device is on fire")

    broken.engine.executor.submit = submit  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="on fire"):
        broken.generate([1, 2], GREEDY, use_tqdm=False)
    with pytest.raises(EngineFailed, match="RuntimeError: the device is on fire"):
        broken.generate([1, 2], GREEDY, use_tqdm=False)


@pytest.mark.usefixtures("collecting_all")
def test_the_program_around_an_llm_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What octavo tunes in processes of its own is another program's business, if it is not asked
    for; a number of threads holds while octavo computes."""
    kept: list[bool] = []
    monkeypatch.setattr(cpu, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(cpu, "num_cpus", lambda: 2)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)

    def state() -> list[Any]:
        return [
            dict(os.environ),
            [signal.getsignal(number) for number in signal.valid_signals()],
            (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
            (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
            (random.getstate(), torch.get_rng_state().tolist()),
            list(sys.path),
        ]

    before = state()
    with LLM(str(model_zoo.model_directory("llama3")), num_blocks=8, num_threads=2) as plain:
        plain.generate("The dog", SamplingParams(max_tokens=3), use_tqdm=False)
    assert state() == before
    assert not kept
    LLM(str(model_zoo.model_directory("llama3")), num_blocks=8, owns_process=True).close()
    assert kept
    assert gc.get_freeze_count() > 10_000, "collections look at modules"


def test_a_large_gpu_gets_larger_steps_unless_they_were_chosen() -> None:
    def limits(config: EngineConfig) -> tuple[int, int]:
        return config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens

    usual = make_config("demo", policy="priority")
    large = usual.for_gpu(80 * 10**9)
    assert limits(usual) == limits(usual.for_gpu(48 * 10**9)) == (256, 2048)
    assert limits(large) == (1024, 8192)
    assert large.scheduler.policy == "priority"
    for chosen in (make_config("demo", max_num_seqs=256), make_config("demo", max_num_seqs=8)):
        assert chosen.for_gpu(80 * 10**9) == chosen
    assert limits(EngineConfig("demo").for_gpu(80 * 10**9)) == (256, 2048)
    with pytest.raises(ConfigError, match="has_usual_steps: there is no such option"):
        make_config("demo", has_usual_steps=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"blok_size": 8}, ConfigError, "blok_size: there is no such option; did you mean block"),
        ({"block_size": 0}, ConfigError, "block_size: 0 is not between 1 and 256"),
        ({"block_size": "16"}, ConfigError, "block_size: '16' is not an integer"),
        ({"swap_space": 1e9}, ConfigError, "swap_space: 1000000000.0 is not an integer"),
        ({"max_num_seqs": True}, ConfigError, "max_num_seqs: True is not an integer"),
        (
            {"enable_prefix_caching": "no"},
            ConfigError,
            "enable_prefix_caching: 'no' is not true or",
        ),
        ({"overlap": 1}, ConfigError, "overlap: 1 is not true or false"),
        ({"aging_seconds": float("inf")}, ConfigError, "aging_seconds: inf is not a finite number"),
        ({"max_logprobs": -1}, ConfigError, "max_logprobs: -1 is negative"),
        ({"dtype": "int8"}, ConfigError, "dtype: 'int8' is not one of auto, float32"),
        ({"max_model_len": 4096}, ConfigError, "max_model_len: 4096 is more than the 512 posi"),
        (
            {"num_blocks": 2, "max_model_len": 128},
            OutOfMemory,
            "one sequence of max_model_len=128 needs 8 KV blocks, but there are 2. Give kv_cach",
        ),
        ({"kv_cache_memory": 10}, OutOfMemory, "kv_cache_memory=10 does not fit"),
        (
            {"num_blocks": 4, "kv_cache_memory": 1 << 20},
            ConfigError,
            "kv_cache_memory: give either kv_cache_memory or num_blocks, not both",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 300},
            ConfigError,
            r"max_num_batched_tokens: 300 is less than max_model_len \(512\), and chunked",
        ),
        ({"max_num_seqs": 10, "max_num_batched_tokens": 9}, ConfigError, "max_num_batched_tokens"),
        ({"device": "abacus"}, ConfigError, "device: 'abacus'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(str(model_zoo.model_directory("llama3")), **options)


def test_a_model_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model 'nowhere'"):
        LLM("nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ModelError, match=r"model_type 'mamba' .* its layers carry a state"):
        LLM(str(tmp_path))


def test_the_pool_decides_how_long_a_sequence_may_be() -> None:
    small = LLM(str(model_zoo.model_directory("llama3")), num_blocks=4, max_num_seqs=4)
    assert small.engine.max_model_len == 64
    with pytest.raises(RequestTooLong, match="in a context of 64 tokens"):
        small.generate([1] * 64, GREEDY, use_tqdm=False)
    with pytest.raises(RequestTooLong, match=r"max_tokens: 4 sequence.* need 16 KV blocks"):
        small.generate([1] * 10, SamplingParams(n=4, max_tokens=None), use_tqdm=False)
    [output] = small.generate([1] * 60, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4


def test_a_model_may_be_named_by_a_path() -> None:
    directory = model_zoo.model_directory("gpt2")
    assert make_config(Path(directory)) == make_config(str(directory))
