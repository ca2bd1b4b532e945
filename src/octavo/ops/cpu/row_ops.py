"""The small operations between projections, each in one pass over memory on a CPU.

torch computes an RMS norm in eight ops, and in bfloat16 with a copy to float32 and back. Elsewhere
(another device or dtype, no Numba) these are plain torch.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from ctypes import addressof, c_int64
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import epilogue as epilogues
from octavo.ops.cpu.threads import Runner, make_runner
from octavo.ops.epilogue import Epilogue

CHUNK = 16384  # elements that a thread takes at once
WORTH_SHARING = 4 * CHUNK  # elements; below this, waking a thread costs more than it saves
_Args = c_int64 * 11  # ctypes takes a fraction of the time of a numpy array


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension of x [num_tokens, (heads,) size].

    Computed in float32 and rounded once. Tokens may be strided, the rest of x is dense.
    """
    kernel = _rms_norm_kernel(x.dtype) if _is_plain(x) else None
    if kernel is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _normalise(kernel, x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place, both [num_tokens, size]; return the sum's rms_norm."""
    kernel = _rms_norm_kernel(x.dtype) if _is_plain(x) and residual.is_contiguous() else None
    if kernel is None:
        return F.rms_norm(residual.add_(x), weight.shape, weight, eps)
    return _normalise(kernel, x, residual, weight, eps)


def silu_mul(gate_up: Tensor, output: Tensor | None = None) -> Tensor:
    """silu(gate) * up for gate_up [num_tokens, 2 * size], gate first -> [num_tokens, size].

    Written into `output` if that is given, which is contiguous.
    """
    kernel = _silu_mul_kernel(gate_up.dtype) if _is_plain(gate_up) else None
    if kernel is None:
        result = epilogues.apply_epilogue(gate_up, Epilogue.SILU_MUL)
        return result if output is None else output.copy_(result)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if output is None:
        output = gate_up.new_empty((num_tokens, size))
    _run(kernel, gate_up, 0, 0, output, 0.0, (num_tokens, 1, size))
    return output


def apply_epilogue(y: Tensor, epilogue: Epilogue) -> Tensor:
    """Like `epilogue.apply_epilogue`, with our kernels where they exist."""
    if epilogue == Epilogue.SILU_MUL:
        return silu_mul(y)
    return epilogues.apply_epilogue(y, epilogue)


def _normalise(
    kernel: Runner, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> Tensor:
    output = torch.empty(x.shape, dtype=x.dtype)
    heads = x.shape[1] if x.dim() == 3 else 1
    added = 0 if residual is None else residual.data_ptr()
    _run(kernel, x, added, weight.data_ptr(), output, eps, (x.shape[0], heads, x.shape[-1]))
    return output


def _run(
    kernel: Runner,
    x: Tensor,
    residual: int,
    weight: int,
    output: Tensor,
    eps: float,
    shape: tuple[int, int, int],
) -> None:
    """Call a kernel with its arguments in the order of row_kernels.py."""
    total = shape[0] * shape[1] * shape[2]
    args = _Args(
        *(0, x.data_ptr(), residual, weight, output.data_ptr()),
        *(_bits(eps), *shape, x.stride(0), max(1, CHUNK // shape[2])),
    )
    kernel(addressof(args), torch.get_num_threads() if total >= WORTH_SHARING else 1)


@cache
def _bits(number: float) -> int:
    """An int64 whose first four bytes are the number in float32."""
    return int.from_bytes(struct.pack("=fxxxx", number), sys.byteorder)


def _is_plain(x: Tensor) -> bool:
    """On the CPU, with every token's elements dense."""
    return x.device.type == "cpu" and (x.is_contiguous() or x[0].is_contiguous())


def _compile(name: str, dtype: torch.dtype) -> Runner | None:
    elements = {torch.float32: np.float32, torch.bfloat16: np.uint16}
    if dtype not in elements or find_spec("numba") is None:
        return None
    from octavo.ops.cpu import row_kernels

    compile_kernel: Callable[..., Any] = getattr(row_kernels, name)
    return make_runner(compile_kernel(np.dtype(elements[dtype])))


@cache
def _rms_norm_kernel(dtype: torch.dtype) -> Runner | None:
    return _compile("compile_rms_norm", dtype)


@cache
def _silu_mul_kernel(dtype: torch.dtype) -> Runner | None:
    return _compile("compile_silu_mul", dtype)
