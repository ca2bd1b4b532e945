"""Embeddings: pooled hidden states of prompts, whatever else the engine does meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import model_zoo
from octavo import LLM, PoolingParams, SamplingParams
from octavo.errors import InvalidRequest, RequestTooLong

KINDS = ("mean", "last", "cls")
GREEDY = SamplingParams(temperature=0, max_tokens=37, ignore_eos=True)
PROMPTS = [model_zoo.random_token_ids(n, seed=n) for n in (1, 2, 17, 40, 61, 90)]


def expected(name: str, prompt: list[int], pooling: str) -> np.ndarray[Any, Any]:
    """By transformers: the hidden states behind the last norm, which logits are computed from."""
    with torch.inference_mode():
        found = model_zoo.reference_model(name).base_model(torch.tensor([prompt]))
    hidden = found.last_hidden_state[0].double().numpy()
    pooled = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]
    return pooled / np.linalg.norm(pooled)


def load(name: str = "llama3", **options: Any) -> LLM:
    values = {"num_blocks": 64, "max_num_seqs": 8, "max_model_len": 128} | options
    return LLM(str(model_zoo.model_directory(name)), **values)


@pytest.mark.parametrize("name", ["gpt2", "llama3", "gemma2", "qwen3"])
def test_embeddings_equal_transformers(name: str) -> None:
    with load(name, max_num_batched_tokens=16) as llm:
        for kind in KINDS:
            outputs = llm.embed(PROMPTS, PoolingParams(pooling=kind), use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert (output.outputs, output.finish_reason) == ([], "stop")
                assert output.embedding == pytest.approx(expected(name, prompt, kind), abs=2e-5)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_embeddings_do_not_depend_on_the_crowd(mode: str) -> None:
    options = {"num_blocks": 12, "preemption_mode": mode, "max_num_batched_tokens": 16}
    with load(**options) as llm:
        alone = [
            llm.embed(p, PoolingParams(pooling=k), use_tqdm=False)[0]
            for k in KINDS
            for p in PROMPTS
        ]
        texts = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in PROMPTS]
        streams = [
            llm.client.make_request(p, PoolingParams(pooling=k)) for k in KINDS for p in PROMPTS
        ]
        others = [llm.client.make_request(p, GREEDY) for p in PROMPTS]
        for pair in zip(others, streams[::3], strict=True):
            for each in pair:
                llm.client.add_request(each)
        for each in streams:
            if each not in streams[::3]:
                llm.client.add_request(each)
        while llm.client.has_unfinished:
            llm.client.step()
        for stream, output in zip(streams, alone, strict=True):
            assert stream.output is not None
            assert stream.output.embedding == pytest.approx(output.embedding, abs=2e-5)
        for stream, output in zip(others, texts, strict=True):
            assert stream.output is not None
            assert stream.output.outputs[0].token_ids == output.outputs[0].token_ids
        assert sum(each.request.num_preemptions for each in [*streams, *others]) > 0
        assert llm.engine.kv.pool.num_held == 0


def test_only_what_is_not_read_comes_from_the_cache() -> None:
    prompt = PROMPTS[-1]
    with load(max_tails=0) as llm:
        for kind, num_cached in (("mean", 0), ("last", 80), ("cls", 0)):
            [output] = llm.embed(prompt, PoolingParams(pooling=kind), use_tqdm=False)
            assert output.num_cached_tokens == num_cached
            assert output.embedding == pytest.approx(expected("llama3", prompt, kind), abs=2e-5)


def test_the_end_of_a_prompt_is_scored_with_the_rest_from_the_cache() -> None:
    prompt = PROMPTS[-1]
    with load(max_tails=0) as llm:
        whole = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        [all_scores] = llm.generate(prompt, whole, use_tqdm=False)
        for start in (0, 1, 2, 50, len(prompt) - 1, len(prompt), 1000):
            params = SamplingParams(
                temperature=0, max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=start
            )
            [output] = llm.generate(prompt, params, use_tqdm=False)
            first = min(max(start, 1), len(prompt))
            assert output.prompt_logprobs is not None
            assert all_scores.prompt_logprobs is not None
            assert output.prompt_logprobs[:first] == [None] * first
            for got, known in zip(output.prompt_logprobs, all_scores.prompt_logprobs, strict=True):
                if got is not None:
                    assert known is not None
                    assert got.logprob == pytest.approx(known.logprob, abs=1e-4)
            assert output.num_cached_tokens == min(first - 1, 80), "of five full blocks"


def test_dimensions_and_length() -> None:
    with load() as llm:
        [whole] = llm.embed(PROMPTS[2], PoolingParams(normalize=False), use_tqdm=False)
        [short] = llm.embed(PROMPTS[2], PoolingParams(dimensions=5), use_tqdm=False)
        assert whole.embedding is not None
        first = np.array(whole.embedding[:5])
        assert short.embedding == pytest.approx(first / np.linalg.norm(first), abs=1e-6)
        assert np.linalg.norm(whole.embedding) != pytest.approx(1)
        hidden_size = llm.engine.model_config.hidden_size
        with pytest.raises(InvalidRequest, match=f"dimensions: {hidden_size + 1} is more than"):
            llm.embed("a", PoolingParams(dimensions=hidden_size + 1))


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    with load() as llm:
        full = model_zoo.random_token_ids(128, seed=1)
        [output] = llm.embed(full, PoolingParams(pooling="mean"), use_tqdm=False)
        assert output.embedding == pytest.approx(expected("llama3", full, "mean"), abs=2e-5)
        with pytest.raises(RequestTooLong, match="129 tokens do not fit into a context of 128"):
            llm.embed([*full, 1])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pooling": "max"}, "pooling"),
        ({"pooling": None}, "pooling"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"normalize": 1}, "normalize"),
        ({"poling": "mean"}, "poling"),
    ],
)
def test_bad_parameters_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PoolingParams(**fields)
    assert caught.value.field == param


def test_hidden_states_that_are_not_finite_fail_their_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = 77
    model_zoo.embed_as_nan(bad, monkeypatch)
    with load() as llm:
        for kind in KINDS:
            wrong, right = llm.embed(
                [[3, 4, bad, 5], [3, 4, 5]], PoolingParams(pooling=kind), use_tqdm=False
            )
            assert wrong.error is not None
            assert wrong.embedding is None
            assert right.error is None
            assert right.embedding == pytest.approx(expected("llama3", [3, 4, 5], kind), abs=2e-5)


def test_an_encoder_has_no_embeddings_of_prompts() -> None:
    with (
        load("bart", max_model_len=32) as llm,
        pytest.raises(InvalidRequest, match="prompt: a model with an encoder has no embeddings"),
    ):
        llm.embed("a")
