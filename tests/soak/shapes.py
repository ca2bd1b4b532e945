"""Shapes of public models whose attention takes paths that those of benchmarks/configs do not.

They are what the models' config.json says, without the number of layers, and without what is their
family's default.
"""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # Long contexts, whose rotary embedding is scaled.
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    # Cross-attention, norms behind the blocks, heads of 64.
    "bart-large": {
        "model_type": "bart",
        "d_model": 1024,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "max_position_embeddings": 1024,
        "vocab_size": 50265,
    },
    # Soft caps, windows in every other layer.
    "gemma-2-9b": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 3.0,  # the model's own is 50, which random scores do not reach
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    # ALiBi.
    "mpt-7b": {
        "model_type": "mpt",
        "attn_config": {"alibi": True},
        "d_model": 4096,
        "max_seq_len": 2048,
        "n_heads": 32,
        "vocab_size": 50432,
    },
    # ALiBi, biases, heads of 64, a norm of the embeddings.
    "bloom-560m": {
        "model_type": "bloom",
        "hidden_size": 1024,
        "n_head": 16,
        "vocab_size": 250880,
    },
    # Half of a head is rotated, in adjacent pairs; 16 queries share a key; norms around the blocks.
    "glm-4-9b": {
        "model_type": "glm4",
        "attention_bias": True,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "vocab_size": 151552,
    },
    # A quarter of a head of 256 is rotated, in adjacent pairs; parallel blocks.
    "gpt-j-6b": {
        "model_type": "gptj",
        "n_embd": 4096,
        "n_head": 16,
        "n_positions": 2048,
        "rotary_dim": 64,
        "tie_word_embeddings": False,
        "vocab_size": 50400,
    },
    # Heads of 96, a window in all layers.
    "phi-3-mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 2047,
        "vocab_size": 32064,
    },
    # Heads of 80, a quarter of which is rotated.
    "stablelm-3b": {
        "model_type": "stablelm",
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "vocab_size": 50304,
    },
    # Every fourth layer has no positions.
    "smollm3-3b": {
        "model_type": "smollm3",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 65536,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rope_theta": 5000000.0,
        "vocab_size": 128256,
    },
    # Parallel blocks; every fourth layer has neither a window nor positions.
    "command-r7b": {
        "model_type": "cohere2",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,  # the model's own is 0.25, which makes random logits alike
        "max_position_embeddings": 132096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 50000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
}
