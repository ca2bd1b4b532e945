"""Rotary tables equal transformers' for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from octavo.json_fields import Fields
from octavo.layers.config import RotaryConfig
from octavo.layers.rotary import rotary_table
from octavo.models.rope_scaling import read_rotary

HEAD_DIM = 32
MAX_POSITIONS = 1024
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.5,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [1.0 + i for i in range(HEAD_DIM // 2)],
    },
    "longrope-attention": {
        "rope_type": "longrope",
        "original_max_position_embeddings": MAX_POSITIONS,
        "attention_factor": 1.25,
        "short_factor": [1.0 + i for i in range(HEAD_DIM // 2)],
        "long_factor": [50.0] * (HEAD_DIM // 2),
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers(kind: str, theta: float) -> None:
    rope = KINDS[kind] | {"rope_theta": theta}
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * HEAD_DIM,
            num_attention_heads=2,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters=dict(rope),
        )
    )
    cos, sin = reference(torch.zeros(1), torch.arange(MAX_POSITIONS)[None])
    fields = Fields("config.json", {"rope_parameters": rope})
    config = read_rotary(fields, HEAD_DIM, MAX_POSITIONS)
    table = rotary_table(config, MAX_POSITIONS, torch.device("cpu"))
    assert table.cos.dtype == table.sin.dtype == torch.float32
    assert table.rotary_dim == HEAD_DIM
    torch.testing.assert_close(table.cos, cos[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-5)
    torch.testing.assert_close(table.sin, sin[0, :, : HEAD_DIM // 2], rtol=0, atol=2e-5)


def test_which_elements_turn_together() -> None:
    config = read_rotary(Fields("config.json", {"rope_theta": 100.0}), HEAD_DIM, MAX_POSITIONS)
    table = rotary_table(config, 64, torch.device("cpu"))
    positions = torch.tensor([0, 5, 63])
    x = torch.randn(3, 2, HEAD_DIM)
    cos = table.cos[positions].repeat(1, 2)[None]
    sin = table.sin[positions].repeat(1, 2)[None]
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(table.apply(x, positions), expected[0].transpose(0, 1))


@pytest.mark.parametrize("dim", [HEAD_DIM, 12])
def test_which_elements_turn_together_if_interleaved(dim: int) -> None:
    table = rotary_table(RotaryConfig(dim, 100.0, interleaved=True), 64, torch.device("cpu"))
    positions = torch.tensor([0, 5, 63])
    x = torch.randn(3, 2, HEAD_DIM)
    cos, sin = table.cos[positions][None], table.sin[positions][None]
    heads = x[..., :dim].transpose(0, 1)[None]
    expected, _ = cohere.apply_rotary_pos_emb(heads, heads, *cohere_angles(cos, sin))
    got = table.apply(x, positions)
    torch.testing.assert_close(got[..., :dim], expected[0].transpose(0, 1))
    assert torch.equal(got[..., dim:], x[..., dim:])


def cohere_angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As CohereRotaryEmbedding returns them: each angle twice, side by side."""
    return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
