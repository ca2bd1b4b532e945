"""Configurations of real models (fields as published), and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from model_zoo import write_model
from octavo.config import ModelImpl
from octavo.core.kv.specs import FullAttention, SlidingWindow
from octavo.errors import ConfigError, ModelError
from octavo.layers.config import EmbeddingScale, PositionTable, QueryScaleConfig, RotaryConfig
from octavo.models.config import ModelConfig
from octavo.models.hub import HUB_FILES, resolve_model
from octavo.models.loader import build_model
from octavo.models.registry import read_model_config
from octavo.ops.communicator import SingleRank
from octavo.parallel import Shard

GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
OPT_13B = {
    "_remove_final_layer_norm": False,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "eos_token_id": 2,
    "ffn_dim": 20480,
    "hidden_size": 5120,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "pad_token_id": 1,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 5120,
}
OPT_350M = {
    **OPT_13B,
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "word_embed_proj_dim": 512,
}
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

PHI_35_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0 + i for i in range(48)],
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
PHI_4_MINI = {
    **PHI_35_MINI,
    "eos_token_id": 199999,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}

SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}
GRANITE_33_8B = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49159,
}
STARCODER2_3B = {
    "architectures": ["Starcoder2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
}
STABLELM_2 = {
    "architectures": ["StableLmForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "model_type": "stablelm",
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "use_qkv_bias": True,
    "vocab_size": 100352,
}
SEED_OSS = {
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "model_type": "seed_oss",
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 155136,
}
EXAONE4 = {
    "architectures": ["Exaone4ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "vocab_size": 102400,
}
MINISTRAL_8B = {
    **MISTRAL_7B,
    "architectures": ["MinistralForCausalLM"],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9,
    "model_type": "ministral",
    "num_hidden_layers": 36,
    "rope_theta": 100000000.0,
    "sliding_window": 32768,
    "max_position_embeddings": 131072,
    "vocab_size": 131072,
}
PYTHIA_69B = {
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50432,
}
FALCON_7B = {
    "alibi": False,
    "architectures": ["FalconForCausalLM"],
    "bias": False,
    "eos_token_id": 11,
    "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_40B = {
    **FALCON_7B,
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA_2_2B = {
    **GEMMA_3_1B,
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
OLMO_2_7B = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
OLMO_3_7B = {
    **OLMO_2_7B,
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
    "vocab_size": 100278,
}
GLM_4_0414 = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "position_embedding_type": "rope_gptj",
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "vocab_size": 256000,
}
COMMAND_R = {**COMMAND_R7B, "architectures": ["CohereForCausalLM"], "model_type": "cohere"}
GPT_J = {
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "layer_norm_epsilon": 1e-05,
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "rotary": True,
    "rotary_dim": 64,
    "tie_word_embeddings": False,
    "vocab_size": 50400,
}
MPT_7B = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "qk_ln": False},
    "d_model": 4096,
    "expansion_ratio": 4,
    "learned_pos_emb": True,
    "max_seq_len": 2048,
    "model_type": "mpt",
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "vocab_size": 50432,
}
BLOOM_560M = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "hidden_size": 1024,
    "layer_norm_epsilon": 1e-05,
    "model_type": "bloom",
    "n_head": 16,
    "n_layer": 24,
    "seq_length": 2048,
    "vocab_size": 250880,
}


BENCHMARKED = Path(__file__).parents[2] / "benchmarks" / "configs"


def write(
    directory: Path, fields: dict[str, Any], generation: dict[str, Any] | None = None
) -> Path:
    (directory / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def read(directory: Path, fields: dict[str, Any]) -> ModelConfig:
    return read_model_config(write(directory, fields))


@pytest.mark.parametrize(
    ("fields", "num_parameters"),
    [
        pytest.param(GPT2, 124_439_808, id="gpt2"),
        pytest.param(OPT_13B, 12_853_473_280, id="opt-13b"),
        pytest.param(OPT_350M, 331_196_416, id="opt-350m"),
        pytest.param(LLAMA_2_7B, 6_738_415_616, id="llama-2-7b"),
        pytest.param(LLAMA_31_8B, 8_030_261_248, id="llama-3.1-8b"),
        pytest.param(MISTRAL_7B, 7_241_732_096, id="mistral-7b"),
        pytest.param(QWEN25_05B, 494_032_768, id="qwen2.5-0.5b"),
        pytest.param(QWEN3_06B, 596_049_920, id="qwen3-0.6b"),
        pytest.param(PHI_35_MINI, 3_821_079_552, id="phi-3.5-mini"),
        pytest.param(PHI_4_MINI, 3_836_021_760, id="phi-4-mini"),
        pytest.param(SMOLLM3, 3_075_098_624, id="smollm3"),
        pytest.param(GRANITE_33_8B, 8_170_864_640, id="granite-3.3-8b"),
        pytest.param(STARCODER2_3B, 3_030_371_328, id="starcoder2-3b"),
        pytest.param(STABLELM_2, 1_644_515_328, id="stablelm-2-1.6b"),
        pytest.param(SEED_OSS, 36_151_104_512, id="seed-oss-36b"),
        pytest.param(EXAONE4, 32_003_216_384, id="exaone-4-32b"),
        pytest.param(MINISTRAL_8B, 8_019_808_256, id="ministral-8b"),
        pytest.param(PYTHIA_69B, 6_857_302_016, id="pythia-6.9b"),
        pytest.param(FALCON_7B, 6_921_720_704, id="falcon-7b"),
        pytest.param(FALCON_40B, 41_303_293_952, id="falcon-40b"),
        pytest.param(GEMMA_3_1B, 999_885_952, id="gemma-3-1b"),
        pytest.param(GEMMA_2_2B, 2_614_341_888, id="gemma-2-2b"),
        pytest.param(OLMO_2_7B, 7_298_617_344, id="olmo-2-7b"),
        pytest.param(GLM_4_0414, 9_400_279_040, id="glm-4-9b-0414"),
        pytest.param(COMMAND_R7B, 8_028_033_024, id="command-r7b"),
        pytest.param(GPT_J, 6_050_882_784, id="gpt-j-6b"),
        pytest.param(MPT_7B, 6_649_286_656, id="mpt-7b"),
        pytest.param(BLOOM_560M, 559_214_592, id="bloom-560m"),
    ],
)
def test_num_parameters_of_published_models(
    tmp_path: Path, fields: dict[str, Any], num_parameters: int
) -> None:
    """Declared shapes count the same as the published weights, and as the modules made of them."""
    config = read(tmp_path, fields)
    assert config.num_parameters() == num_parameters
    model = build_model(config, torch.bfloat16, torch.device("meta"), SingleRank())
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_phi_rotary(tmp_path: Path) -> None:
    config = read(tmp_path, PHI_35_MINI)
    (rotary,) = config.rotaries
    assert (rotary.kind, rotary.dim, rotary.factor) == ("longrope", 96, 32.0)
    assert rotary.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert config.kv_specs() == [FullAttention()] * 32  # the window is longer than the context
    (partial,) = read(tmp_path, PHI_4_MINI).rotaries
    assert partial.dim == 96  # of heads of 128
    su = PHI_35_MINI["rope_scaling"] | {"type": "su"}  # type: ignore[operator]
    assert read(tmp_path, PHI_35_MINI | {"rope_scaling": su}).rotaries == (rotary,)
    without = {key: value for key, value in PHI_35_MINI.items() if "original" not in key}
    assert read(tmp_path, without).rotaries == (rotary,)  # 4,096 is the family's default


def test_llama_31(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_31_8B)
    assert (config.architecture, config.family) == ("LlamaForCausalLM", "llama")
    attention = config.layers[0].attention
    assert (config.num_layers, attention.num_heads, attention.num_kv_heads) == (32, 32, 8)
    assert (attention.head_dim, config.max_model_len) == (128, 131072)
    assert config.rotaries == (RotaryConfig(128, 500000.0, "llama3", 8.0, 8192, 1.0, 4.0),)
    assert attention.rotary == 0
    assert attention.scale == 128**-0.5
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.bos_token_id == 128000
    assert config.dtype == "bfloat16"
    assert not config.tied_embeddings
    assert config.kv_specs() == [FullAttention()] * 32


def test_quantized_weights_take_fewer_bytes(tmp_path: Path) -> None:
    dense = read(tmp_path, LLAMA_31_8B)
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    config = read(tmp_path, LLAMA_31_8B | {"quantization_config": fields})
    assert dense.least_weight_bytes(2) == dense.weight_bytes(2) == config.weight_bytes(2)
    layer = dense.layers[0]
    projections = dense.num_layers * (layer.num_parameters - 2 * layer.norm.num_parameters)
    saved = dense.weight_bytes(2) - config.least_weight_bytes(2)
    assert saved == pytest.approx((2 - 0.5 - 2 / 128) * projections, abs=1)


def test_weight_bytes_count_the_rotary_table(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA_31_8B)
    table = 2 * 131072 * 64 * 4  # cos and sin of each position and pair of elements, float32
    assert config.weight_bytes(2) == 2 * config.num_parameters() + table
    shorter = config.with_max_model_len(1024)
    assert shorter.weight_bytes(2) == 2 * config.num_parameters() + table // 128
    assert read(tmp_path, GPT2).weight_bytes(4) == 4 * 124_439_808


def test_config_json_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B | quantized))
    names: list[str] = []
    read_text = Path.read_text

    def noted(path: Path, **options: Any) -> str:
        names.append(path.name)
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", noted)
    assert read_model_config(tmp_path).is_stored_quantized
    assert names.count("config.json") == 1


def test_heads_of_no_size_have_that_of_the_hidden_state(tmp_path: Path) -> None:
    """A null is not the family's default, as in transformers."""
    fields = SEED_OSS | {"hidden_size": 5120, "num_attention_heads": 80, "head_dim": None}
    assert read(tmp_path, fields).layers[0].attention.head_dim == 64
    del fields["head_dim"]
    assert read(tmp_path, fields).layers[0].attention.head_dim == 128


@pytest.mark.parametrize(
    ("family", "end"),
    [("bart", {"forced_eos_token_id": 2}), ("marian", {"forced_eos_token_id": 0})],
)
def test_outputs_that_max_tokens_ends_end_as_the_family_says(
    family: str, end: dict[str, int], tmp_path: Path
) -> None:
    """As transformers' class has it, where no file mentions it."""

    def last(fields: dict[str, Any]) -> tuple[int, ...]:
        return read(tmp_path, {"model_type": family} | fields).decoding_rules.last_token_ids

    assert CONFIG_MAPPING[family]().to_dict() | end == CONFIG_MAPPING[family]().to_dict()
    assert last({}) == tuple(end.values())
    assert last({"forced_eos_token_id": 7}) == (7,)
    assert last({"forced_eos_token_id": None}) == ()
    (tmp_path / "generation_config.json").write_text("{}")
    assert last({}) == ()


def test_both_spellings_of_rope_and_dtype(tmp_path: Path) -> None:
    old = read(tmp_path, LLAMA_31_8B)
    new_fields = dict(LLAMA_31_8B)
    rope = new_fields.pop("rope_scaling") | {"rope_theta": new_fields.pop("rope_theta")}
    new_fields |= {"rope_parameters": rope, "dtype": new_fields.pop("torch_dtype")}
    assert read(tmp_path, new_fields) == old
    legacy = {"type": "linear", "factor": 2.0}
    rotaries = read(tmp_path, LLAMA_2_7B | {"rope_scaling": legacy}).rotaries
    assert rotaries == (RotaryConfig(128, 10000.0, "linear", 2.0),)


def test_opt_350m(tmp_path: Path) -> None:
    config = read(tmp_path, OPT_350M)
    assert (config.embedding_size, config.hidden_size) == (512, 1024)
    assert {layer.norm_placement for layer in config.layers} == {"post"}
    assert config.final_norm is None
    assert config.tied_embeddings
    assert config.positions == PositionTable(2050, 2)
    assert config.max_model_len == 2048
    assert config.rotaries == ()
    assert config.layers[0].attention.rotary is None


def test_mistral_windows(tmp_path: Path) -> None:
    assert read(tmp_path, MISTRAL_7B).kv_specs() == [SlidingWindow(4096)] * 32
    no_window = read(tmp_path, MISTRAL_7B | {"sliding_window": None})
    assert no_window.kv_specs() == [FullAttention()] * 32
    fields = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert read(tmp_path, fields).layer_windows[0] == 4096  # the family's default


def test_a_window_of_the_whole_context_is_full_attention(tmp_path: Path) -> None:
    config = read(tmp_path, MISTRAL_7B | {"max_position_embeddings": 4096})
    assert config.kv_specs() == [FullAttention()] * 32
    config = read(tmp_path, MISTRAL_7B).with_max_model_len(4096)
    assert config.kv_specs() == [FullAttention()] * 32
    config = read(tmp_path, MISTRAL_7B).with_max_model_len(4097)
    assert config.kv_specs() == [SlidingWindow(4096)] * 32


def test_qwen_windows(tmp_path: Path) -> None:
    assert set(read(tmp_path, QWEN25_05B).layer_windows) == {None}
    sliding = {**QWEN25_05B, "use_sliding_window": True, "sliding_window": 1024}
    config = read(tmp_path, sliding | {"max_window_layers": 20})
    assert config.layer_windows == (None,) * 20 + (1024,) * 4
    types = ["sliding_attention", "full_attention"] * 12
    config = read(tmp_path, sliding | {"layer_types": types})
    assert config.layer_windows == (1024, None) * 12


def test_qwen_norms_and_biases(tmp_path: Path) -> None:
    qwen2, qwen3 = read(tmp_path, QWEN25_05B), read(tmp_path, QWEN3_06B)
    for config, qkv_bias, head_norms in ((qwen2, True, False), (qwen3, False, True)):
        attention = config.layers[0].attention
        assert (attention.qkv_bias, attention.output_bias) == (qkv_bias, False)
        assert (attention.head_norm is not None) == head_norms
    fields = {key: value for key, value in QWEN3_06B.items() if key != "head_dim"}
    assert (
        read(tmp_path, fields).layers[0].attention.head_dim == 128
    )  # the family's default, not 1024 / 16


def test_layers_without_rotary_positions(tmp_path: Path) -> None:
    for fields in (SMOLLM3, EXAONE4, COMMAND_R7B):
        rotaries = [layer.attention.rotary for layer in read(tmp_path, fields).layers]
        assert rotaries == [0, 0, 0, None] * (len(rotaries) // 4)
    small = EXAONE4 | {"sliding_window": None, "layer_types": None, "sliding_window_pattern": None}
    config = read(tmp_path, small)  # as EXAONE 4.0 1.2B, in which all layers are alike
    assert set(config.layer_windows) == {None}
    assert {layer.attention.rotary for layer in config.layers} == {0}


def test_windows_by_family(tmp_path: Path) -> None:
    assert read(tmp_path, GEMMA_3_1B).layer_windows[:7] == (512,) * 5 + (None, 512)
    assert read(tmp_path, GEMMA_2_2B).layer_windows[:3] == (4096, None, 4096)
    for fields in (EXAONE4, COMMAND_R7B, OLMO_3_7B):
        assert read(tmp_path, fields).layer_windows[:5] == (4096,) * 3 + (None, 4096)
    assert read(tmp_path, MINISTRAL_8B).layer_windows[:5] == (None, *(32768,) * 3, None)


def test_a_rotary_embedding_per_kind_of_layer(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA_3_1B)
    assert config.rotaries == (RotaryConfig(256, 1e6), RotaryConfig(256, 1e4))
    assert [layer.attention.rotary for layer in config.layers[:7]] == [1] * 5 + [0, 1]
    scaled = GEMMA_3_1B | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    wanted = RotaryConfig(256, 1e6, "linear", 8.0), RotaryConfig(256, 1e4)
    assert read(tmp_path, scaled).rotaries == wanted
    with pytest.raises(ModelError, match=r"type is 'linear'; transformers .* name it rope_type"):
        read(tmp_path, GEMMA_3_1B | {"rope_scaling": {"factor": 8.0, "type": "linear"}})
    named_twice = {"factor": 8.0, "type": "linear", "rope_type": "linear"}
    assert read(tmp_path, GEMMA_3_1B | {"rope_scaling": named_twice}).rotaries == wanted
    new: dict[str, Any] = {
        key: value for key, value in scaled.items() if not key.startswith("rope_")
    }
    new["rope_parameters"] = {
        "full_attention": {"factor": 8.0, "rope_type": "linear", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert read(tmp_path, new).rotaries == wanted
    full, sliding = read(tmp_path, OLMO_3_7B).rotaries
    assert (full.kind, sliding.kind) == ("yarn", "default")
    assert full.theta == sliding.theta == 500000.0


def test_the_class_may_have_the_name_that_its_authors_gave_it(tmp_path: Path) -> None:
    """Not that of transformers; of a class with another head there is none."""
    for name in ("MPTForCausalLM", "MptForCausalLM"):
        assert read(tmp_path, MPT_7B | {"architectures": [name]}).architecture == "MptForCausalLM"
    with pytest.raises(
        ModelError, match=r"architectures is .*; of mpt, octavo serves MptForCausal"
    ):
        read(tmp_path, MPT_7B | {"architectures": ["MptForSequenceClassification"]})


def test_transformers_is_named_only_where_it_may_help(tmp_path: Path) -> None:
    """Not for types that are refused there, too, nor where octavo's own family was asked for."""
    for fields in (MPT_7B | {"expansion_ratio": 8}, COMMAND_R | {"use_qk_norm": True}):
        model_impl: ModelImpl = "native" if fields["model_type"] == "cohere" else "auto"
        (tmp_path / "config.json").write_text(json.dumps(fields))
        with pytest.raises(ModelError, match=r"octavo does not implement this option$"):
            read_model_config(tmp_path, model_impl)


def test_scales_and_soft_caps(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA_2_2B)
    assert config.embedding_scale == EmbeddingScale(48.0, is_rounded=True)
    assert config.logits_softcap == 30.0
    assert {layer.attention.softcap for layer in config.layers} == {50.0}
    assert {layer.norm.offset for layer in config.layers} == {1.0}
    uncapped = GEMMA_2_2B | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert read(tmp_path, uncapped).logits_softcap is None
    granite = read(tmp_path, GRANITE_33_8B)
    assert {layer.attention.scale for layer in granite.layers} == {0.0078125}
    assert granite.embedding_scale == EmbeddingScale(12.0 / 0.22)
    assert granite.layers[0].norm.eps == pytest.approx(1e-5 / 0.22**2)
    assert granite.final_norm is not None
    assert granite.final_norm.multiplier == 1 / 16
    command = read(tmp_path, COMMAND_R7B)
    assert command.final_norm is not None
    assert command.final_norm.multiplier == 0.25


def test_queries_of_ministral_3_grow_with_their_position(tmp_path: Path) -> None:
    fields = {
        **MISTRAL_7B,
        "architectures": ["Ministral3ForCausalLM"],
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "sliding_window": None,
    }
    del fields["rope_theta"]
    rope = {
        **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1},
        **{"original_max_position_embeddings": 16384, "max_position_embeddings": 262144},
    }
    for given in (fields, fields | {"rope_parameters": rope}):
        config = read(tmp_path, given)
        assert config.max_model_len == 262144
        assert config.rotaries[0].kind == "yarn"
        assert config.layers[0].attention.query_scale == QueryScaleConfig(0.1, 16384)
    constant = fields | {"rope_parameters": rope | {"llama_4_scaling_beta": 0}}
    assert read(tmp_path, constant).layers[0].attention.query_scale is None
    with pytest.raises(ModelError, match="rope_parameters: llama_4_scaling_beta is 'x'; it must"):
        read(tmp_path, fields | {"rope_parameters": rope | {"llama_4_scaling_beta": "x"}})
    with pytest.raises(ModelError, match="rope_parameters is 3; it must be a JSON object"):
        read(tmp_path, fields | {"rope_parameters": 3})


def test_where_falcon_has_norms(tmp_path: Path) -> None:
    for fields, placement in (
        (FALCON_7B, "parallel"),
        (FALCON_40B, "twin"),
        (FALCON_40B | {"num_ln_in_parallel_attn": 1}, "parallel"),
        (FALCON_7B | {"parallel_attn": False}, "pre"),
    ):
        assert read(tmp_path, fields).layers[0].norm_placement == placement
    for fields, heads in (
        (FALCON_7B, 1),
        (FALCON_40B, 8),
        (FALCON_7B | {"multi_query": False}, 71),
    ):
        assert read(tmp_path, fields).layers[0].attention.num_kv_heads == heads


def test_alibi_slopes(tmp_path: Path) -> None:
    """For powers of 2 as in the paper; for others as in the code of BLOOM and MPT."""
    for fields, name in ((BLOOM_560M | {"hidden_size": 960}, "n_head"), (MPT_7B, "n_heads")):
        (slopes,) = {layer.attention.alibi_slopes for layer in read(tmp_path, fields).layers}
        assert slopes is not None
        assert (len(slopes), slopes[-1]) == (fields[name], 2**-8)
    (slopes,) = {
        layer.attention.alibi_slopes
        for layer in read(tmp_path, BLOOM_560M | {"hidden_size": 960, "n_head": 6}).layers
    }
    assert slopes == tuple(2**-power for power in (2, 4, 6, 8, 1, 3))


def test_tokens_that_end_a_text_by_default(tmp_path: Path) -> None:
    fields = {key: value for key, value in GLM_4_0414.items() if key != "eos_token_id"}
    assert read(tmp_path, fields).eos_token_ids == (151329, 151336, 151338)
    fields = {key: value for key, value in GEMMA_2_2B.items() if key != "eos_token_id"}
    assert read(tmp_path, fields).eos_token_ids == (1,)


def test_gpt2_scales(tmp_path: Path) -> None:
    config = read(tmp_path, GPT2 | {"scale_attn_by_inverse_layer_idx": True})
    scales = [layer.attention.scale for layer in config.layers]
    assert scales[:3] == [1 / 8, 1 / 16, 1 / 24]
    config = read(tmp_path, GPT2 | {"scale_attn_weights": False})
    assert {layer.attention.scale for layer in config.layers} == {1.0}
    assert read(tmp_path, GPT2 | {"n_inner": None}).layers[0].mlp.intermediate_size == 3072
    assert read(tmp_path, GPT2).dtype == "float32"


def test_yarn(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = read(tmp_path, QWEN25_05B | {"rope_scaling": yarn})
    assert config.max_model_len == 131072
    assert config.rotaries[0].attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    scaled = yarn | {"mscale": 0.5, "mscale_all_dim": 2.0}
    config = read(tmp_path, QWEN25_05B | {"rope_scaling": scaled})
    expected = (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)
    assert config.rotaries[0].attention_factor == pytest.approx(expected)
    for name in ("attn_factor", "extrapolation_factor"):  # of the authors' code
        assert read(tmp_path, QWEN25_05B | {"rope_scaling": scaled | {name: 1.0}}) == config
        with pytest.raises(ModelError, match=f"{name} is 0.5; octavo does not implement"):
            read(tmp_path, QWEN25_05B | {"rope_scaling": yarn | {name: 0.5}})


@pytest.mark.parametrize(
    "name", [each for each in ACT2FN if "gelu" in each and each not in ("gelu_10", "quick_gelu")]
)
def test_names_of_gelu(name: str, tmp_path: Path) -> None:
    x = torch.linspace(-4, 4, 200, dtype=torch.float64)
    exact = torch.nn.functional.gelu(x)
    is_tanh = float((ACT2FN[name](x) - exact).abs().max()) > 1e-5
    expected = "gelu_tanh" if is_tanh else "gelu"
    gpt2 = read(tmp_path, GPT2 | {"activation_function": name})
    assert gpt2.layers[0].mlp.activation == expected
    if is_tanh:
        llama = read(tmp_path, LLAMA_2_7B | {"hidden_act": name})
        assert llama.layers[0].mlp.activation == expected


def test_a_null_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Of all optional fields, these two do not mean by it what they mean when they are missing."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for value, truncates in (({}, True), ({"truncate": True}, True), ({"truncate": None}, False)):
        (rotary,) = read(tmp_path, QWEN25_05B | {"rope_scaling": yarn | value}).rotaries
        assert rotary.truncate is truncates
    sliding = QWEN25_05B | {"use_sliding_window": True, "max_window_layers": 20}
    assert read(tmp_path, sliding | {"sliding_window": None}).layer_windows == (None,) * 24
    del sliding["sliding_window"]
    assert read(tmp_path, sliding).layer_windows == (None,) * 20 + (4096,) * 4


def test_generation_config_wins(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": [7, 8],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    }
    config = read_model_config(write(tmp_path, QWEN3_06B, generation))
    assert config.eos_token_ids == (7, 8)
    assert config.sampling_defaults == {"temperature": 0.6, "top_p": 0.95}
    config = read_model_config(write(tmp_path, QWEN3_06B, {"_from_model_config": True}))
    assert config.eos_token_ids == (151645,)
    assert config.sampling_defaults == {}
    hash(config)
    greedy = read_model_config(write(tmp_path, QWEN3_06B, {"temperature": 0.6}))
    assert greedy.sampling_defaults == {}


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": 3.0}, "generation_config.json: temperature: 3.0 is not between"),
        ({"top_p": "most"}, "generation_config.json: top_p: 'most' is not a number"),
        ({"do_sample": "yes"}, "generation_config.json: do_sample is 'yes'; it must be true or"),
    ],
)
def test_generation_config_is_checked(
    tmp_path: Path, generation: dict[str, Any], message: str
) -> None:
    """Else every request that leaves the field out would be told that it is wrong."""
    write(tmp_path, QWEN3_06B, {"do_sample": True} | generation)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_end_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, GPT2 | {"eos_token_id": [7, -1, 50257]}).eos_token_ids == (7,)
    assert read(tmp_path, GPT2 | {"eos_token_id": None}).eos_token_ids == ()
    silent = {key: value for key, value in LLAMA_2_7B.items() if key != "eos_token_id"}
    assert read(tmp_path, silent).eos_token_ids == (2,)  # the family's default
    qwen = {key: value for key, value in QWEN3_06B.items() if key != "eos_token_id"}
    assert read(tmp_path, qwen).eos_token_ids == ()


def test_defaults_of_kv_heads(tmp_path: Path) -> None:
    for base, default in ((LLAMA_2_7B, 32), (MISTRAL_7B, 8)):
        fields = {key: value for key, value in base.items() if key != "num_key_value_heads"}
        assert read(tmp_path, fields).layers[0].attention.num_kv_heads == default
        assert (
            read(tmp_path, fields | {"num_key_value_heads": None}).layers[0].attention.num_kv_heads
            == 32
        )


def test_names_that_gpt2_has_two_of(tmp_path: Path) -> None:
    fields = {key: value for key, value in GPT2.items() if not key.startswith("n_")}
    aliases = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = read(tmp_path, fields | aliases | {"max_position_embeddings": 128})
    num_heads = config.layers[0].attention.num_heads
    assert (config.hidden_size, num_heads, config.num_layers) == (64, 4, 2)
    assert config.max_model_len == 128
    assert read(tmp_path, GPT2 | {"hidden_size": 768}).hidden_size == 768


def test_where_the_original_context_stands(tmp_path: Path) -> None:
    rope = dict(LLAMA_31_8B["rope_scaling"])
    original = rope.pop("original_max_position_embeddings")
    fields = LLAMA_31_8B | {"rope_scaling": rope, "original_max_position_embeddings": original}
    assert read(tmp_path, fields).rotaries == read(tmp_path, LLAMA_31_8B).rotaries


def test_both_forms_of_rope_that_agree(tmp_path: Path) -> None:
    rope = LLAMA_31_8B["rope_scaling"] | {"rope_theta": 500000.0}
    both = read(tmp_path, LLAMA_31_8B | {"rope_parameters": rope})
    assert both == read(tmp_path, LLAMA_31_8B)


def test_max_model_len_only_shrinks(tmp_path: Path) -> None:
    config = read(tmp_path, GPT2)
    assert config.with_max_model_len(100).max_model_len == 100
    assert config.with_max_model_len(100).num_parameters() == config.num_parameters()
    with pytest.raises(ConfigError, match="max_model_len: 1025 is more than the 1024 positions"):
        config.with_max_model_len(1025)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (GPT2, {"model_type": "novel"}, "model_type is 'novel'; neither octavo nor transformers"),
        (GPT2, {"model_type": None}, "model_type is None; neither octavo nor"),
        (GPT2, {"model_type": ["gpt2"]}, r"model_type is \['gpt2'\]; neither octavo nor"),
        (
            GPT2,
            {"architectures": ["GPT2ForTokenClassification"]},
            "architectures is .*octavo serves GPT2LM",
        ),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention is True; octavo does not"),
        (GPT2, {"activation_function": "mish"}, "activation_function is 'mish'; octavo knows gelu"),
        (
            GPT2,
            {"activation_function": ["relu"]},
            r"activation_function is \['relu'\]; octavo knows",
        ),
        (GPT2, {"n_head": 7}, r"n_head is 7; it must divide the hidden size \(768\)"),
        (GPT2, {"n_layer": 0}, "n_layer is 0; it must be a positive integer"),
        (GPT2, {"n_layer": True}, "n_layer is True; it must be a positive integer"),
        (GPT2, {"layer_norm_epsilon": "small"}, "layer_norm_epsilon is 'small'; it must be a pos"),
        (GPT2, {"eos_token_id": "end"}, "eos_token_id is 'end'; it must be a token id or a list"),
        (GPT2, {"torch_dtype": "float64"}, "torch_dtype is 'float64'; octavo serves float32"),
        (GPT2, {"dtype": ["float32"]}, "dtype is .*; octavo serves float32"),
        (OPT_350M, {"enable_bias": "no"}, "enable_bias is 'no'; it must be true or false"),
        (LLAMA_2_7B, {"hidden_size": None}, "config.json has no hidden_size"),
        (LLAMA_2_7B, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; octavo knows gelu_acc"),
        (LLAMA_2_7B, {"num_key_value_heads": 5}, "num_key_value_heads is 5; it must divide"),
        (LLAMA_2_7B, {"head_dim": 63}, "rotary embedding needs an even head_dim, not 63"),
        (LLAMA_2_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; octavo does"),
        (LLAMA_2_7B, {"rope_scaling": 2}, "rope_scaling is 2; it must be a JSON object"),
        (GPT2, {"num_attention_heads": 6}, "n_head is 12; but num_attention_heads, .*, is 6"),
        (GPT2, {"layer_norm_epsilon": math.inf}, "layer_norm_epsilon is inf; it must be a pos"),
        (LLAMA_2_7B, {"is_causal": False}, "is_causal is False; octavo does not implement"),
        (LLAMA_2_7B, {"per_layer_config": {"0": {"skip": ["mlp"]}}}, "per_layer_config is .*does"),
        (LLAMA_2_7B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; octavo"),
        (QWEN25_05B, {"dual_chunk_attention_config": {"chunk_size": 9}}, "octavo does not impl"),
        (LLAMA_2_7B, {"sliding_window": 4096}, "sliding_window is 4096; octavo does not"),
        (LLAMA_2_7B, {"layer_types": ["sliding_attention"] * 32}, "every layer .* full_attention"),
        (MISTRAL_7B, {"attention_bias": True}, "attention_bias is True; octavo does not"),
        (
            {key: value for key, value in QWEN3_06B.items() if key != "num_key_value_heads"},
            {},
            r"num_key_value_heads is 32; it must divide num_attention_heads \(16\)",
        ),
        (
            LLAMA_2_7B,
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            r"rope_scaling is .*; rope_parameters \(.*\) says something else",
        ),
        (
            LLAMA_2_7B,
            {"rope_scaling": {"rope_type": "default", "type": "linear", "factor": 2.0}},
            "rope_type is 'default'; but type, which means the same, is 'linear'",
        ),
        (
            LLAMA_2_7B,
            {"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}},
            "factor is 2.0; rope_type 'default' has no such field",
        ),
        (
            LLAMA_31_8B,
            {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings is 8192; outside of it, .* is 4096",
        ),
        (
            LLAMA_31_8B,
            {"rope_scaling": LLAMA_31_8B["rope_scaling"] | {"low_freq_factor": 4.0}},
            r"low_freq_factor is 4.0; it must be less than high_freq_factor \(4.0\)",
        ),
        (LLAMA_2_7B, {"rope_scaling": {"type": "axial"}}, "is 'axial'; octavo knows"),
        (
            PHI_4_MINI,
            {"partial_rotary_factor": 0.76},
            "is 0.76; .* number of a head's 128 .* not 97",
        ),
        (PHI_35_MINI, {"partial_rotary_factor": 0.5}, "it must be a list of 24 positive numbers"),
        (PHI_35_MINI, {"original_max_position_embeddings": 1}, "an original context of 2 or more"),
        (PHI_35_MINI, {"attention_bias": True}, "attention_bias is True; octavo does not"),
        (PHI_35_MINI, {"sliding_window": 0}, "sliding_window is 0; it must be a positive"),
        (
            LLAMA_2_7B,
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters is .*; octavo serves one rotary embedding for all layers",
        ),
        (LLAMA_2_7B, {"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor"),
        (LLAMA_2_7B, {"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1; it must"),
        (
            LLAMA_2_7B,
            {"quantization_config": {"quant_method": "hqq", "bits": 4}},
            r"quant_method is 'hqq'; octavo reads fp8, compressed-tensors, awq, gptq, auto-ro",
        ),
        (MISTRAL_7B, {"layer_types": ["full_attention"] * 32}, "every layer .* sliding_attention"),
        (MISTRAL_7B, {"sliding_window": -1}, "sliding_window is -1; it must be a positive"),
        (QWEN25_05B, {"mlp_bias": True}, "mlp_bias is True; octavo does not implement"),
        (QWEN25_05B, {"layer_types": ["full_attention"]}, "it must name 24 layers"),
        (QWEN25_05B, {"layer_types": ["sliding_attention"] * 24}, "sliding_window set no window"),
        (
            SMOLLM3,
            {"no_rope_layers": [1, 0]},
            "no_rope_layers is .*; it must be a list of 36 zeros",
        ),
        (SMOLLM3, {"no_rope_layers": [2] * 36}, "it must be a list of 36 zeros and ones"),
        (
            SMOLLM3,
            {"layer_types": ["sliding_attention"] * 36},
            "sliding_window is None; layer_types has layers with sliding attention",
        ),
        (LLAMA_2_7B, {"no_rope_layers": [1] * 32}, "no_rope_layers is .*; octavo does not impl"),
        (GRANITE_33_8B, {"residual_multiplier": 0}, "residual_multiplier is 0; it must be a posit"),
        (LLAMA_2_7B, {"logits_scaling": 8.0}, "logits_scaling is 8.0; octavo does not implement"),
        (STARCODER2_3B, {"hidden_act": "mish"}, "hidden_act is 'mish'; octavo knows gelu"),
        (STABLELM_2, {"qk_layernorm": True}, "qk_layernorm is True; octavo does not implement"),
        (STABLELM_2, {"partial_rotary_factor": 0.3}, "is 0.3; it must rotate an even number"),
        (SEED_OSS, {"layer_types": ["sliding_attention"] * 64}, "every layer .* full_attention"),
        (
            EXAONE4,
            {"layer_types": ["full_attention"]},
            "it must name 64 layers, each one of full_a",
        ),
        (
            EXAONE4,
            {"layer_types": ["linear_attention"] * 64},
            "it must name 64 layers, each one of",
        ),
        (EXAONE4, {"layer_types": None}, "sliding_window_pattern is 'LLLG'; it must be a positive"),
        (EXAONE4, {"sliding_window": None}, "sliding_window is None; layer_types has layers with"),
        (MINISTRAL_8B, {"mlp_bias": True}, "mlp_bias is True; octavo does not implement"),
        (PYTHIA_69B, {"num_key_value_heads": 8}, "num_key_value_heads is 8; octavo does not"),
        (PYTHIA_69B, {"rotary_pct": 0.37}, "is 0.37; .* number of a head's 128 elements, not 47"),
        (FALCON_7B, {"alibi": True}, "alibi is True; octavo does not implement"),
        (FALCON_7B, {"num_ln_in_parallel_attn": 2}, "_attn is 2; it must be at most 1"),
        (FALCON_40B, {"num_ln_in_parallel_attn": 3}, "_attn is 3; it must be at most 2"),
        (FALCON_40B, {"parallel_attn": False}, "parallel_attn is False; new_decoder_architecture"),
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; octavo"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA_3_1B, {"rope_parameters": {"rope_theta": 1e6}}, "an object .* each kind of layer"),
        (GEMMA_3_1B, {"rope_parameters": {"full_attention": 5}}, "full_attention in it must be a"),
        (
            GEMMA_3_1B,
            {"rope_parameters": {}, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "rope_scaling is .*; octavo does not implement",
        ),
        (
            GEMMA_3_1B,
            {"rope_parameters": {"sliding_attention": {"rope_type": "x"}}},
            "rope_parameters: sliding_attention: rope_type is 'x'; octavo knows",
        ),
        (
            GEMMA_2_2B,
            {"final_logit_softcapping": -1.0},
            "softcapping is -1.0; it must be a positive",
        ),
        (GEMMA_2_2B, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; octavo knows"),
        (GEMMA_2_2B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a pos"),
        (OLMO_2_7B, {"layer_types": ["sliding_attention"] * 32}, "every layer .* full_attention"),
        (OLMO_3_7B, {"rope_parameters": {"x": {}}, "rope_scaling": None}, "each kind of layer"),
        (GLM_4_0414, {"hidden_act": "relu"}, "hidden_act is 'relu'; octavo knows"),
        (
            COMMAND_R,
            {"use_qk_norm": True},
            r"octavo does not implement this option; transformers may compute it \(model_impl='tra",
        ),
        (COMMAND_R7B, {"logit_scale": 0}, "logit_scale is 0; it must be a positive number"),
        (COMMAND_R7B, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; it must be a"),
        (GPT_J, {"rotary_dim": 65}, "rotary_dim is 65; it must be even"),
        (
            GPT_J,
            {"rotary_dim": 512},
            "rotary_dim is 512; it must be a positive integer, at most 25",
        ),
        (MPT_7B, {"attn_config": {"clip_qkv": 6}}, "attn_config: clip_qkv is 6; octavo does not"),
        (MPT_7B, {"attn_config": {"alibi": False}}, "attn_config: alibi is False; octavo does not"),
        (MPT_7B, {"attn_config": [1]}, r"attn_config is \[1\]; it must be a JSON object"),
        (MPT_7B, {"expansion_ratio": 8}, "expansion_ratio is 8; octavo does not implement"),
        (MPT_7B, {"d_model": 1 << 20, "n_heads": 1 << 20}, "n_heads is 1048576; it must be a posi"),
        (BLOOM_560M, {"n_head": 7}, r"n_head is 7; it must divide the hidden size \(1024\)"),
        (
            BLOOM_560M,
            {"apply_residual_connection_post_layernorm": True},
            "post_layernorm is True; octavo does not implement",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, base | change)


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json: not a model directory"):
        read_model_config(tmp_path)
    with pytest.raises(ModelError, match=r"directory .*absent has no config\.json"):
        read_model_config(tmp_path / "absent")
    path = tmp_path / "config.json"
    for content in (b'{"model_type": ', b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"config\.json cannot be read: "):
            read_model_config(tmp_path)
    path.write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json holds a list, not a JSON object"):
        read_model_config(tmp_path)


def test_resolve_a_directory(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match="is a file; give the directory"):
        resolve_model(str(write(tmp_path, GPT2) / "config.json"))
    absent = str(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"not a directory .*, not 'demo', and not a hub id"):
        resolve_model(absent)
    with pytest.raises(ModelError, match="no model 'gpt-5'"):
        resolve_model("gpt-5")


def test_resolve_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    calls: list[tuple[str, list[str]]] = []

    def fetch(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        calls.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(write(tmp_path, GPT2))
    assert resolve_model("org/name-1.5b") == tmp_path
    assert calls == [("org/name-1.5b", ["*.safetensors", *HUB_FILES])]
    (tmp_path / "org" / "name-1.5b").mkdir(parents=True)
    assert resolve_model("org/name-1.5b") == Path("org/name-1.5b")
    assert len(calls) == 1  # what is here is not fetched


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fetch(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(
        ModelError, match=r"could not be fetched from the hub \(no route to the hub\)"
    ):
        resolve_model("org/name")


def test_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from octavo.models.registry import read_model_config;"
        f"read_model_config({str(write(tmp_path, GPT2))!r}).num_parameters();"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *[("opt-13b", 12853.5), ("llama-3-8b", 8030.3), ("qwen3-0.6b", 596.0)],
        *[("llama-15m", 15.7), ("t5-3b", 2851.6)],
    ],
)
def test_configs_for_benchmarks(name: str, millions: float) -> None:
    config = read_model_config(BENCHMARKED / name)
    assert config.num_parameters() / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(
    ("name", "method", "ranks", "all_of_them", "queries"),
    [
        ("gemma-3-4b", "plain", 1, True, False),
        ("llama-3-8b", "plain", 1, True, False),
        ("llama-3-8b", "quantized", 1, True, False),
        ("llama-3-70b", "plain", 2, False, False),  # a norm adds up the ranks' sums
        ("opt-13b", "plain", 1, False, False),  # layer norms
        ("qwen3-30b-a3b", "plain", 1, True, False),  # those of attention
        ("qwen3-30b-a3b", "quantized", 1, False, True),
        ("qwen3-30b-a3b", "quantized", 2, False, False),
    ],
)
def test_which_projections_are_a_chain(
    name: str, method: str, ranks: int, all_of_them: bool, queries: bool
) -> None:
    config = read_model_config(BENCHMARKED / name).with_linear_method(method)
    config = config.sharded(Shard(0, ranks))
    assert {layer.chains_projections for layer in config.layers} == {all_of_them}
    assert {layer.queries_follow_experts for layer in config.layers} == {queries}


@pytest.mark.parametrize(
    ("overrides", "stack"),
    [
        ({"encoder_attention_heads": 1}, "the encoder: the number of attention heads (1)"),
        ({"decoder_attention_heads": 1}, "the decoder: the number of attention heads (1)"),
    ],
)
def test_heads_that_do_not_divide_are_those_of_a_stack(
    overrides: dict[str, int], stack: str, tmp_path: Path
) -> None:
    config = read_model_config(write_model("bart", tmp_path, **overrides))
    with pytest.raises(ConfigError) as error:
        config.sharded(Shard(0, 2))
    assert str(error.value).startswith(f"tensor_parallel_size: {stack}")
