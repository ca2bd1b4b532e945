"""How pictures look: colours that readers with any colour vision can tell apart, and the canvas.

Uses matplotlib's objects without pyplot, so that its style is the only global state changed, and
that only while a picture is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
)
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 4,
    "lines.linewidth": 1.6,
    "savefig.dpi": 150,
    "svg.hashsalt": "octavo",  # the same picture gives the same file
    "figure.constrained_layout.use": True,
}
PANEL = (3.5, 2.7)  # inches


def require_matplotlib() -> None:
    """Raises OctavoError if it is not installed."""
    if find_spec("matplotlib") is None:
        raise OctavoError(
            "figures are drawn with matplotlib, which is not installed: pip install matplotlib"
        )


@contextmanager
def canvas(
    folder: Path, stem: str, rows: int = 1, columns: int = 1, panel: tuple[float, float] = PANEL
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A grid of axes, row by row, that is saved as PNG and SVG when the block ends.

    Raises OctavoError if matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(panel[0] * columns, panel[1] * rows))
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, [each for row in axes for each in row]
        figure.savefig(folder / f"{stem}.png", metadata={"Software": "octavo"})
        figure.savefig(folder / f"{stem}.svg", metadata={"Date": None})
