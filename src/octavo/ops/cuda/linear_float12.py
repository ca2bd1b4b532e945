"""y = x W^T on Hopper with W in 12 bits (float12.py).

One token is linear_ring_float12.py's, whether other products follow it or not, and up to 64 are
linear_hopper_float12.py's. More are linear_many_float12.py's, as long as that takes less time than
unpacking W into a workspace, which costs as much as writing it, and computing as with any other
weight. Results are those of bfloat16 weights, but for the order in which sums are added up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.ops.cuda.activation import apply_gate
from octavo.ops.cuda.float12 import PIECE_ROWS, Float12Weight, pack_float12
from octavo.ops.cuda.linear import (
    PARTIAL_DTYPE,
    dense_workspace,
    linear,
    linear_partial,
    reserve_dense,
)
from octavo.ops.cuda.linear_hopper_float12 import (
    Float12Tiles,
    choose_float12_tiles,
    linear_few_float12,
)
from octavo.ops.cuda.linear_many_float12 import (
    dequantize_float12,
    linear_many_float12,
    most_tokens,
)
from octavo.ops.cuda.linear_ring_float12 import linear_one_float12
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.norm import DeferredNorm

_MOST_FEW_TOKENS = 64
# Elements of a weight that are unpacked at once: those of any layer, but not of a vocabulary, whose
# head would save less memory than its workspace takes.
_UNPACKED = 1 << 27


class Float12Linear:
    """Owns W in 12 bits."""

    keeps_weight = False

    def __init__(self, weight: Tensor) -> None:
        """weight: bfloat16 [out_features, in_features], of which takes_float12 is true."""
        self._stored = pack_float12(weight)
        self._most_tokens = most_tokens(*weight.shape)
        reserve_dense(weight.device, weight.dtype, min(weight.numel(), _UNPACKED))

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply."""
        num_tokens = len(x)
        if num_tokens == 1:
            return linear_one_float12(x, self._stored, bias, epilogue)
        x, tiles = _aligned(x), self._choose_tiles(num_tokens, epilogue)
        if tiles is None and num_tokens > self._most_tokens:
            return self._apply_unpacked(x, bias, epilogue)
        out = x.new_empty((num_tokens, self._num_results(epilogue)))
        if tiles is None:
            linear_many_float12(x, self._stored, bias, out, epilogue)
        else:
            linear_few_float12(x, self._stored, bias, out, epilogue, tiles, is_partial=False)
        return out

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        num_tokens = len(x)
        tiles = self._choose_tiles(num_tokens, Epilogue.NONE) if num_tokens > 1 else None
        if tiles is not None and tiles.splits > 1:
            shape = (tiles.splits, num_tokens, self._stored.shape[0])
            out = x.new_empty(shape, dtype=PARTIAL_DTYPE)
            stored, x = self._stored, _aligned(x)
            linear_few_float12(x, stored, bias, out, Epilogue.NONE, tiles, is_partial=True)
            return out
        is_whole = math.prod(self._stored.shape) <= _UNPACKED
        if tiles is None and num_tokens > self._most_tokens and is_whole:
            return linear_partial(_aligned(x), self._unpacked(self._stored), bias)
        return self.apply(x, bias, Epilogue.NONE)

    def norms_inputs(self, num_tokens: int, norms_branch: bool) -> bool:
        """See NormingKernel.norms_inputs."""
        return num_tokens == 1

    def apply_normed(self, x: DeferredNorm, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See NormingKernel.apply_normed."""
        return linear_one_float12(x, self._stored, bias, epilogue)

    def _choose_tiles(self, num_tokens: int, epilogue: Epilogue) -> Float12Tiles | None:
        if num_tokens > _MOST_FEW_TOKENS:
            return None
        num_results, size = self._num_results(epilogue), self._stored.shape[1]
        return choose_float12_tiles(num_tokens, num_results, size, epilogue)

    def _num_results(self, epilogue: Epilogue) -> int:
        """Of a token."""
        return self._stored.shape[0] // (2 if epilogue.is_gated else 1)

    def _apply_unpacked(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """By as many rows of W at once as the workspace has room for."""
        num_rows, size = self._stored.shape
        if num_rows * size <= _UNPACKED:
            return linear(x, self._unpacked(self._stored), bias, epilogue)
        y = x.new_empty((len(x), num_rows))
        step = _UNPACKED // (PIECE_ROWS * size) * PIECE_ROWS
        for begin in range(0, num_rows, step):
            rows = slice(begin, min(begin + step, num_rows))
            columns = self._unpacked(_rows_of(self._stored, rows)).t()
            if bias is None:
                torch.mm(x, columns, out=y[:, rows])
            else:
                torch.addmm(bias[rows], x, columns, out=y[:, rows])
        return apply_gate(y, epilogue) if epilogue.is_gated else apply_epilogue(y, epilogue)

    def _unpacked(self, stored: Float12Weight) -> Tensor:
        """W, or some of its rows, until another weight is unpacked."""
        dense = dense_workspace(stored.words.device, torch.bfloat16, *stored.shape)
        dequantize_float12(stored, dense)
        return dense


def _rows_of(stored: Float12Weight, rows: slice) -> Float12Weight:
    """Some rows of W, from the first of a piece on."""
    pieces = slice(rows.start // PIECE_ROWS, -(-rows.stop // PIECE_ROWS))
    shape = (rows.stop - rows.start, stored.shape[1])
    return Float12Weight(shape, stored.words[pieces], stored.scales[rows])


def _aligned(x: Tensor) -> Tensor:
    """x where TMA can fetch it: rows that are dense and aligned to 16 bytes."""
    is_aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if is_aligned else x.contiguous().clone()
