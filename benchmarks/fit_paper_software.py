"""Fit `simulation.cost_model.ONE_SEQUENCE` to the steps that the paper's figure 12 implies.

With --count, first simulate figure 12 (runs that `octavo reproduce` has cached are reused), and
print how many requests run where latency reaches 0.5 s/token: these are BATCHES in
`octavo_paper.paper_software`.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from octavo.simulation.cost_model import PAPER_2023, Coefficients
from octavo_paper.figures import fig12
from octavo_paper.jobs import Store, default_cache_directory, run_jobs
from octavo_paper.paper_software import FITTED, implied_steps
from octavo_paper.scale import QUICK
from octavo_paper.simulations import THRESHOLD, SteadyState

START = {
    "step_overhead": 7e-3,
    "seq_overhead": 2e-4,
    "kv_efficiency": 0.6,
    "reduce_latency": 5e-5,
    "reduce_efficiency": 0.3,
}
FILLING = 0.25  # fraction of a run in which the batches fill up
# An efficiency is a fraction of the peak in the data sheet.
LIMITS = {"kv_efficiency": 1.0, "reduce_efficiency": 1.0}


def coefficients(logarithms: np.ndarray) -> Coefficients:
    values = dict(zip(FITTED, map(float, np.exp(logarithms)), strict=True))
    return replace(PAPER_2023, **values)


def count() -> None:
    """Print the mean batches at the rates that figure 12's systems sustain."""
    sweeps = [sweep for panel in fig12.panels(QUICK) for sweep in panel.sweeps.values()]
    store, processes = Store(default_cache_directory()), os.cpu_count() or 1
    found = run_jobs(sweeps, store, processes, True)
    runs = {}
    for sweep in sweeps:
        duration = sweep.scenario.workload.duration
        assert duration is not None, "sweeps generate their arrivals"
        scenario = sweep.scenario.at_rate(found[sweep]["sustained"][str(THRESHOLD)])
        if scenario.system != "fastertransformer":  # it is never full
            runs[sweep] = SteadyState(scenario, FILLING * duration, duration)
    batches = run_jobs(runs.values(), store, processes, True)
    for sweep, run in runs.items():
        scenario = sweep.scenario
        key = (scenario.model, scenario.workload.source, scenario.system)
        print(f"{key}: {batches[run]['mean_batched_requests']:.1f},")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help="simulate the batches first")
    if parser.parse_args().count:
        count()
    fit()


def fit() -> None:
    steps = list(implied_steps())

    def errors(logarithms: np.ndarray) -> list[float]:
        found = coefficients(logarithms)
        return [math.log(step.priced(found) / step.seconds) for step in steps]

    highest = [math.log(LIMITS.get(name, 1e3)) for name in FITTED]
    start = [math.log(START[name]) for name in FITTED]
    solution = least_squares(errors, start, bounds=(-30.0, highest))
    found = coefficients(solution.x)
    for name in FITTED:
        print(f"{name:20} {getattr(found, name):.3g}")
    print(f"root mean square error {100 * math.sqrt(np.mean(np.square(errors(solution.x)))):.1f}%")
    for step in steps:
        print(
            f"{step.model:9} {step.source:9} {step.system:12} batch {step.batch:6.1f}  "
            f"implied {1e3 * step.seconds:6.1f} ms  priced {1e3 * step.priced(found):6.1f} ms"
        )


if __name__ == "__main__":
    main()
