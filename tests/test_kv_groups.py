"""Models whose layers form KV groups with blocks of different lengths: transformers' tokens.

A full-attention layer beside nine with windows is stored in blocks of three times as many tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import model_zoo
from octavo import LLM, BeamSearchParams, SamplingParams

NUM_TOKENS = 12
PROMPTS = [
    *(model_zoo.random_token_ids(length, seed=length) for length in (3, 17, 60)),
    [*model_zoo.random_token_ids(60, seed=60)[:50], 7, 8],  # shares a prefix
    model_zoo.random_token_ids(60, seed=60),
]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
BLOCK_SIZE = 4
# Without transformers' own KV cache, which holds no token for a window of 1.
THEIR_OPTIONS = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "use_cache": False}


@pytest.fixture(scope="module", params=[1, 6, 20])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of one layer with full attention, and nine with a window."""
    return model_zoo.write_model(
        "qwen2",
        tmp_path_factory.mktemp("mixed"),
        num_hidden_layers=10,
        max_window_layers=1,
        sliding_window=request.param,
    )


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    model = model_zoo.load_reference(directory)
    with torch.inference_mode():
        return [
            model.generate(torch.tensor([prompt]), eos_token_id=None, **THEIR_OPTIONS)[
                0, len(prompt) :
            ].tolist()
            for prompt in PROMPTS
        ]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("num_blocks", [60, 1000])
def test_greedy_tokens_equal_transformers(
    directory: Path, expected: list[list[int]], backend: str, num_blocks: int
) -> None:
    """Cold and warm, in chunks, with copies of shared blocks, and with few blocks."""
    options = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE}
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 80}
    with LLM(directory, attention_backend=backend, watermark=0.0, **options, **limits) as llm:
        kv = llm.engine.kv
        assert kv.block_sizes == (3 * BLOCK_SIZE, *[BLOCK_SIZE] * 3)
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert kv.num_hit_tokens > 0
        assert kv.pool.num_held == 0


def test_beams_share_blocks_of_every_length(directory: Path, expected: list[list[int]]) -> None:
    with LLM(directory, num_blocks=1000, block_size=BLOCK_SIZE) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS)
        [wide] = llm.beam_search(PROMPTS[2], params, use_tqdm=False)
        model = model_zoo.load_reference(directory)
        with torch.inference_mode():
            beams = model.generate(
                torch.tensor([PROMPTS[2]]), num_beams=3, num_return_sequences=3, **THEIR_OPTIONS
            )
        ends = [beam.token_ids for beam in wide.outputs]
        for tokens, sequence in zip(ends, beams.tolist(), strict=True):
            assert sequence[len(PROMPTS[2]) :][: len(tokens)] == tokens
        assert llm.engine.kv.num_cow_copies > 0
