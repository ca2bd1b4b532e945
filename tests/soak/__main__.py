"""A soak test in four parts: `make soak`.

*Kills*: `kill -9` of the engine process at random moments, under load with every decoding method;
no answer may be lost or altered. *Malformed*: requests that no client should send, through raw
sockets; no answer may be 5xx, none may hang, and the engine process may not die. *Offline*: random
work with pins, swaps and aborts; no request may fail or be lost. *Rescored*: such work for a tiny
model, whose tokens and log-probabilities are computed a second time. In all parts no block may
leak, and where nothing is killed or computed again, memory must stay flat.

All random choices follow from the seed, except for timing. Prints progress, and one JSON line at
the end; the exit status is 1 if anything was violated, or if a part did not finish its work in
time. All connections are to the loopback address, and all processes end with the run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable

from soak import kills, malformed, offline, rescored
from soak.report import Report

MINUTES = 60.0
NUM_KILLS = 100
NUM_MALFORMED = 100_000
MOST_RESCORED = 1000  # results, which takes a minute
# Fractions of the time; the first two parts end sooner if they have finished their work.
TIME_FRACTIONS = {"kills": 0.5, "malformed": 0.33, "offline": 0.12, "rescored": 0.05}


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description="See tests/soak/__main__.py.")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor of the time and of all counts"
    )
    parser.add_argument("--minutes", type=float, help=f"time limit; default: {MINUTES:g} x scale")
    parser.add_argument("--kills", type=int, help=f"default: {NUM_KILLS} x scale")
    parser.add_argument("--malformed", type=int, help=f"default: {NUM_MALFORMED} x scale")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=TIME_FRACTIONS, default=list(TIME_FRACTIONS))
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that servers are stopped
    minutes = MINUTES * args.scale if args.minutes is None else args.minutes
    num_kills = round(NUM_KILLS * args.scale) if args.kills is None else args.kills
    count = round(NUM_MALFORMED * args.scale) if args.malformed is None else args.malformed
    seconds = {part: 60 * minutes * fraction for part, fraction in TIME_FRACTIONS.items()}
    parts: dict[str, Callable[[], Report]] = {
        "kills": lambda: kills.run(args.seed, num_kills, seconds["kills"]),
        "malformed": lambda: malformed.run(args.seed, count, seconds["malformed"]),
        "offline": lambda: offline.run(args.seed, seconds["offline"]),
        "rescored": lambda: rescored.run("tiny", args.seed, seconds["rescored"], MOST_RESCORED),
    }
    reports = [parts[part]() for part in args.parts]
    num_violations = sum(report.num_violations for report in reports)
    summary = dict(zip(args.parts, (report.values() for report in reports), strict=True))
    print(json.dumps({"soak": summary, "seed": args.seed, "violations": num_violations}))
    return 1 if num_violations else 0


if __name__ == "__main__":
    sys.exit(main())
