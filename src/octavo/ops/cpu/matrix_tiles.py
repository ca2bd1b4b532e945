"""Products of int8 on the matrix units of x86 CPUs (AMX), as LLVM code that Numba inlines.

A tile register has 16 rows of 64 bytes. A product adds to 16 x 16 sums in int32, exactly: of 16
tokens, 64 inputs each, and 16 outputs, whose weights are in the order [inputs / 4, outputs, 4].
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.ops.cpu.vectors import (
    I8,
    I64,
    LANES,
    PTR,
    VF32,
    VI32,
    advance,
    call,
    int64_const,
    load,
    prefetch,
    round_bf16,
    splat,
    store,
)

TILE_INPUTS = 64
TILE_BYTES = TILE_INPUTS * LANES  # of weights
PAIR = 2  # tiles of tokens, and of outputs, that are multiplied together, at most
_SUMS, _TOKENS, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # which registers hold what
_AHEAD = 4096  # bytes of weights between those that are multiplied and those that are fetched
_VOID = ir.VoidType()


def _tile(b: ir.IRBuilder, name: str, *operands: Any) -> None:
    """An instruction; operands are registers (int), addresses or strides."""
    values = [ir.Constant(I8, each) if isinstance(each, int) else each for each in operands]
    call(b, f"llvm.x86.{name}", _VOID, *values)


@intrinsic
def configure_tiles(typingctx, palette):
    """Set the shapes of this thread's registers; `palette` is an array of the 64 bytes that
    LDTILECFG takes."""

    def codegen(context, b, sig, args):
        data = context.make_array(sig.args[0])(context, b, args[0]).data
        _tile(b, "ldtilecfg", b.bitcast(data, PTR))
        return context.get_dummy_value()

    return types.void(palette), codegen


@intrinsic
def release_tiles(typingctx):
    """Leave the matrix units to others: oneDNN configures them anew."""

    def codegen(context, b, sig, args):
        _tile(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def multiply_tiles(
    typingctx, tokens, outputs, x, x_stride, x_tile, weight, weight_tile, fetches, depth, sums,
    sums_stride, sums_column,
):  # fmt: skip
    """Sums of one or two tiles of tokens and as many of outputs, over depth * 64 inputs.

    Addresses and strides are bytes; tiles of tokens have the rows that they are configured to.
      inputs   of tile t and its row r at x + t * x_tile + r * x_stride, contiguous
      weights  of tile n at weight + n * weight_tile, contiguous; if `fetches` is 1, not 0, what
               follows is fetched meanwhile
      sums     of tiles t and n: int32 [rows, 16] at sums + t * sums_stride + n * sums_column
    """
    signature = types.void(*([types.int64] * 12))

    def codegen(context, b, sig, args):
        tokens, outputs, x, x_stride, x_tile, weight, weight_tile = args[:7]
        fetches, depth, sums, sums_stride, sums_column = args[7:]

        def pointer(address: Any) -> Any:
            return b.inttoptr(address, PTR)

        def emit(num_rows: int, num_columns: int, has_fetches: bool) -> None:
            registers = {
                (t, n): _SUMS[t * num_columns + n]
                for t in range(num_rows)
                for n in range(num_columns)
            }
            for register in registers.values():
                _tile(b, "tilezero", register)
            before = b.block
            loop, after = b.append_basic_block("inputs"), b.append_basic_block("inputs.done")
            b.branch(loop)
            b.position_at_end(loop)
            k = b.phi(I64)
            k.add_incoming(int64_const(0), before)
            x_here = b.add(x, b.mul(k, int64_const(TILE_INPUTS)))
            weight_here = b.add(weight, b.mul(k, int64_const(TILE_BYTES)))
            for n in range(num_columns):
                place = advance(b, weight_here, n, weight_tile)
                _tile(b, "tileloadd64", _WEIGHTS[n], pointer(place), int64_const(64))
                if has_fetches:
                    for offset in range(_AHEAD, _AHEAD + TILE_BYTES, 64):
                        prefetch(b, b.add(place, int64_const(offset)))
            for t in range(num_rows):
                place = advance(b, x_here, t, x_tile)
                _tile(b, "tileloadd64", _TOKENS[t], pointer(place), x_stride)
                for n in range(num_columns):
                    _tile(b, "tdpbssd", registers[t, n], _TOKENS[t], _WEIGHTS[n])
            next_k = b.add(k, int64_const(1))
            k.add_incoming(next_k, loop)
            b.cbranch(b.icmp_signed("<", next_k, depth), loop, after)
            b.position_at_end(after)
            for (t, n), register in registers.items():
                place = advance(b, advance(b, sums, t, sums_stride), n, sums_column)
                _tile(b, "tilestored64", register, pointer(place), int64_const(64))

        done = b.append_basic_block("tiles.done")
        shape = b.add(b.mul(tokens, int64_const(PAIR)), outputs)
        switch = b.switch(b.add(b.mul(shape, int64_const(2)), fetches), done)
        for t, n, has_fetches in product((1, 2), (1, 2), (False, True)):
            block = b.append_basic_block(f"tiles.{t}x{n}.{has_fetches}")
            switch.add_case(int64_const((t * PAIR + n) * 2 + has_fetches), block)
            b.position_at_end(block)
            emit(t, n, has_fetches)
            b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def scale_sums(typingctx, like, sums, offsets, token_scale, scales, shifts, target):
    """Write 16 int32 (sums + offsets) * scales * token_scale + shifts as elements like `like`
    (float32, or uint16 for bf16); sums and offsets (int32), scales and shifts (float32) and the
    target are addresses."""
    dtype = like.dtype
    address = types.int64
    signature = types.void(like, address, address, types.float32, address, address, address)

    def codegen(context, b, sig, args):
        _, sums, offsets, token_scale, scales, shifts, target = args
        exact = b.add(load(b, sums, VI32), load(b, offsets, VI32))
        value = b.fmul(b.sitofp(exact, VF32), load(b, scales, VF32))
        value = b.fadd(b.fmul(value, splat(b, token_scale)), load(b, shifts, VF32))
        store(b, value if dtype == types.float32 else round_bf16(b, value), target, align=2)
        return context.get_dummy_value()

    return signature, codegen
