"""The counts and violations of one part of the soak test."""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

MAX_SHOWN = 20  # violations that are shown in full
PROGRESS_SECONDS = 15.0


@dataclass
class Report:
    """One part, which ends when its work is done or its time is up."""

    part: str
    seconds: float  # time limit
    counts: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    num_violations: int = 0
    _start: float = field(default_factory=time.monotonic)
    _shown: float = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def is_late(self) -> bool:
        return self.elapsed >= self.seconds

    def count(self, name: str, amount: float = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount
        if self.elapsed - self._shown >= PROGRESS_SECONDS:
            self._shown = self.elapsed
            self.show()

    def violate(self, message: str) -> None:
        self.num_violations += 1
        if len(self.violations) < MAX_SHOWN:
            self.violations.append(message)
            print(f"{self.part}: VIOLATION: {message}", flush=True)

    def require(self, name: str, minimum: int) -> None:
        """Report a violation if a part did less work than it should have."""
        done = self.counts.get(name, 0)
        if done < minimum:
            self.violate(f"only {done:.0f} of {minimum} {name} in {self.elapsed:.0f} s")

    def show(self) -> None:
        counts = ", ".join(f"{value:g} {name}" for name, value in self.counts.items())
        print(f"{self.part}: {self.elapsed:.0f} s, {counts}", flush=True)

    def values(self) -> dict[str, object]:
        return {
            "seconds": round(self.elapsed, 1),
            **self.counts,
            "violations": self.num_violations,
            "first_violations": self.violations,
        }


class Memory:
    """Samples the resident memory of a process, which may grow by `bound_mib` after its warm-up."""

    def __init__(self, pid: int | str, bound_mib: float, name: str = "") -> None:
        """name: what counts of this process begin with."""
        self._pid = pid
        self._name = name
        self._bound = bound_mib
        self.samples: list[tuple[float, float]] = []  # time, MiB

    def sample(self) -> None:
        status = Path(f"/proc/{self._pid}/status").read_text()
        [kib] = re.findall(r"^VmRSS:\s+(\d+)", status, re.M)
        self.samples.append((time.monotonic(), int(kib) / 1024))

    def check_growth(self, report: Report) -> None:
        """Growth is the slope of a line through the last two thirds, times their duration."""
        warm = self.samples[len(self.samples) // 3 :]
        report.counts[f"{self._name}rss_mib"] = round(self.samples[-1][1], 1)
        if len(warm) < 3:
            return
        times, sizes = zip(*warm, strict=True)
        growth = statistics.linear_regression(times, sizes).slope * (times[-1] - times[0])
        report.counts[f"{self._name}rss_growth_mib"] = round(growth, 2)
        if growth > self._bound:
            report.violate(
                f"{self._name}memory grew by {growth:.1f} MiB, more than {self._bound} MiB"
            )
