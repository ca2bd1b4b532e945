"""One look for all figures: ours solid, the paper's dotted, a colour and a marker per system."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.simulation.drawing import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
PAPER_LINE: dict[str, Any] = {"linestyle": ":", "linewidth": 1.6}


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
