"""Checkpoints of random weights in the shapes of real layers, without transformers.

A wrong key or value anywhere must show in the log-probabilities of all tokens after it. The
weights are chosen so that it does: queries find few of the keys, what attention adds is as large as
what it is added to, and the next token's distribution is sharp.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.loader import build_model, weight_targets
from octavo.models.registry import read_model_config
from octavo.ops.communicator import SingleRank

EXPONENT_BIAS = 127  # of MXFP4's scales
FP4_DEVIATION = 2.9  # standard deviation of e2m1 numbers whose four bits are random
PER_SCALE = 32  # MXFP4 numbers that share a scale
SHARED_TABLE = "shared.weight"  # of encoder-decoders, which have other names for it, too
TABLES = ("embed_tokens.weight", "wte.weight", SHARED_TABLE)  # of token embeddings


def write_checkpoint(directory: Path, fields: dict[str, Any], device: torch.device) -> None:
    """Write config.json with these fields, and weights in bfloat16 that are made on `device`.

    Experts of a config with MXFP4 are written in that format.
    """
    (directory / "config.json").write_text(json.dumps(fields))
    config = read_model_config(directory)
    is_mxfp4 = fields.get("quantization_config", {}).get("quant_method") == "mxfp4"
    names = build_model(config, torch.bfloat16, torch.device("meta"), SingleRank())
    generator = torch.Generator(device).manual_seed(0)
    files: dict[str, Tensor] = {}
    targets = weight_targets(names, config)
    for name, target in targets.items():
        shape = target.shape
        if name == "lm_head.weight" and config.tied_embeddings:
            continue
        if name.endswith(TABLES) and name != SHARED_TABLE and SHARED_TABLE in targets:
            continue
        if is_mxfp4 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            files |= _mxfp4(name, shape, generator)
            continue
        values = torch.randn(shape, generator=generator, device=device)
        mean, deviation = _distribution(name, shape, config)
        files[name] = (mean + deviation * values).to(torch.bfloat16).cpu()
    save_file(files, directory / "model.safetensors")


def _distribution(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[float, float]:
    """The mean and the standard deviation of a tensor's values."""
    is_gemma = config.family.startswith("gemma")
    if len(shape) == 1 and name.endswith("weight"):  # of a norm
        mean = 1.0
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            mean = 1.6
        elif is_gemma and name in ("norm.weight", "model.norm.weight"):
            mean = 16.0  # the rows of the table, which is the head, too, are that small
        return (mean - 1.0 if is_gemma else mean), 0.1
    if name.endswith(TABLES):
        # Where they are the head, too, and large, the most likely next token is always the last
        # one. Gemma multiplies them by the root of their size, and T5 divides logits by it.
        root = math.sqrt(config.hidden_size)
        if is_gemma:
            return 0.0, 0.1 / root
        if config.family == "t5":
            return 0.0, 1.5
        return 0.0, 1.5 / root if config.tied_embeddings else 0.4
    if len(shape) == 1 or name.endswith("bias"):
        return 0.0, 0.1
    if name.endswith("experts.gate_up_proj"):  # gpt-oss has [experts, inputs, outputs]
        return 0.0, 1.5 / math.sqrt(shape[1])
    deviation = 1.5 / math.sqrt(shape[-1])
    if config.family == "t5" and name.endswith("Attention.q.weight"):  # scores have no scale
        deviation /= math.sqrt(config.layers[0].attention.head_dim)
    return 0.0, deviation


def _mxfp4(name: str, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """shape: [experts, inputs, outputs], of the weight in the model's dtype."""
    num_experts, num_inputs, num_outputs = shape
    scale = 1.5 / math.sqrt(num_inputs) / FP4_DEVIATION
    exponent = EXPONENT_BIAS + round(math.log2(scale))
    scales_shape = num_experts, num_outputs, num_inputs // PER_SCALE
    blocks = torch.randint(
        256, (*scales_shape, PER_SCALE // 2), generator=generator, device=generator.device
    )
    offsets = torch.randint(-1, 2, scales_shape, generator=generator, device=generator.device)
    return {
        f"{name}_blocks": blocks.to(torch.uint8).cpu(),
        f"{name}_scales": (exponent + offsets).to(torch.uint8).cpu(),
    }
