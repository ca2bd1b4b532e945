"""Points in a device's queue of work: to wait for, and to measure between."""

from __future__ import annotations

from time import perf_counter

import torch


class Moment:
    """The end of what the current stream has been given so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._time = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._time = perf_counter()  # a CPU has done it by now

    def wait(self) -> None:
        """Return when the device has come here."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Of the device's time; both must have been reached."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1e3
