"""Mixtures of experts: routing and the experts' products, against reading the experts that are hit.

Each measurement is of one layer: router, gates and ups, down. On a GPU it is replayed in a CUDA
graph, in turns with other layers, so that weights come from memory. Tokens choose their experts as
random router weights make them; the experts that they hit are counted, and the roofline is the time
to read those and the router at the copy bandwidth. The last line is JSON.

    PYTHONPATH=src python benchmarks/experts.py                    # on a GPU
    PYTHONPATH=src python benchmarks/experts.py --models tiny      # on a CPU, in seconds
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from gpu_harness import copy_bandwidth, device_seconds, report
from torch import Tensor

from octavo.ops.epilogue import Epilogue
from octavo.ops.expert_kernels import (
    make_experts_kernel,
    make_quantized_experts_kernel,
    make_router_kernel,
)
from octavo.ops.experts import ExpertWeights, QuantizedExpertWeights, Routed, RouterWeights
from octavo.ops.quantized import GroupedInt, MxFloat4, QuantizedWeight, ScaledFloat8
from octavo.routing import RoutingConfig

DTYPE = torch.bfloat16
SPREAD = 1 << 30  # bytes of weights that take turns: many times the L2 cache
SECONDS = 5e-3  # of device time per measurement
FORMS = ("bf16", "float8", "float8-blocks", "mxfp4", "int4")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)


class Shape(NamedTuple):
    """One layer's experts."""

    routing: RoutingConfig
    size: int
    inner: int
    epilogue: Epilogue = Epilogue.SILU_MUL
    bias: bool = False


MODELS = {
    "qwen3-30b-a3b": Shape(RoutingConfig(num_experts=128, top_k=8), 2048, 768),
    "gpt-oss-20b": Shape(
        RoutingConfig(num_experts=32, top_k=4, bias=True),
        2880,
        2880,
        Epilogue.CLAMPED_SWIGLU,
        bias=True,
    ),
    "mixtral-8x7b": Shape(RoutingConfig(num_experts=8, top_k=2), 4096, 14336),
    "tiny": Shape(RoutingConfig(num_experts=16, top_k=4), 64, 48),
}


class Layer:
    """Owns the weights of one layer, and computes it."""

    def __init__(self, shape: Shape, form: str, device: torch.device) -> None:
        num, size, inner = shape.routing.num_experts, shape.size, shape.inner

        def weight(*dims: int) -> Tensor:
            return torch.randn(dims, device=device, dtype=DTYPE).mul_(dims[-1] ** -0.5)

        router = RouterWeights(weight(num, size), weight(num) if shape.routing.bias else None)
        biases = (weight(num, 2 * inner), weight(num, size)) if shape.bias else ()
        up, down = weight(num, 2 * inner, size), weight(num, size, inner)
        kernel = None
        if form == "bf16":
            kernel = make_experts_kernel(ExpertWeights(up, down, *biases), shape.epilogue)
            self.expert_bytes = (up.nbytes + down.nbytes) / num
        else:
            forms = in_form(up, form), in_form(down, form)
            weights = QuantizedExpertWeights(*forms, *biases)
            kernel = make_quantized_experts_kernel(weights, shape.epilogue, DTYPE)
            self.expert_bytes = sum(each.nbytes for each in forms) / num
        self.num_hit = torch.zeros(1, dtype=torch.int64, device=device)
        self._router = make_router_kernel(router, shape.routing, self.num_hit)
        self._top_k = shape.routing.top_k
        assert kernel is not None, f"no kernel for {form} on this device"
        self._experts = kernel

    def route(self, x: Tensor) -> Routed:
        """The first part alone."""
        return self._router.apply(x, self._experts.rounding(len(x), self._top_k))

    def run(self, x: Tensor) -> Tensor:
        """The whole layer."""
        return self._experts.apply_partial(x, self.route(x))


def in_form(weight: Tensor, form: str) -> QuantizedWeight:
    """Weights [experts, rows, columns], quantized."""
    match form:
        case "float8":
            return ScaledFloat8.quantize(weight, (1, weight.shape[2]))
        case "float8-blocks":
            return ScaledFloat8.quantize(weight, (128, 128))
        case "int4":
            return GroupedInt.quantize(weight, 4, 64 if weight.shape[2] % 128 else 128)
        case "mxfp4":
            return MxFloat4.stack([MxFloat4.quantize(each) for each in weight])
    raise ValueError(form)


def seconds_of(work: Callable[[], object], is_gpu: bool) -> float:
    """Seconds that `work` takes: the median of five measurements."""
    work()
    if not is_gpu:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    repeats = max(1, int(SECONDS / max(1e-6, device_seconds(graph.replay))))

    def replays() -> None:
        for _ in range(repeats):
            graph.replay()

    return statistics.median(device_seconds(replays) for _ in range(5)) / repeats


def measure(shape: Shape, layers: list[Layer], num_tokens: int, bandwidth: float) -> dict[str, Any]:
    """Microseconds of one layer, and what they are of the roofline."""
    device = layers[0].num_hit.device
    is_gpu = device.type == "cuda"
    x = torch.randn(num_tokens, shape.size, device=device, dtype=DTYPE)
    before = sum(int(layer.num_hit) for layer in layers)
    for layer in layers:
        layer.run(x)
    hit = (sum(int(layer.num_hit) for layer in layers) - before) / len(layers)
    total = seconds_of(lambda: [layer.run(x) for layer in layers], is_gpu) / len(layers)
    routing = seconds_of(lambda: [layer.route(x) for layer in layers], is_gpu) / len(layers)
    num_bytes = hit * layers[0].expert_bytes
    num_bytes += DTYPE.itemsize * shape.routing.num_experts * shape.size
    flops = 6.0 * num_tokens * shape.routing.top_k * shape.size * shape.inner
    return {
        "us": round(1e6 * total, 2),
        "routing_us": round(1e6 * routing, 2),
        "experts_hit": round(hit, 1),
        "experts_expected": round(shape.routing.expected_distinct(num_tokens), 1),
        "roofline_share": round(num_bytes / bandwidth / total, 3),
        "tflop_s": round(flops / total / 1e12, 2),
    }


def host_bandwidth() -> float:
    """Bytes per second, read plus written, of a copy of 64 MiB on the CPU."""
    source = torch.zeros(1 << 26, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), is_gpu=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=MODELS)
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=["bf16"])
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    arguments = parser.parse_args()
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    bandwidth = copy_bandwidth() if is_gpu else host_bandwidth()
    models = arguments.models or [name for name in MODELS if (name == "tiny") != is_gpu]
    torch.manual_seed(0)
    results: dict[str, dict[str, Any]] = {}
    for name, form in product(models, arguments.forms):
        shape = MODELS[name]
        layers = [Layer(shape, form, device)]
        layer_bytes = int(shape.routing.num_experts * layers[0].expert_bytes)
        count = max(2, min(8, SPREAD // layer_bytes)) if is_gpu else 1
        layers += [Layer(shape, form, device) for _ in range(count - 1)]
        name = name if form == "bf16" else f"{name}, {form}"
        results[name] = {}
        for num_tokens in arguments.tokens:
            row = measure(shape, layers, num_tokens, bandwidth)
            results[name][str(num_tokens)] = row
            print(
                f"{name:>14} {num_tokens:>5} tokens: {row['us']:10.1f} us, routing "
                f"{row['routing_us']:7.1f}, {row['experts_hit']:6.1f} experts hit "
                f"({row['experts_expected']:.1f} expected), {100 * row['roofline_share']:5.1f}% of "
                f"the roofline, {row['tflop_s']:7.2f} TFLOP/s",
                flush=True,
            )
        del layers
    report("experts", bandwidth_tb_s=round(bandwidth / 1e12, 3), models=results)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
