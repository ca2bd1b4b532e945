"""Token ids that the model does not have are found before they reach a device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import model_zoo
from octavo.config import EngineConfig
from octavo.core.step import LogitBias, SamplingSpec
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.validation import PreparedRequest, RequestPreparer
from octavo.errors import InvalidRequest
from octavo.models.registry import read_model_config
from octavo.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_token_ids": [3, 50]}, "prompt"),
        ({"prompt_token_ids": [-1, 3]}, "prompt"),
        ({"logit_bias": LogitBias.of({2: 1.0, 50: 1.0})}, "logit_bias"),
        ({"allowed_token_ids": (4, 50)}, "allowed_token_ids"),
        ({"bad_words": ((4,), (5, 50))}, "bad_words"),
        ({"end_token_ids": (-2,)}, "stop_token_ids"),
    ],
)
def test_an_engine_checks_what_others_have_prepared(fields: dict[str, Any], field: str) -> None:
    prompt = fields.pop("prompt_token_ids", [3])
    prepared = PreparedRequest(prompt, SamplingSpec(**fields), 9, 1, 0, (), ())
    with pytest.raises(InvalidRequest, match=f"{field}: token id .* outside the vocabulary of 50"):
        prepared.check_vocabulary(50)


def test_a_bad_word_that_the_model_never_writes_bans_nothing() -> None:
    """Its tokenizer may know more tokens than the model has."""
    directory = model_zoo.model_directory("llama3")
    config, tokenizer = read_model_config(directory), Tokenizer.from_directory(directory)
    word = "fox"
    spelled = tokenizer.encode(word, add_special_tokens=False)
    params = SamplingParams(bad_words=[word])
    for vocab_size, is_banned in ((config.vocab_size, True), (max(spelled), False)):
        preparer = RequestPreparer(
            replace(config, vocab_size=vocab_size), tokenizer, EngineConfig("demo", max_logprobs=5)
        )
        banned = preparer.prepare([4], params, 80).sampling.bad_words
        assert (tuple(spelled) in banned) == is_banned
        assert all(max(each) < vocab_size for each in banned)


@pytest.mark.parametrize("name", ["begin", "end"])
def test_a_delimiter_of_reasoning_that_the_tokenizer_leaves_out_is_refused(
    name: str, tmp_path: Path
) -> None:
    directory = model_zoo.model_directory("llama3")
    contents = json.loads((directory / "tokenizer.json").read_text())
    contents["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    tokenizer = Tokenizer.from_directory(tmp_path)
    preparer = RequestPreparer(read_model_config(directory), tokenizer, EngineConfig("demo"))
    params = SamplingParams(thinking={"num_tokens": 3, name: "  "})
    with pytest.raises(InvalidRequest, match=rf"^thinking.{name}: '  ' is no token"):
        preparer.prepare([4], params, 80)
