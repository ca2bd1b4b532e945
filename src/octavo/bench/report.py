"""Reports as text for people and as plain values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from octavo.bench.latency import LatencyReport
from octavo.bench.memory_use import SlotUse
from octavo.bench.percentiles import Percentiles
from octavo.bench.throughput import ThroughputReport

PARTS = {
    "token_states": "token states",
    "reservation": "reservation",
    "internal": "internal fragmentation",
    "external": "external fragmentation & others",
}
DEFINITION = """\
  A reservation will still be filled by its sequence; internal fragmentation never; external are
  free blocks. Shared blocks count once. Of the pool: all slots count, as in the paper's figure 2
  (vLLM: 3.7 %). Of held blocks: only those of running requests."""


def throughput_text(report: ThroughputReport) -> str:
    rows = [
        ("requests", f"{report.num_requests} in {report.seconds:.2f} s{_skipped(report)}"),
        ("requests/s", f"{report.requests_per_second:.2f}"),
        ("output tokens/s", f"{report.output_tokens_per_second:.1f}"),
        ("total tokens/s", f"{report.total_tokens_per_second:.1f}"),
        ("time to first token", _percentiles_text(report.time_to_first_token)),
        ("time per output token", _percentiles_text(report.time_per_output_token)),
        ("steps", f"{report.num_steps}, of {report.mean_seqs:.2f} sequences on average"),
        ("preemptions", ", ".join(f"{n} by {kind}" for kind, n in report.preemptions.items())),
        ("prefix cache", f"{100 * report.prefix_hit_rate:.1f} % of prompt tokens found"),
        ("sharing", f"saves {100 * report.sharing_saves:.1f} % of KV blocks"),
    ]
    lines = [f"{name:<24}{value}" for name, value in rows]
    return "\n".join([*lines, "", *_memory_lines(report), DEFINITION])


def throughput_values(report: ThroughputReport) -> dict[str, Any]:
    values = asdict(report)
    for name in ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second"):
        values[name] = getattr(report, name)
    values["saturated"] = report.saturated and _slot_values(report.saturated)
    values["whole_run"] = _slot_values(report.whole_run)
    return values


def latency_text(report: LatencyReport) -> str:
    return (
        f"{'batch latency':<24}{_percentiles_text(report.batch)}\n"
        f"{'first token of all':<24}{_percentiles_text(report.first_token)}\n"
        f"{'iterations':<24}{report.num_iterations}"
    )


def latency_values(report: LatencyReport) -> dict[str, Any]:
    return asdict(report)


def _skipped(report: ThroughputReport) -> str:
    return f" ({report.skipped} too long ones skipped)" if report.skipped else ""


def _percentiles_text(percentiles: Percentiles) -> str:
    at = "  ".join(f"p{percent} {1e3 * value:.1f}" for percent, value in percentiles.at.items())
    return f"mean {1e3 * percentiles.mean:.1f}  {at}  ms"


def _memory_lines(report: ThroughputReport) -> list[str]:
    """Figure 2's table, in percent, with a column for saturated steps if there were any."""
    columns = [(f"whole run ({report.num_steps} steps)", report.whole_run)]
    if report.saturated is not None:
        columns.insert(0, (f"while requests wait ({report.num_saturated_steps})", report.saturated))
    lines = [f"{'KV slots, %':<34}" + "".join(f"{title:>30}" for title, _ in columns)]
    for name, title in PARTS.items():
        lines.append(_memory_line(title, [100 * getattr(s, name) / s.total for _, s in columns]))
    lines.append(_memory_line("waste of the pool", [100 * s.waste_of_pool for _, s in columns]))
    lines.append(_memory_line("waste of held blocks", [100 * s.waste_of_held for _, s in columns]))
    return lines


def _memory_line(title: str, values: list[float]) -> str:
    return f"  {title:<32}" + "".join(f"{value:>30.2f}" for value in values)


def _slot_values(slots: SlotUse) -> dict[str, float]:
    """Percentages of all slots."""
    parts = {name: 100 * getattr(slots, name) / slots.total for name in PARTS}
    return parts | {
        "waste_of_pool": 100 * slots.waste_of_pool,
        "waste_of_held": 100 * slots.waste_of_held,
    }
