"""Whether the server can do its work: what /health and the metrics say."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.server.delivery import Delivery
from octavo.server.supervisor import Supervision, Supervisor


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server can do its work; `reason` says why not."""

    healthy: bool
    reason: str | None
    state: str  # "starting", "ready", "restarting", "draining", "failed" or "closed"
    num_open: int  # requests without an end


def judge(
    supervisor: Supervisor, supervision: Supervision, delivery: Delivery, is_draining: bool
) -> Health:
    """How things stand now."""
    state, stalled = supervisor.state, supervisor.seconds_stalled
    num_open = len(delivery.streams)
    reason = None
    if state not in ("ready", "restarting"):
        reason = f"the engine is {state}" if state != "failed" else "the engine is given up"
    elif stalled >= supervision.stall_seconds:
        what = "no engine process" if state == "restarting" else "no step"
        reason = f"{what} for {stalled:.0f} s while {num_open} requests are open"
    elif is_draining:
        reason = "the server is shutting down"
    shown = "draining" if is_draining and state == "ready" else state
    return Health(reason is None, reason, shown, num_open)
