"""Which parts of a model ranks divide, and what all of them have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cohere2ForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

import model_zoo
from fallback.shrunken import shrunken_config
from octavo.layers.config import LinearConfig
from octavo.models.fallback.config import TransformersConfig
from octavo.models.registry import read_model_config
from octavo.parallel import Shard


def described(directory: Path, model_type: str, **fields: Any) -> TransformersConfig:
    shrunken_config(model_type, **fields).save_pretrained(directory)
    config = read_model_config(directory, "transformers")
    assert isinstance(config, TransformersConfig)
    return config


def whole(config: TransformersConfig) -> set[str]:
    """What all ranks have of the projections in layers, by the last part of their names."""
    parts = [each for of in config.sharded(Shard(1, 2)).weights for each in of]
    found = set()
    for each in parts:
        if isinstance(each.config, LinearConfig):
            shards = each.config.out_shards or (each.config.in_shard,) * len(each.names)
            pairs = zip(each.names, shards, strict=False)
            found |= {name.rpartition(".")[2] for name, shard in pairs if shard.size == 1}
    return found


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", set()),
        ("deepseek_v3", {"q_a_proj", "kv_a_proj_with_mqa"}),  # other projections read these
        ("gpt_neox", set()),  # queries, keys and values are one projection, head by head
        ("phi3", {"qkv_proj", "o_proj"}),  # one after the other
        ("olmoe", {"q_proj", "k_proj", "v_proj", "o_proj"}),  # a norm over all heads
        ("nemotron", set()),  # an activation that kernels do not have
        ("apertus", set()),  # one with parameters
        ("bitnet", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_what_all_ranks_have(model_type: str, expected: set[str], tmp_path: Path) -> None:
    config = described(tmp_path, model_type)
    assert whole(config) == expected
    is_whole = bool(expected & {"o_proj"})
    assert config.whole_heads == (is_whole,) * 3
    assert config.divides_head


def over_all(x: Tensor, dim: int) -> Tensor:
    return x + x.mean(dim, keepdim=True)


def by_place(x: Tensor, dim: int) -> Tensor:
    places = torch.arange(1, x.shape[dim] + 1, device=x.device)
    return x * places.view(-1, *[1] * (-dim - 1))


def backwards(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim)


@pytest.mark.parametrize("change", [over_all, by_place, backwards])
def test_code_between_projections_that_sees_more_than_a_part(
    change: Callable[[Tensor, int], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes would fit, and results would be others."""

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return change(query, -3), key

    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(
            change(self.act_fn(self.gate_proj(x)) * self.up_proj(x), -1)
        )
        return result

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
        assert whole(described(tmp_path, "llama")) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    assert whole(described(tmp_path, "llama")) == {"gate_proj", "up_proj", "down_proj"}


def test_logits_that_depend_on_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks compute all of them, and take their own."""
    usual = Cohere2ForCausalLM.forward

    def forward(self: Cohere2ForCausalLM, **inputs: Any) -> Any:
        result = usual(self, **inputs)
        result.logits = result.logits - result.logits.mean(-1, keepdim=True)
        return result

    assert described(tmp_path, "cohere2").divides_head
    monkeypatch.setattr(Cohere2ForCausalLM, "forward", forward)
    config = described(tmp_path, "cohere2")
    assert not config.divides_head
    assert config.sharded(Shard(0, 2)).num_lookup_parameters() == config.num_lookup_parameters()


@pytest.mark.parametrize("name", ["llama3", "mixtral"])
def test_a_step_of_one_rank_reads_as_much_as_of_octavo_s_families(name: str) -> None:
    directory, shard = model_zoo.model_directory(name), Shard(1, 2)
    native, config = (
        read_model_config(directory, impl).sharded(shard) for impl in ("native", "transformers")
    )
    assert config.read_bytes(2) == native.read_bytes(2)
    own, copied = (each.with_copies() for each in (native, config))
    assert copied.copy_bytes == own.copy_bytes
    table = native.vocab_size * native.hidden_size  # which the families divide
    assert config.num_parameters() - native.num_parameters() == table // 2
