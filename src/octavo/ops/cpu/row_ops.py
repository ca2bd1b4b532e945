"""The small operations between projections, each in one pass over memory on a CPU.

torch computes an RMS norm in eight ops, and in bfloat16 with a copy to float32 and back. Elsewhere
(another device or dtype, no Numba) these are plain torch.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from ctypes import Array, addressof, c_int64
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import epilogue as epilogues
from octavo.ops import norm as norms
from octavo.ops.communicator import Reduction
from octavo.ops.cpu.threads import Runner, make_runner
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import Affine
from octavo.ops.quantized import Rounding

CHUNK = 16384  # elements that a thread takes at once
WORTH_SHARING = 4 * CHUNK  # elements; below this, waking a thread costs more than it saves
_Args = c_int64 * 18  # ctypes takes a fraction of the time of a numpy array


def norm(
    x: Tensor,
    affine: Affine | None,
    eps: float,
    residual: Tensor | None,
    is_rms: bool,
    *,
    second: Tensor | None = None,
    branch: Affine | None = None,
    branches: tuple[Affine, Affine] | None = None,
    factor: float = 1.0,
    twins: Sequence[Affine] = (),
    reduction: Reduction | None = None,
    rounding: Rounding = Rounding.NONE,
) -> list[Tensor]:
    """See ops/norm.py. Computed in float32 and rounded once; tokens of x may be strided."""
    if reduction is not None:
        x, second = norms.reduced(x, second, branches is not None, reduction)
    kernel, weight = None, (affine or branch or Affine(None)).weight
    # Layer norms whose rest is one addition stay torch's, which start faster.
    is_torchs = not is_rms and second is None and branch is None and not twins
    # Of scales the kernel has one dtype, and two at most of one sum.
    is_torchs = is_torchs or branches is not None or len(twins) > 1
    is_dense = residual is None or residual.is_contiguous()
    if weight is not None and not is_torchs and is_dense and _is_plain(x):
        kernel = _norm_kernel(x.dtype, weight.dtype, is_rms)
    if kernel is None:
        return norms.norm(
            *(x, affine, eps, residual, is_rms),
            second=second,
            branch=branch,
            branches=branches,
            factor=factor,
            twins=twins,
            rounding=rounding,
        )
    results = []
    scale = shift = output = twin_scale = twin_shift = twin_output = 0  # addresses
    if affine is not None:
        results.append(torch.empty(x.shape, dtype=x.dtype))
        scale, shift, output = _addresses(affine, results[0])
    for twin in twins:
        results.append(torch.empty(x.shape, dtype=x.dtype))
        twin_scale, twin_shift, twin_output = _addresses(twin, results[-1])
    tokens, heads, size = x.shape if x.dim() == 3 else (x.shape[0], 1, x.shape[1])
    args = _Args(
        0, x.data_ptr(), 0 if second is None else second.data_ptr(),
        0 if residual is None else residual.data_ptr(), 0 if branch is None else _scale(branch),
        scale, shift, output, twin_scale, twin_shift, twin_output,
        _bits(eps), tokens, heads, size, x.stride(0), max(1, CHUNK // size), _bits(factor),
    )  # fmt: skip
    _run(kernel, args, tokens * heads * size)
    return norms.rounded_results(results, rounding)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension of x [num_tokens, (heads,) size]."""
    return norm(x, Affine(weight), eps, None, is_rms=True)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to `residual` in place, both [num_tokens, size]; return the sum's rms_norm."""
    return norm(x, Affine(weight), eps, residual, is_rms=True)[0]


def apply_gate(gate_up: Tensor, epilogue: Epilogue, output: Tensor | None = None) -> Tensor:
    """A gated epilogue of gate_up [num_tokens, 2 * size], gate first -> [num_tokens, size].

    Written into `output` if that is given, which is contiguous.
    """
    dtype = gate_up.dtype
    kernel = _gate_kernel(dtype, dtype, epilogue) if _is_plain(gate_up) else None
    if kernel is None:
        result = epilogues.apply_epilogue(gate_up, epilogue)
        return result if output is None else output.copy_(result)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    if output is None:
        output = gate_up.new_empty((num_tokens, size))
    args = _Args(
        0, gate_up.data_ptr(), 0, 0, 0, 0, 0, output.data_ptr(), 0, 0, 0, 0,
        num_tokens, 1, size, gate_up.stride(0), max(1, CHUNK // size),
    )  # fmt: skip
    _run(kernel, args, num_tokens * size)
    return output


def rescale_gate(sums: Tensor, scales: Tensor, epilogue: Epilogue, output: Tensor) -> None:
    """Write a gated epilogue of sums [num_tokens, 2 * size] * scales [num_tokens], gate first, into
    `output` [num_tokens, size].

    All of them are dense; sums and scales are float32, output is of another dtype.
    """
    kernel = _gate_kernel(torch.float32, output.dtype, epilogue)
    if kernel is None:
        output.copy_(epilogues.apply_epilogue(sums * scales.unsqueeze(1), epilogue))
        return
    num_tokens, size = output.shape
    args = _Args(
        0, sums.data_ptr(), 0, 0, 0, scales.data_ptr(), 0, output.data_ptr(), 0, 0, 0, 0,
        num_tokens, 1, size, 2 * size, max(1, CHUNK // size),
    )  # fmt: skip
    _run(kernel, args, num_tokens * size)


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """sum over j of weights[t, j] * rows[places[t, j]], in the order of j, in float32.

    Args:
        rows: [num_rows, size], dense.
        places: int64 [num_tokens, n], dense.
        weights: float32 [num_tokens, n], dense.

    Returns:
        [num_tokens, size], of the rows' dtype.
    """
    num_tokens, n = places.shape
    size = rows.shape[1]
    kernel = _weighted_sum_kernel(rows.dtype)
    if kernel is None:
        total = torch.zeros((num_tokens, size))
        for j in range(n):
            total += weights[:, j : j + 1] * rows[places[:, j]].float()
        return total.to(rows.dtype)
    output = rows.new_empty((num_tokens, size))
    args = _Args(
        0, rows.data_ptr(), 0, 0, 0, weights.data_ptr(), places.data_ptr(), output.data_ptr(),
        0, 0, 0, 0, num_tokens, n, size, size, max(1, CHUNK // (n * size)),
    )  # fmt: skip
    _run(kernel, args, num_tokens * n * size)
    return output


def quantize_rows(x: Tensor, shape: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """x [num_tokens, size], rounded: int8 of the same shape, times float32 [num_tokens].

    A token's largest element becomes 127. The scale of one with an infinity or a NaN is NaN. If a
    larger `shape` is given, the result has that, and anything in the elements that x lacks.
    """
    num_tokens, size = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    rounded = x.new_empty(shape or (num_tokens, size), dtype=torch.int8)
    kernel = _quantize_kernel(x.dtype)
    if kernel is None:
        wide = x.float()
        largest = wide.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30)
        is_finite = largest.isfinite()
        scales = (largest / 127).where(is_finite, torch.nan)
        inverse = torch.tensor(127.0) / largest  # 127 / largest would round twice
        rounded[:num_tokens, :size] = (wide * inverse).round_().where(is_finite, 0)
        return rounded, scales.flatten()
    scales = torch.empty(num_tokens)
    args = _Args(
        0, x.data_ptr(), 0, 0, 0, scales.data_ptr(), rounded.stride(0), rounded.data_ptr(),
        0, 0, 0, 0, num_tokens, 1, size, x.stride(0), max(1, CHUNK // size),
    )  # fmt: skip
    _run(kernel, args, num_tokens * size)
    return rounded, scales


def rescale_rows(sums: Tensor, scales: Tensor, bias: Tensor | None, output: Tensor) -> None:
    """Write sums [num_tokens, size] * scales [num_tokens] + bias [size] into `output`.

    All of them are dense; sums and scales are float32, bias has the dtype of output, which may be
    the sums.
    """
    kernel = _rescale_kernel(output.dtype)
    if kernel is None:
        scaled = sums * scales.unsqueeze(1)
        output.copy_(scaled if bias is None else scaled.add_(bias))
        return
    num_tokens, size = sums.shape
    args = _Args(
        0, sums.data_ptr(), 0, 0, 0, scales.data_ptr(), 0 if bias is None else bias.data_ptr(),
        output.data_ptr(), 0, 0, 0, 0, num_tokens, 1, size, size, max(1, CHUNK // size),
    )  # fmt: skip
    _run(kernel, args, num_tokens * size)


def mask_rows(
    logits: Tensor, words: NDArray[np.int32], places: NDArray[np.int32], first: int
) -> None:
    """Write -inf wherever a row's mask rules an element out. A row with NaN or +inf becomes NaN,
    because no mask may hide that it is not finite.

    Args:
        logits: [num_rows, size], each row dense; changed in place.
        words: int32 [num_masks, num_words], dense; bit i % 32 of word i // 32 allows element i.
        places: int32 [num_rows]: where each row's mask is in `words`, or a negative number.
        first: the bit of a row's first element.
    """
    num_rows, size = logits.shape
    assert logits.stride(1) == 1, "the kernel takes dense rows"
    assert first + size <= 32 * words.shape[1], "masks cover the rows"
    kernel = _mask_kernel(logits.dtype)
    if kernel is None:
        for row in np.flatnonzero(places >= 0).tolist():
            bits = np.unpackbits(words[places[row]].view(np.uint8), bitorder="little")
            is_out = torch.from_numpy(bits[first : first + size] == 0)
            is_damaged = bool((~(logits[row] < torch.inf)).any())  # also by NaN
            logits[row].masked_fill_(is_out, -torch.inf)
            if is_damaged:
                logits[row] = torch.nan
        return
    args = _Args(
        0, logits.data_ptr(), 0, 0, 0, words.ctypes.data, places.ctypes.data, 0, 0, 0, 0, first,
        num_rows, words.shape[1], size, logits.stride(0), max(1, CHUNK // size),
    )  # fmt: skip
    _run(kernel, args, num_rows * size)


def apply_epilogue(y: Tensor, epilogue: Epilogue) -> Tensor:
    """Like `epilogue.apply_epilogue`, with our kernels where they exist."""
    if epilogue.is_gated:
        return apply_gate(y, epilogue)
    return epilogues.apply_epilogue(y, epilogue)


def _run(kernel: Runner, args: Array[c_int64], num_elements: int) -> None:
    """Call a kernel; its arguments are in the order of row_kernels.py."""
    shares = num_elements >= WORTH_SHARING
    kernel(addressof(args), torch.get_num_threads() if shares else 1)


def _addresses(affine: Affine, result: Tensor) -> tuple[int, int, int]:
    bias = affine.bias
    return _scale(affine), 0 if bias is None else bias.data_ptr(), result.data_ptr()


def _scale(affine: Affine) -> int:
    assert affine.weight is not None
    return affine.weight.data_ptr()


@cache
def _bits(number: float) -> int:
    """An int64 whose first four bytes are the number in float32."""
    return int.from_bytes(struct.pack("=fxxxx", number), sys.byteorder)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is on the CPU, with every token's elements dense."""
    return x.is_cpu and (x.is_contiguous() or x[0].is_contiguous())


_ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16}


def _element(dtype: torch.dtype) -> np.dtype[Any] | None:
    """What kernels take it as; None if there are no kernels for it, or no Numba."""
    if dtype not in _ELEMENTS or find_spec("numba") is None:
        return None
    return np.dtype(_ELEMENTS[dtype])


@cache
def _norm_kernel(dtype: torch.dtype, weight_dtype: torch.dtype, is_rms: bool) -> Runner | None:
    element, weight_element = _element(dtype), _element(weight_dtype)
    if element is None or weight_element is None:
        return None
    from octavo.ops.cpu.row_kernels import compile_norm

    return make_runner(compile_norm(element, weight_element, is_rms))


@cache
def _gate_kernel(source: torch.dtype, dtype: torch.dtype, epilogue: Epilogue) -> Runner | None:
    source_element, element = _element(source), _element(dtype)
    if source_element is None or element is None:
        return None
    from octavo.ops.cpu.row_kernels import compile_gate

    return make_runner(compile_gate(source_element, element, epilogue))


@cache
def _weighted_sum_kernel(dtype: torch.dtype) -> Runner | None:
    if (element := _element(dtype)) is None:
        return None
    from octavo.ops.cpu.row_kernels import compile_weighted_sum

    return make_runner(compile_weighted_sum(element))


@cache
def _quantize_kernel(dtype: torch.dtype) -> Runner | None:
    if (element := _element(dtype)) is None:
        return None
    from octavo.ops.cpu.row_kernels import compile_quantize

    return make_runner(compile_quantize(element))


@cache
def _rescale_kernel(dtype: torch.dtype) -> Runner | None:
    if (element := _element(dtype)) is None:
        return None
    from octavo.ops.cpu.row_kernels import compile_rescale

    return make_runner(compile_rescale(element))


@cache
def _mask_kernel(dtype: torch.dtype) -> Runner | None:
    if (element := _element(dtype)) is None:
        return None
    from octavo.ops.cpu.row_kernels import compile_mask

    return make_runner(compile_mask(element))
