"""Fit the cost model's default coefficients to measured decode steps of dense models on H200s.

The steps are those of docs/performance.md, at context 1,024, in bfloat16. Prints the coefficients
that fit best, and for each step what it took and what the defaults predict. Large relative errors
count far more than small ones: each prediction should be within 10%.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from octavo.simulation.cost_model import Coefficients, CostModel, ModelSize
from octavo.simulation.gpus import find_gpu
from octavo.simulation.models import find_model
from octavo.simulation.step_shape import StepShape

CONFIGS = Path(__file__).parent / "configs"
CONTEXT = 1040  # tokens: steps are measured from 1,024 on
ALL = -1
# Model, GPUs, layers with copies in 12 bits (ALL of them; 0: not even the head), and milliseconds
# by batch. OPT-175B's 8 are those that fit where its KV cache had room for 33,520 tokens.
MEASURED: list[tuple[str, int, int, dict[int, float]]] = [
    ("opt-13b", 1, 0, {1: 7.04, 8: 8.57, 64: 19.48}),
    ("llama-3-8b", 1, 0, {1: 3.67, 8: 4.20, 32: 5.16, 64: 6.24, 256: 15.22}),
    ("llama-3-8b", 1, ALL, {1: 3.14, 8: 3.67, 16: 4.01, 32: 4.93, 64: 6.17}),
    ("qwen3-0.6b", 1, 0, {1: 0.662, 8: 1.04, 64: 2.59, 256: 8.49}),
    ("gemma-3-4b", 1, 0, {1: 2.14, 8: 2.66, 32: 3.62, 64: 4.71, 256: 12.7}),
    ("gemma-3-4b", 1, ALL, {1: 1.93, 8: 2.51, 32: 3.38, 64: 4.76}),
    ("gemma-3-12b", 1, 0, {1: 6.02, 64: 12.8, 256: 35.3}),
    ("llama-3-8b", 2, 0, {1: 2.54, 64: 3.87, 256: 8.75}),
    ("llama-3-70b", 2, 0, {1: 18.80, 64: 22.3}),
    ("opt-13b", 2, 0, {64: 10.84}),
    ("opt-66b", 2, 0, {1: 17.34, 16: 24.82, 32: 29.51}),
    ("llama-3-70b", 4, 0, {1: 9.91, 64: 12.61}),
    ("llama-3-70b", 4, 34, {1: 9.25, 16: 9.84, 64: 12.77, 256: 27.33}),
    ("opt-66b", 4, 0, {1: 10.44}),
    ("opt-66b", 4, 30, {1: 9.72, 16: 13.21, 32: 15.05, 64: 21.03}),
    ("opt-175b", 4, 8, {1: 24.29, 16: 33.06}),
]
FITTED = (
    "step_overhead",
    "layer_overhead",
    "weight_efficiency",
    "gemm_efficiency",
    "kv_efficiency",
    "reduce_efficiency",
    "reduce_latency",
)
POWER = 4  # of relative errors, whose squares are added up
PRIOR = 1e-3  # weight of a coefficient's distance from where the fit begins


def main() -> None:
    steps = [
        (name, num_gpus, copied, batch, seconds / 1e3, size_of(name, num_gpus, copied))
        for name, num_gpus, copied, by_batch in MEASURED
        for batch, seconds in by_batch.items()
    ]
    start = Coefficients()
    begin = np.log([getattr(start, name) for name in FITTED])

    def coefficients(logarithms: np.ndarray) -> Coefficients:
        values = map(float, np.exp(logarithms))
        return replace(start, **dict(zip(FITTED, values, strict=True)))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        made = coefficients(logarithms)
        errors = [
            math.log(predicted(size, num_gpus, batch, made) / seconds)
            for _, num_gpus, _, batch, seconds, size in steps
        ]
        far = np.sign(errors) * np.abs(np.array(errors) / 0.1) ** POWER
        return np.concatenate([far, PRIOR * (logarithms - begin)])

    found = coefficients(least_squares(residuals, begin).x)
    for name in FITTED:
        print(f"{name:20s} {getattr(found, name):.3g} (is {getattr(start, name):.3g})")
    print("Predicted by the defaults:")
    for name, num_gpus, copied, batch, seconds, size in steps:
        own = predicted(size, num_gpus, batch, start)
        copies = {ALL: "copies of all layers", 0: ""}.get(copied, f"copies of {copied} layers")
        print(
            f"{name:12s} {num_gpus} GPUs, batch {batch:3d}: {1e3 * seconds:6.2f} ms, "
            f"{1e3 * own:6.2f} ({100 * (own / seconds - 1):+.0f}%)  {copies}"
        )


def size_of(name: str, num_gpus: int, copied: int) -> ModelSize:
    known = CONFIGS / name
    model = find_model(str(known) if known.is_dir() else name)
    if copied:
        model = model.with_copies(None if copied == ALL else copied)
    return ModelSize.of(model, "bfloat16", num_gpus=num_gpus)


def predicted(size: ModelSize, num_gpus: int, batch: int, coefficients: Coefficients) -> float:
    shape = StepShape(batch, batch, batch, batch * CONTEXT, 0, num_requests=batch)
    cost = CostModel(size, find_gpu("h200"), num_gpus, coefficients=coefficients)
    return cost.compute_seconds(shape)


if __name__ == "__main__":
    main()
