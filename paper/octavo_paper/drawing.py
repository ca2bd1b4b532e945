"""One look for all figures: ours solid, the paper's dotted, colours that everybody can tell apart.

Uses matplotlib's objects without pyplot, so that nothing global is changed but its style, and that
only while a figure is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
COLOURS = {
    "vllm": BLUE,
    "orca-oracle": ORANGE,
    "orca-pow2": GREEN,
    "orca-max": RED,
    "fastertransformer": PURPLE,
}
MARKERS = {
    "vllm": "o",
    "orca-oracle": "s",
    "orca-pow2": "^",
    "orca-max": "v",
    "fastertransformer": "D",
}
NAMES = {
    "vllm": "paged (octavo; vLLM in the paper)",
    "orca-oracle": "Orca (Oracle)",
    "orca-pow2": "Orca (Pow2)",
    "orca-max": "Orca (Max)",
    "fastertransformer": "FasterTransformer",
}
SHORT_NAMES = NAMES | {"vllm": "paged"}
SOURCE_NAMES = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
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
PAPER_LINE: dict[str, Any] = {"linestyle": ":", "linewidth": 1.6}
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


def legend_below(figure: Figure, axes: Axes, columns: int = 5) -> None:
    """One legend for all axes, under them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def paper_key(axes: Axes, label: str = "the paper") -> None:
    """An entry of the legend for dotted lines."""
    axes.plot([], [], color="#555555", label=label, **PAPER_LINE)


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: dict[str, Sequence[float]],
    colours: dict[str, str],
    paper: dict[str, Sequence[float | None]] | None = None,
    digits: int = 1,
) -> None:
    """Bars side by side in groups, each with its number; the paper's as dotted lines across."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        left = [i - 0.4 + width * (number + 0.5) for i in range(len(groups))]
        drawn = axes.bar(left, values, 0.92 * width, color=colours[name], label=name)
        axes.bar_label(drawn, fmt=f"%.{digits}f", fontsize=6.5, padding=1.5)
        for x, value in zip(left, (paper or {}).get(name, ()), strict=False):
            if value is not None:
                axes.hlines(value, x - 0.46 * width, x + 0.46 * width, BLACK, ":", linewidth=1.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.12)
