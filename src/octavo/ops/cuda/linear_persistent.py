"""Launches linear_hopper_persistent.py's kernel, of any form of W that it takes."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.ops.cuda.linear import _REGISTERS, _descriptor, _workspace
from octavo.ops.cuda.linear_hopper_persistent import HALF, persistent_linear_kernel
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.quantized_tiles import Division, Tiles
from octavo.ops.cuda.stored_weights import BLOCK
from octavo.ops.cuda.tile_sizes import num_sms
from octavo.ops.epilogue import Epilogue

MAX_PROGRAMS = 144  # each needs 256 KB of the workspace


class Operand(NamedTuple):
    """W as the kernel takes it (persistent_linear_kernel says what each argument is)."""

    descriptors: tuple[Any, Any]  # weight, exponents
    scales: Tensor
    zeros: Tensor
    strides: tuple[int, int, int]  # stride_row, stride_group, block_rows
    group_blocks: int
    FORMAT: int
    SCALE: int
    HAS_ZEROS: bool
    PARTS: int
    UNPACK_LOW: str
    UNPACK_HIGH: str


def launch_persistent(
    x: Tensor,
    weight: Operand,
    bias: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    tiles: Tiles,
) -> None:
    """Write epilogue(x W^T + b) to out [num_tokens, num_rows]."""
    (num_tokens, size), num_rows = x.shape, out.shape[-1]
    rows = tiles.rows // 2 if epilogue.is_gated else tiles.rows
    num_blocks = triton.cdiv(size, BLOCK)
    num_tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_tokens, tiles.tokens)
    division = Division.of(num_tiles, num_blocks, _num_sms(x.device), tiles.is_shared)
    sums, arrivals = _workspace(x.device)
    if division.num_shared:
        assert 2 * division.num_programs * tiles.rows * tiles.tokens <= sums.numel()
        assert division.num_shared <= len(arrivals)
    first = 1 << (tiles.tokens.bit_length() - 1)  # tokens of a tile: a power of two
    rest = tiles.tokens - first
    persistent_linear_kernel[(division.num_programs,)](
        _descriptor(x, first, HALF),
        _descriptor(x, rest or first, HALF),
        *weight.descriptors,
        weight.scales,
        weight.zeros,
        bias,
        out,
        sums,
        arrivals,
        num_tokens,
        num_rows,
        num_blocks,
        num_tiles - division.num_shared,
        division.num_shared,
        division.per_program,
        *weight.strides,
        weight.group_blocks,
        REST=rest,
        ROWS=tiles.rows,
        STAGES=tiles.stages,
        X_STAGES=tiles.x_stages,
        HALVES=tiles.halves,
        FORMAT=weight.FORMAT,
        SCALE=weight.SCALE,
        HAS_ZEROS=weight.HAS_ZEROS,
        PARTS=weight.PARTS,
        UNPACK_LOW=weight.UNPACK_LOW,
        UNPACK_HIGH=weight.UNPACK_HIGH,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=tiles.warps,
        maxnreg=_REGISTERS // (32 * (tiles.warps + 4)) // 8 * 8,
        **launch_options(x.device),
    )


@cache
def _num_sms(device: torch.device) -> int:
    """As many programs as have room in the workspace, at most."""
    return min(num_sms(device), MAX_PROGRAMS)
