"""What each feature of a score function costs the GPU's attention kernels, at Gemma 2 9B's shape.

16 query and 8 KV heads of 256, scattered blocks of 16 tokens, bf16: decodes and prompts, in
microseconds per layer, replayed from CUDA graphs, beside the same kernels without the feature. All
features of a row take turns, and the best round counts. Soft caps with both ways to compute tanh
(ops/cuda/attention_scores.py), whose errors against float64 are measured with scores of up to
several caps. Prints a table, and one JSON line at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from attention_work import GPU, Work, seconds
from gpu_harness import report
from torch import Tensor

from octavo.ops import ScoreFunction
from octavo.ops.cuda import (
    attention_cascade,
    attention_decode,
    attention_prefill,
)

MODEL, HEAD_DIM, HEADS = "gemma-2-9b 16/8", 256, 16
SCALE, SOFTCAP, WINDOW = HEAD_DIM**-0.5, 50.0, 4096
ROUNDS = 3


class Variant(NamedTuple):
    scores: ScoreFunction
    window: int | None = None
    fast_tanh: bool = True


SLOPES = tuple(2.0 ** (-8 * (i + 1) / HEADS) for i in range(HEADS))
SINKS = SimpleNamespace(weight=torch.linspace(-1, 1, HEADS))
VARIANTS = {
    "plain": Variant(ScoreFunction(SCALE)),
    "softcap": Variant(ScoreFunction(SCALE, SOFTCAP)),
    "softcap, exact tanh": Variant(ScoreFunction(SCALE, SOFTCAP), fast_tanh=False),
    "ALiBi": Variant(ScoreFunction(SCALE, alibi_slopes=SLOPES)),
    "sinks": Variant(ScoreFunction(SCALE, sinks=SINKS)),
    "window": Variant(ScoreFunction(SCALE), WINDOW),
    "window, softcap": Variant(ScoreFunction(SCALE, SOFTCAP), WINDOW),
}
# (sequences, context, new tokens)
CASES = {
    "decode 1 x 8,192": (1, 8192, 1),
    "decode 16 x 2,048": (16, 2048, 1),
    "decode 64 x 1,024": (64, 1024, 1),
    "decode 256 x 512": (256, 512, 1),
    "prefill 8 x 512": (8, 512, 512),
    "prefill 4 x 2,048": (4, 2048, 2048),
    "prefill 1 x 8,192": (1, 8192, 8192),
}


def use_tanh(fast: bool) -> None:
    """Which tanh the kernels compute from the next launch on."""

    def chosen(*_: object) -> bool:
        return fast

    for module in (attention_decode, attention_prefill, attention_cascade):
        vars(module)["has_fast_tanh"] = chosen


def measure(case: tuple[int, int, int]) -> dict[str, float]:
    """Microseconds per layer of each variant."""
    work = Work(MODEL, *case, head_dim=HEAD_DIM)
    best = dict.fromkeys(VARIANTS, float("inf"))
    for _ in range(ROUNDS):
        for name, variant in VARIANTS.items():
            use_tanh(variant.fast_tanh)
            time = seconds(launcher(work, variant), work.num_layers, 2 * work.num_layers)
            best[name] = min(best[name], time * 1e6)
    return {name: round(time, 1) for name, time in best.items()}


def launcher(work: Work, variant: Variant) -> Callable[[int], Tensor]:
    backend = work.backend_for(variant.scores, variant.window)

    def launch(layer: int) -> Tensor:
        query, key, value = work.heads_of_tokens
        return backend.forward(layer, query, key, value, work.rotary)

    return launch


def softcap_error(fast: bool, new: int) -> float:
    """|output - float64's| / |float64's| for one sequence of 512 tokens, `new` of them new."""
    work = Work(MODEL, 1, 512, new, head_dim=HEAD_DIM)
    use_tanh(fast)
    scores = ScoreFunction(SOFTCAP / 10, SOFTCAP)  # dot products have a deviation of 16
    output = work.backend_for(scores).forward(0, *work.heads_of_tokens).double()
    cached = work.cache[work.table[0].long(), 0].transpose(0, 1).double()
    key, value = cached.transpose(1, 2).reshape(8, 2, 512, HEAD_DIM).unbind(1)
    query = work.heads_of_tokens[0].double().view(new, 8, HEADS // 8, HEAD_DIM)
    products = torch.einsum("qhgd,hkd->hgqk", query, key)
    capped = SOFTCAP * torch.tanh(products * scores.scale / SOFTCAP)
    ahead = torch.arange(512, device=GPU) > torch.arange(512 - new, 512, device=GPU)[:, None]
    weights = capped.masked_fill(ahead, -torch.inf).softmax(-1)
    expected = torch.einsum("hgqk,hkd->qhgd", weights, value).flatten(1)
    return float((output - expected).norm() / expected.norm())


def main() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        errors = {
            f"{kind}, {name} tanh": round(softcap_error(fast, new), 6)
            for name, fast in (("fast", True), ("exact", False))
            for kind, new in (("decode", 1), ("prefill", 200))
        }
        print(
            "relative errors: " + ", ".join(f"{name} {error:g}" for name, error in errors.items())
        )
        results = {}
        for name, case in CASES.items():
            times = results[name] = measure(case)
            cells = [
                f"{key} {time:.1f} ({time / times['plain']:.3f})" for key, time in times.items()
            ]
            print(f"{name:<20}" + "  ".join(cells), flush=True)
    report("score_functions", errors=errors, results=results)


if __name__ == "__main__":
    main()
