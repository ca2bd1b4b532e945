"""What an FP8 KV cache costs in accuracy: logits beside those of the same model with bfloat16 KV.

The demo model reads texts of its corpus that it was not trained on; models of random weights, those
of logits_error.py, read random tokens, which is harder on them than any text, since their
attention is nearly even. Everything but the cache is the same. For each model: the KL divergence
from the distribution with bfloat16 KV to that with FP8 KV (mean and 99th percentile, in nats), how
often the likeliest token is the same, and by how much the loss on the text grows.

    PYTHONPATH=src:demo python benchmarks/kv_cache_error.py                # on this machine's CPU
    PYTHONPATH=src:demo python benchmarks/kv_cache_error.py --device cuda
"""

from __future__ import annotations

import argparse
import json
from itertools import islice

import torch
import torch.nn.functional as F
from logits_error import BF16, FAMILIES, SCALES, VOCAB_SIZE, Octavo, model_config, random_model
from octavo_demo.corpus import documents, text_of
from torch import Tensor

from octavo.engine.tokenizer import Tokenizer
from octavo.models.hub import resolve_model
from octavo.models.loader import build_model, load_weights
from octavo.models.registry import read_model_config
from octavo.ops import KVScales
from octavo.ops.communicator import SingleRank

NUM_TEXTS, TEXT_TOKENS = 16, 512
NUM_SEEDS = 4


def compare(plain: Tensor, fp8: Tensor, ids: Tensor | None) -> dict[str, float]:
    """Logits [num_tokens, vocab_size] of both; ids: the tokens of the text, if it is one."""
    expected, got = plain.double().log_softmax(-1), fp8.double().log_softmax(-1)
    divergence = F.kl_div(got, expected, reduction="none", log_target=True).sum(-1)
    found = {
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(divergence.quantile(0.99)),
        "same_token": float((expected.argmax(-1) == got.argmax(-1)).float().mean()),
    }
    if ids is not None:
        losses = [F.nll_loss(each[:-1], ids[1:]) for each in (expected, got)]
        found |= {"loss": float(losses[0]), "loss_growth": float(losses[1] - losses[0])}
    return found


def demo_model(device: torch.device, backend: str) -> dict[str, float]:
    """The demo model on held-out texts."""
    directory = resolve_model("demo")
    tokenizer = Tokenizer(directory)
    texts = (text_of(each) for each in documents("KV cache", held_out=True))
    ids: list[int] = []
    for text in islice(texts, 64 * NUM_TEXTS):
        ids += tokenizer.encode(text)
    assert len(ids) >= NUM_TEXTS * TEXT_TOKENS, "the corpus has more"
    config = read_model_config(directory).with_max_model_len(TEXT_TOKENS)
    model = build_model(config, BF16, device, SingleRank())
    load_weights(model, config)
    pair = [Octavo(model, config, backend, 1, scales) for scales in (None, KVScales())]
    results = []
    for part in torch.tensor(ids[: NUM_TEXTS * TEXT_TOKENS]).view(NUM_TEXTS, 1, -1):
        for each in pair:
            each.forget()
        plain, fp8 = (each.logits(part.to(device))[0] for each in pair)
        results.append(compare(plain, fp8, part[0].to(device)))
    return _mean(results)


def random_weights(family: str, device: torch.device, backend: str) -> dict[str, float]:
    """Models of random weights on random tokens, in one prompt."""
    scale = SCALES[device.type]
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
    found = {"demo": demo_model(device, backend)}
    found |= {f"random {name}": random_weights(name, device, backend) for name in FAMILIES}
    print("| model | KL, mean | KL, 99th percentile | same token | growth of the loss |")
    print("|---|---|---|---|---|")
    for name, values in found.items():
        growth = ""
        if "loss" in values:
            growth = f"{values['loss']:.4f} + {values['loss_growth']:.4f}"
        print(
            f"| {name} | {values['kl_mean']:.5f} | {values['kl_p99']:.5f} | "
            f"{values['same_token']:.1%} | {growth} |"
        )
    print(json.dumps({"benchmark": "kv_cache_error", "device": args.device, "results": found}))


if __name__ == "__main__":
    main()
