"""GPT-J (Wang and Komatsuzaki, 2021): parallel blocks, rotary positions in adjacent pairs."""

from __future__ import annotations

from dataclasses import replace

from octavo.json_fields import Fields
from octavo.layers.config import MLPConfig, NormConfig, RotaryConfig
from octavo.models.config import ModelDescription
from octavo.models.families.common import (
    MAX_LAYERS,
    PLAIN_ACTIVATIONS,
    divided_head_dim,
    read_rotary_decoder,
)
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

WEIGHTS = WeightNames(
    model={"embedding": "wte", "norm": "ln_f", "head.linear": "lm_head"},
    layers="h",
    layer={
        "attention_norm": "ln_1",
        "attention.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attention.output": "attn.out_proj",
        "mlp.up": "mlp.fc_in",
        "mlp.down": "mlp.fc_out",
    },
    prefixes=("transformer.",),
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)",),
)


def read(config: Fields) -> ModelDescription:
    """Describe a GPTJForCausalLM by its config.json."""
    hidden = config.count(config.either("n_embd", "hidden_size"), 4096)
    heads_field = config.either("n_head", "num_attention_heads")
    heads = config.count(heads_field, 16)
    head_dim = divided_head_dim(config, hidden, heads, heads_field)
    if config.values.get("rotary_dim", 64) is None:
        raise config.error("rotary_dim", "octavo needs the number of elements that are rotated")
    rotary_dim = config.count("rotary_dim", 64, limit=head_dim)
    if rotary_dim % 2:
        raise config.error("rotary_dim", "it must be even")
    names = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": config.count(
            config.either("n_layer", "num_hidden_layers"), 28, MAX_LAYERS
        ),
        "max_position_embeddings": config.count(
            config.either("n_positions", "max_position_embeddings"), 2048
        ),
        "vocab_size": config.count("vocab_size", 50400),
        "head_dim": None,
    }
    description = read_rotary_decoder(
        Fields(config.where, config.values | names),
        norm=NormConfig("layer", hidden, config.number("layer_norm_epsilon", 1e-5)),
        norm_placement="parallel",
        rotaries=[RotaryConfig(rotary_dim, 10000.0, interleaved=True)],
        mlp=MLPConfig(
            kind="plain",
            hidden_size=hidden,
            intermediate_size=config.count("n_inner", 4 * hidden),
            activation=config.choice("activation_function", PLAIN_ACTIVATIONS, "gelu_new"),
            bias=True,
        ),
    )
    return replace(description, head_bias=True)


FAMILY = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    note="GPT-J 6B and fine-tunes",
    read=read,
    weights=WEIGHTS,
    eos_token_ids=(50256,),
)
