"""octavo compared with other engines on this machine's CPU.

The peers are transformers' `generate` with static batches of 16 in the order given, and OpenVINO
GenAI's continuous batching, if it is installed, on the same weights in a GGUF file. 64 requests
(prompts of 16 to 512 tokens, outputs of 16 to 256, token ids in, greedy, end-of-sequence ignored),
no prefix caching. The engines take turns, each time in a new process; the tables show medians, and
`ratio` is relative to transformers. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from harness import CASES, Case, Measurement, measure, model_directory, summary

BASELINE = "transformers"


def openvino_model(case: Case, has_int8: bool) -> Path | None:
    """A GGUF file of the model for OpenVINO GenAI; None if that is not installed."""
    if importlib.util.find_spec("openvino_genai") is None:
        return None
    directory = model_directory(case)
    file = directory / ("model-q8_0.gguf" if has_int8 else "model.gguf")
    if not file.exists():
        from gguf_file import write_gguf

        write_gguf(directory, file, has_int8)
    return file


def compare(
    case: Case, engines: list[str], threads: int, repeat: int, has_int8: bool
) -> dict[str, dict[str, float]]:
    """Run one case on all engines and print a table; returns the values for the JSON line."""
    print(f"\n{case.name}: {case.num_requests} requests, {threads} thread(s)", flush=True)
    models = dict.fromkeys(engines, model_directory(case))
    if "openvino" in engines:
        file = openvino_model(case, has_int8)
        if file is None:
            print("  openvino skipped: openvino-genai is not installed")
            del models["openvino"]
        else:
            models["openvino"] = file
    runs: dict[str, list[Measurement]] = {engine: [] for engine in models}
    for _ in range(repeat):
        for engine, model in models.items():
            quantization = "int8" if has_int8 and engine == "octavo" else None
            runs[engine].append(measure(engine, case, threads, model, quantization=quantization))
    results: dict[str, dict[str, float]] = {}
    medians = {engine: summary(each) for engine, each in runs.items()}
    base = medians.get(BASELINE, {}).get("tokens_per_second")
    print(f"  {'engine':<14}{'tok/s':>9}{'tok/cpu-s':>11}{'ready s':>9}{'MB':>7}{'ratio':>8}")
    for engine, values in medians.items():
        ratio = values["tokens_per_second"] / base if base else float("nan")
        print(
            f"  {engine:<14}{values['tokens_per_second']:>9.1f}"
            f"{values['tokens_per_cpu_second']:>11.1f}{values['ready_seconds']:>9.2f}"
            f"{values['peak_rss_mb']:>7.0f}{ratio:>8.2f}",
            flush=True,
        )
        results[engine] = values | {"ratio": round(ratio, 3)}
    for engine in [engine for engine in models if engine != BASELINE and BASELINE in models]:
        equal, total = count_equal(runs[engine][0], runs[BASELINE][0])
        print(f"  outputs of {engine} equal to {BASELINE}': {equal} of {total}")
        results[engine] |= {"equal_outputs": equal}
    return results


def count_equal(ours: Measurement, theirs: Measurement) -> tuple[int, int]:
    pairs = list(zip(ours.token_ids, theirs.token_ids, strict=True))
    return sum(a == b for a, b in pairs), len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=["octavo", "transformers", "openvino"],
        default=["octavo", "transformers", "openvino"],
    )
    parser.add_argument(
        "--int8",
        action="store_true",
        help="octavo and OpenVINO with weights in int8; transformers has them as they are",
    )
    args = parser.parse_args()
    chosen = [case for case in CASES if case.name in args.cases]
    results = {
        case.name: compare(case, args.engines, args.threads, args.repeat, args.int8)
        for case in chosen
    }
    print()
    print(
        json.dumps(
            {"benchmark": "peers", "threads": args.threads, "int8": args.int8, "cases": results}
        )
    )
    unequal = [
        case.name
        for case in chosen
        if not args.int8
        and case.check_tokens
        and results[case.name].get("octavo", {}).get("equal_outputs", case.num_requests)
        < case.num_requests
    ]
    if unequal:
        sys.exit(f"greedy outputs differ from {BASELINE}' in {', '.join(unequal)}")


if __name__ == "__main__":
    main()
