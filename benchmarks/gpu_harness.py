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


def report(benchmark: str, **values: Any) -> None:
    """The last line of a benchmark."""
    facts = {"benchmark": benchmark, "device": device_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"time": time.strftime("%Y-%m-%d %H:%M")} | values), flush=True)
