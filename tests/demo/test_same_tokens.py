"""Without affecting model accuracy (paper, section 1): the demo model gives the same tokens through
transformers and through octavo, however short of blocks it is and whatever the prefix cache holds.
"""

from __future__ import annotations

import functools
from random import Random

import pytest
import torch
import transformers

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.demo import demo_model_path
from octavo.errors import RequestTooLong
from octavo_demo.corpus import chat_prompt
from octavo_demo.evaluate import Item, exact, question_items, translation_items
from octavo_demo.stories import story

transformers.utils.logging.disable_progress_bar()

MAX_TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
# The longest prompt fits with its answer; two of them do not.
STARVED = 34
BEAM = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS)


@functools.cache
def items() -> tuple[Item, ...]:
    return (*translation_items(4, 5), *translation_items(3, 0), *question_items(4, (150, 300)))


@functools.cache
def prompts() -> list[str]:
    rng = Random("openings")
    openings = [story(rng, held_out=True).text[:160].rpartition(" ")[0] for _ in range(3)]
    asked = chat_prompt("Tell me a story about a fox and a storm.")
    return [*(item.prompt for item in items()), *openings, asked]


@functools.cache
def reference(num_beams: int) -> list[list[int]]:
    """transformers' own tokens, one prompt at a time, in fp32."""
    path = demo_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answers = []
    for prompt in prompts()[: 4 if num_beams > 1 else None]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                num_beams=num_beams,
            )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def load(**options: object) -> LLM:
    return LLM("demo", dtype="float32", max_num_seqs=32, **options)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_greedy_tokens_with_too_few_blocks(
    preemption_mode: str, enable_prefix_caching: bool
) -> None:
    with load(
        num_blocks=STARVED,
        max_model_len=STARVED * 16,
        preemption_mode=preemption_mode,
        enable_prefix_caching=enable_prefix_caching,
    ) as llm:
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert sum(output.num_preemptions for output in outputs) > 0
        assert tokens(outputs) == reference(1)


def test_greedy_tokens_with_a_cold_and_a_warm_prefix_cache() -> None:
    with load(num_blocks=600) as llm:
        cold = llm.generate(prompts(), GREEDY, use_tqdm=False)
        warm = llm.generate(prompts(), GREEDY, use_tqdm=False)
    assert sum(output.num_preemptions for output in cold) == 0
    assert sum(output.num_cached_tokens for output in warm) > 1000
    assert tokens(cold) == tokens(warm) == reference(1)


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_beams_with_too_few_blocks(preemption_mode: str) -> None:
    with load(
        num_blocks=STARVED, max_model_len=STARVED * 16, preemption_mode=preemption_mode
    ) as llm:
        outputs = llm.beam_search(prompts()[:4], BEAM, use_tqdm=False)
    assert tokens(outputs) == reference(4)


def test_the_answers_are_right() -> None:
    with load(num_blocks=600) as llm:
        outputs = llm.generate(prompts()[: len(items())], GREEDY, use_tqdm=False)
    assert exact([output.outputs[0].text for output in outputs], list(items())) >= 0.95


def test_odd_input() -> None:
    with load(num_blocks=200) as llm:
        with pytest.raises(RequestTooLong, match="2048"):
            llm.generate("once upon a time " * 600, GREEDY, use_tqdm=False)
        [output] = llm.generate("Übersetze 世界 👩‍🚀 =>", GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids
        assert "\ufffd" not in output.outputs[0].text
