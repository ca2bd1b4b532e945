"""How patient the server is with its engine processes, and what it says of their health."""

from __future__ import annotations

from dataclasses import dataclass, fields

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Supervision:
    """The supervisor's limits. Times in seconds."""

    max_waiting: int = 1024
    """Requests that may wait for their first block; more are refused with 429."""
    stall_seconds: float = 30.0
    """After this long without a step while requests wait, /health answers 503."""
    hang_seconds: float = 300.0
    """After this long without a step while requests wait, the engine process is replaced."""
    start_seconds: float = 1800.0
    """How long an engine process may take to become ready."""
    max_fruitless_restarts: int = 5
    """Restarts in a row, without a new token, until the engine is given up."""
    revival_seconds: float = 30.0
    """Until the next attempt to start an engine that was given up; doubles up to 8 minutes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(field.name, f"{value} is not positive")


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server can serve requests, for /health and the metrics."""

    healthy: bool
    reason: str | None  # why not
    state: str  # "starting", "ready", "restarting", "draining", "failed" or "closed"
    num_open: int  # requests that have not ended
