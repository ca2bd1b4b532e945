"""Whatever a config.json says, octavo computes what transformers does, or refuses it by name."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from config_sweep import FALLBACK, FAMILIES, outcome_of
from huggingface_hub.errors import StrictDataclassError
from random_configs import Drawing
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.errors import ModelError
from octavo.models.registry import read_model_config

NUM_SEEDS = 60
SAMPLE = (
    *("llama", "qwen2", "gemma3_text", "gpt_neox", "falcon", "cohere2", "phi3"),
    *("glm4_moe", "gpt_oss", "t5", "marian"),
)


@pytest.mark.parametrize("family", SAMPLE)
def test_a_few_random_configurations(family: str, tmp_path: Path) -> None:
    assert "served" in [outcome_of(family, seed, tmp_path).kind for seed in range(4)]


@pytest.mark.parametrize(
    "family", [each for each in FAMILIES if CONFIG_MAPPING[each].attribute_map]
)
def test_other_names_that_transformers_has_for_fields(family: str, tmp_path: Path) -> None:
    kind, path = CONFIG_MAPPING[family], tmp_path / "config.json"
    for seed in range(20):
        drawing = Drawing(family, seed)
        try:
            fields = kind(**drawing.fields).to_dict() | {"architectures": None}
            path.write_text(json.dumps(fields))
            expected = read_model_config(tmp_path, "native")
        except (StrictDataclassError, ModelError):
            continue  # no such model
        for other, own in kind.attribute_map.items():
            renamed = {other if name == own else name: value for name, value in fields.items()}
            path.write_text(json.dumps(renamed))
            assert read_model_config(tmp_path, "native") == expected, (other, seed)
        return
    pytest.fail("all configurations were refused")


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
