"""What the host does for a decode step, beside the time of the step.

While a device computes a step, the host takes in the one before and starts the next. Where it takes
longer for that than the device for a step, the device waits: with small models and few sequences.
The host's part is the time of a step less that in which the host waits for the device. Steps that
continue the one before, whose sequences are the same, are counted: the device goes on with them by
itself (worker/model_runner.py). Without a GPU, --models tiny shows that everything runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from gpu_harness import decoding, make_engine, report

from octavo.engine.engine import Engine
from octavo.worker.device.base import Moment
from octavo.worker.model_runner import ModelRunner

STEPS = 200
PROMPT = 500


class Watch:
    """Adds up the calls of a method, and their seconds, while it is in place."""

    def __init__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name
        self._method: Callable[..., Any] = getattr(owner, name)
        self.seconds, self.num_calls = 0.0, 0

    def __enter__(self) -> Watch:
        def watched(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return self._method(*args, **options)
            finally:
                self.seconds += time.perf_counter() - began
                self.num_calls += 1

        setattr(self._owner, self._name, watched)
        return self

    def __exit__(self, *error: object) -> None:
        setattr(self._owner, self._name, self._method)


def step_row(engine: Engine, batch: int) -> dict[str, float]:
    """Steps of sequences whose blocks are not full at the same steps."""
    rng = random.Random(batch)
    lengths = [PROMPT + rng.randrange(16) for _ in range(batch)]
    device: list[float] = []
    with decoding(engine, lengths, 2 * STEPS, temperature=0.6) as client:
        engine.observers.append(lambda plan, result, _: device.append(result.compute_seconds))
        with Watch(Moment, "wait") as waiting, Watch(ModelRunner, "_stage") as staging:
            began = time.perf_counter()
            for _ in range(STEPS):
                client.step()
            wall = (time.perf_counter() - began) / STEPS
        engine.observers.clear()
    return {
        "step_us": round(1e6 * wall, 1),
        "device_us": round(1e6 * statistics.fmean(device), 1),
        "host_us": round(1e6 * (wall - waiting.seconds / STEPS), 1),
        "staging_us": round(1e6 * staging.seconds / STEPS, 1),
        "continued": round(1 - staging.num_calls / STEPS, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["qwen3-0.6b"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32, 64])
    arguments = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    for model in arguments.models:
        engine = make_engine(
            model,
            max_num_seqs=max(arguments.batches),
            enable_prefix_caching=False,
            swap_space=0,
            tune_kernels="off",
        )
        for batch in arguments.batches:
            row = rows[f"{model}@{batch}"] = step_row(engine, batch)
            print(f"{model} batch {batch:>3}: {row}", flush=True)
        engine.executor.shutdown()
    report("step_host", steps=rows)


if __name__ == "__main__":
    main()
