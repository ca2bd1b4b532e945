"""Projections with quantized weights: kernels alone, beside bf16's and the memory's bandwidth.

Each time is that of one product in a CUDA graph of several, whose weights together do not fit the
L2 cache. The bandwidth counts the weight's bytes alone. --measure chooses kernels as engines do
when they start: what is not in the user's cache is measured first, and kept there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import product

import torch
from gpu_harness import report
from torch import Tensor

from octavo.ops.cuda.linear import linear
from octavo.ops.cuda.linear_quantized import QuantizedCudaLinear, make_kernel
from octavo.ops.cuda.tuning import CudaMeter, microseconds, tuning_path
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.quantized import GroupedInt, QuantizedWeight, ScaledFloat8
from octavo.ops.tuning import TuningFile, distinct

SHAPES = {  # of Llama 3 8B: rows of W, inputs, epilogue
    "qkv": (6144, 4096, Epilogue.NONE),
    "o": (4096, 4096, Epilogue.NONE),
    "gate_up": (28672, 4096, Epilogue.SILU_MUL),
    "down": (4096, 14336, Epilogue.NONE),
}
FORMS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "fp8": lambda dense: ScaledFloat8.quantize(dense, (1, dense.shape[1]), quantizes_inputs=True),
    "fp8-weights": lambda dense: ScaledFloat8.quantize(dense, (1, dense.shape[1])),
    "fp8-block": lambda dense: ScaledFloat8.quantize(dense, (128, 128), quantizes_inputs=True),
    "int8": lambda dense: GroupedInt.quantize(dense, 8, dense.shape[1]),
    "int4": lambda dense: GroupedInt.quantize(dense, 4, 128),
}
L2_BYTES = 160e6  # of several weights that do not fit it together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8, 16, 64, 256, 1024])
    parser.add_argument(
        "--measure", action="store_true", help="choose the fastest kernels, and keep the choice"
    )
    parser.add_argument(
        "--copies",
        action="store_true",
        help="weights have copies beside them, dequantized or in 7 bits",
    )
    arguments = parser.parse_args()
    results = {}
    for shape, kind in product(arguments.shapes, arguments.forms):
        num_rows, size, epilogue = SHAPES[shape]
        dense = torch.randn(num_rows, size, device="cuda", dtype=torch.bfloat16) * size**-0.5
        form = FORMS[kind](dense)
        weight = form.dequantize()
        kernels = [
            make_kernel(
                copied(form),
                dense.dtype,
                dequantized_copy=arguments.copies,
                float7_copy=arguments.copies,
            )
            for _ in range(num_copies(form.nbytes))
        ]
        if arguments.measure:
            choose(kernels, dense, arguments.tokens, epilogue)
        denses = [dense.clone() for _ in range(num_copies(dense.nbytes))]
        for num_tokens in arguments.tokens:
            x = torch.randn(num_tokens, size, device="cuda", dtype=torch.bfloat16)
            works = [partial(each.apply, x, None, epilogue) for each in kernels if each is not None]
            wanted = apply_epilogue(x.float() @ weight.t(), epilogue)
            error = float((works[0]().float() - wanted).norm() / wanted.norm())
            spent = microseconds(works)
            base = microseconds([partial(linear, x, each, None, epilogue) for each in denses])
            rate = form.nbytes / spent / 1e6
            results[f"{shape}, {kind}@{num_tokens}"] = {
                "us": round(spent, 1),
                "bf16_us": round(base, 1),
                "tb_s": round(rate, 2),
                "error": round(error, 5),
            }
            print(
                f"{shape:>8} {kind:>12} {num_tokens:5} tokens: {spent:7.1f} us, {rate:5.2f} TB/s, "
                f"bf16 {base:7.1f} us ({base / spent:.2f}x), relative error {error:.1e}",
                flush=True,
            )
    for kind in arguments.forms:
        ratios = {
            name: each["bf16_us"] / each["us"]
            for name, each in results.items()
            if name.split("@")[0].endswith(f" {kind}")
        }
        least = min(ratios, key=lambda name: ratios[name])
        print(f"{kind}: in comparison with bf16 least at {least}, {ratios[least]:.2f}x")
    report("quantized_linear", products=results)


def choose(
    kernels: Sequence[QuantizedCudaLinear | None],
    like: Tensor,
    numbers: Sequence[int],
    epilogue: Epilogue,
) -> None:
    """Have kernels compute in the fastest way for up to so many tokens; `like` has the dtype and
    the width of the inputs."""
    for kernel in kernels:
        if kernel is not None:
            kernel.apply(like[:1], None, epilogue)  # which says what is asked of it
            file = TuningFile(tuning_path(like.device), max_seconds=math.inf)
            questions = distinct(kernel.questions(max(numbers)))
            kernel.adopt(file.answer(questions, CudaMeter(like.device)))


def num_copies(num_bytes: int) -> int:
    return int(L2_BYTES // num_bytes) + 2


def copied(form: QuantizedWeight) -> QuantizedWeight:
    """The same elsewhere in memory."""
    return copy(form).to(torch.device("cpu")).to(form.device)


if __name__ == "__main__":
    main()
