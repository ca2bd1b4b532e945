"""Random values for the fields of a family's configuration, and the spellings that they have in
config.json files of different ages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from random import Random
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octavo.models.registry import OWN_FAMILIES

MAX_PROMPT = 70
# What no forward pass in evaluation reads.
UNREAD = {
    *PreTrainedConfig().to_dict(),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache"),
    *("initializer_range", "init_std", "initializer_factor", "pretraining_tp", "is_decoder"),
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"),
    *("emb_pdrop", "residual_dropout", "embedding_dropout", "dropout_rate", "activation_dropout"),
    *("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "classifier_dropout"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "output_router_logits", "router_aux_loss_coef"),
    *("reorder_and_upcast_attn", "slow_but_exact", "init_device", "input_jitter_noise"),
    *("num_nextn_predict_layers", "forced_eos_token_id", "_sliding_window_pattern"),
    *("norm_type", "learned_pos_emb", "dense_act_fn", "is_gated_act", "scale_decoder_outputs"),
}
# A model of other sizes than these would be too large for a test, so files always say them.
SIZES = {
    *("vocab_size", "decoder_vocab_size", "hidden_size", "n_embd", "d_model"),
    *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts"),
    *("num_local_experts", "n_routed_experts", "num_hidden_layers", "n_layer", "n_layers"),
    *("num_layers", "encoder_layers", "decoder_layers", "num_attention_heads", "n_head", "n_heads"),
    *("num_heads", "encoder_attention_heads", "decoder_attention_heads", "layer_types"),
    *("max_position_embeddings", "n_positions", "max_seq_len", "num_key_value_heads"),
    *("num_kv_heads", "num_experts_per_tok", "model_type", "is_encoder_decoder", "pad_token_id"),
    *("rotary_dim", "vocab_size_per_layer_input", "hidden_size_per_layer_input"),
    *("top_k_experts", "per_layer_config", "num_kv_shared_layers"),
}
WINDOWED = {
    *("qwen2", "qwen3", "smollm3", "exaone4", "ministral", "gemma2", "gemma3_text", "olmo3"),
    *("cohere2", "gpt_oss", "qwen2_moe", "gemma4_text"),
}  # families with layer_types of two kinds
NESTED_ROPE = {"gemma3_text", "gemma4_text", "olmo3"}  # with rope_parameters for each of them
LAYER_TYPES = ("full_attention", "sliding_attention")
ODDS = {  # of options that octavo refuses in some families, so that most models are served
    "clip_qkv": 0.05,
    "use_bidirectional_attention": 0.03,
    "add_cross_attention": 0.03,
    "use_qk_norm": 0.3,
    "qk_layernorm": 0.05,
    "apply_residual_connection_post_layernorm": 0.05,
    "alibi": 0.1,
    "swiglu_limit": 0.05,
    "swiglu_alpha": 0.05,
    "attn_logit_softcapping": 0.5,
    "share_encoder_decoder_embeddings": 0.05,
    "no_bias": 0.05,
    "num_kv_shared_layers": 0.4,
    "rotary_dim": 1.0,
    "logit_scale": 0.5,
    "expansion_ratio": 0.2,
    "embedding_fraction": 0.05,
}


class Drawing:
    """One random configuration of a family."""

    def __init__(self, family: str, seed: int) -> None:
        self.random = Random(f"{family} {seed}")
        self.family = family
        self.kind = CONFIG_MAPPING[family]
        self.usual = self.kind().to_dict()
        self.fields: dict[str, Any] = {}
        self._draw_sizes()
        for name in self.usual:
            if name not in self.fields and name not in UNREAD:
                self._draw(name)

    def nullable(self) -> set[str]:
        """Fields that may be null, whatever their default."""
        return (
            {each.name for each in fields(self.kind) if "None" in str(each.type)}
            - UNREAD
            - SIZES
            - {"rope_parameters"}
        )

    def chance(self, odds: float) -> bool:
        return self.random.random() < odds

    def _draw_sizes(self) -> None:
        """Those that depend on each other; all that a family does not have are left out."""
        pick = self.random
        heads = pick.randint(1, 6)
        kv_heads = pick.choice([n for n in range(1, heads + 1) if heads % n == 0])
        self.head_dim = pick.choice([2, 4, 6, 8, 10, 12, 14, 16, 18, 24, 30, 38])
        usual_rope = self.usual.get("rope_parameters") or {}
        if "partial_rotary_factor" in usual_rope and self.chance(0.85):  # so that parts are even
            self.head_dim = pick.choice([8, 16, 24])
        self.layers = pick.randint(1, 4)
        hidden = heads * self.head_dim
        is_free = "head_dim" in self.usual and self.family not in ("cohere2",)
        if self.family in ("t5", "mt5") or (is_free and self.chance(0.7)):
            hidden = heads * pick.randint(2, 15)  # which transformers wants to divide, without need
            if self.chance(0.1):
                hidden += 1
        if self.family in ("marian",):
            hidden += hidden % 2
        experts = pick.randint(2, 9)
        groups = pick.choice([n for n in range(1, experts) if experts % n == 0])
        group = experts // groups
        top_groups = pick.randint(1, groups)
        if groups > 1 and group < 2:
            groups = top_groups = 1
            group = experts
        sizes = {
            **dict.fromkeys(("vocab_size", "decoder_vocab_size"), pick.randint(101, 320)),
            **dict.fromkeys(("hidden_size", "n_embd", "d_model"), hidden),
            **dict.fromkeys(
                ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), self.layers
            ),
            "encoder_layers": self.layers,
            **dict.fromkeys(("decoder_layers", "num_decoder_layers"), pick.randint(1, 3)),
            **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), heads),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads),
            **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), kv_heads),
            **dict.fromkeys(("head_dim", "d_kv"), self.head_dim),
            **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts),
            **{
                "bos_token_id": 0,
                "eos_token_id": 1,
                "pad_token_id": 2,
                "decoder_start_token_id": 2,
            },
            "n_group": groups,
            "topk_group": top_groups,
            "num_experts_per_tok": pick.randint(1, min(experts, top_groups * group)),
            "top_k_experts": pick.randint(1, experts),
            "hidden_size_per_layer_input": pick.choice([0, 0, 2, 8, 18]),
            "vocab_size_per_layer_input": pick.choice([320, 320, 320, 400, 110]),
            "n_shared_experts": pick.randint(1, 3),
            **dict.fromkeys(
                ("max_position_embeddings", "n_positions", "max_seq_len"),
                pick.choice([71, 80, 128, 200]),
            ),
        }
        if self.family == "phimoe":  # SparseMixer chooses two at most
            sizes["num_experts_per_tok"] = min(2, sizes["num_experts_per_tok"])
        self.fields = {name: value for name, value in sizes.items() if name in self.usual}
        if "head_dim" in self.fields and hidden == heads * self.head_dim and self.chance(0.3):
            del self.fields["head_dim"]
            self.usual.pop("head_dim")

    def _draw(self, name: str) -> None:
        pick, default = self.random, self.usual[name]
        if name in ("rope_parameters", "layer_types", "per_layer_config"):
            getattr(self, f"_draw_{name}")()
        elif name in DRAWS:
            odds = ODDS.get(name, 0.7)
            if (self.family, name) == ("gemma3_text", "attn_logit_softcapping"):
                odds = 0.05
            if self.chance(odds):
                self.fields[name] = DRAWS[name](self)
        elif isinstance(default, bool):
            if self.chance(ODDS.get(name, 1.0)):
                self.fields[name] = pick.random() < 0.5
        elif self.family in OWN_FAMILIES:
            raise LookupError(f"{self.family} has a field that nothing draws: {name}")

    def _draw_layer_types(self) -> None:
        if self.family in WINDOWED and self.chance(0.7):
            types = [self.random.choice(LAYER_TYPES) for _ in range(self.layers)]
            self.fields["layer_types"] = types
            if self.chance(0.8) and "sliding_attention" in types:
                self.fields["use_sliding_window"] = True
        self.fields.setdefault("layer_types", None)
        if self.fields["layer_types"] is None:
            del self.fields["layer_types"]

    def _draw_per_layer_config(self) -> None:
        """What Gemma 4 makes it of."""
        heads = self.fields["num_attention_heads"]
        self.fields["global_head_dim"] = self.random.choice([2, 8, 16, 24, 40])
        self.fields["num_global_key_value_heads"] = self.random.choice(
            [None, *(n for n in range(1, heads + 1) if heads % n == 0)]
        )

    def _draw_rope_parameters(self) -> None:
        if self.chance(0.1):
            return
        if self.family in NESTED_ROPE:
            kinds = {each: self.rope() for each in LAYER_TYPES}
            kinds["sliding_attention"] = self.rope() if self.chance(0.3) else {"rope_theta": 100.0}
            if self.family == "gemma4_text" and self.chance(0.8):
                kinds["sliding_attention"]["rope_type"] = "default"
                kinds["full_attention"] = {
                    "rope_type": "proportional",
                    "rope_theta": self.random.choice([10.0, 1e4]),
                    "partial_rotary_factor": self.random.choice([0.2, 0.25, 0.5, 1.0]),
                }
            self.fields["rope_parameters"] = kinds
        else:
            self.fields["rope_parameters"] = self.rope()

    def rope(self) -> dict[str, Any]:
        """One rotary embedding, of any type, with any of the parameters that the type has."""
        pick = self.random
        usual = self.usual.get("rope_parameters") or {}
        factors = {"partial_rotary_factor": pick.choice([0.25, 0.5, 0.75, 1.0])}
        is_partial = "partial_rotary_factor" in usual or self.chance(0.05)
        partial = factors if is_partial and self.chance(0.8) else {}
        kinds = ["default", "default", "linear", "dynamic", "yarn", "yarn", "longrope", "llama3"]
        if self.family in ("phi3", "phimoe") and self.chance(0.9):
            kinds = ["default", "longrope"]
        rope: dict[str, Any] = {
            "rope_type": pick.choice(kinds + ["proportional"] * self.chance(0.2)),
            "rope_theta": pick.choice([10.0, 500.0, 10000.0, 1e6]),
            **partial,
        }
        factor = pick.choice([1.0, 1.5, 2.0, 8.0])
        original = pick.choice([16, 32, 48])
        share = partial.get("partial_rotary_factor", usual.get("partial_rotary_factor", 1.0))
        head_dim = self.fields.get("head_dim", self.head_dim)
        pairs = int(head_dim * share) // 2
        optional: dict[str, Any] = {}
        match rope["rope_type"]:
            case "linear" | "dynamic" | "proportional":
                rope |= {"factor": factor}
            case "yarn":
                rope |= {"factor": factor, "original_max_position_embeddings": original}
                optional = {
                    "attention_factor": pick.choice([0.5, 1.5]),
                    "beta_fast": pick.choice([8.0, 20.0]),
                    "beta_slow": pick.choice([0.5, 2.0]),
                    "truncate": pick.choice([True, False]),
                    "mscale": pick.choice([0.7, 1.0]),
                    "mscale_all_dim": pick.choice([0.5, 1.0, 0.0]),
                }
            case "longrope":
                rope |= {
                    "original_max_position_embeddings": original,
                    "short_factor": [pick.choice([1.0, 1.2]) for _ in range(pairs)],
                    "long_factor": [pick.choice([1.5, 3.0, 9.0]) for _ in range(pairs)],
                }
                optional = {"factor": factor, "attention_factor": pick.choice([0.8, 1.3])}
            case "llama3":
                low = pick.choice([1.0, 2.0])
                rope |= {
                    **{"factor": factor, "original_max_position_embeddings": original},
                    **{"low_freq_factor": low, "high_freq_factor": low * pick.choice([1.5, 4.0])},
                }
        if self.family == "ministral3":
            optional["llama_4_scaling_beta"] = pick.choice([0.0, 0.1, 0.5])
        if self.family == "phimoe" and rope["rope_type"] != "default":
            # transformers 5.23 takes the short factors at all lengths, which the model is not
            # trained for.
            if rope["rope_type"] == "longrope":
                rope["original_max_position_embeddings"] = 512
            rope["short_mscale"] = rope["long_mscale"] = pick.choice([0.9, 1.2])
        return rope | {name: value for name, value in optional.items() if self.chance(0.5)}


def _activation(drawing: Drawing) -> str:
    usual = "silu", "swish", "gelu_pytorch_tanh"
    odds = drawing.random.random()
    if odds < 0.7:
        return drawing.random.choice(usual)
    if odds < 0.85:
        return drawing.random.choice(["gelu", "gelu_new", "relu"])
    return drawing.random.choice(sorted(ACT2FN))


def _one_of(*values: Any) -> Callable[[Drawing], Any]:
    return lambda drawing: drawing.random.choice(values)


def _integer(low: int, high: int) -> Callable[[Drawing], int]:
    return lambda drawing: drawing.random.randint(low, high)


_EPS = _one_of(1e-8, 1e-5, 1e-2, 0.3)
_MULTIPLIER = _one_of(0.1, 0.37, 1.0, 2.5)
DRAWS: dict[str, Callable[[Drawing], Any]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), _activation),
    "activation": _activation,
    "feed_forward_proj": lambda drawing: (
        drawing.random.choice(["", "gated-"]) + _activation(drawing)
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner"), _integer(3, 90)),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), _integer(3, 90)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _integer(3, 50)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), _EPS),
    "sliding_window": _one_of(None, 1, 2, 7, 16, 20, 300),
    "sliding_window_pattern": _integer(1, 5),
    "max_window_layers": _integer(0, 4),
    "use_bidirectional_attention": lambda drawing: drawing.random.choice(
        [None, "vision", "all"] if drawing.family == "gemma4_text" else [None, False, True]
    ),
    "num_kv_shared_layers": _integer(0, 2),
    "query_pre_attn_scalar": _one_of(3, 24, 100),
    "attn_logit_softcapping": _one_of(None, 0.5, 20.0),
    "final_logit_softcapping": _one_of(None, 1.0, 20.0),
    **dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier"), _MULTIPLIER
    ),
    **dict.fromkeys(("logits_scaling", "logit_scale", "routed_scaling_factor"), _MULTIPLIER),
    "router_jitter_noise": _one_of(0.0, 0.01, 0.3),
    "clip_qkv": _one_of(None, 0.5),
    "decoder_sparse_step": _integer(1, 3),
    "mlp_only_layers": lambda drawing: sorted(
        drawing.random.sample(range(5), drawing.random.randint(0, 3))
    ),
    "first_k_dense_replace": _integer(0, 3),
    "no_rope_layers": lambda drawing: [drawing.random.randint(0, 1) for _ in range(drawing.layers)],
    "no_rope_layer_interval": _integer(1, 4),
    "word_embed_proj_dim": _integer(5, 40),
    "rotary_dim": lambda drawing: 2 * drawing.random.randint(1, drawing.head_dim // 2),
    "num_ln_in_parallel_attn": _one_of(None, 1, 2),
    "original_max_position_embeddings": _one_of(16, 32, 48),
    "relative_attention_num_buckets": _one_of(4, 8, 12, 16, 16, 32, 7),
    "relative_attention_max_distance": _one_of(17, 20, 40, 128),
    "swiglu_alpha": _one_of(1.0, 1.702),
    "swiglu_limit": _one_of(1.0, 7.0),
    "expansion_ratio": _one_of(4, 4, 4, 2),
    "embedding_fraction": _one_of(1.0, 0.5),
    "attn_config": lambda drawing: {
        name: value
        for name, value in {
            "clip_qkv": 0.7,
            "softmax_scale": drawing.random.choice([0.11, 1.0]),
            "qk_ln": True,
            "alibi": False,
            "alibi_bias_max": drawing.random.choice([4, 8, 16]),
            "prefix_lm": True,
        }.items()
        if drawing.chance(0.6 if name == "softmax_scale" else 0.06)
    },
}


def respelled(written: dict[str, Any], random: Random, nullable: set[str]) -> dict[str, Any]:
    """The fields of a config.json as files of other ages have them; what they mean may change.

    written: as transformers 5 has written them. nullable: those of which some become null.
    """
    found = dict(written)
    is_newer = found.get("model_type") == "gemma4_text"
    if not is_newer and random.random() < 0.5:  # transformers 4
        if "dtype" in found:
            found["torch_dtype"] = found.pop("dtype")
        rope = found.pop("rope_parameters", None)
        if isinstance(rope, dict):
            found |= _old_rope(rope, random)
    for name in sorted(found):
        if name not in SIZES and random.random() < 0.12:
            del found[name]
        elif name in ("head_dim", "num_key_value_heads") and random.random() < 0.1:
            if random.random() < 0.5:
                del found[name]
            else:
                found[name] = None
        elif name in nullable and random.random() < 0.05:
            found[name] = None
    for name, values in FOREIGN.items():
        if name not in found and random.random() < 0.006:
            found[name] = random.choice(values)
    return found


# Fields that some families have: where a family's class lacks them, it may read them all the same.
FOREIGN: dict[str, list[Any]] = {
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "use_bias": [True],
    "qkv_bias": [True, False],
    "head_dim": [4, 8],
    "sliding_window": [5, None],
    "use_sliding_window": [True, False],
    "layer_types": [["sliding_attention"] * 2, ["full_attention"] * 2],
    "attn_logit_softcapping": [1.0],
    "final_logit_softcapping": [1.0],
    "query_pre_attn_scalar": [3],
    "attention_multiplier": [0.3],
    "embedding_multiplier": [0.3],
    "residual_multiplier": [0.3],
    "logits_scaling": [3.0],
    "logit_scale": [0.3],
    "partial_rotary_factor": [0.5],
    "original_max_position_embeddings": [16],
    "rope_theta": [50.0],
    "rope_scaling": [{"type": "linear", "factor": 2.0}, None],
    "rope_local_base_freq": [50.0],
    "sliding_window_pattern": [1, 2],
    "num_key_value_heads": [1],
    "scale_embedding": [True],
    "norm_eps": [0.1],
    "layer_norm_eps": [0.1],
    "rms_norm_eps": [0.1],
    "hidden_act": ["gelu", "relu"],
    "tie_word_embeddings": [True, False],
    "rotary_pct": [0.5],
    "rotary_emb_base": [50],
    "n_embed": [16],
    "n_inner": [11],
    "use_qk_norm": [True],
    "is_causal": [False],
    "norm_topk_prob": [True],
    "normalize_before": [True],
    "static_position_embeddings": [True],
    "multi_query_group_num": [1],
}


def _old_rope(rope: dict[str, Any], random: Random) -> dict[str, Any]:
    """rope_theta, rope_scaling and what else stood beside them."""
    found: dict[str, Any] = {}
    if any(isinstance(value, dict) for value in rope.values()):  # one for each kind of layer
        local = dict(rope.get("sliding_attention") or {})
        rope = dict(rope.get("full_attention") or {})
        if "rope_theta" in local:
            found["rope_local_base_freq"] = local["rope_theta"]
    rope = dict(rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            found[name] = rope.pop(name)
    kind = rope.pop("rope_type", "default")
    if kind == "default" and not rope:
        found["rope_scaling"] = None
        return found
    names = random.choice([("type",), ("rope_type",), ("rope_type", "type")])
    if kind == "longrope" and random.random() < 0.3:
        kind = "su"  # which transformers knows of Phi-3 alone
    found["rope_scaling"] = {**rope, **dict.fromkeys(names, kind)}
    return found
