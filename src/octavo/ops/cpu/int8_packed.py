"""Products of int8 weights with rounded tokens on x86 CPUs: by matrix units (AMX), or by the dot
products of AVX-512 (VNNI).

One call multiplies, scales, adds the bias, applies the gate and writes results in the inputs'
dtype, where oneDNN's product leaves float32 sums to another pass. Where it runs on one thread, it
rounds the tokens, too; for several threads another call does. Measured on one core of a Xeon with
matrix units, weights from memory, with a call of its own for rounding, this takes 0.65 to 0.9 of
the time of oneDNN's int8 with such a pass (int8.py) for 1 to 1,024 tokens, with the same bits.

There few tokens wait for the weights, which come as fast as the core reads memory. With 64 tokens a
KB of them takes 1.5 times as long: the rest, arithmetic and inputs that come from the L2 cache,
does not overlap with it. These were tried and are no faster there: all tokens in one pass over the
weights; weights ordered by parts of their inputs, so that the tokens' stay in the L1 cache (3 to
14% faster for 1,024 tokens); other distances of fetching, and fetching the next tiles in the
second pass; and huge pages.

Dot products took 0.75 to 0.9 of oneDNN's time on one core of a Zen 5 for one token, and 0.75 to
0.87 from 12 tokens on, when each tile of 16 outputs lay by itself; in blocks of 64, one token takes
3 to 10% less than that. There the inputs are uint8 before the kernel reads them: made from int8 in
the loop, 64 tokens took 1.4 times as long (and as vectors, LLVM 22 did not come to an end).
"""

from __future__ import annotations

from ctypes import addressof, c_int64
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.cpu.int8_kernel import JOB, MAX_SPAN, PANEL_TILES, compile_product
from octavo.ops.cpu.jit import host_has
from octavo.ops.cpu.linear import empty_weights
from octavo.ops.cpu.linear_kernel import BLOCK
from octavo.ops.cpu.matrix_tiles import TILE_INPUTS
from octavo.ops.cpu.row_ops import apply_epilogue, quantize_rows
from octavo.ops.cpu.threads import Runner, make_runner
from octavo.ops.cpu.vectors import LANES
from octavo.ops.epilogue import Epilogue
from octavo.ops.quantized import GroupedInt, chunks

UNITS_PER_THREAD = 8  # so that a thread which loses its core hardly delays the others
WORTH_SHARING = 1 << 19  # weights; below this, waking a thread costs more than it saves
_Job = c_int64 * len(JOB.names or ())


class PackedInt8Linear:
    """Owns a copy of W [out_features, in_features] in int8, filled up with zeros to whole tiles of
    64 inputs: [tiles of 16 outputs, in_features / 4, 16, 4], or for dot products [blocks of 64,
    in_features / 4, 64, 4]. Needs has_matrix_units() or has_dot_products().

    Results have the inputs' dtype, or are in float32 if `is_wide`: they are not rounded again.
    """

    keeps_weight = False

    def __init__(self, form: GroupedInt, is_wide: bool = False) -> None:
        self._is_wide = is_wide
        self._out_features = form.shape[0]
        self._has_tiles = has_matrix_units()
        self._tiles = pack(form.packed, LANES if self._has_tiles else BLOCK)
        self._stride = self._tiles.shape[1] * 4
        self._scales = form.scales.flatten().float()
        self._offsets = None
        if not self._has_tiles:  # 128 is added to inputs
            # One tile after the other, because torch would make all of them int32 first.
            sums = [tile.sum(dim=(0, 2), dtype=torch.int32) for tile in self._tiles]
            self._offsets = torch.stack(sums).mul_(-128)
        self._addresses = (
            self._tiles.data_ptr(),
            0 if self._offsets is None else self._offsets.data_ptr(),
            self._scales.data_ptr(),
        )

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply. Batch-invariant."""
        if epilogue.is_gated and self._out_features % (2 * LANES) == 0:
            return self._multiply(x, bias, epilogue)
        return apply_epilogue(self.apply_partial(x, bias), epilogue)

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        return self._multiply(x, bias, Epilogue.NONE)

    def _multiply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        (num_tokens, in_features), num_outputs = x.shape, self._out_features
        size = num_outputs // 2 if epilogue.is_gated else num_outputs
        dtype = torch.float32 if self._is_wide else x.dtype
        output = torch.empty((num_tokens, size), dtype=dtype)
        num_tiles = -(-num_tokens // LANES)
        if num_tiles == 0:
            return output
        tile_rows = -(-num_tokens // num_tiles) if self._has_tiles else LANES
        threads, span, rows_per_unit = torch.get_num_threads(), MAX_SPAN, num_tokens
        if threads > 1 and self._tiles.numel() * max(1, num_tokens // 8) < WORTH_SHARING:
            threads = 1
        exact = to_rounded = to_scales = 0
        if threads == 1:  # who rounds the tokens, too
            x = x if x.stride(1) == 1 else x.contiguous()
            exact = x.data_ptr()
        else:
            num_rows = num_tiles * tile_rows if self._has_tiles else num_tokens
            rounded, scales = quantize_rows(x, (num_rows, self._stride))
            to_rounded, to_scales = rounded.data_ptr(), scales.data_ptr()
            if not self._has_tiles:
                rounded.view(torch.uint8).bitwise_xor_(128)  # adds it
            columns, wanted = -(-size // LANES), UNITS_PER_THREAD * threads
            span = max(1, min(MAX_SPAN, columns // wanted))
            panel = PANEL_TILES * tile_rows
            cuts = -(-wanted // -(-columns // span))
            rows_per_unit = -(-num_tokens // (cuts * panel)) * panel
        job = _Job(  # in the order of JOB: next_unit first
            0, to_rounded, self._stride, to_scales, *self._addresses,
            0 if bias is None else bias.data_ptr(), output.data_ptr(),
            num_tokens, tile_rows, num_outputs, self._stride // TILE_INPUTS, span, rows_per_unit,
            exact, x.stride(0), in_features,
        )  # fmt: skip
        _runner(dtype, x.dtype, epilogue, self._has_tiles)(addressof(job), threads)
        return output


@cache
def has_matrix_units() -> bool:
    """Whether this CPU has them for int8, and the system lets us use them."""
    # The system keeps these registers only for processes that ask; torch knows how.
    ask = getattr(torch.cpu, "_init_amx", None)
    return host_has("amx-int8") and host_has("avx512f") and ask is not None and bool(ask())


def has_dot_products() -> bool:
    """Whether this CPU has those of int8, of 16 sums at once."""
    return host_has("avx512vnni")


def pack(values: Tensor, rows: int) -> Tensor:
    """uint8 [out_features, in_features], 128 standing for 0 -> int8 [tiles of so many rows,
    inputs / 4, rows, 4]."""
    out_features, in_features = values.shape
    tiles, steps = -(-out_features // rows), -(-in_features // TILE_INPUTS)
    num_columns = steps * TILE_INPUTS
    packed = empty_weights((tiles, num_columns // 4, rows), torch.int32)
    for part in chunks(tiles * rows, num_columns, rows):  # a copy of all would take as much again
        whole = values.new_full((part.stop - part.start, num_columns), 128)
        given = values[part]
        whole[: len(given), :in_features] = given
        words = whole.bitwise_xor_(128).view(torch.int32).view(-1, rows, num_columns // 4)
        packed[part.start // rows : part.stop // rows].copy_(words.transpose(1, 2))
    return packed.view(torch.int8).view(tiles, -1, rows, 4)


@cache
def _runner(
    dtype: torch.dtype, bias_dtype: torch.dtype, epilogue: Epilogue, has_tiles: bool
) -> Runner:
    elements: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.bfloat16: np.uint16}
    kinds = [np.dtype(elements[each]) for each in (dtype, bias_dtype)]
    return make_runner(compile_product(kinds[0], kinds[1], epilogue, has_tiles))
