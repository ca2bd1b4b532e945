"""Projections with quantized weights: kernels alone, beside bf16's and the memory's bandwidth.

Each time is that of one product in a CUDA graph of several, whose weights together do not fit the
L2 cache. With --tune, all candidates of tiles are measured; --warm I N only compiles every N-th of
them, from the I-th on, so that several processes can share that work.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.ops.cuda import linear_quantized as quantized
from octavo.ops.cuda.linear import linear
from octavo.ops.cuda.linear_gemv import Programs, linear_one
from octavo.ops.cuda.linear_quantized import Tiles
from octavo.ops.cuda.stored_weights import StoredWeight, dequantize
from octavo.ops.cuda.quantize import quantize_rows
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.quantized import GroupedInt, QuantizedWeight, ScaledFloat8

SHAPES = {  # of Llama 3 8B: rows of W, inputs, epilogue
    "qkv": (6144, 4096, Epilogue.NONE),
    "o": (4096, 4096, Epilogue.NONE),
    "gate_up": (28672, 4096, Epilogue.SILU_MUL),
    "down": (4096, 14336, Epilogue.NONE),
}
FORMS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "fp8": lambda dense: ScaledFloat8.quantize(dense, (1, dense.shape[1])),
    "fp8-block": lambda dense: ScaledFloat8.quantize(dense, (128, 128)),
    "int4": lambda dense: GroupedInt.quantize(dense, 4, 128),
    "int8": lambda dense: GroupedInt.quantize(dense, 8, dense.shape[1]),
}
SHARED_MEMORY = 222_000
NUM_SMS = 132


def candidates(
    num_tokens: int, stored: StoredWeight, num_rows: int, is_gated: bool
) -> Iterator[Tiles]:
    sizes = [size for size in (8, 16, 32, 64, 128) if num_tokens <= size][:1] or [128, 256]
    width = stored.weight.nbytes // stored.shape[0] / (stored.shape[1] / 128)
    num_blocks = -(-stored.shape[1] // 128)
    halves = 2 if is_gated else 1
    for tokens, rows, per_sm in itertools.product(sizes, (64, 128), (1, 2, 3)):
        if tokens * rows * halves * per_sm > 64 * 256 * 2 or (
            per_sm == 3 and (tokens > 32 or rows > 64)
        ):
            continue
        if tokens == 256 and is_gated:
            continue
        num_tiles = -(-num_rows // rows) * -(-num_tokens // tokens)
        for fill in (1, 2):
            splits = max(1, min(8, NUM_SMS * per_sm * fill // num_tiles, num_blocks // 4))
            if fill == 2 and (splits == 1 or per_sm > 1):
                continue
            staged = stored.staged_groups(splits) * rows * 4 * halves
            room = SHARED_MEMORY // per_sm - staged - 1024
            stage = int(width * rows * halves) + 256 * tokens
            stages = min(room // stage, 12, -(-num_blocks // splits))
            if stages < 2:
                continue
            is_large = tokens * halves >= 128 and stored.group > 0
            yield Tiles(tokens, rows, stages, rows // 16, splits, per_sm, per_sm > 1, is_large)


def both_rounded(x: Tensor, stored: StoredWeight, is_fast: bool) -> Tensor:
    rounded, scales = quantize_rows(x)
    return torch._scaled_mm(
        rounded,
        stored.weight.t(),
        scale_a=scales,
        scale_b=stored.scales.t(),
        out_dtype=x.dtype,
        use_fast_accum=is_fast,
    )


def microseconds(works: list[Callable[[], object]]) -> float:
    """Of each of these, one after the other in a graph."""
    for work in works[:2]:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(works))
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 16, 64, 256])
    parser.add_argument("--warm", nargs=2, type=int)
    arguments = parser.parse_args()
    counter = itertools.count()
    for name, kind in itertools.product(arguments.shapes, arguments.forms):
        num_rows, size, epilogue = SHAPES[name]
        out_rows = num_rows // 2 if epilogue.is_gated else num_rows
        generator = torch.Generator("cuda").manual_seed(1)
        dense = torch.randn(num_rows, size, device="cuda", generator=generator) * size**-0.5
        dense = dense.bfloat16()
        form = FORMS[kind](dense)
        stored = StoredWeight.of(form)
        assert stored is not None
        copies = max(2, int(160e6 // form.nbytes) + 1)
        stores = [stored]
        if not arguments.warm:
            stores += [
                StoredWeight(
                    **{
                        each: getattr(stored, each)
                        for each in stored.__dataclass_fields__
                        if each not in ("weight", "scales")
                    },
                    weight=stored.weight.clone(),
                    scales=stored.scales.clone(),
                )
                for _ in range(copies - 1)
            ]
            dequantized = form.dequantize()
            denses = [dense.clone() for _ in range(max(2, int(160e6 // dense.nbytes) + 1))]
            target = torch.empty_like(dense)
            dequantize(stored, target)
            error = (target.float() - dequantized).abs().max() / dequantized.abs().max()
            spent = microseconds(
                [lambda s=s: dequantize(s, target) for s in stores]  # type: ignore
            )
            print(f"{name:8} {kind:9} dequantize {spent:7.1f} us, error {error:.1e}", flush=True)
        for num_tokens in arguments.tokens:
            x = torch.randn(num_tokens, size, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(num_tokens, out_rows, device="cuda", dtype=torch.bfloat16)
            if not arguments.warm:
                wanted = apply_epilogue(x.float() @ dequantized.t(), epilogue)
                base = microseconds([lambda w=w: linear(x, w, None, epilogue) for w in denses])  # type: ignore
            rows: list[tuple[float, str, float]] = []
            works: list[tuple[Any, Callable[[StoredWeight], object]]] = [
                (
                    tiles,
                    lambda s, tiles=tiles: quantized.launch(
                        x, s, None, out, epilogue, tiles, False
                    ),
                )
                for tiles in candidates(num_tokens, stored, out_rows, epilogue.is_gated)
            ]
            if num_tokens == 1 and kind == "fp8":
                works += [
                    (
                        programs,
                        lambda s, programs=programs: linear_one(
                            x, s.weight, None, out, epilogue, s.scales, s.block_rows, programs
                        ),
                    )
                    for programs in (
                        Programs(2, 2048, 2, 1),
                        Programs(2, 1024, 4, 1),
                        Programs(4, 1024, 2, 1),
                        Programs(1, 2048, 2, 1),
                        Programs(4, 2048, 1, 1),
                    )
                ]
            if num_tokens >= 64 and kind == "fp8" and not epilogue.is_gated:
                works += [
                    (
                        f"FP8 x FP8, {is_fast}",
                        lambda s, is_fast=is_fast: out.copy_(both_rounded(x, s, is_fast)),
                    )
                    for is_fast in (False, True)
                ]
            for what, work in works:
                if arguments.warm and next(counter) % arguments.warm[1] != arguments.warm[0]:
                    continue
                try:
                    work(stored)
                    torch.cuda.synchronize()
                    if arguments.warm:
                        continue
                    error = float((out.float() - wanted).norm() / wanted.norm())
                    spent = microseconds([lambda s=s: work(s) for s in stores])  # type: ignore
                except Exception as failure:
                    print(f"FAILED {name} {kind} {what}: {str(failure)[:300]}", flush=True)
                    if "CUDA" in str(failure) or "device" in str(failure):
                        sys.exit(1)
                    continue
                rows.append((spent, str(what), error))
            for spent, what, error in sorted(rows):
                rate = form.nbytes / spent / 1e6
                print(
                    f"{name:8} {kind:9} {num_tokens:4} tokens: {spent:7.1f} us, {rate:4.2f} TB/s, "
                    f"bf16 {base:7.1f} us, error {error:.1e}  {what}",
                    flush=True,
                )


if __name__ == "__main__":
    began = time.perf_counter()
    main()
    print(f"{time.perf_counter() - began:.1f} s", flush=True)
