"""Dense kernels on one GPU: GEMMs compared with cuBLAS, whole layers, norms, and the sampler.

Times are those of CUDA graphs replayed back to back, so that kernels may overlap as in a model,
over weights that exceed the L2 cache. Prints a table for each part; the last line is JSON.

    PYTHONPATH=src python benchmarks/dense_kernels.py [--parts sampler_us]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from gpu_harness import copy_bandwidth, device_seconds, report
from torch import Tensor

from octavo.ops.cuda.activation import apply_gate
from octavo.ops.cuda.linear import linear, linear_partial
from octavo.ops.cuda.norm import norm
from octavo.ops.cuda.sampling import DeviceDraws, sample
from octavo.ops.cuda.sampling_candidates import best_tokens
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import Affine

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
WEIGHT_BYTES = 300_000_000  # per graph: several times the L2 cache
SECONDS = 3e-3  # of device time per measurement
EPS = 1e-5

# Rows of W (of each half, if it is gated), columns of W, epilogue.
Shape = tuple[int, int, Epilogue]
# name: norm, number of layers measured, shapes of qkv, output, up and down
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
    """Microseconds per launch, the median of five measurements.

    `work` makes `launches` launches and takes about `expected` seconds, which decides how often it
    is repeated.
    """
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


def gemms() -> dict[str, dict[str, list[float]]]:
    """TB/s of weights, [octavo, cuBLAS], for every shape and number of tokens."""
    result: dict[str, dict[str, list[float]]] = {}
    for shape in [shape for _, _, shapes in MODELS.values() for shape in shapes] + HEADS:
        rows, size, epilogue = shape
        bytes_ = weight_of(shape).nbytes
        weights = [weight_of(shape) for _ in range(min(24, max(2, WEIGHT_BYTES // bytes_)))]
        name = f"{size} -> {rows}" + (f" {epilogue.name.lower()}" if epilogue else "")
        result[name] = {str(count): gemm_rates(shape, weights, count) for count in TOKENS}
        cells = " | ".join(
            f"{octavo:.2f} / {cublas:.2f}" for octavo, cublas in result[name].values()
        )
        print(f"| {name} | {cells} |", flush=True)
        del weights
    return result


def gemm_rates(shape: Shape, weights: list[Tensor], num_tokens: int) -> list[float]:
    rows, size, epilogue = shape
    # A GEMM that a norm follows may leave its split-K partial sums to the norm.
    norm_follows = not epilogue and rows in (1024, 4096, 5120) and shape[:2] != (4096, 1024)
    x = torch.randn(num_tokens, size, device=DEVICE, dtype=DTYPE)

    def octavo() -> None:
        for weight in weights:
            if norm_follows:
                linear_partial(x, weight)
            else:
                linear(x, weight, None, epilogue)

    def cublas() -> None:
        for weight in weights:
            F.linear(x, weight)

    bytes_ = weights[0].nbytes
    expected = len(weights) * bytes_ / 3e12
    times = [microseconds(work, len(weights), expected) for work in (octavo, cublas)]
    return [round(bytes_ / us / 1e6, 2) for us in times]


def layers() -> dict[str, dict[str, list[float]]]:
    """Microseconds per layer: [octavo, cuBLAS with octavo's norms, cuBLAS with torch's norms]."""
    result: dict[str, dict[str, list[float]]] = {}
    for model, (_, num_layers, shapes) in MODELS.items():
        weights = [[weight_of(shape) for shape in shapes] for _ in range(num_layers)]
        result[model] = {str(count): Layers(model, weights, count).times() for count in TOKENS}
        cells = " | ".join(
            " / ".join(f"{us:.1f}" for us in times) for times in result[model].values()
        )
        print(f"| {model} | {cells} |", flush=True)
        del weights
    return result


class Layers:
    """The layers of a model of MODELS without their attention, and the tokens that they compute."""

    def __init__(self, model: str, weights: list[list[Tensor]], num_tokens: int) -> None:
        """`weights` holds qkv, output, up and down of each layer."""
        self._norm_kind, _, shapes = MODELS[model]
        self._epilogue = shapes[2][2]
        self._weights = weights
        hidden_size, self._attention_size = weights[0][1].shape
        self._scale = torch.ones(hidden_size, device=DEVICE, dtype=DTYPE)
        self._x, self._residual = torch.randn(
            2, num_tokens, hidden_size, device=DEVICE, dtype=DTYPE
        )

    def times(self) -> list[float]:
        """Microseconds per layer: [octavo, cuBLAS with octavo's norms, with torch's norms]."""
        cublas = partial(self._cublas, self._norm, partial(apply_gate, epilogue=Epilogue.SILU_MUL))
        cublas_and_torch = partial(self._cublas, self._torch_norm, self._torch_silu_mul)
        return [self.octavo_time(), *map(self._time, (cublas, cublas_and_torch))]

    def octavo_time(self) -> float:
        """Microseconds per layer of octavo's kernels."""
        return self._time(self._octavo)

    def _time(self, work: Callable[[], None]) -> float:
        num_layers = len(self._weights)
        num_bytes = num_layers * sum(weight.nbytes for weight in self._weights[0])
        return round(microseconds(work, num_layers, expected=num_bytes / 2e12), 1)

    def _octavo(self) -> None:
        hidden = self._x
        for qkv, output, up, down in self._weights:
            attended = linear(self._norm(hidden), qkv)[:, : self._attention_size]
            hidden = linear_partial(attended, output)
            hidden = linear_partial(linear(self._norm(hidden), up, None, self._epilogue), down)

    def _cublas(
        self, norm: Callable[[Tensor], Tensor], silu_mul: Callable[[Tensor], Tensor]
    ) -> None:
        hidden = self._x
        for qkv, output, up, down in self._weights:
            hidden = F.linear(F.linear(norm(hidden), qkv)[:, : self._attention_size], output)
            inner = F.linear(norm(hidden), up)
            inner = F.relu(inner) if self._epilogue == Epilogue.RELU else silu_mul(inner)
            hidden = F.linear(inner, down)

    def _norm(self, hidden: Tensor) -> Tensor:
        is_rms = self._norm_kind == "rms"
        affine = Affine(self._scale, None if is_rms else self._scale)
        return norm(hidden, affine, EPS, self._residual, is_rms)[0]

    def _torch_norm(self, hidden: Tensor) -> Tensor:
        self._residual.add_(hidden)
        if self._norm_kind == "rms":
            return F.rms_norm(self._residual, self._scale.shape, self._scale, EPS)
        return F.layer_norm(self._residual, self._scale.shape, self._scale, self._scale, EPS)

    @staticmethod
    def _torch_silu_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


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
        mask_places=full(-1, torch.int32),
        masks=torch.zeros((1, 1), dtype=torch.int32, device=DEVICE),
        is_greedy=is_greedy,
        is_limited=limited,
    )


def _sample(chosen: DeviceDraws, logits: Tensor) -> Tensor:
    return sample(logits, chosen)


def _each(work: Callable[[Tensor], object], logits: list[Tensor]) -> None:
    for each in logits:
        work(each)


def sampler() -> dict[str, dict[str, float]]:
    """Microseconds for all rows; logits are bfloat16, normal with a standard deviation of 2, and of
    some rows 300 tokens stand out by up to 12."""
    result: dict[str, dict[str, float]] = {}
    shapes = ((1, 151936), (8, 151936), (64, 151936), (256, 151936), (256, 50272))
    for (num_rows, vocab_size), num_likely in product(shapes, (0, 300)):
        logits = list[Tensor]()
        for _ in range(2):
            values = torch.randn(num_rows, vocab_size, device=DEVICE).mul_(2)
            values[:, :num_likely] += 12 * torch.rand(num_rows, num_likely, device=DEVICE)
            logits.append(values.to(DTYPE))
        settings = {
            "greedy": draws(num_rows, 0.0, 0, 1.0, is_greedy=True, limited=False),
            "temperature 0.6": draws(num_rows, 0.6, 0, 1.0, is_greedy=False, limited=False),
            "top_k 50": draws(num_rows, 0.8, 50, 1.0, is_greedy=False, limited=True),
            "top_p 0.95": draws(num_rows, 0.8, 0, 0.95, is_greedy=False, limited=True),
            "both": draws(num_rows, 0.8, 50, 0.95, is_greedy=False, limited=True),
        }
        works: dict[str, Callable[[Tensor], object]] = {
            name: partial(_sample, chosen) for name, chosen in settings.items()
        }
        works["top 12"] = lambda values: best_tokens(values, 12)
        works["top 12 by torch"] = lambda values: values.float().log_softmax(-1).topk(12)
        name = f"{num_rows} x {vocab_size}" + (", some likely" if num_likely else "")
        result[name] = {
            label: round(microseconds(partial(_each, work, logits), 2, 4e-4), 1)
            for label, work in works.items()
        }
        print(f"sampler {name}: {result[name]}", flush=True)
    return result


PARTS = {"gemms_tb_s": gemms, "layer_us": layers, "sampler_us": sampler}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parts = parser.parse_args().parts
    torch.manual_seed(0)
    copied = round(copy_bandwidth() / 1e12, 2)
    report("dense_kernels", copy_tb_s=copied, **{part: PARTS[part]() for part in parts})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
