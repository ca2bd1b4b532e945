"""octavo's throughput on this machine's CPU: the workload of peers.py, without the peers.

Prints medians, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import os

from harness import CASES, measure, summary


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
    args = parser.parse_args()
    print(f"{'case':<16}{'tok/s':>9}{'tok/cpu-s':>11}{'ready s':>9}{'MB':>7}")
    results = {}
    for case in CASES:
        if case.name not in args.cases:
            continue
        values = summary(
            [
                measure("octavo", case, args.threads, owns_process=not args.library)
                for _ in range(args.repeat)
            ]
        )
        results[case.name] = values
        print(
            f"{case.name:<16}{values['tokens_per_second']:>9.1f}"
            f"{values['tokens_per_cpu_second']:>11.1f}{values['ready_seconds']:>9.2f}"
            f"{values['peak_rss_mb']:>7.0f}",
            flush=True,
        )
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
