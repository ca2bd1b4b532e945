"""What small numbers cost in accuracy: logits beside those of the same model in bfloat16.

An FP8 KV cache, weights that the option `quantization` rounds while they are loaded, and weights in
12 bits (`dense_weights`), with the kernels of bfloat16, so that nothing else differs. The demo
model reads texts of its corpus that it was not trained on; models of random weights, those of
logits_error.py, read random tokens with an FP8 KV cache. Everything else is the same. For each: the
mean difference of the logits, in percent of their standard deviation; the KL divergence from the
distribution in bfloat16 (mean and 99th percentile, in nats); how often the likeliest token is the
same; and by how much the loss on the texts grows.

    PYTHONPATH=src:demo python benchmarks/rounding_error.py                # on this machine's CPU
    PYTHONPATH=src:demo python benchmarks/rounding_error.py --device cuda
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from typing import cast, get_args

import torch
import torch.nn.functional as F
from logits_error import BF16, FAMILIES, VOCAB_SIZE, Octavo, model_config, random_model
from logits_error import SCALES as SIZES
from torch import Tensor

from octavo.config import QuantizationName
from octavo.engine.tokenizer import Tokenizer
from octavo.layers.linear import PlainLinear
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.hub import resolve_model
from octavo.models.loader import build_model, load_weights
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops import KVScales
from octavo.ops.communicator import SingleRank
from octavo.ops.cuda.float12 import pack_float12, unpack_float12
from octavo_demo.corpus import documents, text_of

KV = "KV in fp8"
FLOAT12 = "float12"
SKILLS = ("stories", "translation")
NUM_TEXTS, TEXT_TOKENS = 32, 512
NUM_SEEDS = 4


def compare(plain: Tensor, rounded: Tensor, ids: Tensor | None) -> dict[str, float]:
    """Logits [num_tokens, vocab_size] of both; ids: the tokens of the text, if it is one."""
    expected, got = plain.double().log_softmax(-1), rounded.double().log_softmax(-1)
    divergence = F.kl_div(got, expected, reduction="none", log_target=True).sum(-1)
    found = {
        "error": float((plain - rounded).abs().mean() / plain.std()),
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(divergence.quantile(0.99)),
        "same_token": float((expected.argmax(-1) == got.argmax(-1)).float().mean()),
    }
    if ids is not None:
        losses = [F.nll_loss(each[:-1], ids[1:]) for each in (expected, got)]
        found |= {"loss": float(losses[0]), "loss_growth": float(losses[1] - losses[0])}
    return found


def demo_model(rounding: str, skill: str, device: torch.device, backend: str) -> dict[str, float]:
    """The demo model on held-out documents of one kind; rounding: KV, FLOAT12, or a
    `quantization`."""
    directory = resolve_model("demo")
    tokenizer = Tokenizer.from_directory(directory)
    config = read_model_config(directory).with_max_model_len(TEXT_TOKENS)

    def octavo(config: ModelConfig, scales: KVScales | None = None, packs: bool = False) -> Octavo:
        model = build_model(config, BF16, device, SingleRank())
        load_weights(model, config)
        if packs:
            _pass_through_float12(model)
        return Octavo(model, config, backend, 1, scales)

    if rounding == KV:
        other = octavo(config, KVScales())
    elif rounding == FLOAT12:
        other = octavo(config, packs=True)
    else:
        other = octavo(quantized_on_load(config, cast("QuantizationName", rounding)))
    plain, results = octavo(config), []
    for document in islice(documents("KV cache", skill, held_out=True), NUM_TEXTS):
        ids = torch.tensor(tokenizer.encode(text_of(document))[:TEXT_TOKENS], device=device)
        for each in (plain, other):
            each.forget()
        results.append(compare(plain.logits(ids[None])[0], other.logits(ids[None])[0], ids))
    return _mean(results)


def _pass_through_float12(model: CausalLM) -> None:
    """Round what would be kept in 12 bits; a tied head gets weights of its own."""
    for module in model.modules():
        if isinstance(module, PlainLinear) and module.config.takes_float12:
            assert module.weight is not None, "before finalize"
            rounded = unpack_float12(pack_float12(module.weight.detach()))
            module.weight = torch.nn.Parameter(rounded, requires_grad=False)


def random_weights(family: str, device: torch.device, backend: str) -> dict[str, float]:
    """Models of random weights on random tokens, in one prompt."""
    scale = SIZES[device.type]
    config, results = model_config(family, scale), []
    for seed in range(NUM_SEEDS):
        model = random_model(config, device, seed, cancels=True)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCAB_SIZE, (1, max(scale.prefills)), generator=generator)
        pair = [Octavo(model, config, backend, 1, scales) for scales in (None, KVScales())]
        plain, fp8 = (each.logits(ids.to(device))[0] for each in pair)
        results.append(compare(plain, fp8, None))
    return _mean(results)


def _mean(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in results) / len(results) for name in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    backend = "triton" if args.device == "cuda" else "cpu"
    found = {
        f"demo, {skill}, {rounding}": demo_model(rounding, skill, device, backend)
        for rounding in (KV, FLOAT12, *get_args(QuantizationName))
        for skill in SKILLS
    }
    found |= {f"random {name}, {KV}": random_weights(name, device, backend) for name in FAMILIES}
    print("| model | logits | KL, mean | KL, 99th percentile | same token | loss |")
    print("|---|---|---|---|---|---|")
    for name, values in found.items():
        growth = ""
        if "loss" in values:
            growth = f"{values['loss']:.4f} + {values['loss_growth']:.5f}"
        cells = (
            f"{values['error']:.2%}",
            f"{values['kl_mean']:.1e}",
            f"{values['kl_p99']:.1e}",
            f"{values['same_token']:.1%}",
            growth,
        )
        print(f"| {name} | {' | '.join(cells)} |")
    print(json.dumps({"benchmark": "rounding_error", "device": args.device, "results": found}))


if __name__ == "__main__":
    main()
