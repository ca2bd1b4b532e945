"""Shared by the GPU benchmarks: engines with dummy weights, the card's peak rates, reports."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from octavo import SamplingParams
from octavo.config import make_config
from octavo.engine.engine import Engine
from octavo.engine.local_client import LocalClient
from octavo.llm import load_engine
from octavo.simulation.models import DIRECTORY as SIMULATED

ROOT = Path(__file__).parent
CONFIGS = ROOT / "configs"
TRACES = ROOT / "traces"
WARM_UP = 12  # steps after all sequences have their first tokens
GEMM_SIZE = 8192
GEMM_FLOPS = 2 * GEMM_SIZE**3


def config_directory(model: str) -> Path:
    """benchmarks/configs/MODEL, or that of the simulator's models."""
    own = CONFIGS / model
    return own if own.exists() else SIMULATED / model


def make_engine(model: str, **options: Any) -> Engine:
    """An engine of the model with this name (config_directory) with random bf16 weights."""
    options = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 2048, **options}
    return load_engine(make_config(str(config_directory(model)), **options))


@contextmanager
def decoding(
    engine: Engine, lengths: Sequence[int], max_tokens: int, **asked: Any
) -> Iterator[LocalClient]:
    """Sequences with random prompts of these lengths that all decode, from WARM_UP steps on; in the
    end their requests are aborted, and nothing is under way. asked: SamplingParams of all."""
    client, rng = LocalClient(engine), random.Random(len(lengths))
    vocab_size = engine.model_config.vocab_size
    settled = {"max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, "seed": 1}
    params = SamplingParams(**{**asked, **settled})
    for length in lengths:
        prompt = [rng.randrange(vocab_size) for _ in range(length)]
        client.add_request(client.make_request(prompt, params))
    requests = engine.scheduler.requests
    while any(request.first_token_time is None for request in requests.values()):
        client.step()
    for _ in range(WARM_UP):
        client.step()
    yield client
    for request_id in list(requests):
        engine.abort_request(request_id)
    while engine.has_unfinished:
        engine.step()


def device_seconds(work: Callable[[], object]) -> float:
    """Seconds that the device takes for what `work` launches, measured with CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a device-to-device copy of 4 GiB."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = [device_seconds(lambda: target.copy_(source)) for _ in range(12)]
    return 2 * source.nbytes / statistics.median(times[2:])


def first_and_settled(work: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Seconds that the device takes for `work` at first, and once it has run for a while.

    Repeats `work` for `seconds`; returns the medians of the first five times and of the second
    half.
    """
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        times.append(device_seconds(work))
    return statistics.median(times[:5]), statistics.median(times[len(times) // 2 :])


def square_gemm() -> Callable[[], torch.Tensor]:
    """A bf16 GEMM of GEMM_FLOPS on random numbers, the work that draws the most power."""
    a, b = (
        torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    return lambda: a @ b


def matmul_rate(seconds: float = 1.5) -> tuple[float, float]:
    """FLOP/s of `square_gemm` at first, and after `seconds`, throttled by the power limit."""
    gemm = square_gemm()
    gemm()
    torch.cuda.synchronize()
    first, settled = first_and_settled(gemm, seconds)
    return GEMM_FLOPS / first, GEMM_FLOPS / settled


def peak_rates() -> dict[str, float]:
    """The rates that this card reaches, for a report; cards of the same kind differ."""
    copy, (first, settled) = copy_bandwidth(), matmul_rate()
    print(
        f"copy {copy / 1e12:.2f} TB/s, {GEMM_SIZE}^3 GEMM at first {first / 1e12:.0f}, then "
        f"{settled / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    return {
        "copy_tb_s": round(copy / 1e12, 3),
        "matmul_tflop_s": round(first / 1e12),
        "settled_matmul_tflop_s": round(settled / 1e12),
    }


def report(benchmark: str, **values: Any) -> None:
    """Print the last line of a benchmark: one JSON object."""
    facts = {"benchmark": benchmark, "device": device_name(), "torch": torch.__version__}
    print(json.dumps(facts | {"time": time.strftime("%Y-%m-%d %H:%M")} | values), flush=True)
