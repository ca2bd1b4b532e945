"""Seconds from a fresh process to the first token: imports, dummy weights, CUDA graphs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

from octavo.config import KernelTuning, QuantizationName

PROGRAM = """
import json, sys, time
start = time.perf_counter()
import gpu_harness
imported = time.perf_counter()
from octavo.engine.local_client import LocalClient
client = LocalClient(gpu_harness.make_engine(sys.argv[1], **json.loads(sys.argv[2])))
ready = time.perf_counter()
from octavo import SamplingParams
client.add_request(client.make_request([1, 2, 3], SamplingParams(max_tokens=1, detokenize=False)))
while client.has_unfinished:
    client.step()
first = time.perf_counter()
print(json.dumps({"import": imported - start, "engine": ready - imported, "first": first - ready}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument(
        "--runs", type=int, default=2, help="number of runs; caches may be cold in the first"
    )
    parser.add_argument("--quantization", choices=get_args(QuantizationName))
    parser.add_argument("--tune-kernels", choices=get_args(KernelTuning), default="auto")
    arguments = parser.parse_args()
    names = ("quantization", "tune_kernels")
    options = json.dumps({name: getattr(arguments, name) for name in names})
    runs = []
    for _ in range(arguments.runs):
        began = time.perf_counter()
        command = [sys.executable, "-c", PROGRAM, arguments.model, options]
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
        if result.returncode:
            raise SystemExit(result.stderr)
        values = json.loads(result.stdout.splitlines()[-1])
        values["ready"] = values["import"] + values["engine"]
        values["process"] = time.perf_counter() - began
        runs.append({name: round(seconds, 2) for name, seconds in values.items()})
        print(runs[-1], flush=True)
    print(json.dumps({"benchmark": "startup", "model": arguments.model, "runs": runs}))


if __name__ == "__main__":
    main()
