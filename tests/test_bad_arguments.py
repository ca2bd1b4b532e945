"""Every argument of the offline API with values of every wrong kind: one of octavo's own errors,
and an engine that goes on as if nothing had been asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from model_zoo import model_directory
from octavo import LLM, BeamSearchParams, PoolingParams, SamplingParams
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig, make_config
from octavo.engine.validation import MAX_CACHE_SALT
from octavo.errors import ConfigError, EngineClosed, InvalidRequest, ModelError, OutOfMemory

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=3)
PROMPT = [5, 6, 7]
MESSAGES = [{"role": "user", "content": "Hello"}]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("it cannot be shown")


NUMBERS = [-1, 0, 5, 1 << 63, 10**400, -(10**5000), 1.5, float("nan"), float("inf"), -0.0, True]
TEXTS = ["", "x", "\ud800", "\0", "x" * 100_000]
OTHERS: list[Any] = [
    None, b"x", [], [None], [[]], ["\ud800"], [10**400], (), {}, {"max_tokens": 2}, {None: 1},
    {1}, range(3), np.arange(3), np.array(5), np.float32("nan"), object(), Unprintable(),
    SamplingParams, lambda: 5, memoryview(b"x"),
]  # fmt: skip
VALUES: list[Any] = [*NUMBERS, *TEXTS, *OTHERS]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(model_directory("llama3")), num_blocks=32, max_num_seqs=8, max_model_len=64)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(autouse=True)
def the_engine_goes_on(llm: LLM, expected: list[int]) -> Iterator[None]:
    yield
    assert not llm.engine.has_unfinished
    assert llm.client.num_open == 0
    assert llm.engine.kv.pool.num_held == llm.engine.kv.num_pinned_blocks == 0
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def stream(llm: LLM, *args: Any, **options: Any) -> None:
    assert list(llm.stream(*args, **options))


def pin(llm: LLM, *args: Any, **options: Any) -> None:
    llm.unpin_prefix(llm.pin_prefix(*args, **options))


# How each argument is given, and which of VALUES it takes.
CALLS: dict[str, tuple[Callable[[LLM, Any], object], Callable[[Any], bool]]] = {
    "generate.prompts": (
        lambda llm, v: llm.generate(v, GREEDY, use_tqdm=False),
        lambda v: v in ("x", "\0") or (isinstance(v, list | tuple) and not v),
    ),
    "generate.prompts[1]": (
        lambda llm, v: llm.generate([PROMPT, v], GREEDY, use_tqdm=False),
        lambda v: v in ("x", "\0"),
    ),
    "generate.params": (
        lambda llm, v: llm.generate(PROMPT, v, use_tqdm=False),
        lambda v: v is None,
    ),
    "generate.params[1]": (
        lambda llm, v: llm.generate([PROMPT, PROMPT], [GREEDY, v], use_tqdm=False),
        lambda v: False,
    ),
    "generate.priority": (
        lambda llm, v: llm.generate(PROMPT, GREEDY, priority=v, use_tqdm=False),
        lambda v: type(v) is int and v in (-1, 0, 5),
    ),
    "generate.tenant": (
        lambda llm, v: llm.generate(PROMPT, GREEDY, tenant=v, use_tqdm=False),
        lambda v: v in ("", "x", "\0"),
    ),
    "generate.cache_salt": (
        lambda llm, v: llm.generate(PROMPT, GREEDY, cache_salt=v, use_tqdm=False),
        lambda v: v in ("", "x", "\0"),
    ),
    "beam_search.prompts": (
        lambda llm, v: llm.beam_search(v, BEAMS, use_tqdm=False),
        lambda v: v in ("x", "\0") or (isinstance(v, list | tuple) and not v),
    ),
    "beam_search.params": (
        lambda llm, v: llm.beam_search(PROMPT, v, use_tqdm=False),
        lambda v: False,
    ),
    "beam_search.priority": (
        lambda llm, v: llm.beam_search(PROMPT, BEAMS, priority=v, use_tqdm=False),
        lambda v: type(v) is int and v in (-1, 0, 5),
    ),
    "beam_search.tenant": (
        lambda llm, v: llm.beam_search(PROMPT, BEAMS, tenant=v, use_tqdm=False),
        lambda v: v in ("", "x", "\0"),
    ),
    "beam_search.cache_salt": (
        lambda llm, v: llm.beam_search(PROMPT, BEAMS, cache_salt=v, use_tqdm=False),
        lambda v: v in ("", "x", "\0"),
    ),
    "chat.messages": (lambda llm, v: llm.chat(v, GREEDY, use_tqdm=False), lambda v: False),
    "chat.messages[0]": (
        lambda llm, v: llm.chat([v], GREEDY, use_tqdm=False),
        lambda v: False,
    ),
    "chat.messages[1]": (
        lambda llm, v: llm.chat([*MESSAGES, v], GREEDY, use_tqdm=False),
        lambda v: False,
    ),
    "chat.messages[0].role": (
        lambda llm, v: llm.chat([{"role": v, "content": "Hello"}], GREEDY, use_tqdm=False),
        lambda v: v in ("", "x", "\0"),
    ),
    "chat.messages[0].content": (
        lambda llm, v: llm.chat([{"role": "user", "content": v}], GREEDY, use_tqdm=False),
        lambda v: v in ("", "x", "\0", None) or (isinstance(v, list | tuple) and not v),
    ),
    "chat.params": (
        lambda llm, v: llm.chat(MESSAGES, v, use_tqdm=False),
        lambda v: v is None,
    ),
    "chat.tenant": (
        lambda llm, v: llm.chat(MESSAGES, GREEDY, tenant=v, use_tqdm=False),
        lambda v: v in ("", "x", "\0"),
    ),
    "chat.cache_salt": (
        lambda llm, v: llm.chat(MESSAGES, GREEDY, cache_salt=v, use_tqdm=False),
        lambda v: v in ("", "x", "\0"),
    ),
    "chat_prompt.messages": (lambda llm, v: llm.chat_prompt(v), lambda v: False),
    "stream.prompt": (lambda llm, v: stream(llm, v, GREEDY), lambda v: v in ("x", "\0")),
    "stream.params": (lambda llm, v: stream(llm, PROMPT, v), lambda v: v is None),
    "stream.priority": (
        lambda llm, v: stream(llm, PROMPT, GREEDY, priority=v),
        lambda v: type(v) is int and v in (-1, 0, 5),
    ),
    "stream.tenant": (
        lambda llm, v: stream(llm, PROMPT, GREEDY, tenant=v),
        lambda v: v in ("", "x", "\0"),
    ),
    "stream.cache_salt": (
        lambda llm, v: stream(llm, PROMPT, GREEDY, cache_salt=v),
        lambda v: v in ("", "x", "\0"),
    ),
    "pin_prefix.prefix": (lambda llm, v: pin(llm, v), lambda v: False),
    "pin_prefix.name": (
        lambda llm, v: pin(llm, [1] * 16, name=v),
        lambda v: v is None or (isinstance(v, str) and v != "\ud800"),
    ),
    "pin_prefix.cache_salt": (
        lambda llm, v: pin(llm, [1] * 16, cache_salt=v),
        lambda v: v in ("", "x", "\0"),
    ),
    "unpin_prefix.name": (lambda llm, v: llm.unpin_prefix(v), lambda v: False),
    "engine.make_request.request_id": (
        lambda llm, v: llm.client.make_request(PROMPT, GREEDY, v),
        lambda v: v is None or (isinstance(v, str) and v != "\ud800"),
    ),
}


def takes(is_good: Callable[[Any], bool], value: Any) -> bool:
    """Whether a value is one that the argument takes; arrays compare with nothing."""
    return not isinstance(value, np.ndarray) and bool(is_good(value))


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_every_wrong_kind_are_refused(llm: LLM, name: str) -> None:
    call, is_good = CALLS[name]
    for value in VALUES:
        if takes(is_good, value):
            call(llm, value)
            continue
        with pytest.raises(InvalidRequest) as raised:
            call(llm, value)
        assert len(str(raised.value)) < 400
        assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *((SamplingParams, field.name) for field in fields(SamplingParams)),
        *((BeamSearchParams, field.name) for field in fields(BeamSearchParams)),
    ],
)
def test_fields_of_every_wrong_kind_are_refused(llm: LLM, kind: type, field: str) -> None:
    """What is not refused when it is made is refused by the engine, or works."""
    errors = []
    for value in VALUES:
        given = {"beam_width": 2, field: value} if kind is BeamSearchParams else {field: value}
        given.setdefault("max_tokens", 8)
        try:
            params = kind(**given)
            method = llm.beam_search if kind is BeamSearchParams else llm.generate
            assert method(PROMPT, params, use_tqdm=False)[0].outputs  # type: ignore[operator]
        except InvalidRequest as error:
            errors.append(str(error))
    assert len(errors) > 10
    assert max(map(len, errors)) < 400


@pytest.mark.parametrize("field", ["pooling", "dimensions", "normalize"])
def test_fields_of_pooling_of_every_wrong_kind_are_refused(llm: LLM, field: str) -> None:
    errors = []
    for value in VALUES:
        try:
            assert llm.embed(PROMPT, PoolingParams(**{field: value}), use_tqdm=False)[0].embedding
        except InvalidRequest as error:
            errors.append(str(error))
    assert len(errors) > 30
    assert max(map(len, errors)) < 400


@pytest.mark.parametrize(
    "option",
    [
        field.name
        for kind in (EngineConfig, CacheConfig, SchedulerConfig)
        for field in fields(kind)
        if field.name not in ("model", "cache", "scheduler", "has_usual_steps")
    ],
)
def test_options_of_every_wrong_kind_are_refused(option: str) -> None:
    errors = []
    for value in VALUES:
        try:
            make_config("demo", **{option: value})
        except ConfigError as error:
            errors.append(error)
    assert len(errors) > 20
    assert {error.field for error in errors} <= {option, "policy", "max_num_batched_tokens"}
    assert max(len(str(error)) for error in errors) < 400


@pytest.mark.parametrize("option", ["max_model_len", "num_blocks", "max_num_batched_tokens"])
def test_options_beyond_the_machine_are_refused(option: str) -> None:
    largest = (1 << 63) - 1
    with pytest.raises((ConfigError, OutOfMemory), match=option):
        LLM(str(model_directory("llama3")), **{"num_blocks": 8, option: largest})


@pytest.mark.parametrize(
    "value", [None, 5, b"x", "", "\ud800", "\0", "x" * 5000, "~nouser", [None], {}]
)
def test_a_model_of_every_wrong_kind_is_refused(value: Any) -> None:
    with pytest.raises((ConfigError, ModelError)):
        LLM(value)


def test_the_other_method_s_parameters_are_refused_with_its_name(llm: LLM) -> None:
    """Before anything is computed, although a stream is otherwise checked when it begins."""
    generate: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPT, BEAMS),  # type: ignore[arg-type]
        lambda: llm.chat(MESSAGES, [BEAMS]),  # type: ignore[list-item]
        lambda: llm.stream(PROMPT, BEAMS),  # type: ignore[arg-type]
    ]
    for call in generate:
        with pytest.raises(InvalidRequest, match=r"^params: .*; call beam_search\(\)"):
            call()
    with pytest.raises(InvalidRequest, match=r"^params: .*; call generate\(\)"):
        llm.beam_search(PROMPT, GREEDY)  # type: ignore[arg-type]


def test_a_salt_has_a_length(llm: LLM) -> None:
    llm.generate(PROMPT, GREEDY, cache_salt="x" * MAX_CACHE_SALT, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="cache_salt: 4097 characters are more than 4096"):
        llm.generate(PROMPT, GREEDY, cache_salt="x" * (MAX_CACHE_SALT + 1), use_tqdm=False)


def test_a_request_is_queued_once(llm: LLM) -> None:
    client = llm.client
    stream = client.make_request(PROMPT, GREEDY, "mine")
    client.add_request(stream)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="request: 'mine' is queued already"):
            client.add_request(stream)
        with pytest.raises(InvalidRequest, match="request_id: 'mine' is in use"):
            client.make_request(PROMPT, GREEDY, "mine")
        client.step()
    while client.has_unfinished:
        client.step()
    with pytest.raises(InvalidRequest, match="request: 'mine' has ended; make another request"):
        client.add_request(stream)


def test_a_closed_engine_says_so() -> None:
    closed = LLM(str(model_directory("llama3")), num_blocks=8)
    begun = closed.stream(PROMPT, GREEDY)
    next(begun)
    waiting = closed.client.make_request(PROMPT, GREEDY)
    closed.close()
    closed.close()
    calls: list[Callable[[], Any]] = [
        lambda: closed.generate(PROMPT, GREEDY),
        lambda: closed.beam_search(PROMPT, BEAMS),
        lambda: closed.chat(MESSAGES),
        lambda: list(closed.stream(PROMPT)),
        lambda: list(begun),
        lambda: closed.pin_prefix([1] * 16),
        lambda: closed.unpin_prefix("x"),
        lambda: closed.client.add_request(waiting),
        lambda: closed.client.step(),
        lambda: closed.engine.step(),
    ]
    for call in calls:
        with pytest.raises(EngineClosed, match="the engine was closed"):
            call()
    assert not closed.engine.has_unfinished
