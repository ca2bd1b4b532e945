"""Simulations as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.bench.percentiles import Percentiles
from octavo.bench.report import PARTS
from octavo.simulation.calibration import Calibration, FitError
from octavo.simulation.planning import Fleet, HighestRate, Probe, Refusal
from octavo.simulation.result import SimulationResult


def simulation_text(result: SimulationResult) -> str:
    """One run."""
    left = f", {result.num_unfinished} not served" if result.num_unfinished else ""
    rows = [
        ("requests", f"{len(result.requests)} in {result.seconds:.1f} virtual s{left}"),
        ("requests/s", f"{result.requests_per_second:.2f}"),
        ("output tokens/s", f"{result.output_tokens_per_second:.1f}"),
        ("normalized latency", f"{result.normalized_latency:.4f} s/token"),
        ("time to first token", percentiles_text(result.time_to_first_token)),
        ("time per output token", percentiles_text(result.time_per_output_token)),
        (
            "batch",
            f"{result.mean_batched_requests:.2f} requests, {result.mean_batched_sequences:.2f} "
            f"sequences, mean of {len(result.steps)} steps",
        ),
        ("preemptions", ", ".join(f"{n} by {kind}" for kind, n in result.preemptions.items())),
        ("prefix cache", f"{100 * result.prefix_hit_rate:.1f} % of prompt tokens found"),
        ("sharing", f"saves {100 * result.sharing_saves:.1f} % of KV blocks"),
    ]
    lines = [f"{name:<24}{value}" for name, value in rows]
    slots = result.mean_slots
    if slots is not None:
        lines.append(f"{'KV slots':<24}{int(slots.total):,} in {result.num_blocks:,} blocks")
        lines += [
            f"  {title:<32}{100 * getattr(slots, name) / slots.total:6.1f} %"
            for name, title in PARTS.items()
        ]
    return "\n".join(lines)


def percentiles_text(percentiles: Percentiles) -> str:
    """In milliseconds."""
    shown = "  ".join(f"p{p} {1e3 * percentiles.at[p]:.0f}" for p in (50, 90, 99))
    return f"mean {1e3 * percentiles.mean:.0f}  {shown}  ms"


def probe_text(probe: Probe) -> str:
    """One simulation of a search."""
    result = probe.result
    if not probe.is_met:
        return f"{probe.rate:8.3f} requests/s: misses the target"
    return (
        f"{probe.rate:8.3f} requests/s: meets it, {result.normalized_latency:.4f} s/token, "
        f"p99 {result.time_to_first_token.at[99]:.2f} s to the first token and "
        f"{1e3 * result.time_per_output_token.at[99]:.0f} ms for each other, "
        f"{result.mean_batched_requests:.1f} requests a step"
    )


def highest_rate_text(found: HighestRate) -> str:
    """A search of the highest rate."""
    lines = [probe_text(probe) for probe in found.probes]
    if not found.rate:
        return "\n".join([*lines, "no rate meets the target"])
    return "\n".join([*lines, f"highest rate that meets the target: {found.rate:.3f} requests/s"])


def fleets_text(found: Sequence[Fleet | Refusal]) -> str:
    """A table of choices, and the one with the fewest devices."""
    lines = [f"{'GPUs an engine':>15}{'engines':>9}{'GPUs':>6}{'s/token':>10}"]
    for choice in found:
        size = choice.config.num_gpus
        if isinstance(choice, Refusal):
            lines.append(f"{size:>15}  {choice.reason}")
        else:
            latency = choice.result.normalized_latency
            lines.append(f"{size:>15}{choice.num_engines:>9}{choice.num_gpus:>6}{latency:>10.4f}")
    best = fewest(found)
    if best is None:
        return "\n".join([*lines, "no choice meets the target"])
    many = "engine" if best.num_engines == 1 else "engines"
    return "\n".join(
        [
            *lines,
            f"fewest: {best.num_gpus} x {best.config.gpu}, as {best.num_engines} {many} on "
            f"{best.config.num_gpus} each",
        ]
    )


def fewest(found: Sequence[Fleet | Refusal]) -> Fleet | None:
    """The choice with the fewest devices; of two, the one with the lower latency."""
    fleets = [choice for choice in found if isinstance(choice, Fleet)]
    return min(
        fleets, key=lambda each: (each.num_gpus, each.result.normalized_latency), default=None
    )


def calibration_text(calibration: Calibration) -> str:
    """What was learnt, and how well it predicts."""
    coefficients = calibration.coefficients
    lines = [
        f"{name:<22}{getattr(coefficients, name):.4g}"
        + ("" if name in calibration.fitted else "   (no step tells; left as it was)")
        for name in coefficients.__dataclass_fields__
    ]
    lines.append(f"{'error':<22}{'steps':>8}{'total':>10}{'median':>10}{'p90':>10}")
    lines.append(_error_line("steps fitted to", calibration.on_fitted))
    lines.append(_error_line("steps held out", calibration.on_held_out))
    return "\n".join(lines)


def _error_line(name: str, error: FitError) -> str:
    return (
        f"{name:<22}{error.num_steps:>8}{100 * error.total:>+9.1f}%"
        f"{100 * error.median:>9.1f}%{100 * error.p90:>9.1f}%"
    )
