"""Building blocks of kernels for Hopper GPUs: tiles that TMA fetches, copies, and shared memory.

What Triton calls otherwise in 3.6 than in 3.9 has one name here.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# By TMA: (descriptor, place, mbarrier, tile in shared memory).
fetch_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# By threads: (place in shared memory, pointers). In 3.9 the old name still exists, and fails.
copy_async = (
    async_copy.async_load
    if hasattr(async_copy, "async_load")
    else async_copy.async_copy_global_to_shared
)
# All threads of a partition wait for each other.
sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def swizzled_descriptor(tensor: Tensor, block: list[int], swizzle: int) -> TensorDescriptor:
    """The TMA descriptor for fetching blocks of that shape, which shared memory holds with a
    swizzle of so many bytes; 0: with none."""
    return TensorDescriptor.from_tensor(
        tensor, block, _swizzled_layout(swizzle, 8 * tensor.element_size(), len(block))
    )


@cache
def _swizzled_layout(swizzle: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle, bits, rank=rank)


@gluon.jit
def allocate_tiles(descriptor, COUNT: gl.constexpr):
    """So many tiles in shared memory, as the descriptor fetches them."""
    SHAPE: gl.constexpr = descriptor.block_type.shape
    return gl.allocate_shared_memory(
        descriptor.dtype, [COUNT, SHAPE[0], SHAPE[1]], descriptor.layout
    )


@gluon.jit
def recast(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared memory as elements of another type, in another shape and layout."""
    if _IS_PUBLIC:
        found = memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        found = memory._reinterpret(DTYPE, SHAPE, LAYOUT)
    return found


@gluon.jit
def reinterpreted(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared memory in another shape and layout."""
    return recast(memory, memory.dtype, SHAPE, LAYOUT)


@gluon.jit
def tiles_of_rows(tiles, ROWS: gl.constexpr):
    """Shared memory [n, rows, columns] as [n * rows / ROWS, ROWS, columns]."""
    SHAPE: gl.constexpr = [tiles.shape[0] * tiles.shape[1] // ROWS, ROWS, tiles.shape[2]]
    LAYOUT: gl.constexpr = tiles.layout
    return reinterpreted(tiles, SHAPE, LAYOUT)


@gluon.jit
def prefetch(places):
    """Have the lines of pointers on their way to the L2 cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [places],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
