"""Whatever a config.json says, octavo computes what transformers does, or refuses it by name."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from config_sweep import FALLBACK, FAMILIES, outcome_of

NUM_SEEDS = 60
SAMPLE = (
    *("llama", "qwen2", "gemma3_text", "gpt_neox", "falcon", "cohere2", "phi3"),
    *("glm4_moe", "gpt_oss", "t5", "marian"),
)


@pytest.mark.parametrize("family", SAMPLE)
def test_a_few_random_configurations(family: str, tmp_path: Path) -> None:
    assert "served" in [outcome_of(family, seed, tmp_path).kind for seed in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_configurations(family: str, tmp_path: Path) -> None:
    """Of which some are served: else nothing would be compared."""
    kinds = [outcome_of(family, seed, tmp_path).kind for seed in range(NUM_SEEDS)]
    assert kinds.count("served") >= NUM_SEEDS // 6
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FALLBACK)
def test_random_configurations_through_transformers(model_type: str, tmp_path: Path) -> None:
    kinds = [outcome_of(model_type, seed, tmp_path, "transformers").kind for seed in range(12)]
    assert kinds.count("served") >= 2
    gc.collect()
