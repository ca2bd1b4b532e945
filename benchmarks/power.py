"""Power, clock and energy of the parts of a decode step of Llama-3-8B at batch 256.

On a card that runs at its power limit, work takes its energy divided by that power, whatever the
peak rates are. Each kind of work is replayed from a CUDA graph for some seconds, at context 1,024;
the last line is JSON. Needs nvidia-smi.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO, NamedTuple

import torch
from attention_work import GPU, Work
from gpu_harness import GEMM_FLOPS, first_and_settled, report, square_gemm
from torch import Tensor

from octavo.ops.cuda.linear import linear, linear_partial
from octavo.ops.cuda.norm import norm
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import Affine

TOKENS, CONTEXT = 256, 1024
HIDDEN, INNER, HEADS_AND_KV = 4096, 14336, 6144
NUM_LAYERS = 16  # enough that their weights exceed the L2 cache
READ_BYTES = 4 << 30
QUERY = "power.draw.instant,clocks.sm"
INTERVAL_MS = 40


class Sample(NamedTuple):
    time: float
    watts: float
    mhz: float


class Meter:
    """Samples power and clock in the background."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        every = ["-lms", str(INTERVAL_MS)]
        self._process = subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", *every],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            watts, mhz = map(float, line.split(","))
            self.samples.append(Sample(time.perf_counter(), watts, mhz))

    def between(self, begin: float, end: float) -> list[Sample]:
        return [sample for sample in self.samples if begin < sample.time < end]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each kind of work")
    arguments = parser.parse_args()
    work = Work("llama-3-8b 32/8", TOKENS, CONTEXT, new=1)
    source = torch.rand(READ_BYTES // 4, device=GPU)
    gemm = square_gemm()
    layers = [LayerGemms() for _ in range(NUM_LAYERS)]

    def attend(i: int) -> Tensor:
        return work.forward(i % work.num_layers).view(TOKENS, HIDDEN)

    def whole(i: int) -> None:
        layers[i % NUM_LAYERS](lambda _: attend(i))

    def gemms(i: int) -> None:
        layers[i % NUM_LAYERS](lambda qkv: qkv[:, :HIDDEN])

    layer_flops = 2 * TOKENS * layers[0].num_weights
    kinds: dict[str, tuple[Callable[[int], object], int, float, str]] = {
        "reading": (lambda i: source.sum(), 1, source.nbytes / 1e12, "TB/s"),
        "a square GEMM": (lambda i: gemm(), 2, GEMM_FLOPS / 1e12, "TFLOP/s"),
        "a layer's attention": (attend, work.num_layers, work.kv_bytes / 1e12, "TB/s"),
        "a layer's GEMMs and norms": (gemms, NUM_LAYERS, layer_flops / 1e12, "TFLOP/s"),
        "a layer": (whole, NUM_LAYERS, 1e-3, "layers per ms"),
    }
    meter = Meter()
    results = {}
    for name, (launch, launches, amount, unit) in kinds.items():
        results[name] = values = measure(meter, launch, launches, arguments.seconds)
        rates = amount / values["cool_us"] * 1e6, amount / values["us"] * 1e6
        print(
            f"{name:>26}: at first {values['cool_us']:8.1f} us ({rates[0]:7.2f} {unit}), then "
            f"{values['us']:8.1f} us ({rates[1]:7.2f}), {values['watts']:4.0f} W, "
            f"{values['mhz']:5.0f} MHz, {values['mj']:7.1f} mJ",
            flush=True,
        )
    meter.close()
    report("power", tokens=TOKENS, context=CONTEXT, kinds=results)


class LayerGemms:
    """The weights of one layer, and its GEMMs and norms as the model computes them."""

    def __init__(self) -> None:
        def weight(rows: int, columns: int) -> Tensor:
            values = torch.randn(rows, columns, device=GPU, dtype=torch.bfloat16)
            return values.mul_(columns**-0.5)

        self.qkv, self.output = weight(HEADS_AND_KV, HIDDEN), weight(HIDDEN, HIDDEN)
        self.gate_up, self.down = weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)
        self.scale = torch.ones(HIDDEN, device=GPU, dtype=torch.bfloat16)
        self.hidden = torch.randn(TOKENS, HIDDEN, device=GPU, dtype=torch.bfloat16)
        self.residual = torch.randn(TOKENS, HIDDEN, device=GPU, dtype=torch.bfloat16)

    @property
    def num_weights(self) -> int:
        return sum(w.numel() for w in (self.qkv, self.output, self.gate_up, self.down))

    def __call__(self, attend: Callable[[Tensor], Tensor]) -> None:
        attended = attend(linear(self.hidden, self.qkv))
        hidden = self._normed(linear_partial(attended, self.output))
        inner = linear(hidden, self.gate_up, None, Epilogue.SILU_MUL)
        self._normed(linear_partial(inner, self.down))

    def _normed(self, parts: Tensor) -> Tensor:
        return norm(parts, Affine(self.scale), 1e-5, self.residual, is_rms=True)[0]


def measure(
    meter: Meter, launch: Callable[[int], object], launches: int, seconds: float
) -> dict[str, float]:
    """Microseconds per launch at first and after a while, then watts, MHz and millijoules."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    time.sleep(1)  # lets the card cool down
    began = time.perf_counter()
    cool, later = (t / launches for t in first_and_settled(graph.replay, seconds))
    ended = time.perf_counter()
    samples = meter.between((began + ended) / 2, ended)
    watts = statistics.fmean(sample.watts for sample in samples)
    return {
        "cool_us": round(1e6 * cool, 1),
        "us": round(1e6 * later, 1),
        "watts": round(watts),
        "mhz": round(statistics.fmean(sample.mhz for sample in samples)),
        "mj": round(1e3 * watts * later, 1),
    }


if __name__ == "__main__":
    main()
