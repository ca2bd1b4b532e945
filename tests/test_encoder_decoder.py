"""Encoder-decoder models through the whole engine: the tokens of transformers' generate.

Whatever the engine does on the way: company, preemption by either mode, prefixes found, budgets.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import model_zoo
from daily_cases import checkered
from model_zoo import generate
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import RequestTooLong
from octavo.models.decoder import Encoder

NAMES = model_zoo.ENCODER_DECODER_NAMES
NUM_TOKENS = 14
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (1, 16, 17, 50)  # the block size is 16
START = 2  # decoder_start_token_id of the zoo's models


def inputs() -> list[list[int]]:
    return [model_zoo.random_token_ids(n, seed=n) for n in LENGTHS]


@functools.cache
def reference_tokens(name: str) -> list[list[int]]:
    return [
        generate(name, prompt, NUM_TOKENS, eos_token_id=None)[0, 1:].tolist() for prompt in inputs()
    ]


def load(directory: str | Path, **options: Any) -> LLM:
    if not isinstance(directory, Path):
        directory = model_zoo.model_directory(directory)
    options = {"num_blocks": 200, "max_num_seqs": 16, "max_model_len": 80, **options}
    return LLM(str(directory), **options)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the inputs of each run of the encoder."""
    runs: list[list[int]] = []
    encode = Encoder.encode

    def counted(self: Encoder, vectors: Any, positions: Any, lens: Sequence[int]) -> Any:
        runs.append(list(lens))
        return encode(self, vectors, positions, lens)

    monkeypatch.setattr(Encoder, "encode", counted)
    return runs


def test_forms_are_kept_to_beside_forced_tokens(tmp_path: Path) -> None:
    """A form begins after the first one, and is cut off where the last one would complete it."""
    model_zoo.write_model("bart", tmp_path)
    path = tmp_path / "generation_config.json"
    rules = {"forced_bos_token_id": 0, "forced_eos_token_id": model_zoo.EOS_ID}
    path.write_text(json.dumps(json.loads(path.read_text()) | rules))
    regex = "[a-z]{3,5}"
    form = {"regex": regex}
    with load(tmp_path) as llm:
        for n in (1, 3):
            whole, cut = (
                SamplingParams(n=n, temperature=n - 1, max_tokens=most, structured=form)
                for most in (8, 2)
            )
            [got], [short] = (llm.generate([inputs()[1]], each) for each in (whole, cut))
            assert all(re.fullmatch(regex, each.text) for each in got.outputs)
            assert {each.finish_reason for each in got.outputs} == {"stop"}
            unfinished = [each for each in short.outputs if not re.fullmatch(regex, each.text)]
            assert unfinished or n > 1
            assert {each.finish_reason for each in unfinished} <= {"length"}
        beams = BeamSearchParams(3, max_tokens=8, structured=form)
        [found] = llm.beam_search([inputs()[1]], beams)
        assert all(re.fullmatch(regex, each.text) for each in found.outputs)


def test_a_decoder_s_cached_tokens_are_none_of_the_prompt_s() -> None:
    prompt, start = inputs()[1], [START, *model_zoo.random_token_ids(40)]
    with load("bart") as llm:
        found = [
            llm.generate([{"prompt": prompt, "decoder_input_ids": start}], GREEDY)[0]
            for _ in range(2)
        ]
    assert [each.num_cached_tokens for each in found] == [0, len(prompt)]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name: str, backend: str) -> None:
    llm = load(name, attention_backend=backend)
    assert tokens(llm.generate(inputs(), GREEDY, use_tqdm=False)) == reference_tokens(name)


@pytest.mark.parametrize(("name", "width"), list(zip(NAMES, (2, 3, 4, 5, 6), strict=True)))
def test_beams_equal_transformers(name: str, width: int) -> None:
    model_zoo.check_beam_search(load(name), name, inputs()[3], width)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_decoder_starts_with(name: str) -> None:
    llm, prompt, start = load(name), inputs()[2], [START, 40, 50, 60]
    how = {"decoder_input_ids": torch.tensor([start]), "eos_token_id": None}
    expected = generate(name, prompt, NUM_TOKENS, **how)
    for given in (start, start[1:]):  # the start token is put in front
        [output] = llm.generate(
            [{"prompt": prompt, "decoder_input_ids": given}], GREEDY, use_tqdm=False
        )
        assert output.outputs[0].token_ids == expected[0, 4:].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_samples_share_one_run_of_the_encoder(name: str, encoded: list[list[int]]) -> None:
    """And are the same whatever else is computed, and in whichever order."""
    params = SamplingParams(n=4, temperature=0.8, max_tokens=9, seed=5, ignore_eos=True)
    llm, prompt = load(name), inputs()[3]
    [alone] = llm.generate([prompt], params, use_tqdm=False)
    assert encoded == [[50]]
    [again, *_] = llm.generate([prompt, *inputs()[:3]], [params] + [GREEDY] * 3, use_tqdm=False)
    samples = [sample.token_ids for sample in alone.outputs]
    assert [sample.token_ids for sample in again.outputs] == samples
    assert len({tuple(sample) for sample in samples}) > 1
    assert [50] not in encoded[1:], "the input was found in the cache"


@pytest.mark.parametrize(("name", "mode"), checkered(NAMES, ("swap", "recompute")))
def test_preempted_requests_go_on(name: str, mode: str) -> None:
    """An urgent request displaces the others halfway, and takes all blocks."""
    llm = load(
        name,
        policy="priority",
        num_blocks=22,
        block_size=8,
        max_model_len=40,
        max_num_batched_tokens=64,
        preemption_mode=mode,
        swap_space=1 << 24,
        enable_prefix_caching=False,
    )
    client = llm.client
    for prompt, expected in zip(inputs(), reference_tokens(name), strict=True):
        stream = client.make_request(prompt, GREEDY, priority=5)
        client.add_request(stream)
        outputs: list[Any] = []
        for _ in range(5):
            outputs += client.step()
        filler = model_zoo.random_token_ids(60, seed=99)
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, n=1)
        for seed in (1, 2):
            urgent = client.make_request(filler[seed:], params, priority=0)
            client.add_request(urgent)
        while client.has_unfinished:
            outputs += client.step()
        assert stream.output is not None
        assert stream.output.outputs[0].token_ids == expected
    assert llm.engine.scheduler.num_preemptions[mode] > 0


def test_equal_inputs_run_the_encoder_once(encoded: list[list[int]]) -> None:
    llm, prompt = load("t5"), inputs()[3]
    outputs = llm.generate([prompt] * 6, GREEDY, use_tqdm=False)
    assert tokens(outputs) == [reference_tokens("t5")[3]] * 6
    assert encoded == [[50]]
    llm.generate([prompt[:-1]], GREEDY, use_tqdm=False)
    assert encoded == [[50], [49]], "half of an input is of no use"


@pytest.mark.parametrize("name", ["flan-t5", "bart"])
def test_beside_64_others(name: str, encoded: list[list[int]]) -> None:
    """In steps of few tokens, of which an input takes most."""
    others = [model_zoo.random_token_ids(1 + i % 60, seed=100 + i) for i in range(64)]
    mixed = SamplingParams(temperature=1.0, max_tokens=5, seed=1)
    llm = load(name, num_blocks=600, max_num_seqs=40, max_num_batched_tokens=70)
    params = [GREEDY] * 4 + [mixed] * 64
    outputs = llm.generate([*inputs(), *others], params, use_tqdm=False)
    assert tokens(outputs[:4]) == reference_tokens(name)
    assert max(map(sum, encoded)) < 70


def test_a_long_input() -> None:
    """3,000 tokens, which is many parts of relative biases and splits of decode attention."""
    prompt = model_zoo.random_token_ids(3000, seed=3)
    llm = load("flan-t5", num_blocks=400, max_num_batched_tokens=3001)
    expected = generate("flan-t5", prompt, 6, eos_token_id=None)[0, 1:].tolist()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    assert tokens(llm.generate([prompt], params, use_tqdm=False)) == [expected]
    with pytest.raises(RequestTooLong, match="max_num_batched_tokens"):
        llm.generate([[*prompt, 5]], params, use_tqdm=False)


def test_an_input_beyond_the_positions() -> None:
    llm = load("bart")
    with pytest.raises(RequestTooLong, match="takes 512 tokens"):
        llm.generate([model_zoo.random_token_ids(513)], GREEDY, use_tqdm=False)


# -------------------------------------------------------------------- rules of the output

RULES = [
    {"forced_bos_token_id": 9, "forced_eos_token_id": 7},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [[5], [100, 200]]},
    {"forced_eos_token_id": 1, "no_repeat_ngram_size": 3, "bad_words_ids": [[8, 9]]},
    # As OPUS-MT models have them.
    {"bad_words_ids": [[100]], "no_repeat_ngram_size": 1, "renormalize_logits": True},
]


def directory_with(rules: dict[str, Any], directory: Path) -> Path:
    for path in model_zoo.model_directory("bart").iterdir():
        if path.name != "generation_config.json":
            (directory / path.name).symlink_to(path)
    rules = rules | {"eos_token_id": 1}
    (directory / "generation_config.json").write_text(json.dumps(rules))
    return directory


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_rules_of_the_output_are_those_of_transformers(
    tmp_path: Path, rules: dict[str, Any]
) -> None:
    """For greedy decoding and for beams, scores included. Bad words are some that came without."""
    name, prompt = "bart", inputs()[3]
    if "bad_words_ids" in rules and len(rules) == 1:
        first = reference_tokens(name)[3]
        rules = {"bad_words_ids": [[first[0]], first[3:5], first[1:3]]}
    llm = load(directory_with(rules, tmp_path))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    expected = generate(name, prompt, NUM_TOKENS, **rules)[0, 1:].tolist()
    assert output.outputs[0].token_ids == expected[: len(output.outputs[0].token_ids)]
    num_tokens = expected.index(1) + 1 if 1 in expected else NUM_TOKENS
    assert len(output.outputs[0].token_ids) == num_tokens
    [output] = llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=8), use_tqdm=False)
    model_zoo.check_beams(
        output, generate(name, prompt, 8, **rules, **model_zoo.beam_options(4)), 1
    )


@pytest.mark.parametrize("name", ["llama", "t5", "bart"])
def test_beams_of_a_least_length_and_with_a_penalty(name: str) -> None:
    """As the generation_config.json of BART's summarizers asks for (min_length)."""
    llm, prompt = load(name), inputs()[2]
    given = 1 if name in NAMES else len(prompt)
    params = BeamSearchParams(4, max_tokens=8, length_penalty=-1.0)  # for short ones
    [usual] = llm.beam_search(prompt, params, use_tqdm=False)
    ends = [beam.token_ids[2] for beam in usual.outputs]  # so that some are shorter
    found = []
    least: dict[str, Any] = {"min_tokens": 6}
    for more in ({}, least, least | {"repetition_penalty": 1.8}):
        asked = replace(params, stop_token_ids=ends, **more)
        [output] = llm.beam_search(prompt, asked, use_tqdm=False)
        how = {"eos_token_id": [model_zoo.EOS_ID, *ends], **more, **model_zoo.beam_options(4)}
        how |= {"min_new_tokens": how.pop("min_tokens", None), "length_penalty": -1.0}
        model_zoo.check_beams(output, generate(name, prompt, 8, **how), given)
        found.append([beam.token_ids for beam in output.outputs])
    assert found[0] != found[1] != found[2], "the options change nothing"


def test_beams_that_must_end_in_one_of_several_tokens(tmp_path: Path) -> None:
    """All of these tokens are as likely, so that scores are transformers', and tokens one of the
    choices that have them."""
    prompt, rules = inputs()[3], {"forced_eos_token_id": [7, 300]}
    llm = load(directory_with(rules, tmp_path))
    [output] = llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=8), use_tqdm=False)
    expected = generate("bart", prompt, 8, **rules, **model_zoo.beam_options(4))
    scores = [beam.score for beam in output.outputs]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), rel=1e-5)
    ends = {beam.token_ids[-1] for beam in output.outputs if len(beam.token_ids) == 8}
    assert ends
    assert ends <= {7, 300}
