"""The same tokens from one rank and from several, for every family and decoding method."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ranks import Ranks
from sharded import executor_on, model_for, spoil_embedding

import model_zoo
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.outputs import RequestOutput

RanksOf = Callable[[int], Ranks]
LENGTHS = (3, 16, 33, 50)
PROMPTS = [model_zoo.random_token_ids(n, seed=n) for n in LENGTHS]
NUM_TOKENS = 10


@contextmanager
def engine(name: str, size: int, ranks: Ranks | None = None, **options: Any) -> Iterator[LLM]:
    """The model that `size` ranks can share; on them, or on one."""
    directory = model_for(name, size)
    if directory is None:
        pytest.skip(f"{name} has no variant for {size} ranks")
    options = {"num_blocks": 200, "max_num_seqs": 16, "max_model_len": 80, **options}
    with (
        executor_on(ranks) as executor,
        LLM(str(directory), executor=executor, num_threads=1, **options) as llm,
    ):
        yield llm


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 5, **fields})


REQUESTS = [
    params(temperature=0),
    params(temperature=0, logprobs=3, prompt_logprobs=2),
    params(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    params(temperature=0, logit_bias={7: 20.0, 9: -100.0}),
    params(temperature=0.9),
    params(temperature=1.2, n=3),
    params(temperature=0.8, min_p=0.05),
    params(temperature=1.1, top_k=7),
    params(temperature=1.1, top_k=100, n=2),
    params(temperature=1.0, top_p=0.8),
    params(temperature=1.0, top_p=0.9, top_k=30, min_p=0.01, logprobs=2),
    params(temperature=1.0, repetition_penalty=1.2, n=2),
    params(temperature=1.0, allowed_token_ids=list(range(40, 300, 7))),
]


def compare(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """The same tokens, and nearly the same log-probabilities."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert len(one.outputs) == len(other.outputs)
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.finish_reason == theirs.finish_reason
            if theirs.score is not None:
                assert mine.score == pytest.approx(theirs.score, rel=1e-4)
            compare_logprobs(mine.logprobs, theirs.logprobs)
        compare_logprobs(one.prompt_logprobs, other.prompt_logprobs)


def compare_logprobs(found: Any, expected: Any) -> None:
    if expected is None:
        assert found is None
        return
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        values = [value for _, value in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx(values, abs=1e-4)


def run_all(llm: LLM, has_beams: bool = True) -> list[RequestOutput]:
    """Every way to decode, in the same batches."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(REQUESTS))]
    outputs = llm.generate(prompts, REQUESTS, use_tqdm=False)
    if not has_beams:
        return outputs
    beams = [BeamSearchParams(beam_width=width, max_tokens=8) for width in (2, 4)]
    return outputs + llm.beam_search(PROMPTS[1:3], beams, use_tqdm=False)


@functools.cache
def on_one_rank(name: str, size: int, has_beams: bool = True) -> list[RequestOutput]:
    with engine(name, size) as llm:
        return run_all(llm, has_beams)


# Of each way to divide a layer one: biases, KV heads of several numbers, blocks in parallel,
# positions of every kind, experts. The others have two; by night all have both. How beams are
# searched does not depend on the family: three ranks do, so that each family has them once.
# test_sharded_models.py divides all families among three.
ON_THREE = {"gpt2", "llama3", "falcon", "gemma2", "cohere", "bloom", "mixtral", "gpt_oss"}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(
            name, size, marks=[pytest.mark.slow] if (size == 3) != (name in ON_THREE) else []
        )
        for size in (2, 3)
        for name in model_zoo.NAMES
    ],
)
def test_every_family_and_decoding_method(name: str, size: int, ranks: RanksOf) -> None:
    has_beams = size == 3
    expected = on_one_rank(name, size, has_beams)
    with engine(name, size, ranks(size)) as llm:
        compare(run_all(llm, has_beams), expected)


@pytest.mark.parametrize(("name", "size"), [("t5", 2), ("flan-t5", 3), ("bart", 3), ("marian", 2)])
def test_models_with_an_encoder(name: str, size: int, ranks: RanksOf) -> None:
    requests = [each for each in REQUESTS if each.prompt_logprobs is None]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(requests))]
    beams = BeamSearchParams(beam_width=3, max_tokens=8)
    results = []
    for given in (None, ranks(size)):
        with engine(name, size, given) as llm:
            outputs = llm.generate(prompts, requests, use_tqdm=False)
            results.append(outputs + llm.beam_search(PROMPTS[1], beams, use_tqdm=False))
    compare(results[1], results[0])


def test_fewer_kv_heads_than_ranks(ranks: RanksOf) -> None:
    """Two KV heads on four ranks: each is held twice."""
    expected = on_one_rank("llama3", 4)
    with engine("llama3", 4, ranks(4)) as llm:
        compare(run_all(llm), expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_bfloat16(backend: str, ranks: RanksOf) -> None:
    """Sums are rounded elsewhere than on one rank, so only the ranks' agreement is exact, and the
    first tokens' probabilities are near."""
    asked = [params(temperature=0, logprobs=0), params(temperature=1.0, n=2), params(top_p=0.9)]
    options = {"dtype": "bfloat16", "attention_backend": backend}
    with engine("qwen3", 2, **options) as llm:
        expected = llm.generate(PROMPTS[:3], asked, use_tqdm=False)
    with engine("qwen3", 2, ranks(2), **options) as llm:
        found = llm.generate(PROMPTS[:3], asked, use_tqdm=False)
    [mine, theirs] = [outputs[0].outputs[0].logprobs for outputs in (found, expected)]
    assert mine[0].logprob == pytest.approx(theirs[0].logprob, abs=0.2)
    assert [len(output.outputs[0].token_ids) for output in found] == [NUM_TOKENS] * 3


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_preemption(name: str, mode: str, ranks: RanksOf) -> None:
    """A pool of little more than one sequence: requests are preempted all the time."""
    prompts = PROMPTS * 3
    asked = [params(temperature=0), params(temperature=0.9, n=2)] * (len(prompts) // 2)
    expected = on_one_rank_plain(name, len(prompts))
    options = {"num_blocks": 26, "block_size": 8, "preemption_mode": mode}
    with engine(name, 2, ranks(2), **options) as llm:
        compare(llm.generate(prompts, asked, use_tqdm=False), expected)
        assert llm.engine.scheduler.num_preemptions[mode] > 0
        assert llm.engine.kv.pool.num_held == 0


def on_one_rank_plain(name: str, number: int) -> list[RequestOutput]:
    asked = [params(temperature=0), params(temperature=0.9, n=2)] * (number // 2)
    with engine(name, 2) as llm:
        return llm.generate(PROMPTS * (number // len(PROMPTS)), asked, use_tqdm=False)


def test_prefix_hits(ranks: RanksOf) -> None:
    """Cached blocks, and copies of those in which a hit ends, hold each rank's heads."""
    prefix = model_zoo.random_token_ids(43, seed=1)
    prompts = [prefix + model_zoo.random_token_ids(n, seed=n) for n in (3, 9, 14)]
    results = []
    for group in (None, ranks(2)):
        with engine("llama3", 2, group, block_size=8) as llm:
            outputs = [llm.generate(prompts, params(temperature=0), use_tqdm=False)]
            outputs.append(llm.generate(prompts, params(temperature=0.8), use_tqdm=False))
            assert all(output.num_cached_tokens > 40 for output in outputs[1])
            results.append(outputs)
    for found, expected in zip(*results, strict=True):
        compare(found, expected)


def test_a_request_that_is_not_finite_fails_alone(ranks: RanksOf) -> None:
    """NaN in one rank's part of the embedding reaches the logits of all ranks."""
    group = ranks(2)
    with engine("llama", 2, group, enable_prefix_caching=False) as llm:
        bad = PROMPTS[1][3]
        prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2]]
        assert [bad in prompt for prompt in prompts] == [False, True, False]
        expected = llm.generate(prompts, params(temperature=0), use_tqdm=False)
        assert sum(group.call(spoil_embedding, bad)) == 1
        found = llm.generate(prompts, params(temperature=0), use_tqdm=False)
    assert found[1].error is not None
    for place in (0, 2):
        assert found[place].outputs[0].token_ids == expected[place].outputs[0].token_ids


@pytest.mark.slow
def test_ranks_round_their_own_keys_and_values_to_fp8(ranks: RanksOf) -> None:
    """Each has the same scales, whatever heads it holds."""
    prompts, beams = PROMPTS * 2, BeamSearchParams(beam_width=3, max_tokens=8)
    results = []
    for given in (None, ranks(2)):
        options = {"kv_cache_dtype": "fp8", "num_blocks": 14, "preemption_mode": "swap"}
        with engine("llama3", 2, given, **options) as llm:
            outputs = llm.generate(prompts, params(temperature=0), use_tqdm=False)
            results.append(outputs + llm.beam_search(PROMPTS[1], beams, use_tqdm=False))
    compare(results[1], results[0])
