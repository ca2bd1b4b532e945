"""How much is simulated: short traces by default, the paper's own lengths on request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Scale:
    """Seconds of arrivals, and where a steady state is measured in them."""

    name: str
    # Sweeps of basic sampling. The systems of a plot have the same, and the slowest need many
    # requests, too.
    sharegpt_seconds: float
    sharegpt_66b_seconds: float  # it serves few requests per second, so a run must be long
    sharegpt_175b_seconds: float
    alpaca_seconds: float
    busy_seconds: float  # figure 14, whose steps hold the most sequences
    translation_seconds: float  # figure 16
    block_size_seconds: float  # figures 18b and 19b: single rates
    # Figures 2 and 15 look at a window of a run, figure 13 at a later one.
    window: tuple[float, float]
    late_window: tuple[float, float]
    resolution: float  # a sweep ends when the sustained rate is known to this share
    measurements: Path | None = None  # a directory with *.json, see `measurements`

    def with_measurements(self, folder: Path) -> Scale:
        """The same with measurements on a GPU, if there are any."""
        return replace(self, measurements=folder if folder.is_dir() else None)

    def trace_seconds(self, source: str, model: str) -> float:
        """How long requests arrive in a sweep."""
        if source == "sharegpt":
            longer = {
                "opt-66b": self.sharegpt_66b_seconds,
                "opt-175b": self.sharegpt_175b_seconds,
            }
            return longer.get(model, self.sharegpt_seconds)
        return self.alpaca_seconds

    @property
    def description(self) -> str:
        return (
            f"{self.name}. Requests arrive for {self.sharegpt_seconds:g} s on ShareGPT "
            f"({self.sharegpt_66b_seconds:g} s with OPT-66B, {self.sharegpt_175b_seconds:g} s with "
            f"OPT-175B), {self.alpaca_seconds:g} s on "
            f"Alpaca, {self.busy_seconds:g} s in figure 14, {self.translation_seconds:g} s in "
            f"figure 16, and "
            f"{self.block_size_seconds:g} s in figures 18 and 19, and all are served; steady "
            f"states are means over the steps from {self.window[0]:g} to {self.window[1]:g} s, in "
            f"figure 13 from {self.late_window[0]:g} to {self.late_window[1]:g} s"
        )


QUICK = Scale(
    "quick",
    sharegpt_seconds=1200.0,
    sharegpt_66b_seconds=3600.0,
    sharegpt_175b_seconds=900.0,
    alpaca_seconds=600.0,
    busy_seconds=150.0,
    translation_seconds=600.0,
    block_size_seconds=600.0,
    window=(300.0, 900.0),
    late_window=(600.0, 1800.0),
    resolution=0.08,
)
# As in the paper; the windows, and figure 16's 20 minutes, are those of the artifact.
FULL = Scale(
    "full",
    sharegpt_seconds=3600.0,
    sharegpt_66b_seconds=3600.0,
    sharegpt_175b_seconds=900.0,
    alpaca_seconds=3600.0,
    busy_seconds=3600.0,
    translation_seconds=1200.0,
    block_size_seconds=3600.0,
    window=(300.0, 900.0),
    late_window=(600.0, 3600.0),
    resolution=0.02,
)
