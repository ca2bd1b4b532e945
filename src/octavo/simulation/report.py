"""Simulations as tables and text for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table

from octavo.bench.report import PARTS, milliseconds
from octavo.bench.tables import columns, facts
from octavo.simulation.calibration import Calibration
from octavo.simulation.planning import Fleet, HighestRate, Probe, Refusal
from octavo.simulation.result import SimulationResult


def simulation_table(result: SimulationResult) -> Table:
    """One run."""
    left = f", {result.num_unfinished} not served" if result.num_unfinished else ""
    rows = [
        ("requests", f"{len(result.requests)} in {result.seconds:.1f} virtual s{left}"),
        ("requests/s", f"{result.requests_per_second:.2f}"),
        ("output tokens/s", f"{result.output_tokens_per_second:.1f}"),
        ("normalized latency", f"{result.normalized_latency:.4f} s/token"),
        ("time to first token", milliseconds(result.time_to_first_token, 0)),
        ("time per output token", milliseconds(result.time_per_output_token, 0)),
        (
            "batch",
            f"{result.mean_batched_requests:.2f} requests, {result.mean_batched_sequences:.2f} "
            f"sequences, mean of {len(result.steps)} steps",
        ),
        ("preemptions", ", ".join(f"{n} by {kind}" for kind, n in result.preemptions.items())),
        ("prefix cache", f"{100 * result.prefix_hit_rate:.1f} % of prompt tokens found"),
        ("sharing", f"saves {100 * result.sharing_saves:.1f} % of KV blocks"),
    ]
    slots = result.mean_slots
    if slots is not None:
        rows.append(("KV slots", f"{int(slots.total):,} in {result.num_blocks:,} blocks"))
        rows += [
            (f"  {title}", f"{100 * getattr(slots, name) / slots.total:.1f} %")
            for name, title in PARTS.items()
        ]
    return facts(rows)


def probe_text(probe: Probe) -> str:
    """One simulation of a search."""
    result = probe.result
    if not probe.is_met:
        return f"{probe.rate:8.3f} requests/s: misses the target"
    return (
        f"{probe.rate:8.3f} requests/s: meets it, {result.normalized_latency:.4f} s/token, "
        f"p99 {result.time_to_first_token.at[99]:.2f} s to the first token and "
        f"{1e3 * result.time_per_output_token.at[99]:.0f} ms for each other, "
        f"{result.mean_batched_requests:.1f} requests per step"
    )


def highest_rate_text(found: HighestRate) -> str:
    """A search for the highest rate."""
    lines = [probe_text(probe) for probe in found.probes]
    if not found.rate:
        return "\n".join([*lines, "no rate meets the target"])
    return "\n".join([*lines, f"highest rate that meets the target: {found.rate:.3f} requests/s"])


def fleets_table(found: Sequence[Fleet | Refusal]) -> RenderableType:
    """The choices, and which has the fewest devices."""
    table = columns("GPUs per engine", "engines", "GPUs", "s/token", "")
    table.columns[-1].justify = "left"
    for choice in found:
        size = str(choice.config.num_gpus)
        if isinstance(choice, Refusal):
            table.add_row(size, "-", "-", "-", choice.reason)
        else:
            latency = f"{choice.result.normalized_latency:.4f}"
            table.add_row(size, str(choice.num_engines), str(choice.num_gpus), latency)
    best = fewest(found)
    if best is None:
        return Group(table, "no choice meets the target")
    many = "engine" if best.num_engines == 1 else "engines"
    return Group(
        table,
        f"fewest: {best.num_gpus} x {best.config.gpu}, as {best.num_engines} {many} on "
        f"{best.config.num_gpus} each",
    )


def fewest(found: Sequence[Fleet | Refusal]) -> Fleet | None:
    """The choice with the fewest devices; of two, the one with the lower latency."""
    fleets = [choice for choice in found if isinstance(choice, Fleet)]
    return min(
        fleets, key=lambda each: (each.num_gpus, each.result.normalized_latency), default=None
    )


def calibration_tables(calibration: Calibration) -> tuple[Table, Table]:
    """The coefficients, and how well they predict."""
    coefficients = facts(
        (
            name,
            f"{value:.4g}"
            + ("" if name in calibration.fitted else "   (no step tells; left as it was)"),
        )
        for name, value in asdict(calibration.coefficients).items()
    )
    errors = columns("error", "steps", "total", "median", "p90")
    for name, error in (
        ("steps fitted to", calibration.on_fitted),
        ("steps held out", calibration.on_held_out),
    ):
        shares = (f"{100 * error.total:+.1f}%", f"{100 * error.median:.1f}%")
        errors.add_row(name, str(error.num_steps), *shares, f"{100 * error.p90:.1f}%")
    return coefficients, errors
