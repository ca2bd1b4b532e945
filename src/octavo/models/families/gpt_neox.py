"""GPT-NeoX (arXiv:2204.06745) and Pythia: both blocks of a layer in parallel, each with a norm."""

from __future__ import annotations

from octavo.json_fields import Fields
from octavo.layers.config import MLPConfig, NormConfig
from octavo.models.config import ModelDescription
from octavo.models.families.common import PLAIN_ACTIVATIONS, read_rotary_decoder
from octavo.models.family import Family
from octavo.models.weight_names import WeightNames

WEIGHTS = WeightNames(
    model={"embedding": "embed_in", "norm": "final_layer_norm", "head.linear": "embed_out"},
    layers="layers",
    layer={
        "attention_norm": "input_layernorm",
        "attention.qkv": "attention.query_key_value",
        "attention.output": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
    prefixes=("gpt_neox.",),
    aliases={"lm_head": "embed_out"},  # as transformers 5 holds it
    ignored=(r"layers\.\d+\.attention\.(bias|masked_bias)",),  # the causal mask
    qkv_by_head=True,
)


def read(config: Fields) -> ModelDescription:
    """Describe a GPTNeoXForCausalLM by its config.json."""
    config.refuse("num_key_value_heads", None)
    # The family's own names; what others call the same has no effect beside them.
    for own, other, default in (
        ("rotary_pct", "partial_rotary_factor", 0.25),
        ("rotary_emb_base", "rope_theta", 10000.0),
    ):
        value = config.number(own, default)
        if config.get(other, value) != value:
            raise config.error(other, f"this family calls it {own}, which is {value:g}")
        config = Fields(config.where, config.values | {other: value})
    hidden = config.count("hidden_size")
    bias = config.flag("attention_bias", True)
    is_parallel = config.flag("use_parallel_residual", True)
    return read_rotary_decoder(
        config,
        norm=NormConfig("layer", hidden, config.number("layer_norm_eps", 1e-5)),
        norm_placement="twin" if is_parallel else "pre",
        partial_rotary=0.25,
        qkv_bias=bias,
        output_bias=bias,
        mlp=MLPConfig(
            kind="plain",
            hidden_size=hidden,
            intermediate_size=config.count("intermediate_size"),
            activation=config.choice("hidden_act", PLAIN_ACTIVATIONS, "gelu"),
            bias=True,
        ),
    )


FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    note="GPT-NeoX 20B, Pythia, Dolly v2, RedPajama-INCITE",
    read=read,
    weights=WEIGHTS,
    options=frozenset({"rotary_pct"}),
    eos_token_ids=(2,),
)
