"""What the kernels of experts on Hopper share: which tiles there are, whose they are, where their
inputs come from, and where their results go.

A kernel computes both projections (experts_hopper.py). `lists` are the experts, begins and ends of
blocks, and the rows of routing.py's lists; numbers of tiles go on from gates to down projections.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from octavo.ops.cuda.claims import claimed, make_claims
from octavo.ops.cuda.hopper import sync_threads

_TURNS = tl.constexpr(2)  # tiles of gates of a program that may be stored and not yet counted


@gluon.jit
def _block_of(lists, tile, row_tiles):
    """The expert of a tile, and where its tokens begin and end in the lists."""
    block = tile // row_tiles
    expert = gl.load(lists[0] + block, cache_modifier=".cg")
    begin = gl.load(lists[1] + block, cache_modifier=".cg")
    end = gl.load(lists[2] + block, cache_modifier=".cg")
    return expert, begin, end


@gluon.jit
def count_tiles(num_blocks, shapes):
    """How many tiles there are, and how many come before: of gates and ups, of down projections."""
    num_gates = num_blocks * shapes[0][1]
    return (num_gates, 0), (num_blocks * shapes[1][1], num_gates)


@gluon.jit
def shapes_of(num_inner, size, ROWS: gl.constexpr):
    """The outputs, tiles of rows, and rows per expert of both projections."""
    return (
        (num_inner, gl.cdiv(num_inner, ROWS), 2 * num_inner),
        (size, gl.cdiv(size, 2 * ROWS), size),
    )


@gluon.jit
def rows_of(tile, row_tiles, num_outputs, ROWS: gl.constexpr, GATED: gl.constexpr):
    """Where both matrices of a tile begin, of an expert's rows."""
    row = tile % row_tiles * (ROWS if GATED else 2 * ROWS)
    return row, row + (num_outputs if GATED else ROWS)


@gluon.jit
def make_grouped_claims(STAGES: gl.constexpr):
    """A program's claims (claims.py), and the barriers at which its tiles of gates are stored and
    counted, _TURNS in turns.

    Those that multiply are at most so many tiles ahead of the partition that counts.
    """
    stored = gl.allocate_shared_memory(gl.int64, [_TURNS, 1], mbarrier.MBarrierLayout())
    counted = gl.allocate_shared_memory(gl.int64, [_TURNS, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(_TURNS):
        mbarrier.init(stored.index(turn), count=1)
        mbarrier.init(counted.index(turn), count=1)
    return make_claims(STAGES + 1 + _TURNS), (stored, counted)


@gluon.jit
def hand_over(barriers, count):
    """Tell the partition that counts them that the program's tile `count` of gates is stored, by
    all threads of those that multiply.

    barriers: of make_grouped_claims.
    """
    stored, counted = barriers
    turn = count % _TURNS
    mbarrier.wait(counted.index(turn), (count // _TURNS + 1) & 1)
    sync_threads()  # all threads have stored
    mbarrier.arrive(stored.index(turn), count=1)


@gluon.jit
def announce_all(num_blocks, done, barriers, claims, gate_tiles, PDL: gl.constexpr):
    """The partition that counts a block's tiles of gates in `done`, once they are stored.

    An addition that releases what other threads have stored takes until that has arrived in the L2
    cache: a microsecond, in which those that multiply go on.
    """
    stored, counted = barriers
    if PDL:
        tl.extra.cuda.gdc_wait()
    num_tiles = gl.load(num_blocks, cache_modifier=".cg") * gate_tiles
    tile, count, _ = first_state()
    while tile < num_tiles:
        turn = count % _TURNS
        mbarrier.wait(stored.index(turn), (count // _TURNS) & 1)
        gl.atomic_add(done + tile // gate_tiles, 1, sem="release", scope="gpu")
        mbarrier.arrive(counted.index(turn), count=1)
        tile = claimed(claims, count)
        count += 1


@gluon.jit
def await_gates(done, gate_tiles):
    """Return when so many tiles of a block's gates are there, which are counted in `done`."""
    seen = gl.to_tensor(0)
    while seen < gate_tiles:
        seen = gl.atomic_add(done, 0, sem="acquire", scope="gpu")


@gluon.jit
def first_state():
    """A partition's state when it begins: its next tile, and its claims and steps so far."""
    return gl.program_id(0), gl.to_tensor(0), gl.to_tensor(0)


@gluon.jit
def next_block(lists, tile, num_tiles, row_tiles):
    """`_block_of` a tile that was claimed, if there is one: of the last tile otherwise."""
    return _block_of(lists, gl.minimum(tile, num_tiles - 1), row_tiles)


@gluon.jit
def first_block(lists, tile, num_tiles, row_tiles, GATED: gl.constexpr):
    """`_block_of` this program's first tile. That of gates and ups is asked for without waiting for
    the number of blocks: behind the last one the lists hold anything."""
    if GATED:
        return _block_of(lists, tile, row_tiles)
    else:
        return next_block(lists, tile, num_tiles, row_tiles)


@gluon.jit
def sources_of(rows, places, end, TOP_K: gl.constexpr, GATED: gl.constexpr):
    """Where the inputs of some places in the lists are."""
    if GATED:
        return gl.load(rows + places, mask=places < end, other=0) // TOP_K
    return places


@gluon.jit
def reset_progress(progress, num_blocks):
    """What a program does that waits for none any more: the last one of them has the counters ready
    for the next layer."""
    if gl.atomic_add(progress, 1, sem="relaxed", scope="gpu") == gl.num_programs(0) - 1:
        COUNTERS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        done = progress + 2
        for first in range(0, num_blocks, 32 * gl.num_warps()):
            blocks = first + gl.arange(0, 32 * gl.num_warps(), layout=COUNTERS)
            gl.store(done + blocks, gl.zeros_like(blocks), mask=blocks < num_blocks)
        gl.store(progress, 0)
        gl.store(progress + 1, 0)


@gluon.jit
def targets_of(
    rows,
    shares,
    begin,
    end,
    num_tokens,
    TOKENS: gl.constexpr,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    STORE: gl.constexpr,
):
    """Where the results for some places in the lists go, -1 for nowhere, and what they are
    multiplied by. These are loaded before a tile is multiplied, so that nothing waits for them
    afterwards."""
    places = begin + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORE))
    is_row = places < end
    share = 1.0
    target = places
    if not GATED:
        assigned = gl.load(rows + places, mask=is_row, other=0)
        share = gl.load(shares + assigned, mask=is_row, other=0.0)
        target = assigned % TOP_K * num_tokens + assigned // TOP_K
    return gl.where(is_row, target, -1), share


@gluon.jit
def store_to(acc, out, targets, row, num_outputs, GATED: gl.constexpr, STORE: gl.constexpr):
    """Write acc [ROWS, TOKENS], outputs from `row` on, to what `targets_of` says."""
    target, share = targets
    values = gl.convert_layout(acc, STORE)
    if not GATED:
        values = values * share[None, :]
    outputs = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, STORE))
    places = out + target.to(gl.int64)[None, :] * num_outputs + outputs[:, None]
    inside = (target >= 0)[None, :] & (outputs < num_outputs)[:, None]
    gl.store(places, values.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def store_halves(high, low, out, begin, end, row, size, STORE: gl.constexpr):
    """Write both numbers of outputs from `row` on, [ROWS, TOKENS], to out [places, 2, size]."""
    places = begin + gl.arange(0, high.shape[1], layout=gl.SliceLayout(0, STORE))
    outputs = row + gl.arange(0, high.shape[0], layout=gl.SliceLayout(1, STORE))
    targets = out + places.to(gl.int64)[None, :] * (2 * size) + outputs[:, None]
    inside = (places < end)[None, :] & (outputs < size)[:, None]
    gl.store(targets, high, mask=inside)
    gl.store(targets + size, low, mask=inside)
