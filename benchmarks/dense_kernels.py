"""Dense kernels on one GPU: products against cuBLAS, layers, norms, and the sampler.

Times are of CUDA-graph replays over weights beyond the L2 cache, back to back, so that kernels may
overlap as in a model. Prints a table per part; the last line is JSON.

    PYTHONPATH=src python benchmarks/dense_kernels.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from gpu_harness import copy_bandwidth, device_seconds, report
from torch import Tensor

from octavo.ops.cuda.activation import silu_mul
from octavo.ops.cuda.linear import linear, linear_partial
from octavo.ops.cuda.norm import layer_norm, rms_norm
from octavo.ops.cuda.sampling import DeviceDraws, sample
from octavo.ops.cuda.sampling_candidates import best_tokens
from octavo.ops.epilogue import Epilogue

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
BYTES_AT_ONCE = 300_000_000  # of weights: several times the L2 cache
SECONDS = 3e-3  # of device time per measurement
EPS = 1e-5

# name: rows of W (of each half), columns of W, epilogue
Shape = tuple[int, int, Epilogue]
MODELS: dict[str, tuple[str, int, list[Shape]]] = {
    "Llama-3-8B": (
        "rms",
        8,
        [
            (6144, 4096, Epilogue.NONE),
            (4096, 4096, Epilogue.NONE),
            (14336, 4096, Epilogue.SILU_MUL),
            (4096, 14336, Epilogue.NONE),
        ],
    ),
    "OPT-13B": (
        "layer",
        6,
        [
            (15360, 5120, Epilogue.NONE),
            (5120, 5120, Epilogue.NONE),
            (20480, 5120, Epilogue.RELU),
            (5120, 20480, Epilogue.NONE),
        ],
    ),
    "Qwen3-0.6B": (
        "rms",
        28,
        [
            (4096, 1024, Epilogue.NONE),
            (1024, 2048, Epilogue.NONE),
            (3072, 1024, Epilogue.SILU_MUL),
            (1024, 3072, Epilogue.NONE),
        ],
    ),
}
HEADS: list[Shape] = [
    (128256, 4096, Epilogue.NONE),
    (50272, 5120, Epilogue.NONE),
    (151936, 1024, Epilogue.NONE),
]
TOKENS = (1, 8, 16, 32, 64, 128, 256)


def microseconds(work: Callable[[], object], launches: int, expected: float) -> float:
    """Median of five; `expected` seconds of `work` decide how often it is repeated."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    repeats = max(1, int(SECONDS / expected))

    def replays() -> None:
        for _ in range(repeats):
            graph.replay()

    times = [device_seconds(replays) for _ in range(5)]
    return statistics.median(times) / repeats / launches * 1e6


def weight_of(shape: Shape) -> Tensor:
    rows, size, epilogue = shape
    rows *= 2 if epilogue.is_gated else 1
    return torch.randn(rows, size, device=DEVICE, dtype=DTYPE).mul_(size**-0.5)


def products() -> dict[str, dict[str, list[float]]]:
    """TB/s of weights, [ours, cuBLAS], for every shape and number of tokens."""
    result: dict[str, dict[str, list[float]]] = {}
    for shape in [shape for _, _, shapes in MODELS.values() for shape in shapes] + HEADS:
        rows, size, epilogue = shape
        bytes_ = weight_of(shape).nbytes
        weights = [weight_of(shape) for _ in range(min(24, max(2, BYTES_AT_ONCE // bytes_)))]
        name = f"{size} -> {rows}" + (f" {epilogue.name.lower()}" if epilogue else "")
        result[name] = {str(count): product_rates(shape, weights, count) for count in TOKENS}
        cells = " | ".join(f"{ours:.2f} / {blas:.2f}" for ours, blas in result[name].values())
        print(f"| {name} | {cells} |", flush=True)
        del weights
    return result


def product_rates(shape: Shape, weights: list[Tensor], num_tokens: int) -> list[float]:
    rows, size, epilogue = shape
    # What a norm follows may come in parts.
    of_norm = not epilogue and rows in (1024, 4096, 5120) and shape[:2] != (4096, 1024)
    x = torch.randn(num_tokens, size, device=DEVICE, dtype=DTYPE)

    def ours() -> None:
        for weight in weights:
            if of_norm:
                linear_partial(x, weight)
            else:
                linear(x, weight, None, epilogue)

    def cublas() -> None:
        for weight in weights:
            F.linear(x, weight)

    bytes_ = weights[0].nbytes
    expected = len(weights) * bytes_ / 3e12
    times = [microseconds(work, len(weights), expected) for work in (ours, cublas)]
    return [round(bytes_ / us / 1e6, 2) for us in times]


def layers() -> dict[str, dict[str, list[float]]]:
    """Microseconds a layer without attention: [ours, cuBLAS with our norms, with torch's]."""
    result: dict[str, dict[str, list[float]]] = {}
    for model, (norm, num_layers, shapes) in MODELS.items():
        weights = [[weight_of(shape) for shape in shapes] for _ in range(num_layers)]
        epilogue = shapes[2][2]
        result[model] = {
            str(count): layer_times(norm, weights, epilogue, count) for count in TOKENS
        }
        cells = " | ".join(
            " / ".join(f"{us:.1f}" for us in times) for times in result[model].values()
        )
        print(f"| {model} | {cells} |", flush=True)
        del weights
    return result


def layer_times(
    norm: str, weights: list[list[Tensor]], epilogue: Epilogue, num_tokens: int
) -> list[float]:
    hidden_size, attended = weights[0][1].shape
    scale = torch.ones(hidden_size, device=DEVICE, dtype=DTYPE)
    x, residual = torch.randn(2, num_tokens, hidden_size, device=DEVICE, dtype=DTYPE)

    def normed(hidden: Tensor) -> Tensor:
        if norm == "rms":
            return rms_norm(hidden, scale, EPS, residual)
        return layer_norm(hidden, scale, scale, EPS, residual)

    def normed_by_torch(hidden: Tensor) -> Tensor:
        residual.add_(hidden)
        if norm == "rms":
            return F.rms_norm(residual, scale.shape, scale, EPS)
        return F.layer_norm(residual, scale.shape, scale, scale, EPS)

    def gated_by_torch(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def cublas(norm: Callable[[Tensor], Tensor], gated: Callable[[Tensor], Tensor]) -> None:
        hidden = x
        for qkv, output, up, down in weights:
            hidden = F.linear(F.linear(norm(hidden), qkv)[:, :attended], output)
            inside = F.linear(norm(hidden), up)
            inside = F.relu(inside) if epilogue == Epilogue.RELU else gated(inside)
            hidden = F.linear(inside, down)

    works = (partial(cublas, normed, silu_mul), partial(cublas, normed_by_torch, gated_by_torch))
    times = [microseconds(work, len(weights), _expected(weights)) for work in works]
    return [our_layer_time(norm, weights, epilogue, num_tokens), *(round(us, 1) for us in times)]


def our_layer_time(
    norm: str, weights: list[list[Tensor]], epilogue: Epilogue, num_tokens: int
) -> float:
    """Microseconds a layer, without attention."""
    hidden_size, attended = weights[0][1].shape
    scale = torch.ones(hidden_size, device=DEVICE, dtype=DTYPE)
    x, residual = torch.randn(2, num_tokens, hidden_size, device=DEVICE, dtype=DTYPE)

    def normed(hidden: Tensor) -> Tensor:
        if norm == "rms":
            return rms_norm(hidden, scale, EPS, residual)
        return layer_norm(hidden, scale, scale, EPS, residual)

    def ours() -> None:
        hidden = x
        for qkv, output, up, down in weights:
            inside = linear(normed(hidden), qkv)[:, :attended]
            hidden = linear_partial(inside, output)
            hidden = linear_partial(linear(normed(hidden), up, None, epilogue), down)

    return round(microseconds(ours, len(weights), _expected(weights)), 1)


def _expected(weights: list[list[Tensor]]) -> float:
    """Seconds that reading them takes, about."""
    return len(weights) * sum(weight.nbytes for weight in weights[0]) / 2e12


def draws(
    num_rows: int, temperature: float, top_k: int, top_p: float, *, is_greedy: bool, limited: bool
) -> DeviceDraws:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=DEVICE)

    rows = torch.arange(num_rows, device=DEVICE)
    return DeviceDraws(
        rows=rows,
        temperature=full(temperature, torch.float32),
        top_k=full(top_k, torch.int64),
        top_p=full(top_p, torch.float64),
        log_min_p=full(-torch.inf, torch.float32),
        seeds=rows,
        sample_indices=full(0, torch.int64),
        positions=rows * 7,
        is_greedy=is_greedy,
        is_limited=limited,
    )


def sampler() -> dict[str, dict[str, float]]:
    """Microseconds for all rows; logits bfloat16, normal with deviation 2."""
    result: dict[str, dict[str, float]] = {}
    for num_rows, vocab_size in ((64, 151936), (256, 151936), (256, 50272)):
        logits = [
            torch.randn(num_rows, vocab_size, device=DEVICE).mul_(2).to(DTYPE) for _ in range(2)
        ]
        settings = {
            "greedy": draws(num_rows, 0.0, 0, 1.0, is_greedy=True, limited=False),
            "temperature 0.6": draws(num_rows, 0.6, 0, 1.0, is_greedy=False, limited=False),
            "top_k 50": draws(num_rows, 0.8, 50, 1.0, is_greedy=False, limited=True),
            "top_p 0.95": draws(num_rows, 0.8, 0, 0.95, is_greedy=False, limited=True),
        }
        works: dict[str, Callable[[Tensor], object]] = {
            name: lambda values, chosen=chosen: sample(values, chosen)
            for name, chosen in settings.items()
        }
        works["best 12"] = lambda values: best_tokens(values, 12)
        works["best 12 by torch"] = lambda values: values.float().log_softmax(-1).topk(12)
        name = f"{num_rows} x {vocab_size}"
        result[name] = {
            label: round(
                microseconds(lambda work=work, logits=logits: [work(x) for x in logits], 2, 4e-4), 1
            )
            for label, work in works.items()
        }
        print(f"sampler {name}: {result[name]}", flush=True)
    return result


def main() -> None:
    torch.manual_seed(0)
    report(
        "dense_kernels",
        copy_tb_s=round(copy_bandwidth() / 1e12, 2),
        products_tb_s=products(),
        layer_us=layers(),
        sampler_us=sampler(),
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
