"""Where the time of decode steps goes: device time by kind of kernel, in this process or in a rank.

Kernels overlap (ops/cuda/pdl.py): one that waits for the kernel before it counts from that one's
end, so the kinds and the time in which the device is idle add up to the time of a step.

Run as `python benchmarks/step_profile.py FD`, this is rank 0's or another rank's program
(executor/rank.py) in which rank 0 profiles STEPS steps when the file in REQUEST appears.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.core.step import PendingStep, StepPlan
from octavo.executor.messages import Ready, Start
from octavo.executor.rank import main, make_worker

STEPS = 10
REQUEST = "OCTAVO_PROFILE"  # the environment variable: where the result goes, if FILE.now exists
# Parts of names, the first that fits.
KINDS = {
    "attention": ("_decode_kernel", "_cascade", "prefill", "_write"),
    "norm, all-reduce": ("_norm_kernel",),
    "GEMM": ("linear", "gemm", "nvjet", "splitK", "cutlass", "_gate_kernel"),
    "sampling": ("_peak", "_draw", "_candidates", "_weights", "nccl", "_keep", "reduce", "arg"),
    "embedding": ("gather", "index", "embedding"),
    "copies": ("Memcpy", "Memset", "memcpy"),
}


def kind_of(kernel: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(p in kernel for p in parts)), "other")


def profile() -> Any:
    """A profiler of what the device does."""
    from torch import profiler

    return profiler.profile(activities=[profiler.ProfilerActivity.CUDA])


def summary(profiler: Any, steps: int) -> tuple[dict[str, float], str]:
    """Microseconds per step by kind, and a table of kernels with theirs, of `steps` steps."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    )
    own: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    end = spans[0][0]
    for first, last, name in spans:
        own["idle"] += max(0.0, first - end)
        own[name] += max(0.0, last - max(first, end))
        calls[name] += 1
        end = max(end, last)
    kinds: dict[str, float] = defaultdict(float)
    for name, time_ in own.items():
        kinds["idle" if name == "idle" else kind_of(name)] += time_ / steps
    rows = sorted(own.items(), key=lambda item: -item[1])
    table = "\n".join(
        f"{us / steps:10.1f} us per step {calls[name] / steps:8.1f} calls  {name[:100]}"
        for name, us in rows
    )
    return {kind: round(us, 1) for kind, us in kinds.items()}, table


def describe(kinds: dict[str, float]) -> str:
    """One line, the longest time first."""
    ordered = sorted(kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {us:.0f}" for kind, us in ordered)


# ---------------------------------------------------------------- ranks


def request(path: str, step: Callable[[], object]) -> dict[str, float]:
    """Have rank 0 profile, and make the steps; see `summary`, whose table goes to `path`."""
    target, started = Path(path), time.monotonic()
    Path(os.environ[REQUEST] + ".now").write_text(path)
    while not target.with_name(target.name + ".json").exists():
        assert time.monotonic() - started < 60, "rank 0 has not profiled anything"
        step()
    kinds: dict[str, float] = json.loads(target.with_name(target.name + ".json").read_text())
    return kinds


def profiled_worker(start: Start) -> tuple[Ready, Callable[[StepPlan], PendingStep]]:
    """A worker whose rank 0 profiles when it is asked to."""
    ready, submit = make_worker(start)
    asked = Path(os.environ[REQUEST] + ".now")
    if start.shard.rank:
        return ready, submit
    state: dict[str, Any] = {}

    def submit_profiled(plan: StepPlan) -> PendingStep:
        if not state and asked.exists():
            state["path"] = asked.read_text()
            asked.unlink()
            state["profile"] = profile()
            state["profile"].start()
            state["left"] = STEPS
        step = submit(plan)
        if state:
            state["left"] -= 1
            if not state["left"]:
                step.result()
                state["profile"].stop()
                kinds, table = summary(state["profile"], STEPS)
                target = Path(state["path"])
                target.write_text(table)
                target.with_name(target.name + ".json").write_text(json.dumps(kinds))
                state.clear()
        return step

    return ready, submit_profiled


if __name__ == "__main__":
    main(int(sys.argv[1]), profiled_worker)
