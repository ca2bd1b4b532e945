"""What generation_config.json of a decoder demands is done as in transformers' generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import model_zoo
from daily_cases import checkered
from octavo import LLM, SamplingParams
from octavo.config import ModelImpl
from octavo.errors import ModelError
from octavo.models.registry import read_model_config

NAME = "llama"
NUM_TOKENS = 12
PROMPT = model_zoo.random_token_ids(9)


def generated(prompt: list[int], **rules: Any) -> list[int]:
    """transformers' greedy tokens, and none behind an end token."""
    model = model_zoo.reference_model(NAME)
    given = {"eos_token_id": None, "pad_token_id": 2, "max_new_tokens": NUM_TOKENS, **rules}
    with torch.inference_mode():
        [tokens] = model.generate(torch.tensor([prompt]), do_sample=False, **given)
    found: list[int] = tokens[len(prompt) :].tolist()
    return found


def directory_with(rules: dict[str, Any], directory: Path) -> Path:
    for path in model_zoo.model_directory(NAME).iterdir():
        if path.name != "generation_config.json":
            (directory / path.name).symlink_to(path)
    (directory / "generation_config.json").write_text(json.dumps(rules))
    return directory


def served(directory: Path, prompts: list[list[int]], impl: ModelImpl, **given: Any) -> Any:
    with LLM(directory, num_blocks=64, block_size=8, max_num_seqs=4, model_impl=impl) as llm:
        defaults = llm.engine.model_config.sampling_defaults
        params = SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, **defaults, **given})
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [each.outputs[0].token_ids for each in outputs]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """Tokens without rules, of which bad words are made."""
    return generated(PROMPT)


def test_a_forced_token_that_is_a_bad_word_is_forced(tmp_path: Path) -> None:
    rules = {"bad_words_ids": [[9]], "forced_bos_token_id": 9, "forced_eos_token_id": 9}
    want = generated(PROMPT[:1], **rules)
    assert want[0] == want[-1] == 9
    assert served(directory_with(rules, tmp_path), [PROMPT[:1]], "native") == [want]


KINDS = (
    *("ngram", "word", "words", "word from the prompt", "suppressed", "first", "last"),
    *("one of several last", "one of several last, but one", "penalty", "ends"),
)


@pytest.mark.parametrize(("kind", "impl"), checkered(KINDS, ["native", "transformers"]))
def test_greedy_tokens_equal_those_of_generate(
    kind: str, impl: ModelImpl, plain: list[int], tmp_path: Path
) -> None:
    # The third has half of the vocabulary, so that an output without its tokens is another one.
    prompts = [PROMPT, PROMPT[:1], [*range(4, 164)]]
    rules: dict[str, Any] = {
        "ngram": {"no_repeat_ngram_size": 1},
        "word": {"bad_words_ids": [[plain[1]]]},
        "words": {"bad_words_ids": [plain[2:4], [plain[0], 7]]},
        "word from the prompt": {"bad_words_ids": [[*PROMPT[-2:], plain[0]]]},
        "suppressed": {"suppress_tokens": [plain[0], plain[3]]},
        "first": {"forced_bos_token_id": 9},
        "last": {"forced_eos_token_id": 9},
        "one of several last": {"forced_eos_token_id": [30, 9]},
        "one of several last, but one": {"forced_eos_token_id": [30, 9], "suppress_tokens": [9]},
        "penalty": {"repetition_penalty": 1.7},
        "ends": {"eos_token_id": [plain[4], plain[6]]},
    }[kind]
    wants = [generated(prompt, **rules) for prompt in prompts]
    assert wants != [generated(prompt) for prompt in prompts], "the rule changes nothing"
    got = served(directory_with(rules, tmp_path), prompts, impl)
    for tokens, want in zip(got, wants, strict=True):
        assert tokens == want[: len(tokens)]
        ends = rules.get("eos_token_id", [model_zoo.EOS_ID])
        number = next((i + 1 for i, token in enumerate(want) if token in ends), NUM_TOKENS)
        assert len(tokens) == number


@pytest.mark.parametrize(
    "rules",
    [
        {"begin_suppress_tokens": [5]},
        {"sequence_bias": [[[5], 1.0]]},
        {"exponential_decay_length_penalty": [3, 1.1]},
        {"guidance_scale": 1.5},
        {"encoder_repetition_penalty": 1.2},
        {"stop_strings": ["."]},
        {"token_healing": True},
        {"do_sample": True, "typical_p": 0.9},
        {"do_sample": True, "eta_cutoff": 0.1},
        {"top_k": 4, "penalty_alpha": 0.6},
        {"dola_layers": "high"},
        {"suppress_tokens": [320]},
        {"suppress_tokens": 5},
        {"bad_words_ids": []},
        {"repetition_penalty": -1.0},
        {"suppress_tokens": [4, 9], "forced_bos_token_id": 9},
        {"suppress_tokens": [9], "forced_eos_token_id": 9},
        {"suppress_tokens": [9, 8], "forced_eos_token_id": [8, 9]},
        {"forced_eos_token_id": [8, 320]},
        {"bad_words_ids": [[i] for i in range(5, 320)], "suppress_tokens": [*range(5)]},
        {"bad_words_ids": [[i] for i in range(320)]},
    ],
    ids=lambda rules: str(rules)[:60],
)
def test_what_octavo_lacks_is_refused_by_name(rules: dict[str, Any], tmp_path: Path) -> None:
    name = [*rules][-1]
    with pytest.raises(ModelError, match=rf"generation_config.json: {name}") as error:
        read_model_config(directory_with(rules, tmp_path))
    assert "model_impl" not in str(error.value), "transformers' module would have the same rules"


@pytest.mark.parametrize("name", ["begin_suppress_tokens", "forced_decoder_ids", "stop_strings"])
def test_an_empty_list_is_no_rule(name: str, tmp_path: Path) -> None:
    read_model_config(directory_with({name: []}, tmp_path))


def test_config_json_has_the_rules_where_there_is_no_generation_config(tmp_path: Path) -> None:
    rules = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.7, "temperature": 0.5}
    (directory_with({}, tmp_path) / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.unlink()  # a link
    path.write_text(json.dumps(fields | rules))
    config = read_model_config(tmp_path)
    assert config.decoding_rules.no_repeat_ngram_size == 2
    assert config.sampling_defaults == {"repetition_penalty": 1.7}, "do_sample is off"
    path.write_text(json.dumps(fields | rules | {"do_sample": True}))
    sampling = {"repetition_penalty": 1.7, "temperature": 0.5}
    assert read_model_config(tmp_path).sampling_defaults == sampling


@pytest.mark.parametrize(("bos", "first"), [(0, 0), (None, 9)])
def test_an_old_config_json_forces_the_first_token_in_other_words(
    bos: int | None, first: int, tmp_path: Path
) -> None:
    """As those of BART's first summarizers; transformers reads it from config.json alone."""
    old = {"force_bos_token_to_be_generated": True, "forced_bos_token_id": 9, "bos_token_id": bos}
    path = directory_with({}, tmp_path) / "config.json"
    fields = json.loads(path.read_text()) | old
    path.unlink()  # a link
    path.write_text(json.dumps(fields))
    assert read_model_config(tmp_path).decoding_rules.first_token_id is None
    (tmp_path / "generation_config.json").unlink()
    theirs = transformers.GenerationConfig.from_pretrained(
        tmp_path, config_file_name="config.json", _from_model_config=True
    )
    rules = read_model_config(tmp_path).decoding_rules
    assert rules.first_token_id == theirs.forced_bos_token_id == first
