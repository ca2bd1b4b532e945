"""Fit the cost model's coefficients to measured steps, and say how good they are."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.simulation.config import SimulationConfig
from octavo.simulation.cost_model import Coefficients, CostModel
from octavo.simulation.gpus import find_gpu
from octavo.simulation.step_records import Setting, StepRecord, check_names, total_seconds

HELD_OUT = 0.25  # share of the steps that the fit does not see
LARGEST = 1e6  # how far a coefficient may go from where the fit begins
PRIOR = 1e-2  # weight of a coefficient's distance from where the fit begins
NUM_PASSES = 3
# The amounts of a step that each coefficient prices. One without such steps cannot be learnt. What
# layers take is another matter: it needs steps that have it and steps that do not.
AMOUNTS = {
    "step_overhead": "num_tokens",
    "seq_overhead": "num_seqs",
    "weight_efficiency": "num_tokens",
    "gemm_efficiency": "num_tokens",
    "kv_efficiency": "kv_tokens",
    "attention_efficiency": "attention_pairs",
    "copy_efficiency": "num_copied_blocks",
    "swap_efficiency": "num_swapped_blocks",
}
ON_SEVERAL = {"reduce_efficiency": "num_tokens", "reduce_latency": "num_tokens"}


@dataclass(frozen=True, slots=True)
class FitError:
    """Predicted against measured."""

    num_steps: int
    total: float  # (predicted - measured) / measured, of all steps together
    median: float  # of the steps' |predicted - measured| / measured
    p90: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Coefficients for one model on one kind of device."""

    setting: Setting
    coefficients: Coefficients
    fitted: tuple[str, ...]  # the coefficients that the steps determined
    on_fitted: FitError
    on_held_out: FitError

    def write(self, path: str | Path) -> None:
        """As JSON. Raises ConfigError if the file cannot be written."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError("out", f"{path} cannot be written: {error.strerror}") from error

    def apply(self, config: SimulationConfig) -> SimulationConfig:
        """The same simulation with these coefficients.

        Raises ConfigError if they were fitted for another model or device.
        """
        machine = config.prepare()
        measured, gpu = asdict(self.setting.model), machine.cost_model.gpu
        other = [
            f"{name} was {measured[name]} and is {value}"
            for name, value in asdict(machine.cost_model.size).items()
            if measured[name] != value
        ]
        if other:
            raise ConfigError("calibration", f"it was made for another model: {', '.join(other)}")
        if self.setting.gpu != gpu.name:
            raise ConfigError(
                "calibration", f"it was made on {self.setting.gpu}, and this is {gpu.name}"
            )
        return replace(config, coefficients=self.coefficients)


def calibrate(
    setting: Setting, records: Sequence[StepRecord], start: Coefficients | None = None
) -> Calibration:
    """Fit to three quarters of the steps, and measure the error on the others.

    Least squares of (predicted - measured) / sqrt(expected), where what is expected comes from the
    fit before: long steps count for their length, and the predictions' sum has no bias. A
    coefficient that no step tells anything about stays as it was in `start`; where two explain the
    same steps, those nearer to `start` are taken. What a layer takes is fitted only where steps of
    one token, in which layers without experts do not have it, are among those of several: it looks
    like more of the step overhead otherwise, and stays.

    Raises:
        ConfigError: the device is unknown, there are too few steps, or SciPy is missing.
    """
    # A record does not say how many requests its sequences belong to: they bear it all.
    start = replace(start or Coefficients(), request_overhead=0.0)
    fitted, held_out = _split(records)
    amounts = AMOUNTS | (ON_SEVERAL if setting.num_gpus > 1 else {})
    names = [
        name
        for name, amount in amounts.items()
        if any(getattr(record, amount) for record in fitted)
    ]
    has_others = setting.model.num_expert_layers < setting.model.num_layers
    if has_others and {1, 2} <= {min(record.num_tokens, 2) for record in fitted}:
        names.append("layer_overhead")
    if len(fitted) < 2 * len(names) or not held_out:
        raise ConfigError("steps", f"{len(records)} steps are too few for {len(names)} unknowns")
    fit = _Fit(setting, fitted, start, names)
    coefficients = fit.solve()
    model = cost_model_of(setting, coefficients)
    return Calibration(
        setting, coefficients, tuple(names), fit_error(model, fitted), fit_error(model, held_out)
    )


def read_calibration(path: str | Path) -> Calibration:
    """What `Calibration.write` wrote. Raises ConfigError if the file is broken, or lacks a name or
    has one that is not known, as those of other versions do."""
    try:
        given = json.loads(Path(path).read_bytes())
        calibration = msgspec.convert(given, Calibration)
        check_names(asdict(calibration), given)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors among them
        raise ConfigError("calibration", f"{path} is not a calibration: {error}") from error
    return calibration


def cost_model_of(setting: Setting, coefficients: Coefficients) -> CostModel:
    """The cost model of what was measured."""
    gpu = find_gpu(setting.gpu)
    return CostModel(setting.model, gpu, setting.num_gpus, setting.block_size, coefficients)


def fit_error(model: CostModel, records: Sequence[StepRecord]) -> FitError:
    predicted = sum(model.seconds(record) for record in records)
    measured = total_seconds(records)
    relative = sorted(
        abs(model.seconds(record) - record.seconds) / record.seconds for record in records
    )
    return FitError(
        len(records),
        (predicted - measured) / measured,
        relative[len(relative) // 2],
        relative[int(0.9 * len(relative))],
    )


def _split(records: Sequence[StepRecord]) -> tuple[list[StepRecord], list[StepRecord]]:
    """Fitted and held out; always the same for the same steps."""
    timed = [record for record in records if record.seconds > 0]
    random.Random(0).shuffle(timed)
    num_held_out = int(HELD_OUT * len(timed))
    return timed[num_held_out:], timed[:num_held_out]


class _Fit:
    """One least-squares problem; the unknowns are logarithms of coefficients."""

    def __init__(
        self,
        setting: Setting,
        records: Sequence[StepRecord],
        start: Coefficients,
        names: Sequence[str],
    ) -> None:
        self._setting = setting
        self._records = records
        self._measured = np.array([record.seconds for record in records])
        self._weights = self._weights_for(self._measured)
        self._start = start
        self._names = list(names)
        self._start_values = np.array([getattr(start, name) for name in names])

    def solve(self) -> Coefficients:
        try:
            from scipy.optimize import least_squares
        except ImportError as error:
            raise ConfigError("calibrate", "it needs SciPy: pip install scipy") from error
        reach = math.log(LARGEST)
        logs = np.zeros(len(self._names))
        for _ in range(NUM_PASSES):
            logs = least_squares(self._residuals, logs, bounds=(-reach, reach)).x
            self._weights = self._weights_for(self._predict(logs))
        return self._coefficients(logs)

    def _weights_for(self, expected: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(1 / np.sqrt(expected * self._measured.mean()))

    def _predict(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        model = cost_model_of(self._setting, self._coefficients(logs))
        return np.array([model.seconds(record) for record in self._records])

    def _coefficients(self, logs: NDArray[np.float64]) -> Coefficients:
        values = self._start_values * np.exp(logs)
        return replace(self._start, **dict(zip(self._names, values.tolist(), strict=True)))

    def _residuals(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        errors = (self._predict(logs) - self._measured) * self._weights
        return np.concatenate([errors, PRIOR * logs])
