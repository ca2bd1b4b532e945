"""StableLM (arXiv:2402.17834): layer norms, partial rotary positions, perhaps parallel blocks."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.layers.config import NormConfig
from octavo.models.config import ModelDescription
from octavo.models.families import llama
from octavo.models.families.common import read_rotary_decoder
from octavo.models.family import Family


def read(config: Fields) -> ModelDescription:
    """Describe a StableLmForCausalLM by its config.json."""
    config.refuse("qk_layernorm", False)
    norm = NormConfig("layer", config.count("hidden_size"), config.number("layer_norm_eps", 1e-5))
    is_parallel = config.flag("use_parallel_residual", False)
    return read_rotary_decoder(
        config,
        num_kv_heads=32,
        norm=norm,
        norm_placement="parallel" if is_parallel else "pre",
        partial_rotary=0.25,
        qkv_bias=config.flag("use_qkv_bias", False),
    )


FAMILY = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    note="StableLM 3B, StableLM 2 1.6B, Stable Code; no norms of heads (StableLM 2 12B)",
    read=read,
    weights=llama.WEIGHTS,
    eos_token_ids=(0,),
)
