"""Shapes of public models whose attention takes paths that those of benchmarks/configs do not.

They are what the models' config.json says, without the number of layers, and without what is their
family's default.
"""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
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
}
