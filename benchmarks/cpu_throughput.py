"""octavo's throughput on this machine's CPU: the workload of peers.py, without the peers.

Prints medians, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

from harness import CASES, Measurement, measure, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=names, default=["15m-fp32", "15m-bf16"])
    parser.add_argument(
        "--library",
        action="store_true",
        help="run as inside another program: octavo does not tune the process (owns_process=False)",
    )
    parser.add_argument(
        "--quantization",
        choices=["fp8", "int8", "int4"],
        help="run each case also with projections quantized on load, in turns",
    )
    args = parser.parse_args()
    print(f"{'case':<16}{'weights':<9}{'tok/s':>9}{'tok/cpu-s':>11}{'ready s':>9}{'MB':>7}")
    results = {}
    variants = [None, args.quantization] if args.quantization else [None]
    for case in CASES:
        if case.name not in args.cases:
            continue
        runs: dict[str | None, list[Measurement]] = {each: [] for each in variants}
        for _ in range(args.repeat):
            for each in variants:
                measured = measure(
                    "octavo",
                    case,
                    args.threads,
                    owns_process=not args.library,
                    quantization=each,
                )
                runs[each].append(measured)
        for each in variants:
            values = summary(runs[each])
            results[case.name if each is None else f"{case.name} {each}"] = values
            print(
                f"{case.name:<16}{each or 'as is':<9}{values['tokens_per_second']:>9.1f}"
                f"{values['tokens_per_cpu_second']:>11.1f}{values['ready_seconds']:>9.2f}"
                f"{values['peak_rss_mb']:>7.0f}",
                flush=True,
            )
        if args.quantization:
            pairs = zip(runs[args.quantization], runs[None], strict=True)
            ratios = [one.tokens_per_second / other.tokens_per_second for one, other in pairs]
            ratio = statistics.median(ratios)
            results[f"{case.name} {args.quantization}"]["speedup"] = round(ratio, 3)
            print(f"{'':<16}{args.quantization} is {ratio:.2f} times as fast", flush=True)
    print(
        json.dumps(
            {
                "benchmark": "cpu_throughput",
                "threads": args.threads,
                "library": args.library,
                "cases": results,
            }
        )
    )


if __name__ == "__main__":
    main()
