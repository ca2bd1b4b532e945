"""What the engine's process and its ranks tell each other. Loads no torch.

    engine to rank    Start; then plans, and between them ASK: the result of the oldest step is due
    rank to engine    Ready or Failed; then LogLines, and StepResults from rank 0, Failed from any

Messages are pickled: both ends run the same program. They come over a socket pair, which has no
address that others could connect to, or over a connection whose ends have proved that they know a
secret (rank_sockets.py).
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from octavo.config import EngineConfig
from octavo.core.step import BlockCopy, Fork, OpenedRow, StepPlan, TableWrite
from octavo.errors import EngineFailed, OctavoError, lines_of_code, without_values
from octavo.executor.base import KVCapacity
from octavo.models.config import ModelConfig
from octavo.parallel import Shard

ASK = b""

encode = partial(pickle.dumps, protocol=5)
decode: Any = pickle.loads


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: take part in a group. The reply is Ready or Failed."""

    config: EngineConfig
    model_config: ModelConfig
    shard: Shard
    neighbours: Shard  # which of the group's ranks on its host it is, and how many they are
    address: str  # where the ranks meet; see connect
    log_level: int  # as in the logging module; records are sent back as LogLine


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank that can compute."""

    config: EngineConfig  # with what follows from the device
    model_config: ModelConfig  # the whole model, as the device has its weights
    is_asynchronous: bool
    capacity: KVCapacity  # of all ranks; the budget is this one's


@dataclass(frozen=True, slots=True)
class Failed:
    """What went wrong in a rank, which ends."""

    error: OctavoError
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException, in_server: bool) -> Failed:
        """What a rank says of the error that it ends with; in_server: once it computes requests
        of others, whose prompts must not come into the log."""
        if in_server:
            text, where = without_values(error), lines_of_code(error)
        else:
            text = f"{type(error).__name__}: {error}"
            where = "".join(traceback.format_exception(error))
        if not isinstance(error, OctavoError):
            error = EngineFailed(f"rank {rank}: {text}")
        return cls(error, where)


class LogLine(NamedTuple):
    """A log record of a rank."""

    time: float  # as of time.time
    level: int
    logger: str
    text: str


# A plan's named tuples are sent as plain ones, which takes a fifth of the time.
_ROWS: dict[str, Any] = {
    "forks": Fork,
    "opened": OpenedRow,
    "table_writes": TableWrite,
    "copies": BlockCopy,
}
_PLAN_FIELDS = tuple(field.name for field in fields(StepPlan))
_plan_values = attrgetter(*_PLAN_FIELDS)


def encode_plan(plan: StepPlan) -> bytes:
    """A plan, to be decoded by `decode_plan`."""
    columns = dict(zip(_PLAN_FIELDS, _plan_values(plan), strict=True))
    for name in _ROWS:
        columns[name] = [*map(tuple, columns[name])]
    return encode(tuple(columns.values()))


def decode_plan(payload: bytes) -> StepPlan:
    """The plan that `encode_plan` has encoded."""
    columns = dict(zip(_PLAN_FIELDS, decode(payload), strict=True))
    for name, kind in _ROWS.items():
        columns[name] = [*map(kind._make, columns[name])]
    return StepPlan(**columns)
