"""Decode attention with and without cascade attention, where sequences share physical blocks.

Beams and samples share their prompt and their common ancestors, requests a common prefix. Without
cascade attention each sequence reads the shared keys; with it they are read once. One layer, in
microseconds per launch, replayed from a CUDA graph; scattered blocks of 16 tokens; bf16. Prints a
table, and one JSON line at the end. --few measures few sequences, of which cascade attention pays
for long contexts alone.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from attention_work import BLOCK_SIZE, HEAD_DIM, HEAD_DIMS, MODELS, SHAPES, Work, seconds
from gpu_harness import report

from octavo.ops import CascadeSegments
from octavo.ops.cuda import attention as triton_backend
from octavo.ops.cuda.attention_cascade import CascadeConfig


class Case(NamedTuple):
    """Groups of `size` sequences that share `shared` tokens and have `own` tokens each."""

    groups: int
    size: int
    shared: int
    own: int


CASES = {
    "64 x 2 beams, 128 + 32": Case(64, 2, 128, 32),
    "64 x 4 beams, 512 + 32": Case(64, 4, 512, 32),
    "64 x 6 beams, 128 + 32": Case(64, 6, 128, 32),
    "4 x 8 beams, 2,048 + 128": Case(4, 8, 2048, 128),
    "16 after 4,096, 256 each": Case(1, 16, 4096, 256),
    "64 after 1,024, 96 each": Case(1, 64, 1024, 96),
    "512 after 1,024, 96 each": Case(1, 512, 1024, 96),
}
FEW = {
    f"{groups} x {size} after {shared:,}": Case(groups, size, shared, 32)
    for groups, size in ((1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (4, 2), (4, 4))
    for shared in (512, 1024, 2048, 4096, 8192, 16384)
}


def shared_segments(case: Case) -> CascadeSegments:
    groups = np.arange(case.groups, dtype=np.int32)
    return CascadeSegments(
        begins=np.zeros_like(groups),
        ends=np.full_like(groups, case.shared),
        starts=np.arange(case.groups + 1, dtype=np.int32) * case.size,
        members=np.arange(case.groups * case.size, dtype=np.int32),
    )


def measure(model: str, case: Case) -> dict[str, float]:
    """Microseconds per launch without and with cascade attention, and TB/s of the latter."""
    num_seqs = case.groups * case.size
    head_dim = HEAD_DIMS.get(model, HEAD_DIM)
    work = Work(model, num_seqs, case.shared + case.own, new=1, head_dim=head_dim)
    common = work.table[:: case.size, : case.shared // BLOCK_SIZE]
    work.table[:, : case.shared // BLOCK_SIZE] = common.repeat_interleave(case.size, 0)
    plain = seconds(work.forward, work.num_layers, 2 * work.num_layers)
    expected = work.forward(0).float()
    work.backend.plan(replace(work.batch, cascade=[shared_segments(case)]))
    cascade = seconds(work.forward, work.num_layers, 2 * work.num_layers)
    error = (work.forward(0).float() - expected).abs().max().item()
    assert error < 0.02, f"{model}, {case}: outputs differ by {error}"
    keys = case.groups * case.shared + num_seqs * case.own
    num_bytes = keys * work.kv_heads * 2 * head_dim * 2
    return {
        "plain": round(plain * 1e6, 1),
        "cascade": round(cascade * 1e6, 1),
        "ratio": round(plain / cascade, 2),
        "TB/s": round(num_bytes / cascade / 1e12, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(SHAPES))
    parser.add_argument("--few", action="store_true", help="few sequences")
    parser.add_argument(
        "--configs",
        nargs="*",
        default=["chosen"],
        metavar="ROWS,KEYS,WARPS,STAGES,PROGRAMS",
        help="tile configurations to try instead of the chosen one",
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, dict[str, dict[str, float]]] = {}
    with torch.inference_mode():
        for config in arguments.configs:
            if config != "chosen":
                tiles = CascadeConfig(*map(int, config.split(",")))
                vars(triton_backend)["cascade_config"] = lambda *_, tiles=tiles: tiles
            for model in arguments.models:
                cells = results[f"{model}, {config}"] = {}
                print(f"{model}, {config}")
                for name, case in (FEW if arguments.few else CASES).items():
                    cells[name] = measure(model, case)
                    values = "  ".join(f"{k} {v:g}" for k, v in cells[name].items())
                    print(f"  {name:<28}{values}", flush=True)
    report("cascade_attention", results=results)


if __name__ == "__main__":
    main()
