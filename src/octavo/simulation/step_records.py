"""Measured steps as a file: the input of `octavo calibrate`.

JSON lines. The first line says what ran: `{"octavo_steps": 3, "model": {...}, "gpu": ...}`, with
the fields of `Setting`. Each other line is one step, with the fields of `StepRecord`: the amounts
of work in it and how long it took. A `StepRecorder` writes such a file while an engine runs:

    with StepRecorder(engine, path, gpu="h200"):
        ...  # engine.step(), LLM.generate, ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Self

import msgspec

from octavo.core.scheduler import Progress
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.errors import ConfigError, TraceError
from octavo.simulation.cost_model import ModelSize
from octavo.simulation.step_shape import RowLengths, StepShape

FORMAT = 3
Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Setting:
    """What steps were measured on."""

    model: ModelSize  # equal sizes are equal work
    gpu: str
    num_gpus: Count
    block_size: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(StepShape):
    """One measured step: the amounts of work in it, and how long it took."""

    seconds: float  # from the end of the step before to the end of this one
    compute_seconds: float  # of it, as the worker measured; 0 if it did not
    swap_seconds: float

    @classmethod
    def of(
        cls, shape: StepShape, seconds: float, compute_seconds: float, swap_seconds: float
    ) -> StepRecord:
        return cls(
            **asdict(shape),
            seconds=seconds,
            compute_seconds=compute_seconds,
            swap_seconds=swap_seconds,
        )


class StepRecorder:
    """Keeps every step of an engine, as an observer of it, and writes the file when it is left.

    It must begin and end while nothing runs. A step after an idle engine is left out, as its
    start is unknown; so is the first one.
    """

    def __init__(
        self,
        engine: Engine,
        path: str | Path,
        gpu: str,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`gpu`: the name by which `octavo calibrate` and `simulate` know the device. `clock`: in
        seconds; that of the process, say, where other programs take its processor away.

        Raises ConfigError if the engine is busy, or the file cannot be written.
        """
        if engine.has_unfinished:
            raise ConfigError("engine", "steps can be recorded only from an idle engine on")
        model = engine.model_config
        dtype = engine.config.dtype_for(model.dtype)
        kv_bytes = engine.config.cache.element_bytes(dtype)
        num_gpus = engine.executor.capacity.num_ranks
        size = ModelSize.of(model, dtype, kv_bytes, num_gpus)
        setting = Setting(size, gpu, num_gpus, engine.kv.block_size)
        self._path = Path(path)
        self._head = json.dumps({"octavo_steps": FORMAT, **asdict(setting)})
        # What is measured is kept as it comes, and counted at the end: that would take time, too.
        self._seen: list[tuple[StepPlan, float | None, float, float]] = []
        try:
            self._path.write_text("", encoding="utf-8")  # now, rather than fail at the end
        except OSError as error:
            raise ConfigError("path", f"{path} cannot be written: {error.strerror}") from error
        self._engine = engine
        self._clock = clock
        self._window_sizes = model.window_sizes
        self._last_end: float | None = None

    def __enter__(self) -> Self:
        self._engine.observers.append(self._observe)
        return self

    def __exit__(self, *raised: object) -> None:
        self._engine.observers.remove(self._observe)
        self._write()

    def _observe(self, plan: StepPlan, result: StepResult, progress: Progress) -> None:
        end, start = self._clock(), self._last_end
        seconds = None if start is None else end - start
        self._seen.append((plan, seconds, result.compute_seconds, result.swap_seconds))
        self._last_end = end if self._engine.has_unfinished else None

    def _write(self) -> None:
        rows = RowLengths(self._window_sizes)
        lines = [self._head]
        for plan, seconds, compute_seconds, swap_seconds in self._seen:
            shape = rows.follow(plan)
            if seconds is not None and shape.num_tokens:
                times = (seconds, compute_seconds, swap_seconds)
                lines.append(json.dumps(asdict(StepRecord.of(shape, *times))))
        self._path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_step_records(path: str | Path) -> tuple[Setting, list[StepRecord]]:
    """What a recorder has written.

    Raises TraceError with file and line if something in it is broken.
    """
    path = Path(path)
    lines = _lines(path)
    number, head = next(lines, (1, None))
    if not isinstance(head, dict) or head.pop("octavo_steps", None) != FORMAT:
        raise TraceError(f'{path}:{number}: it does not begin with {{"octavo_steps": {FORMAT}, ...')
    try:
        setting = msgspec.convert(head, Setting)
        check_names(asdict(setting), head)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: {error}") from error
    records = [StepRecord(**_checked(path, number, values)) for number, values in lines]
    if not records:
        raise TraceError(f"{path}: it has no steps")
    return setting, records


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}:{number}: it is not JSON ({error})") from error


def _checked(path: Path, number: int, values: Any) -> dict[str, Any]:
    names = [field.name for field in fields(StepRecord)]
    if not isinstance(values, dict) or set(values) != set(names):
        raise TraceError(f"{path}:{number}: it must be an object with {', '.join(names)}")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise TraceError(f"{path}:{number}: {name} is {value!r}, not a number from 0 on")
    return values


def check_names(read: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """That a file gives exactly the fields of what was read from it, to any depth.

    msgspec fills in what has a default, and passes over what it does not know: a file of another
    version would be misread.
    """
    wrong = [f"{name} is missing" for name in sorted(read.keys() - given.keys())]
    wrong += [f"{name} is not known" for name in sorted(given.keys() - read.keys())]
    if wrong:
        raise ValueError(", ".join(wrong))
    for name, value in read.items():
        if isinstance(value, dict):
            check_names(value, given[name])


def total_seconds(records: Sequence[StepRecord]) -> float:
    return sum(record.seconds for record in records)
