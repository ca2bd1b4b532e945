"""Whether the server can serve requests, for /health and the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.server.engine_process.delivery import Delivery
from octavo.server.engine_process.supervisor import Supervision, Supervisor


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server can serve requests; `reason` says why not."""

    healthy: bool
    reason: str | None
    state: str  # "starting", "ready", "restarting", "draining", "failed" or "closed"
    num_open: int  # requests that have not ended


def health_of(
    supervisor: Supervisor, supervision: Supervision, delivery: Delivery, is_draining: bool
) -> Health:
    """The server's present health."""
    state, stalled = supervisor.state, supervisor.seconds_stalled
    num_open = len(delivery.streams)
    reason = None
    if state == "failed":
        seconds = supervisor.seconds_to_revival
        reason = "the engine is given up"
        reason += "" if seconds is None else f"; it is started again in {seconds:.0f} s"
    elif state not in ("ready", "restarting"):
        reason = f"the engine is {state}"
    elif stalled >= supervision.stall_seconds:
        what = "no engine process" if state == "restarting" else "no step"
        reason = f"{what} for {stalled:.0f} s while {num_open} requests are open"
    elif is_draining:
        reason = "the server is shutting down"
    shown = "draining" if is_draining and state == "ready" else state
    return Health(reason is None, reason, shown, num_open)
