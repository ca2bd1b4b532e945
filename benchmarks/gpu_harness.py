"""What the GPU benchmarks share: engines with dummy weights, the card's ceilings, one JSON line."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo.config import make_config
from octavo.engine.engine import Engine
from octavo.llm import load_engine

ROOT = Path(__file__).parent
CONFIGS = ROOT / "configs"
TRACES = ROOT / "traces"
SQUARE = 8192
SQUARE_FLOPS = 2 * SQUARE**3


def make_engine(model: str, **options: Any) -> Engine:
    """An engine of benchmarks/configs/MODEL with random bf16 weights."""
    options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 2048, **options}
    return load_engine(make_config(str(CONFIGS / model), **options))


def device_seconds(work: Callable[[], object]) -> float:
    """How long the device takes for what `work` launches, by its own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 4 GiB on the device."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = [device_seconds(lambda: target.copy_(source)) for _ in range(12)]
    return 2 * source.nbytes / statistics.median(times[2:])


def first_and_settled(work: Callable[[], object], seconds: float) -> tuple[float, float]:
    """How long the device takes for `work` at first, and after a while of nothing else: medians of
    the first five times, and of the later half."""
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        times.append(device_seconds(work))
    return statistics.median(times[:5]), statistics.median(times[len(times) // 2 :])


def square_product() -> Callable[[], torch.Tensor]:
    """A bf16 product of SQUARE_FLOPS, of random numbers: what costs the most power."""
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


def matmul_rate(seconds: float = 1.5) -> tuple[float, float]:
    """FLOP/s of that product: at first, and after so many seconds, held back by power."""
    product = square_product()
    product()
    torch.cuda.synchronize()
    first, settled = first_and_settled(product, seconds)
    return SQUARE_FLOPS / first, SQUARE_FLOPS / settled


def ceilings() -> dict[str, float]:
    """What this card reaches today, for a report; cards of one kind differ."""
    copy, (first, settled) = copy_bandwidth(), matmul_rate()
    print(
        f"copy {copy / 1e12:.2f} TB/s, {SQUARE}^3 product at first {first / 1e12:.0f}, then "
        f"{settled / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    return {
        "copy_tb_s": round(copy / 1e12, 3),
        "matmul_tflop_s": round(first / 1e12),
        "settled_matmul_tflop_s": round(settled / 1e12),
    }


def report(benchmark: str, **values: Any) -> None:
    """The last line of a benchmark."""
    facts = {"benchmark": benchmark, "device": device_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"time": time.strftime("%Y-%m-%d %H:%M")} | values), flush=True)
