"""Programmatic dependent launch (PDL): a kernel starts while the preceding one is still running.

Launched this way (NVIDIA sm_90 and later), the programs of a kernel move to the SMs as soon as all
programs of the preceding kernel have called `allow_next` or ended. Work that needs no result of an
earlier kernel (loading weights above all) is done before `wait_previous`, which returns when the
preceding kernel has ended and its writes are visible.

The rule, for every kernel that is launched with `launch_options()`:
  1. Each program calls `wait_previous` once, on every path, even if it has no work.
  2. Before it: no store, no atomic, no load from memory that any kernel writes. Weights, rotary
     tables and other constants may be read or prefetched into the L2 cache. So may what was
     written by kernels before the preceding one, if that one calls `allow_next` after its own
     `wait_previous`; by loads that pass by the L1 cache. So may what was written before the
     embedding of the step's tokens (embedding.py): a kernel without the option, that waits for
     all before it, as the only one that precedes it in the step does (pending_tokens.py).
     Cached keys and values of earlier tokens are such, with the copies of blocks, and what the
     encoder of a step has written. What draws ask for is complete before the head begins
     (sampling.py). Kernels of one token's experts take tickets from a counter of their own before
     they wait, and call `allow_next` no sooner than they have them (one_token.py).
  3. `allow_next` may come first of all: it publishes no result, it only lets the next kernel take
     the resources that are left. Early is best, unless the next kernel's programs slow ours down.
Then all kernels of a stream are safe, not only neighbours: a kernel ends after its own
`wait_previous`, so when it has ended, all kernels before it have ended, too. Buffers may be
reused as if kernels ran one after another. Kernels launched without the option (cuBLAS, torch)
wait for all of the kernel before them, and the one after them waits for all of theirs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_LINE = tl.constexpr(128)  # bytes of the L2 cache that are fetched together


@triton.jit
def wait_previous(PDL: tl.constexpr):
    """Return once all earlier kernels of the stream have ended and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def allow_next(PDL: tl.constexpr):
    """The next kernel of the stream may start once every program has got here or ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def not_before(x, PDL: tl.constexpr):
    """x, which has been asked for, and which no instruction before this place may wait for."""
    if PDL:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False,
            pack=32 // x.dtype.primitive_bitwidth,
        )  # fmt: skip
    else:
        return x


@triton.jit
def fetch_to_l2(rows, size):
    """Have rows of `size` on their way, of pointers [n], while the preceding kernel ends."""
    places = rows.to(tl.int64)[:, None]
    row_bytes = size * (rows.dtype.element_ty.primitive_bitwidth // 8)
    for start in range(0, row_bytes, 32 * _LINE):
        offsets = tl.minimum(start + tl.arange(0, 32) * _LINE, row_bytes - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [places + offsets[None, :]],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@cache
def _is_supported(device_index: int) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device_index)[0] >= 9


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch on `device`: the constexpr `PDL` and the launch attribute."""
    if device.type != "cuda" or not _is_supported(torch.cuda.current_device()):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
