"""Progress of a search over simulations, on stderr: a line for each, and a bar on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from octavo.simulation.config import SimulationConfig
    from octavo.simulation.planning import Probe, SearchProgress


def search_progress() -> SearchProgress:
    """Shows each simulation when it begins, and its outcome."""
    from tqdm import tqdm

    from octavo.simulation.planning import SearchProgress
    from octavo.simulation.report import probe_text

    class ShownProgress(SearchProgress):
        def __init__(self) -> None:
            self._machine = ""
            self._bar: Any = None

        def begin(self, config: SimulationConfig, rate: float, num_requests: int) -> None:
            self._machine = f"{config.num_gpus} x {config.gpu}"
            is_terminal = sys.stderr.isatty()
            if not is_terminal:
                click.echo(
                    f"{self._machine} {rate:8.3f} requests/s: simulating {num_requests} requests",
                    err=True,
                )
            self._bar = tqdm(
                total=num_requests,
                desc=f"{self._machine} {rate:8.3f} requests/s",
                unit="requests",
                disable=not is_terminal,
                leave=False,
            )

        def advance(self, num_requests: int) -> None:
            self._bar.update(num_requests)

        def end(self, probe: Probe) -> None:
            self._bar.close()
            click.echo(f"{self._machine} {probe_text(probe)}", err=True)

    return ShownProgress()
