"""The systems that the paper compares with, on the real worker: the same tokens as paged memory."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from model_zoo import model_directory, random_token_ids
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.bench.memory_use import MemoryUse
from octavo.config import make_config
from octavo.errors import ConfigError
from octavo.registry import MEMORY_POLICIES

RESERVING = [name for name in MEMORY_POLICIES if name != "paged"]
# gpt2 attends to everything; qwen2 mixes in layers with a sliding window: two KV groups.
MODELS = ("gpt2", "qwen2")
NUM_TOKENS = 12


def load(model: str, policy: str, **options: object) -> LLM:
    settings = {"num_blocks": 200, "block_size": 4, "max_model_len": 96, "max_num_seqs": 8}
    return LLM(str(model_directory(model)), memory_policy=policy, **(settings | options))


def everything(llm: LLM) -> list[list[int]]:
    """Greedy, parallel samples and beams, of prompts that do not all fit at once."""
    prompts = [random_token_ids(n, seed=n) for n in (3, 40, 17, 29, 8)]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    samples = SamplingParams(n=3, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS)
    outputs = llm.generate(prompts, [greedy, samples, greedy, samples, greedy], use_tqdm=False)
    outputs += llm.beam_search(prompts[1:3], beams, use_tqdm=False)
    return [each.token_ids for output in outputs for each in output.outputs]


@functools.cache
def paged_tokens(model: str) -> list[list[int]]:
    with load(model, "paged") as llm:
        return everything(llm)


@pytest.mark.parametrize("policy", RESERVING)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_tokens_as_paged(model: str, policy: str) -> None:
    with load(model, policy) as llm:
        assert everything(llm) == paged_tokens(model)
        kv, scheduler = llm.engine.kv, llm.engine.scheduler
        assert kv.num_free_blocks == kv.pool.num_blocks
        assert kv.num_cow_copies > 0  # forks copy
        assert scheduler.num_preemptions == {"swap": 0, "recompute": 0}


def test_the_same_tokens_while_steps_overlap() -> None:
    with load("gpt2", "orca-pow2", overlap=True) as llm:
        assert everything(llm) == paged_tokens("gpt2")


@pytest.mark.parametrize("policy", ["orca-max", "fastertransformer"])
def test_stop_strings_end_a_sample_early(policy: str) -> None:
    """Also the last one of a batch: its results come out with the next step."""
    prompts = [random_token_ids(n, seed=n) for n in (5, 9)]
    params = SamplingParams(n=2, seed=3, max_tokens=30, ignore_eos=True)
    with load("gpt2", "paged") as llm:
        texts = [o.text for r in llm.generate(prompts, params, use_tqdm=False) for o in r.outputs]
        params = replace(params, stop=[text[10:13] for text in texts])
        expected = llm.generate(prompts, params, use_tqdm=False)
    with load("gpt2", policy) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.kv.num_free_blocks == llm.engine.kv.pool.num_blocks
    assert [r.outputs for r in outputs] == [r.outputs for r in expected]
    assert {o.finish_reason for r in outputs for o in r.outputs} == {"stop"}


@pytest.mark.parametrize(
    ("policy", "internal"),
    [("orca-max", 96 - 21), ("orca-pow2", 10 + 16 - 21), ("orca-oracle", 10 + 12 - 21)],
)
def test_where_the_slots_go(policy: str, internal: int) -> None:
    """Prompt of 10, 12 tokens out, of which 21 are ever stored; blocks of 4. At most 96."""
    with load("gpt2", policy) as llm:
        memory = MemoryUse.watch(llm.engine)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        llm.generate([random_token_ids(10, seed=0)], params, use_tqdm=False)
        first, last = memory.steps[0].slots, memory.steps[-1].slots
    assert (first.token_states, first.reservation, first.internal) == (10, 11, internal)
    assert (last.token_states, last.reservation, last.internal) == (21, 0, internal)
    assert first.total == last.total == 200 * 4


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy: memory_policy orca-m.* priority needs paged"):
        make_config("demo", memory_policy="orca-max", policy="priority")
    with pytest.raises(
        ConfigError, match="enable_prefix_caching: memory_policy orca-max shares no"
    ):
        make_config("demo", memory_policy="orca-max", enable_prefix_caching=True)
    assert not make_config("demo", memory_policy="orca-max").cache.enable_prefix_caching
