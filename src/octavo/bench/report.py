"""Reports as tables for people and as plain values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from octavo.bench.latency import LatencyReport
from octavo.bench.memory_use import SlotUse
from octavo.bench.percentiles import Percentiles
from octavo.bench.tables import columns, facts
from octavo.bench.throughput import ThroughputReport

PARTS = {
    "token_states": "token states",
    "reservation": "reservation",
    "internal": "internal fragmentation",
    "external": "external fragmentation & others",
}
DEFINITION = """\
  A reservation will still be filled by its sequence; internal fragmentation never; external are
  free blocks. Shared blocks count once. Percentages of the pool count all slots, as in the
  paper's figure 2 (vLLM: 3.7 %); those of held blocks only the slots of running requests."""


def throughput_tables(report: ThroughputReport) -> tuple[RenderableType, ...]:
    """The run, and the four parts of the paper's figure 2."""
    shares = []
    if report.share_of_unstructured is not None:
        share = f"{100 * report.share_of_unstructured:.1f} % of the tokens/s without it"
        shares.append(("with a schema", share))
    run = facts(
        [
            *shares,
            ("requests", f"{report.num_requests} in {report.seconds:.2f} s{_skipped(report)}"),
            ("requests/s", f"{report.requests_per_second:.2f}"),
            ("output tokens/s", f"{report.output_tokens_per_second:.1f}"),
            ("total tokens/s", f"{report.total_tokens_per_second:.1f}"),
            ("time to first token", milliseconds(report.time_to_first_token)),
            ("time per output token", milliseconds(report.time_per_output_token)),
            ("steps", f"{report.num_steps}, of {report.mean_seqs:.2f} sequences on average"),
            ("preemptions", ", ".join(f"{n} by {kind}" for kind, n in report.preemptions.items())),
            ("prefix cache", f"{100 * report.prefix_hit_rate:.1f} % of prompt tokens found"),
            ("sharing", f"saves {100 * report.sharing_saves:.1f} % of KV blocks"),
        ]
    )
    return run, "", _memory_table(report), DEFINITION


def throughput_values(report: ThroughputReport) -> dict[str, Any]:
    values = asdict(report)
    for name in ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second"):
        values[name] = getattr(report, name)
    values["saturated"] = report.saturated and _slot_values(report.saturated)
    values["whole_run"] = _slot_values(report.whole_run)
    return values


def latency_table(report: LatencyReport) -> Table:
    return facts(
        [
            ("batch latency", milliseconds(report.batch)),
            ("first token of all", milliseconds(report.first_token)),
            ("iterations", str(report.num_iterations)),
        ]
    )


def _skipped(report: ThroughputReport) -> str:
    return f" ({report.skipped} too long ones skipped)" if report.skipped else ""


def milliseconds(percentiles: Percentiles, digits: int = 1) -> str:
    """Mean and percentiles in one line."""
    at = "  ".join(f"p{p} {1e3 * value:.{digits}f}" for p, value in percentiles.at.items())
    return f"mean {1e3 * percentiles.mean:.{digits}f}  {at}  ms"


def _memory_table(report: ThroughputReport) -> Table:
    """Figure 2's table, in percent, with a column for saturated steps if there were any."""
    of_steps = {f"whole run ({report.num_steps} steps)": report.whole_run}
    if report.saturated is not None:
        of_steps = {f"while requests wait ({report.num_saturated_steps})": report.saturated} | (
            of_steps
        )
    table = columns("KV slots, %", *of_steps)
    names = PARTS | {
        "waste_of_pool": "waste of the pool",
        "waste_of_held": "waste of held blocks",
    }
    for name, title in names.items():
        values = [_slot_values(slots)[name] for slots in of_steps.values()]
        table.add_row(f"  {title}", *(f"{value:.2f}" for value in values))
    return table


def _slot_values(slots: SlotUse) -> dict[str, float]:
    """Percentages of all slots."""
    parts = {name: 100 * getattr(slots, name) / slots.total for name in PARTS}
    return parts | {
        "waste_of_pool": 100 * slots.waste_of_pool,
        "waste_of_held": 100 * slots.waste_of_held,
    }
