"""Shared by the CPU benchmarks: the workload, the models, and how to run one engine in isolation.

Each measurement runs in a fresh process (engine_process.py), so that engines share neither threads
nor memory, and so that the time until an engine is ready can be measured from outside.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "octavo" / "benchmarks"
SEED = 1234
MAX_PROMPT, MAX_OUTPUT = 512, 256


@dataclass(frozen=True)
class Case:
    """One model in one dtype, and the number of requests of the workload that it runs."""

    name: str
    config: str  # a directory in benchmarks/configs
    dtype: str
    num_requests: int
    busy_neighbour: bool = False
    check_tokens: bool = False  # greedy outputs must be equal; in bfloat16 they diverge


CASES = (
    Case("15m-fp32", "llama-15m", "float32", 64, check_tokens=True),
    Case("15m-bf16", "llama-15m", "bfloat16", 64),
    Case("15m-fp32-busy", "llama-15m", "float32", 64, busy_neighbour=True),
    Case("0.6b-bf16", "qwen3-0.6b", "bfloat16", 16),
)


@dataclass(frozen=True)
class Measurement:
    """One run of one engine. Times are in seconds."""

    ready_seconds: float  # from the start of the process to the first request accepted
    seconds: float
    cpu_seconds: float
    peak_rss_mb: float
    token_ids: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.cpu_seconds


def workload(num_requests: int) -> list[tuple[list[int], int]]:
    """(prompt token ids, output length) of each request.

    64 requests have 15,973 prompt tokens and 7,714 output tokens in total.
    """
    rng = random.Random(SEED)
    requests = []
    for _ in range(num_requests):
        length = rng.randint(16, MAX_PROMPT)
        prompt = [rng.randint(2, 999) for _ in range(length)]
        requests.append((prompt, rng.randint(16, MAX_OUTPUT)))
    return requests


def model_directory(case: Case) -> Path:
    """A model with random weights in Hugging Face format, written on first use."""
    directory = CACHE / f"{case.config}-{case.dtype}"
    if not (directory / "model.safetensors").exists():
        import torch
        import transformers

        print(f"writing {directory}", file=sys.stderr)
        torch.manual_seed(SEED)
        config = transformers.AutoConfig.from_pretrained(HERE / "configs" / case.config)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, case.dtype)
        )
        # Round to values that float16 can represent, so that every engine's file format holds the
        # same model.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half())
        model.save_pretrained(directory, max_shard_size="100GB")
    return directory


def measure(
    engine: str,
    case: Case,
    threads: int,
    model: Path | None = None,
    owns_process: bool = True,
    quantization: str | None = None,
) -> Measurement:
    """Run `case` on `engine` in a new process, which octavo may tune if `owns_process`, and whose
    projections it quantizes on load if that is given.

    Raises:
        RuntimeError: the process failed; the message holds the end of its output.
    """
    options = {
        "engine": engine,
        "model": str(model or model_directory(case)),
        "dtype": case.dtype,
        "threads": threads,
        "num_requests": case.num_requests,
        "owns_process": owns_process,
        "quantization": quantization,
    }
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    with (
        busy_core(case.busy_neighbour),
        subprocess.Popen(
            [sys.executable, str(HERE / "engine_process.py"), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdout is not None
        ready = 0.0
        result: dict[str, Any] | None = None
        output = ""
        for line in process.stdout:
            if line.startswith("READY"):
                ready = time.perf_counter() - start
            elif line.startswith("{"):
                result = json.loads(line)
            else:
                output = (output + line)[-600:]
    if result is None:
        raise RuntimeError(f"{engine} failed: {output.strip()}")
    return Measurement(ready_seconds=ready, **result)


@contextmanager
def busy_core(enabled: bool) -> Iterator[None]:
    """Keep one core busy with another process, as far as the system allows it."""
    if not enabled:
        yield
        return
    program = (
        "import os\n"
        "if hasattr(os, 'sched_setaffinity'):\n"
        "    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "while True: pass"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as neighbour:
        try:
            yield
        finally:
            neighbour.kill()


def summary(measurements: list[Measurement]) -> dict[str, float]:
    """Medians of every field except the token ids."""
    names = [name for name in asdict(measurements[0]) if name != "token_ids"]
    names += ["tokens_per_second", "tokens_per_cpu_second"]
    return {
        name: round(statistics.median(getattr(m, name) for m in measurements), 3) for name in names
    }
