"""The same tokens, whatever the engine did on the way.

Greedy tokens and beams of tiny random models must equal transformers' (fp32), for every family
and under every combination of block size, chunking, cold or warm prefix cache, preemption and
company. Seeded samples have no outside oracle: they must equal the samples drawn alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest

import model_zoo
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.models.registry import read_model_config
from octavo.ops import load_backend, token_size_of

NUM_TOKENS = 14
MAX_MODEL_LEN = 80
PROMPT_LENGTHS = (3, 16, 33, 50)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def prompts() -> list[list[int]]:
    return [model_zoo.random_token_ids(n, seed=n) for n in PROMPT_LENGTHS]


@functools.cache
def reference_tokens(name: str) -> list[list[int]]:
    return [
        model_zoo.generate(name, prompt, NUM_TOKENS, eos_token_id=None)[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


def load(name: str, **options: object) -> LLM:
    options.setdefault("num_blocks", 200)
    options.setdefault("max_num_seqs", 16)
    options.setdefault("max_model_len", MAX_MODEL_LEN)
    return LLM(str(model_zoo.model_directory(name)), **options)


def blocks_for_one(name: str, block_size: int, chunk: int) -> int:
    """The blocks of one sequence of MAX_MODEL_LEN, computed in chunks."""
    config = read_model_config(model_zoo.model_directory(name))
    layout = config.kv_layout(token_size_of(load_backend("cpu")))
    return sum(
        spec.max_blocks(MAX_MODEL_LEN, size, chunk)
        for spec, size in zip(layout.specs, layout.block_sizes(block_size), strict=True)
    )


def tokens(outputs: list) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_greedy_tokens_equal_transformers(name: str, backend: str) -> None:
    llm = load(name, attention_backend=backend)
    assert tokens(llm.generate(prompts(), GREEDY, use_tqdm=False)) == reference_tokens(name)


@pytest.mark.parametrize(
    ("name", "width"),
    [
        # How beams are searched does not depend on the family: every third is enough by day.
        pytest.param(name, (2, 4, 6)[i // 3 % 3], marks=pytest.mark.slow if i % 3 else ())
        for i, name in enumerate(model_zoo.NAMES)
    ],
)
def test_beams_equal_transformers(name: str, width: int) -> None:
    model_zoo.check_beam_search(load(name), name, prompts()[1], width)


def run_alone(llm: LLM, preempt: bool) -> list[list[int]]:
    """Each prompt by itself; an urgent request displaces it halfway if `preempt`."""
    results = []
    for prompt in prompts():
        stream = llm.client.make_request(prompt, GREEDY, priority=5)
        llm.client.add_request(stream)
        outputs = []
        steps = 0
        while stream.output is None:
            outputs += llm.client.step()
            steps += 1
            if preempt and steps == 6:
                filler = model_zoo.random_token_ids(MAX_MODEL_LEN - 1, seed=99)
                urgent = llm.client.make_request(filler, SamplingParams(max_tokens=1), priority=0)
                llm.client.add_request(urgent)
        while llm.client.has_unfinished:
            llm.client.step()
        mine = [o for o in outputs if o.request_id == stream.request_id]
        assert mine[0].num_preemptions == (1 if preempt else 0)
        results += tokens(mine)
    return results


# The smallest blocks and the largest with one family each, and a model whose heads differ and whose
# layers share KV; by night all with all.
DAILY = {("llama3", 1), ("qwen2", 32), ("gemma4-e2b", 8)}


@pytest.mark.parametrize("preemption", ["none", "swap", "recompute"])
@pytest.mark.parametrize(
    ("name", "block_size"),
    [
        pytest.param(name, size, marks=() if (name, size) in DAILY else pytest.mark.slow)
        for name in ("llama3", "qwen2", "gemma4-e2b")
        for size in (1, 8, 16, 32)
    ],
)
def test_every_combination(name: str, block_size: int, preemption: str) -> None:
    """{chunked or not} x {cold, warm cache} x {alone, in a crowd} for each of the parameters."""
    for chunked, crowded in itertools.product([True, False], [True, False]):
        budget = 20 if chunked else MAX_MODEL_LEN
        options: dict[str, object] = {
            "block_size": block_size,
            "enable_chunked_prefill": chunked,
            "max_num_batched_tokens": budget,
            "policy": "fcfs" if crowded else "priority",
            "num_blocks": 1500,
        }
        if preemption != "none":
            # One sequence of the longest length fits, and hardly anything beside it.
            options["num_blocks"] = blocks_for_one(name, block_size, budget)
            options["preemption_mode"] = preemption
        llm = load(name, **options)
        for _cache in ("cold", "warm"):
            if crowded:
                outputs = llm.generate(prompts() * 2, GREEDY, use_tqdm=False)
                assert tokens(outputs) == reference_tokens(name) * 2
            else:
                assert run_alone(llm, preemption != "none") == reference_tokens(name)
        counts = llm.engine.scheduler.num_preemptions
        if preemption != "swap":
            assert counts["swap"] == 0
        if preemption != "recompute" and not crowded:  # a crowd may fill the swap tier
            assert counts["recompute"] == 0
        if preemption != "none" and not crowded:
            assert counts[preemption] == 2 * len(PROMPT_LENGTHS)
        assert llm.engine.kv.pool.num_held == 0


def test_seeded_samples_are_the_same_alone_and_in_a_crowd() -> None:
    params = [
        SamplingParams(n=3, temperature=0.8, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.2, top_k=20, seed=8, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, min_p=0.05, seed=9, max_tokens=12, ignore_eos=True),
        SamplingParams(n=2, frequency_penalty=0.5, seed=10, max_tokens=12, ignore_eos=True),
    ]
    alone_llm = load("llama3")
    alone = [
        alone_llm.generate(prompt, each, use_tqdm=False)[0]
        for prompt, each in zip(prompts(), params, strict=True)
    ]
    for options in (
        {},
        {"num_blocks": 12, "preemption_mode": "recompute", "max_num_batched_tokens": 17},
        {"num_blocks": 12, "preemption_mode": "swap", "enable_prefix_caching": False},
    ):
        crowd = load("llama3", **options).generate(prompts(), params, use_tqdm=False)
        for one, other in zip(alone, crowd, strict=True):
            assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]


def run_together(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams | BeamSearchParams]
) -> list[list[list[int]]]:
    """The token ids of each sequence of each prompt, all of which are queued at once."""
    streams = [
        llm.client.make_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)
    ]
    for stream in streams:
        llm.client.add_request(stream)
    while llm.client.has_unfinished:
        llm.client.step()
    outputs = [stream.output for stream in streams]
    assert all(outputs), "every request has ended"
    return [[sequence.token_ids for sequence in output.outputs] for output in outputs if output]


def test_methods_mix_in_one_batch() -> None:
    """Greedy, samples and beams run side by side, starved of blocks, and do not disturb."""
    calm, busy = load("llama3"), load("llama3", num_blocks=22, max_model_len=64)
    params = [
        GREEDY,
        SamplingParams(n=3, seed=3, max_tokens=10, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=10),
        SamplingParams(seed=4, max_tokens=12, ignore_eos=True),
    ]
    expected = [
        run_together(calm, [prompt], [each])[0]
        for prompt, each in zip(prompts(), params, strict=True)
    ]
    assert run_together(busy, prompts(), params) == expected
    assert busy.engine.kv.pool.num_held == 0
