"""Virtual time, which passes only when it is set."""

from __future__ import annotations


class VirtualClock:
    """Seconds from the start of a simulation; called like `time.monotonic`, and settable."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
