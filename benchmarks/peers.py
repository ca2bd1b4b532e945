"""octavo beside other engines on this machine's CPU, in one run.

The peers: transformers' `generate` with static batches of 16 in the order given, and OpenVINO GenAI
if it is installed and a model is exported for it. 64 requests (prompts of 16 to 512 tokens, outputs
of 16 to 256, token ids in, greedy, end-of-sequence ignored), no prefix caching. Engines take turns,
each time in a new process; medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness import CACHE, CASES, Case, Measurement, measure, model_directory, summary

BASELINE = "transformers"


def openvino_model(case: Case) -> Path | str:
    """The folder of the exported model, or why there is none."""
    if importlib.util.find_spec("openvino_genai") is None:
        return "openvino-genai is not installed"
    directory = CACHE / f"{case.config}-{case.dtype}-openvino"
    if (directory / "openvino_model.xml").exists():
        return directory
    exporter = shutil.which("optimum-cli")
    if exporter is None:
        return f"no exported model in {directory}, and no optimum-cli to export one"
    weight_format = {"float32": "fp32", "bfloat16": "bf16"}[case.dtype]
    command = [exporter, "export", "openvino", "--model", str(model_directory(case))]
    command += ["--task", "text-generation-with-past", "--weight-format", weight_format]
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True)
    return directory if done.returncode == 0 else f"the export failed: {done.stderr[-300:]}"


def compare(case: Case, engines: list[str], threads: int, repeat: int) -> dict[str, object]:
    """One case on all engines: prints a table, returns what goes into the JSON line."""
    print(f"\n{case.name}: {case.num_requests} requests, {threads} thread(s)", flush=True)
    models = dict.fromkeys(engines, model_directory(case))
    if "openvino" in engines:
        exported = openvino_model(case)
        if isinstance(exported, str):
            print(f"  openvino left out: {exported}")
            del models["openvino"]
        else:
            models["openvino"] = exported
    runs: dict[str, list[Measurement]] = {engine: [] for engine in models}
    for _ in range(repeat):
        for engine, model in models.items():
            runs[engine].append(measure(engine, case, threads, model))
    results: dict[str, object] = {}
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
    if BASELINE in runs and "octavo" in runs:
        equal, total = count_equal(runs["octavo"][0], runs[BASELINE][0])
        note = "" if case.check_tokens else " (no gate: rounding differs)"
        print(f"  octavo's outputs equal to {BASELINE}': {equal} of {total}{note}")
        results["equal_outputs"] = [equal, total]
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
    args = parser.parse_args()
    chosen = [case for case in CASES if case.name in args.cases]
    results = {case.name: compare(case, args.engines, args.threads, args.repeat) for case in chosen}
    print()
    print(json.dumps({"benchmark": "peers", "threads": args.threads, "cases": results}))
    unequal = [
        case.name
        for case in chosen
        if case.check_tokens
        and (found := results[case.name].get("equal_outputs"))
        and found[0] != found[1]  # type: ignore[index]
    ]
    if unequal:
        sys.exit(f"greedy outputs differ from {BASELINE}' in {', '.join(unequal)}")


if __name__ == "__main__":
    main()
