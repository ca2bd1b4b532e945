"""Thread block clusters: programs that write into each other's shared memory.

The programs of a cluster run at the same time on SMs that lie close together. One of them can store
to another one's shared memory without a detour by the L2 cache, and an mbarrier there counts the
bytes that have come. So a result is there sooner than one that announces itself in global memory
(announcing.py).

Triton knows clusters as parts of one program, whose tensors lie in several SMs. Here each part is a
program of its own, as without clusters; only the launch says that they belong together. So a kernel
is compiled for one program, and `launch` sets the size of the cluster afterwards. Consecutive
numbers along axis 0 of the grid are one cluster.

Each program receives in an inbox, which begins with its mbarrier. The order for a program is:
`open_inbox`, `wait_until_open`, then `send` and `send_pair`, and `wait_for_bytes` before it reads.
What lies behind the inbox in the same memory is the program's own. A program must wait for its
bytes before it ends, because its shared memory has to exist while others store to it. See the PTX
ISA for st.async, mapa and mbarrier.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

BARRIER_BYTES = gl.constexpr(16)  # at the beginning of an inbox

_OPEN = gl.constexpr("""
{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [$1], 1;
    @first fence.mbarrier_init.release.cluster;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;
    barrier.cluster.arrive.release.aligned;
    mov.u32 $0, 0;
}
""")
_WAIT_OPEN = gl.constexpr("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;")
_WAIT_BYTES = gl.constexpr("""
{
    .reg .pred complete;
look:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [$1], 0;
    @!complete bra look;
    mov.u32 $0, 0;
}
""")
_OF_RANK = gl.constexpr("mapa.shared::cluster.u32 $0, $1, $2;")
# Elements of a thread that follow each other, with the address of each and that of the mbarrier for
# each; those of the first count.
_SEND = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
_SEND_1 = gl.constexpr(_SEND + ".b32 [$2], $1, [$3]; mov.u32 $0, 0;")
_SEND_2 = gl.constexpr(_SEND + ".v2.b32 [$4], {$2, $3}, [$6]; mov.u32 $0, 0; mov.u32 $1, 0;")
_SEND_4 = gl.constexpr(
    _SEND + ".v4.b32 [$8], {$4, $5, $6, $7}, [$12];"
    " mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;"
)
_SEND_PAIR = gl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p "
    + _SEND
    + ".v2.b32 [$3], {$1, $2}, [$4]; mov.u32 $0, 0; }"
)
_KEEP = gl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $12, 0; @p st.shared.v4.b32 [$8], {$4, $5, $6, $7};"
    " mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; }"
)
_READ_1 = gl.constexpr("ld.shared.b32 $0, [$1];")
_READ_2 = gl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")
_READ_4 = gl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")


def inbox_of(num_bytes: int) -> str:
    """The assembly that declares so many bytes of shared memory and gives their address: an inbox,
    and what a program keeps for itself. A compile-time constant for `declare_inbox`."""
    return f"{{ .shared .align 16 .b8 inbox[{num_bytes}]; mov.u32 $0, inbox; }}"


def launch(
    kernel: JITFunction[Any], grid: tuple[int, ...], cluster: int, *args: Any, **options: Any
) -> None:
    """Launch a kernel in clusters.

    Args:
        grid: clusters along axis 0, and programs along the others.
        cluster: programs of each; up to 8 on any GPU that has clusters, 16 on an H100 or H200.
        args, options: as for a launch without clusters.
    """
    compiled = kernel.run(*args, grid=grid, warmup=True, **options)
    if compiled is None:  # other threads compile it: see compiled_together
        return
    num_warps, _, shared_memory = compiled.packed_metadata
    compiled.packed_metadata = num_warps, cluster, shared_memory
    kernel.run(*args, grid=grid, warmup=False, **options)


@gluon.jit
def declare_inbox(INBOX: gl.constexpr):
    """The address of this program's inbox, which begins with its mbarrier; see `inbox_of`."""
    return gl.inline_asm_elementwise(INBOX, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def open_inbox(inbox, num_bytes):
    """Expect so many bytes, and tell the other programs of the cluster so."""
    gl.inline_asm_elementwise(
        _OPEN, "=r,r,r", [inbox, num_bytes], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_until_open():
    """Return once all programs of the cluster have called `open_inbox`."""
    gl.inline_asm_elementwise(_WAIT_OPEN, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def of_rank(address, rank):
    """The same places in the shared memory of the cluster's programs with these numbers."""
    address, rank = gl.broadcast(address, rank)
    return gl.inline_asm_elementwise(
        _OF_RANK, "=r,r,r", [address, rank], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def send(x, address, barrier, VEC: gl.constexpr):
    """Store float32 at addresses that `of_rank` has given, in one place each.

    Each element of x is in one thread, which has VEC neighbours with neighbouring addresses.
    barrier: of the inbox that each element goes to.
    """
    bits = x.to(gl.int32, bitcast=True)
    if VEC == 4:
        gl.inline_asm_elementwise(
            _SEND_4, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [bits, address, barrier],
            dtype=gl.int32, is_pure=False, pack=4,
        )  # fmt: skip
    elif VEC == 2:
        gl.inline_asm_elementwise(
            _SEND_2, "=r,=r,r,r,r,r,r,r", [bits, address, barrier],
            dtype=gl.int32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            _SEND_1, "=r,r,r,r", [bits, address, barrier], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def send_pair(x, y, address, barrier, inside):
    """Store x and y, float32 one behind the other, where `inside`; see `send`."""
    gl.inline_asm_elementwise(
        _SEND_PAIR, "=r,r,r,r,r,r",
        [x.to(gl.int32, bitcast=True), y.to(gl.int32, bitcast=True), address, barrier, inside],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_bytes(inbox):
    """Return once all bytes that the inbox expects have come."""
    gl.inline_asm_elementwise(_WAIT_BYTES, "=r,r", [inbox], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep_own(x, address, inside):
    """Store float32 in the program's own shared memory where `inside`. A thread has four neighbours
    with neighbouring addresses."""
    gl.inline_asm_elementwise(
        _KEEP, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
        [x.to(gl.int32, bitcast=True), address, inside],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def read_own(address, VEC: gl.constexpr):
    """float32 of the program's own shared memory; VEC: as in `send`."""
    if VEC == 4:
        bits = gl.inline_asm_elementwise(
            _READ_4, "=r,=r,=r,=r,r,r,r,r", [address], dtype=gl.int32, is_pure=False, pack=4
        )
    elif VEC == 2:
        bits = gl.inline_asm_elementwise(
            _READ_2, "=r,=r,r,r", [address], dtype=gl.int32, is_pure=False, pack=2
        )
    else:
        bits = gl.inline_asm_elementwise(
            _READ_1, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1
        )
    return bits.to(gl.float32, bitcast=True)
