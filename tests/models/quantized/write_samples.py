"""Writes the quantized models beside this file, with the real quantizers, on a CPU.

    python tests/models/quantized/write_samples.py [NAME ...]

Each directory has a tiny random Llama as a quantizer saved it, and `expected.safetensors`: for each
projection, its dequantized weight, by the quantizer's own dequantization, times one fixed vector.
Needs llmcompressor, compressed-tensors, auto-round, bitsandbytes, torchao and nvidia-modelopt, none
of which the tests need.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent
KEPT = ("config.json", "hf_quant_config.json", "model.safetensors", "expected.safetensors")
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
)


@functools.cache
def dense_directory() -> str:
    """Where the model before quantization is, in bfloat16."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.15)
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def dense_model(**options: object) -> LlamaForCausalLM:
    """That model, perhaps quantized while it is loaded."""
    return AutoModelForCausalLM.from_pretrained(dense_directory(), dtype=torch.bfloat16, **options)


def probe(size: int) -> Tensor:
    """The vector that weights with `size` columns are multiplied with."""
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def products(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the projections' weights and their probes."""
    return {
        name: weight.detach().float().cpu() @ probe(weight.shape[1])
        for name, weight in weights.items()
        if name.endswith("proj.weight")
    }


def tokenizer() -> PreTrainedTokenizerFast:
    """Some quantizers want one, and do not use it."""
    vocabulary = {chr(33 + i): i for i in range(CONFIG.vocab_size)}
    model = models.BPE(vocab=vocabulary, merges=[])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token="!", eos_token='"')


def llm_compressor(directory: Path, scheme: str = "", **weights: object) -> dict[str, Tensor]:
    """By a scheme's name, or by arguments for the quantization of weights."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if scheme:
        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    else:
        args = QuantizationArgs(**weights)
        group = QuantizationScheme(targets=["Linear"], weights=args)
        recipe = QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])
    model = dense_model()
    oneshot(model=model, processor=tokenizer(), recipe=recipe)
    model.save_pretrained(directory, save_compressed=True)
    return dequantized_by_transformers(directory)


def packed(directory: Path, num_bits: int, symmetric: bool) -> dict[str, Tensor]:
    """Integers in groups of 32 inputs."""
    return llm_compressor(
        directory,
        **{"num_bits": num_bits, "type": "int", "strategy": "group"},
        **{"group_size": 32, "symmetric": symmetric},
    )


def dequantized_by_transformers(directory: Path) -> dict[str, Tensor]:
    from transformers import CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    return dict(model.state_dict())


def block_fp8(directory: Path) -> dict[str, Tensor]:
    """As transformers and DeepSeek write it: quant_method fp8, weight_scale_inv."""
    model = dense_model()
    model.save_pretrained(directory)
    tensors, weights = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name].float()
        rows, columns = weight.shape
        scales = torch.empty(-(-rows // 128), -(-columns // 128))
        quantized = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                where = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
                scales[i, j] = weight[where].abs().max() / 448
                quantized[where] = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn)
                weight[where] = quantized[where].float() * scales[i, j]
        weights[name] = weight
        tensors[name] = quantized
        tensors[name.replace("weight", "weight_scale_inv")] = scales
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return weights


def auto_round(
    directory: Path, export: str, bits: int, sym: bool, **layers: dict[str, int]
) -> dict[str, Tensor]:
    """layers: what is different in some modules, by a part of their names."""
    from auto_round import AutoRound

    rounder = AutoRound(
        dense_model(),
        tokenizer(),
        bits=bits,
        group_size=32,
        sym=sym,
        iters=0,
        disable_opt_rtn=True,
        device_map="cpu",
        layer_config=layers,
    )
    with tempfile.TemporaryDirectory() as scratch:
        rounder.quantize()
        weights = {
            name: weight.detach().clone() for name, weight in rounder.model.state_dict().items()
        }
        rounder.save_quantized(scratch, format=export)
        [saved] = Path(scratch).rglob("config.json")
        for path in saved.parent.iterdir():
            if path.suffix in (".safetensors", ".json"):
                shutil.copy(path, directory)
    return weights


def bitsandbytes(directory: Path, **options: object) -> dict[str, Tensor]:
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
    from transformers import BitsAndBytesConfig

    model = dense_model(quantization_config=BitsAndBytesConfig(**options))
    model.save_pretrained(directory)
    weights = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            weight = module.weight
            if "load_in_4bit" in options:
                weights[f"{name}.weight"] = dequantize_4bit(weight.data, weight.quant_state)
            else:
                statistics = weight.SCB if weight.SCB is not None else module.state.SCB
                weights[f"{name}.weight"] = int8_vectorwise_dequant(weight.data, statistics)
    return weights


def torchao(directory: Path, name: str, **options: object) -> dict[str, Tensor]:
    """name: of one of its configurations."""
    import torchao.quantization
    from transformers import TorchAoConfig

    config = getattr(torchao.quantization, name)(**options)
    model = dense_model(quantization_config=TorchAoConfig(config))
    model.save_pretrained(directory)
    return {
        name: parameter.dequantize() if hasattr(parameter, "dequantize") else parameter
        for name, parameter in model.named_parameters()
    }


def torchao_int4(directory: Path) -> dict[str, Tensor]:
    """Groups of 32 inputs, in a byte each."""
    from torchao.quantization import PerGroup

    granularity = PerGroup(32)
    return torchao(
        directory, "IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=granularity
    )


def modelopt(directory: Path, name: str, has_kv_scales: bool = False) -> dict[str, Tensor]:
    """name: of one of its configurations."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    model = dense_model()
    rules = [*getattr(mtq, name)["quant_cfg"], *(mtq.FP8_KV_CFG["quant_cfg"] * has_kv_scales)]
    tokens = torch.arange(64).view(2, 32)
    mtq.quantize(model, {"quant_cfg": rules, "algorithm": "max"}, lambda each: each(tokens))
    export_hf_checkpoint(model, export_dir=directory)
    tensors, weights = load_file(directory / "model.safetensors"), {}
    for key in [key for key in tensors if key.endswith("proj.weight")]:
        stored, scale = tensors[key], tensors[f"{key}_scale"]
        whole = FP8QTensor(stored.shape, torch.float32, stored)
        options: dict[str, object] = {"scale": scale.view(-1, 1)}
        if stored.dtype == torch.uint8:
            whole = NVFP4QTensor((len(scale), 16 * scale.shape[1]), torch.float32, stored)
            outer = tensors[f"{key}_scale_2"]
            options = {"scale": scale, "double_scale": outer, "block_sizes": {-1: 16}}
        elif scale.dim() == 4:
            options = {"scale": scale[:, 0, :, 0], "block_sizes": {-1: 128, -2: 128}}
        weights[key] = whole.dequantize(torch.float32, **options)
    return weights


SAMPLES: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "fp8_channel": lambda directory: llm_compressor(directory, "FP8_DYNAMIC"),
    "fp8_tensor": lambda directory: llm_compressor(
        directory, num_bits=8, type="float", strategy="tensor", symmetric=True
    ),
    "fp8_block": lambda directory: llm_compressor(directory, "FP8_BLOCK"),
    "fp8_transformers": block_fp8,
    "int8": lambda directory: llm_compressor(directory, "W8A8"),
    "packed_int4": lambda directory: packed(directory, 4, symmetric=True),
    "packed_int4_asymmetric": lambda directory: packed(directory, 4, symmetric=False),
    "packed_int8": lambda directory: packed(directory, 8, symmetric=True),
    "awq": lambda directory: auto_round(directory, "auto_awq", 4, sym=False),
    "gptq": lambda directory: auto_round(directory, "auto_gptq", 4, sym=True),
    "gptq_int8": lambda directory: auto_round(directory, "auto_gptq", 8, sym=True),
    "auto_round": lambda directory: auto_round(directory, "auto_round", 4, sym=True),
    "auto_round_mixed": lambda directory: auto_round(
        *(directory, "auto_round:gptqmodel", 4, False),
        **{"q_proj": {"bits": 8}, "gate_proj": {"bits": 8, "group_size": 64}},
    ),
    "bitsandbytes_nf4": lambda directory: bitsandbytes(
        directory, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes_fp4": lambda directory: bitsandbytes(
        directory, load_in_4bit=True, bnb_4bit_quant_type="fp4"
    ),
    "bitsandbytes_int8": lambda directory: bitsandbytes(directory, load_in_8bit=True),
    "torchao": lambda directory: torchao(directory, "Float8WeightOnlyConfig"),
    "torchao_int8": lambda directory: torchao(directory, "Int8WeightOnlyConfig"),
    "torchao_int4": torchao_int4,
    "modelopt_fp8": lambda directory: modelopt(directory, "FP8_DEFAULT_CFG", has_kv_scales=True),
    "modelopt_fp8_channel": lambda directory: modelopt(directory, "FP8_PER_CHANNEL_PER_TOKEN_CFG"),
    "modelopt_fp8_block": lambda directory: modelopt(directory, "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "modelopt_nvfp4": lambda directory: modelopt(directory, "NVFP4_DEFAULT_CFG"),
    "nvfp4": lambda directory: llm_compressor(directory, "NVFP4A16"),
    "mxfp4": lambda directory: llm_compressor(directory, "MXFP4A16"),
}


def main(names: list[str]) -> None:
    for name in names or SAMPLES:
        directory = HERE / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        expected = products(SAMPLES[name](directory))
        assert len(expected) == 7, f"{name}: {sorted(expected)}"
        save_file(expected, directory / "expected.safetensors")
        for path in directory.iterdir():
            if path.name not in KEPT:
                path.unlink()
        print(name, sorted(path.name for path in directory.iterdir()))


if __name__ == "__main__":
    main(sys.argv[1:])
