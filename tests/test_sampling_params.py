"""Every bad value is refused where it is made, with the field, the value and the limit."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from octavo import sampling_params
from octavo.core.step import LogitBias, SamplingSpec
from octavo.errors import InvalidRequest
from octavo.sampling_params import BeamSearchParams, SamplingParams

NAN, INF = float("nan"), float("inf")

BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n: 0 is less than 1"),
    ({"n": -3}, "n: -3 is less than 1"),
    ({"n": 16_385}, "n: 16385 is more than 16384"),
    ({"n": 2.0}, "n: 2.0 is not an integer"),
    ({"n": True}, "n: True is not an integer"),
    ({"n": 2, "temperature": 0.0}, "n: 2 greedy samples"),
    ({"n": 2, "temperature": 1e-6}, "n: 2 greedy samples"),
    ({"temperature": NAN}, "temperature: nan is not finite"),
    ({"temperature": INF}, "temperature: inf is not finite"),
    ({"temperature": -0.1}, "temperature: -0.1 is not between 0.0 and 2.0"),
    ({"temperature": 2.1}, "temperature: 2.1 is not between 0.0 and 2.0"),
    ({"temperature": "hot"}, "temperature: 'hot' is not a number"),
    ({"temperature": None}, "temperature: None is not a number"),
    ({"temperature": False}, "temperature: False is not a number"),
    ({"top_k": -2}, "top_k: -2 is less than -1"),
    ({"top_k": 1.5}, "top_k: 1.5 is not an integer"),
    ({"top_k": 1 << 63}, "top_k: 9223372036854775808 is more than 9223372036854775807"),
    ({"min_tokens": 1 << 63, "max_tokens": None}, "min_tokens: 9223372036854775808 is more than"),
    ({"top_p": 0}, "top_p: 0.0 leaves no token"),
    ({"top_p": 1.1}, "top_p: 1.1 is not between 0.0 and 1.0"),
    ({"top_p": NAN}, "top_p: nan is not finite"),
    ({"min_p": -0.5}, "min_p: -0.5 is not between 0.0 and 1.0"),
    ({"min_p": 2}, "min_p: 2.0 is not between 0.0 and 1.0"),
    ({"presence_penalty": 2.5}, "presence_penalty: 2.5 is not between -2.0 and 2.0"),
    ({"frequency_penalty": -2.5}, "frequency_penalty: -2.5 is not between -2.0 and 2.0"),
    ({"repetition_penalty": 0}, "repetition_penalty: 0.0 is not more than 0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty: -1.0 is not more than 0"),
    ({"repetition_penalty": INF}, "repetition_penalty: inf is not finite"),
    ({"logit_bias": {5: 100.5}}, "logit_bias: 100.5 is not between -100.0 and 100.0"),
    ({"logit_bias": {5: NAN}}, "logit_bias: nan is not finite"),
    ({"logit_bias": {5: 10**400}}, "logit_bias: about 2**1328 is not finite"),
    ({"logit_bias": {5: 1.0, 1 << 63: 1.0}}, f"logit_bias: {1 << 63} is more than"),
    ({"logit_bias": {5: True}}, "logit_bias: True is not a number"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias: '5' is not an integer"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias: -1 is less than 0"),
    ({"logit_bias": [5]}, "logit_bias: [5] is not a mapping"),
    ({"allowed_token_ids": []}, "allowed_token_ids: an empty list allows no token"),
    ({"allowed_token_ids": [1, -1]}, "allowed_token_ids: -1 is less than 0"),
    ({"allowed_token_ids": 7}, "allowed_token_ids: 7 is not a list"),
    ({"bad_words": "word"}, "bad_words: 'word' is not a list"),
    ({"bad_words": [""]}, "bad_words: an empty string"),
    ({"bad_words": [5]}, "bad_words: 5 is not a string"),
    ({"bad_words": ["w"] * 129}, "bad_words: 129 strings are more than 128"),
    ({"max_tokens": 0}, "max_tokens: 0 is less than 1"),
    ({"max_tokens": -1}, "max_tokens: -1 is less than 1"),
    ({"max_tokens": "8"}, "max_tokens: '8' is not an integer"),
    ({"min_tokens": -1}, "min_tokens: -1 is less than 0"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: 9 is more than max_tokens (8)"),
    ({"stop": ""}, "stop: an empty string"),
    ({"stop": ["a", ""]}, "stop: an empty string"),
    ({"stop": [1]}, "stop: 1 is not a string"),
    ({"stop": {"a": 1}}, "stop: {'a': 1} is not a list"),
    ({"stop": list("abcdefghijklmnopq")}, "stop: 17 strings are more than 16"),
    ({"stop": ["a", "b" * 1025]}, "stop: 'bbbbbbbbbbbbbbbb'... has 1025 characters"),
    ({"stop": "a", "detokenize": False}, "stop: stop strings are found in text"),
    ({"stop_token_ids": [-5]}, "stop_token_ids: -5 is less than 0"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids: 'a' is not an integer"),
    ({"ignore_eos": 1}, "ignore_eos: 1 is not true or false"),
    ({"detokenize": None}, "detokenize: None is not true or false"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens: 'no' is not true or false"),
    ({"include_stop_str_in_output": 0}, "include_stop_str_in_output: 0 is not true or false"),
    ({"seed": 1 << 63}, "seed: 9223372036854775808 is more than 9223372036854775807"),
    ({"seed": 0.5}, "seed: 0.5 is not an integer"),
    ({"logprobs": -1}, "logprobs: -1 is less than 0"),
    ({"logprobs": True}, "logprobs: True is not an integer"),
    ({"prompt_logprobs": -1}, "prompt_logprobs: -1 is less than 0"),
]

BAD_BEAMS: list[tuple[dict[str, Any], str]] = [
    ({"beam_width": 0}, "beam_width: 0 is less than 1"),
    ({"beam_width": -2}, "beam_width: -2 is less than 1"),
    ({"beam_width": 16_385}, "beam_width: 16385 is more than 16384"),
    ({"beam_width": 2.5}, "beam_width: 2.5 is not an integer"),
    ({"beam_width": 2, "max_tokens": 0}, "max_tokens: 0 is less than 1"),
    ({"beam_width": 2, "length_penalty": NAN}, "length_penalty: nan is not finite"),
    ({"beam_width": 2, "length_penalty": 10**400}, "length_penalty: about 2**1328 is not finite"),
    ({"beam_width": 2, "length_penalty": 300}, "length_penalty: 300.0 is not between -32.0 and"),
    ({"beam_width": 2, "length_penalty": -300}, "length_penalty: -300.0 is not between -32.0 and"),
    (
        {"beam_width": 2, "stop_token_ids": range(129)},
        "stop_token_ids: 129 are more than the 128 that a beam search takes",
    ),
    ({"beam_width": 2, "early_stopping": "always"}, "early_stopping: 'always' is not true, false"),
    ({"beam_width": 2, "early_stopping": 1}, "early_stopping: 1 is not true, false or 'never'"),
    ({"beam_width": 2, "early_stopping": None}, "early_stopping: None is not true, false"),
    ({"beam_width": 2, "num_return_sequences": 0}, "num_return_sequences: 0 is less than 1"),
    (
        {"beam_width": 2, "num_return_sequences": 3},
        "num_return_sequences: 3 is more than beam_width (2)",
    ),
    ({"beam_width": 2, "ignore_eos": "x"}, "ignore_eos: 'x' is not true or false"),
    ({"beam_width": 2, "stop_token_ids": [-1]}, "stop_token_ids: -1 is less than 0"),
    ({"beam_width": 2, "min_tokens": 9, "max_tokens": 8}, "min_tokens: 9 is more than max_tokens"),
    ({"beam_width": 2, "repetition_penalty": 0}, "repetition_penalty: 0.0 is not more than 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_SAMPLING)
def test_bad_sampling_values_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**arguments)
    assert str(raised.value).startswith(message)
    assert raised.value.field == message.split(":")[0]


@pytest.mark.parametrize(("arguments", "message"), BAD_BEAMS)
def test_bad_beam_values_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        BeamSearchParams(**arguments)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("params", [SamplingParams, BeamSearchParams])
def test_unknown_fields_are_refused(params: type) -> None:
    with pytest.raises(InvalidRequest, match=rf"best_of: {params.__name__} has no such field$"):
        params(best_of=3)
    with pytest.raises(InvalidRequest, match=r"max_token: .*; did you mean max_tokens"):
        params(max_token=3)
    given = params(beam_width=2) if params is BeamSearchParams else params(n=2)
    with pytest.raises(InvalidRequest, match="best_of"):
        replace(given, best_of=3)
    assert pickle.loads(pickle.dumps(given)) == copy.copy(given) == replace(given) == given


def test_defaults_change_nothing() -> None:
    assert SamplingParams().to_spec([2]) == SamplingSpec()
    assert SamplingParams().max_tokens == 16


def test_values_are_brought_to_one_form() -> None:
    params = SamplingParams(
        n=np.int64(2),
        temperature=1,
        stop="end",
        stop_token_ids={3},
        allowed_token_ids=range(3),
        logit_bias={np.int32(4): 1},
        min_tokens=0,
    )
    assert type(params.n) is int
    assert type(params.temperature) is float
    assert params.stop_strings == ("end",)
    assert params.stop_token_ids == (3,)
    assert params.allowed_token_ids == (0, 1, 2)
    assert params.logit_bias == {4: 1.0}
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop=[], detokenize=False).stop_strings == ()


def test_many_token_ids_are_not_checked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    real = sampling_params.integer_in
    monkeypatch.setattr(
        sampling_params,
        "integer_in",
        lambda *args, **more: checked.append(args) or real(*args, **more),
    )
    many = [*range(5000)] * 2
    params = SamplingParams(stop_token_ids=many, allowed_token_ids=many)
    assert params.stop_token_ids == params.allowed_token_ids == tuple(range(5000))
    assert not [args for args in checked if args[0].endswith("_token_ids")]
    with pytest.raises(InvalidRequest, match="stop_token_ids: -7 is less than 0"):
        SamplingParams(stop_token_ids=[*many, -7])
    with pytest.raises(InvalidRequest, match=f"{1 << 63} is more than"):
        SamplingParams(stop_token_ids=[*many, 1 << 63])
    with pytest.raises(InvalidRequest, match="True is not an integer"):
        SamplingParams(stop_token_ids=[1, True])


def test_many_biases_are_not_checked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    for name in ("integer_in", "_real_in"):
        monkeypatch.setattr(sampling_params, name, lambda field, *_: checked.append(field))
    biases = {token_id: token_id % 100 for token_id in range(5000)}
    given = SamplingParams(logit_bias=biases).logit_bias or {}
    assert given == biases
    assert set(map(type, given.values())) == {float}
    assert "logit_bias" not in checked


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(n=16_384, temperature=2.0, top_k=-1, top_p=1.0, min_p=1.0)
    SamplingParams(temperature=0.0, top_p=1e-9, presence_penalty=-2.0, frequency_penalty=2.0)
    SamplingParams(logit_bias={0: 100.0, 1: -100.0}, seed=-(1 << 63), max_tokens=None)
    SamplingParams(min_tokens=8, max_tokens=8)
    SamplingParams(min_tokens=10_000, max_tokens=None)
    BeamSearchParams(1, length_penalty=-1.0, early_stopping="never")


def test_parameters_are_frozen_and_travel_between_processes() -> None:
    for params in (SamplingParams(stop="a", logit_bias={1: 2.0}), BeamSearchParams(4)):
        assert pickle.loads(pickle.dumps(params)) == params
        with pytest.raises(FrozenInstanceError):
            params.max_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias: token id 100 is outside the vocabulary of 100"),
        ({"allowed_token_ids": [5, 123]}, "allowed_token_ids: token id 123 is outside"),
        ({"stop_token_ids": [100]}, "stop_token_ids: token id 100 is outside"),
        ({"logprobs": 21}, "logprobs: 21 is more than max_logprobs (20)"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: 21 is more than max_logprobs (20)"),
    ],
)
def test_what_depends_on_the_model_is_checked_against_it(
    arguments: dict[str, Any], message: str
) -> None:
    params = SamplingParams(**arguments)
    with pytest.raises(InvalidRequest) as raised:
        params.check_against(vocab_size=100, max_logprobs=20)
    assert str(raised.value).startswith(message)
    params.check_against(vocab_size=200, max_logprobs=30)


def test_logprobs_are_no_more_than_the_vocabulary() -> None:
    with pytest.raises(InvalidRequest, match=r"logprobs: 9 is more than the vocabulary \(8\)"):
        SamplingParams(logprobs=9).check_against(vocab_size=8, max_logprobs=20)


def test_a_beams_stop_tokens_are_checked_against_the_model() -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids: token id 8"):
        BeamSearchParams(2, stop_token_ids=[8]).check_against(vocab_size=8, max_logprobs=20)


def test_to_spec() -> None:
    params = SamplingParams(
        temperature=1e-6,
        top_k=-1,
        logit_bias={9: 1.0, 3: -1.0},
        allowed_token_ids=[3, 9, 2],
        stop_token_ids=[7],
        min_tokens=4,
        logprobs=0,
        prompt_logprobs=3,
        bad_words=["ab"],
    )
    assert params.to_spec([2], [[1, 5], [], [8]]) == SamplingSpec(
        temperature=0.0,
        logit_bias=LogitBias.of({9: 1.0, 3: -1.0}),
        allowed_token_ids=(3, 9, 2),
        bad_words=((1, 5), (8,)),
        min_tokens=4,
        end_token_ids=(2, 7),
        num_logprobs=0,
        num_prompt_logprobs=3,
    )


def test_ends_are_masked_only_as_long_as_they_end() -> None:
    assert SamplingParams().to_spec([2]).end_token_ids == ()
    ignoring = SamplingParams(min_tokens=3, ignore_eos=True, stop_token_ids=[5])
    assert ignoring.to_spec([2]).end_token_ids == (5,)


def test_a_request_that_leaves_no_token_is_refused() -> None:
    params = SamplingParams(min_tokens=1, allowed_token_ids=[2, 7], stop_token_ids=[7])
    with pytest.raises(InvalidRequest, match="allowed_token_ids: only end tokens are allowed"):
        params.to_spec([2])
    assert params.to_spec([3]).allowed_token_ids == (2, 7)


def test_bad_words_of_too_many_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="bad_words: 1025 tokens in all are more than 1024"):
        SamplingParams(bad_words=["long"]).to_spec([], [list(range(1025))])


def test_beams_ask_for_enough_candidates() -> None:
    """So many that `beam_width` are left without the end tokens, whose number adds to theirs."""
    assert BeamSearchParams(4).to_spec([]).num_candidates == 8
    assert BeamSearchParams(4).to_spec([2]).num_candidates == 8
    assert BeamSearchParams(4).to_spec([2, 3]).num_candidates == 8
    assert BeamSearchParams(4, stop_token_ids=[5]).to_spec([2]).num_candidates == 8
    assert BeamSearchParams(4, stop_token_ids=range(3, 103)).to_spec([2]).num_candidates == 105
    assert BeamSearchParams(4, ignore_eos=True).to_spec([2, 3]).num_candidates == 8
    assert BeamSearchParams(4).num_return_sequences == 4
    assert BeamSearchParams(4, num_return_sequences=2).num_return_sequences == 2


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, octavo.sampling_params, octavo.executor.base, octavo.memory_budget;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
