"""Searches tiles of skinny GEMMs and programs of GEMVs (ops/cuda/linear_*.py) for models.

For each product of a layer and each padded number of tokens, candidates are timed alone, over
weights that exceed the L2 cache. Then whole layers without their attention (norms and products, in
one CUDA graph) are timed with the fastest few, one product after the other, because kernels overlap
with their neighbours. Kernels are compiled in several processes first. Prints what was chosen, and
writes all times to a file.

    PYTHONPATH=src python benchmarks/tune_linear.py --models gemma-3-4b llama-3-70b/2 --out FILE

`/2` stands for the part of one of two ranks. Of layers of experts, those of attention are tuned.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from gpu_harness import config_directory, device_seconds, report
from torch import Tensor

from octavo.layers.config import ExpertsConfig
from octavo.layers.mlp import GATED_EPILOGUES, PLAIN_EPILOGUES
from octavo.models.registry import read_model_config
from octavo.ops.cuda import linear as cuda_linear
from octavo.ops.cuda import linear_gemv
from octavo.ops.cuda.linear_table import SIZES, Tiles, choose_tiles
from octavo.ops.cuda.norm import norm
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import Affine
from octavo.parallel import Shard

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
SMS, SHARED_MEMORY = 132, 222_000
WEIGHT_BYTES = 260_000_000  # per graph: several times the L2 cache
MAX_CANDIDATES = 11
FINALISTS = 4
TOKENS = (1, *SIZES)

Choice = Any  # Tiles, Programs of a GEMV, or None for cuBLAS


class Product(NamedTuple):
    rows: int  # results per token
    size: int
    epilogue: Epilogue
    norm_follows: bool

    @property
    def halves(self) -> int:
        return 2 if self.epilogue.is_gated else 1

    @property
    def num_bytes(self) -> int:
        return 2 * self.rows * self.halves * self.size

    def weight(self) -> Tensor:
        shape = (self.rows * self.halves, self.size)
        return torch.randn(shape, device=DEVICE, dtype=DTYPE).mul_(self.size**-0.5)


class Model(NamedTuple):
    products: list[Product]  # qkv, output, up and down (not of experts), and the head
    normalises_branches: bool


def read_model(name: str) -> Model:
    name, _, ranks = name.partition("/")
    config = read_model_config(str(config_directory(name))).sharded(Shard(0, int(ranks or 1)))
    layer = config.layers[0]
    attention, mlp = layer.attention, layer.mlp
    none = Epilogue.NONE
    products = [
        Product(attention.qkv.out_features, attention.qkv.in_features, none, False),
        Product(attention.output.out_features, attention.output.in_features, none, True),
    ]
    if not isinstance(mlp, ExpertsConfig):
        gated = mlp.kind == "gated"
        epilogue = (GATED_EPILOGUES if gated else PLAIN_EPILOGUES)[mlp.activation]
        products += [
            Product(mlp.up.out_features // (1 + gated), mlp.up.in_features, epilogue, False),
            Product(mlp.down.out_features, mlp.down.in_features, none, True),
        ]
    products.append(Product(config.head.out_features, config.head.in_features, none, False))
    return Model(products, layer.norm_placement == "around")


# ---------------------------------------------------------------- candidates


def candidates(product: Product, tokens: int) -> list[Choice]:
    """What is tried; the first is what is chosen today."""
    if tokens == 1:
        return _gemv_candidates(product)
    today = choose_tiles(tokens, product.rows, product.size, product.epilogue)
    scored: list[tuple[float, Tiles]] = []
    for swap in (False, True) if tokens <= 64 else (False,):
        for rows in (32, 64) if swap else (64, 128):
            if swap and rows == 64 and tokens < 64:
                continue  # the same with more padding
            for columns in (64, 128) if swap else (64, 128, 256):
                for per_sm in (1, 2, 3):
                    scored += _with_splits(product, tokens, swap, rows, columns, per_sm)
    scored.sort(key=lambda each: -each[0])
    return list(dict.fromkeys([today, None, *(tiles for _, tiles in scored[:MAX_CANDIDATES])]))


def _with_splits(
    product: Product, tokens: int, swap: bool, rows: int, columns: int, per_sm: int
) -> Iterator[tuple[float, Tiles]]:
    is_padded = product.size % columns > 0
    if is_padded and product.size < 16 * columns:
        return
    held = 64 if swap else tokens
    stage = 2 * columns * (rows * product.halves + held)
    stages = min(SHARED_MEMORY // per_sm // stage, 12)
    warps = 8 if rows * held * product.halves > 64 * 64 * 2 or (rows == 128 and held > 16) else 4
    tiles = -(-product.rows // rows)
    in_flight = min(stages, product.size // columns) * columns * rows * product.halves * 2 * per_sm
    if stages < 2 or in_flight < 48_000:
        return
    for splits in range(1, 9):
        is_long = columns * 2 * splits <= product.size
        if splits > 1 and (is_padded or product.rows > 16384 or not is_long):
            continue
        programs = tiles * splits
        waves = programs / (SMS * per_sm)
        if splits > 1 and waves > 1.05:
            continue
        # The share of time in which all SMs read, if a program's time is its bytes.
        full = waves / -(-programs // (SMS * per_sm))
        busy = min(1.0, full + (0.05 if per_sm > 1 else 0)) if waves < 6 else 1.0
        score = busy - 0.02 * splits - (0.03 if splits > 1 and not product.norm_follows else 0)
        score -= 0.02 if columns == 64 and tokens < 64 else 0
        score -= 0.03 if per_sm == 3 else 0
        score += 0.02 if columns == 128 else 0
        early = per_sm > 1
        yield score, Tiles(held, rows, columns, stages, warps, splits, per_sm, swap, early)


def _gemv_candidates(product: Product) -> list[Choice]:
    today = linear_gemv.choose_programs(*_shape(product))
    found = [
        linear_gemv.Programs(rows, block, ahead, per_sm=1)
        for block in (256, 512, 1024, 2048)
        for rows in (1, 2, 4, 8, 16)
        for ahead in (1, 2, 3, 5)
        if 1024 <= rows * block * product.halves <= 16384
        and block * ahead < product.size + block
        and (ahead == 1 or rows * block * product.halves * ahead <= 16384)
    ]
    return [today, *(each for each in found if each != today)]


def _shape(product: Product) -> tuple[int, int, bool]:
    return product.rows, product.size, product.epilogue.is_gated


@contextmanager
def chosen(choices: dict[Product, Choice]) -> Iterator[None]:
    """Products take these tiles or programs."""
    by_shape = {(p.rows, p.size, p.epilogue): choice for p, choice in choices.items()}
    by_gate = {_shape(product): choice for product, choice in choices.items()}
    with (
        patch.object(cuda_linear, "choose_tiles", lambda _, *shape: by_shape[shape]),
        patch.object(linear_gemv, "choose_programs", lambda *shape: by_gate[shape[:3]]),
    ):
        yield


def run(product: Product, x: Tensor, weight: Tensor) -> Tensor:
    if product.norm_follows:
        return cuda_linear.linear_partial(x, weight)
    return cuda_linear.linear(x, weight, None, product.epilogue)


# ---------------------------------------------------------------- times


def microseconds(work: Callable[[], object], launches: int, expected: float) -> float:
    """Per launch, in a CUDA graph; `expected`: seconds that `work` takes."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    repeats = max(1, int(1.5e-3 / expected))

    def replays() -> None:
        for _ in range(repeats):
            graph.replay()

    times = [device_seconds(replays) for _ in range(5)]
    return statistics.median(times) / repeats / launches * 1e6


def time_alone(product: Product, tokens: int, weights: list[Tensor]) -> list[tuple[float, Choice]]:
    """(microseconds, candidate), the fastest first; the first candidate is marked by its place."""
    x = torch.randn(tokens, product.size, device=DEVICE, dtype=DTYPE)
    times: list[tuple[float, Choice]] = []
    for choice in candidates(product, tokens):
        with chosen({product: choice}):
            try:
                us = microseconds(
                    lambda: [run(product, x, weight) for weight in weights],
                    len(weights),
                    len(weights) * product.num_bytes / 3.5e12,
                )
            except Exception as error:
                print("failed", product, choice, str(error)[:100], flush=True)
                continue
        times.append((round(us, 2), choice))
    return times


class Layers:
    """Some layers without attention and `tokens` tokens."""

    def __init__(self, model: Model, weights: list[list[Tensor]], tokens: int) -> None:
        self.model, self.weights = model, weights
        hidden_size = model.products[0].size
        self.x, self.residual = torch.randn(2, tokens, hidden_size, device=DEVICE, dtype=DTYPE)
        scale = Affine(torch.ones(hidden_size, device=DEVICE, dtype=DTYPE))
        self.branch = scale if model.normalises_branches else None
        self.scale = scale

    def step(self) -> None:
        hidden = self.x
        qkv, output, *mlp, _ = self.model.products
        for w_qkv, w_output, *w_mlp in self.weights:
            heads = run(qkv, self.norm(hidden), w_qkv)
            hidden = run(output, heads[:, : output.size], w_output)
            if mlp:
                up, down = mlp
                w_up, w_down = w_mlp
                hidden = run(down, run(up, self.norm(hidden), w_up), w_down)

    def norm(self, hidden: Tensor) -> Tensor:
        return norm(hidden, self.scale, 1e-6, self.residual, True, branch=self.branch)[0]

    def time(self, choices: dict[Product, Choice]) -> float:
        expected = len(self.weights) * sum(p.num_bytes for p in self.model.products[:-1]) / 3.5e12
        with chosen(choices):
            return round(microseconds(self.step, len(self.weights), expected), 2)


def tune(name: str, tokens: int) -> dict[str, Any]:
    model = read_model(name)
    *products, head = model.products
    alone: dict[Product, list[tuple[float, Choice]]] = {}
    for product in model.products:
        count = min(24, max(2, WEIGHT_BYTES // product.num_bytes))
        weights = [product.weight() for _ in range(count)]
        alone[product] = time_alone(product, tokens, weights)
        del weights
    today = {product: alone[product][0][1] for product in model.products}
    ranked = {p: [c for _, c in sorted(times, key=lambda t: t[0])] for p, times in alone.items()}
    best = {product: ranked[product][0] for product in model.products}
    count = max(4, min(16, 1_000_000_000 // sum(p.num_bytes for p in products)))
    layers = Layers(model, [[p.weight() for p in products] for _ in range(count)], tokens)
    before = layers.time(today)
    least = layers.time(best)
    for product in [*products, *products]:
        options = [each for each in ranked[product][:FINALISTS] if each != best[product]]
        if today[product] != best[product]:
            options.append(today[product])
        for option in options:
            time = layers.time(best | {product: option})
            if time < 0.997 * least:
                least, best = time, best | {product: option}
    again = layers.time(today), layers.time(best)
    roof = sum(p.num_bytes for p in products) / 4.27e12 * 1e6
    print(
        f"{name} {tokens:>3} tokens: layer {before} -> {least} us (again {again[0]} -> "
        f"{again[1]}), roofline {roof:.1f}; head {alone[head][0][0]} -> "
        f"{min(t for t, _ in alone[head])} us",
        flush=True,
    )
    for product in model.products:
        times = {_key(c): t for t, c in alone[product]}
        print(
            f"   {product.size} -> {product.rows} {product.epilogue.name}: "
            f"{times[_key(today[product])]} -> {times[_key(best[product])]} us, "
            f"{product.num_bytes / 4.27e6:.2f} at best; {best[product]}",
            flush=True,
        )
    return {
        "model": name,
        "tokens": tokens,
        "layer_us": [before, least, *again],
        "products": [
            {
                "shape": [product.rows, product.size, product.epilogue.name],
                "times": [[t, _plain(c)] for t, c in alone[product]],
                "best": _plain(best[product]),
            }
            for product in model.products
        ],
    }


def _plain(choice: Choice) -> Any:
    return asdict(choice) if choice else choice


def _key(choice: Choice) -> str:
    return json.dumps(_plain(choice))


# ---------------------------------------------------------------- compiling in several processes


def kernels(names: list[str], counts: Sequence[int]) -> list[tuple[Product, int, Choice]]:
    """One product, padded tokens and candidate per kernel to compile."""
    found: dict[str, tuple[Product, int, Choice]] = {}
    for name in names:
        for product in read_model(name).products:
            for tokens in counts:
                for choice in candidates(product, tokens):
                    if choice is None:
                        continue
                    plain = dict(_plain(choice))
                    splits = plain.pop("splits", 1)
                    partial = product.norm_follows and splits > 1
                    reduces = splits if not partial else 1
                    key = json.dumps([plain, product.epilogue, tokens == 1, partial, reduces])
                    found.setdefault(key, (product, tokens, choice))
    return list(found.values())


def compile_part(names: list[str], counts: Sequence[int], part: int, parts: int) -> None:
    for product, tokens, choice in kernels(names, counts)[part::parts]:
        small = product._replace(rows=min(product.rows, 4096))
        weight = torch.zeros(small.rows * small.halves, small.size, device=DEVICE, dtype=DTYPE)
        x = torch.zeros(tokens, small.size, device=DEVICE, dtype=DTYPE)
        with chosen({small: choice}):
            try:
                run(small, x, weight)
            except Exception as error:
                print("does not compile:", product, choice, str(error)[:100], flush=True)
    torch.cuda.synchronize()


def compile_all(models: list[str], counts: Sequence[int]) -> None:
    count = max(1, (os.cpu_count() or 1) - 2)
    print(len(kernels(models, counts)), "kernels", flush=True)
    command = [sys.executable, __file__, "--models", *models, "--tokens", *map(str, counts)]
    command.append("--compile")
    processes = [subprocess.Popen([*command, str(i), str(count)]) for i in range(count)]
    for process in processes:
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--out", metavar="FILE", help="all times, as JSON")
    parser.add_argument(
        "--compile",
        nargs=2,
        type=int,
        metavar=("PART", "PARTS"),
        help="compile one part of the kernels, and measure nothing",
    )
    arguments = parser.parse_args()
    if arguments.compile:
        compile_part(arguments.models, arguments.tokens, *arguments.compile)
        return
    compile_all(arguments.models, arguments.tokens)
    results = [tune(name, tokens) for name in arguments.models for tokens in arguments.tokens]
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(results, file)
    report("tune_linear", layers={f"{r['model']} {r['tokens']}": r["layer_us"] for r in results})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
