"""Tiles that the programs of a persistent kernel claim, one after the other, from a counter.

Not all SMs read memory equally fast: with as many tiles for each, some would end long before the
others. A program's first tile has the program's own number. The partition that loads weights, a
single warp, claims each one that follows when it has asked for all weights of the one before, and
tells it to the other partitions by shared memory.

There are more places for such numbers than stages of weights, so that none is overwritten before
all have read it: with one step in each tile, who loads weights is ahead of the others by as many
tiles as there are stages.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from octavo.ops.cuda.hopper import sync_threads


@gluon.jit
def make_claims(SLOTS: gl.constexpr):
    """A program's claims in shared memory: places for numbers, and barriers."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], FLAT)
    told = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(told.index(slot), count=1)
    return numbers, told


@gluon.jit
def next_number(counter):
    """The next number of a counter in the first lane of a single warp, and 0 in the other lanes. A
    scalar addition would return it through shared memory; this one is waited for where the result
    is used."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    none = gl.zeros_like(lanes)
    first = lanes == 0
    before = gl.atomic_add(counter + none, none + 1, mask=first, sem="relaxed", scope="gpu")
    return gl.where(first, before, 0)


@gluon.jit
def tell(claims, count, tile):
    """Tell the other partitions the tile of the program's claim `count`, by a single warp."""
    numbers, told = claims
    slot = count % numbers.shape[0]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index(slot).store(gl.zeros([1], gl.int32, ONE) + tile)
    sync_threads()
    mbarrier.arrive(told.index(slot), count=1)


@gluon.jit
def claim(claims, count, counter):
    """A program's next tile, claimed by a single warp, and told to the other partitions as its
    claim `count`."""
    tile = gl.num_programs(0) + gl.sum(next_number(counter), 0)
    tell(claims, count, tile)
    return tile


@gluon.jit
def claimed(claims, count):
    """The tile of the program's claim `count`, once it is there."""
    numbers, told = claims
    SLOTS: gl.constexpr = numbers.shape[0]
    slot = count % SLOTS
    mbarrier.wait(told.index(slot), (count // SLOTS) & 1)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(numbers.index(slot).load(ONE), 0)
