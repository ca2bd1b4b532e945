"""Starts the engine process, watches it, and starts another when it is gone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Supervision:
    """How patient the supervisor is. Times in seconds."""

    max_waiting: int = 1024  # requests that may wait for their first block; more are refused
    stall_seconds: float = 30.0  # without a step while work waits: unhealthy
    hang_seconds: float = 300.0  # the same: the engine process is killed and replaced
    start_seconds: float = 1800.0  # for an engine process to become ready
    max_fruitless_restarts: int = 5  # in a row, without a new token: the engine is given up
