"""Figure 15: memory saved by sharing blocks among samples and beams."""

from __future__ import annotations

from pathlib import Path

from octavo.simulation.drawing import BLUE, SKY, canvas
from octavo.simulation.workloads import WorkloadSpec
from octavo_paper.beams import FITTED_SPACING
from octavo_paper.demo_sharing import DemoSharing
from octavo_paper.jobs import Job, Results
from octavo_paper.paper_values import FIGURE_15, FIGURE_15_RATE, FIGURE_15_SHAREGPT
from octavo_paper.report import Report, Row, Table, Target
from octavo_paper.scale import Scale
from octavo_paper.simulations import Scenario, SteadyState

NAME = "fig15"
TITLE = "Figure 15: memory saved by sharing"
TITLES = {"parallel": "parallel sampling", "beam": "beam search"}
TARGETS = {"parallel": Target(2, "points"), "beam": Target(10, "points")}
FITTED_ON = ("beam", 2)
WIDTHS = (2, 4, 6)


def job(kind: str, width: int, scale: Scale, source: str = "alpaca") -> SteadyState:
    start, end = scale.window
    workload = WorkloadSpec(
        source,
        FIGURE_15_RATE,
        end,
        n=width if kind == "parallel" else 1,
        beam_width=width if kind == "beam" else None,
    )
    scenario = Scenario("opt-13b", "vllm", workload, beam_spacing=FITTED_SPACING)
    return SteadyState(scenario, start, end)


def demo_job(kind: str, width: int) -> DemoSharing:
    return DemoSharing(n=width) if kind == "parallel" else DemoSharing(beam_width=width)


def jobs(scale: Scale) -> list[Job]:
    found: list[Job] = []
    for kind in FIGURE_15:
        for width in WIDTHS:
            found += [job(kind, width, scale), job(kind, width, scale, "sharegpt")]
            found.append(demo_job(kind, width))
    return found


def make(results: Results, scale: Scale, folder: Path) -> Report:
    def saved(of: Job) -> float:
        return 100 * float(results[of]["sharing_saves"])

    rows, real, sharegpt = [], [], []
    for kind, paper in FIGURE_15.items():
        for width, value in paper.items():
            label = f"{TITLES[kind]}, {width}"
            real.append(Row(label, saved(demo_job(kind, width)), value))
            target: Target | None = TARGETS[kind]
            if (kind, width) == FITTED_ON:
                label, target = f"{label} (fitted)", None
            rows.append(Row(label, saved(job(kind, width, scale)), value, target))
        # The text names the range over the three widths.
        for width, bound in zip((2, 6), FIGURE_15_SHAREGPT[kind], strict=True):
            ours = saved(job(kind, width, scale, "sharegpt"))
            sharegpt.append(Row(f"{TITLES[kind]}, {width}", ours, bound))
    _draw(folder, rows, real)
    return Report(
        NAME,
        TITLE,
        "Simulated: OPT-13B on an A100 of 40 GB, Alpaca at 20 requests/s; 1 - 1 / mean over steps "
        "of (entries in block tables / blocks behind them), as in the artifact.",
        [
            Table("Saved, percent of blocks", rows),
            Table("The real engine with the demo model", real),
            Table("ShareGPT, simulated", sharegpt),
        ],
        [NAME],
        [
            "How simulated beams descend from each other: the likeliest next token of a beam has a "
            "surprise (negative log-probability) drawn from an exponential distribution of mean 1, "
            "and each further candidate is less likely by a gap, exponential with mean "
            f"{FITTED_SPACING:g}. octavo's own beam search then decides who survives. The mean of "
            "the gaps was fitted to the paper's saving at width 2; widths 4 and 6 follow.",
            "As in the artifact, a request's samples count from the step of its prompt on, when "
            "all share it.",
            "Beside it, the real engine runs the demo model on a CPU, with Alpaca's lengths on the "
            "beginnings of held-out stories. Its savings depend on how sure of itself that small "
            "model is, so it need not agree with OPT-13B's; what it shows is that sharing works "
            "in the engine itself.",
        ],
    )


def _draw(folder: Path, rows: list[Row], real: list[Row]) -> None:
    with canvas(folder, NAME, columns=2) as (_, panels):
        for number, (axes, kind) in enumerate(zip(panels, FIGURE_15, strict=True)):
            part = slice(number * len(WIDTHS), (number + 1) * len(WIDTHS))
            for x, (row, measured) in enumerate(zip(rows[part], real[part], strict=True)):
                for side, value, colour, label in (
                    (-0.2, row.ours, BLUE, "simulated OPT-13B"),
                    (0.2, measured.ours, SKY, "demo model, real engine"),
                ):
                    drawn = axes.bar(
                        x + side, value or 0.0, 0.38, color=colour, label=label if not x else None
                    )
                    axes.bar_label(drawn, fmt="%.1f", fontsize=7, padding=1)
                axes.hlines(
                    row.paper or 0.0,
                    x - 0.4,
                    x + 0.4,
                    "black",
                    ":",
                    linewidth=2,
                    label="the paper" if not x else "",
                )
            axes.set_xticks(range(len(WIDTHS)), [str(width) for width in WIDTHS])
            axes.set_xlabel("samples" if kind == "parallel" else "beams")
            axes.set_title(TITLES[kind])
            axes.grid(axis="x", visible=False)
            axes.margins(y=0.5)
        panels[0].set_ylabel("blocks saved, %")
        panels[0].legend(loc="upper left")
