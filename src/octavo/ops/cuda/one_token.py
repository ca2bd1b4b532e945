"""What the kernels of one token's experts share: where inputs and experts come from, and buffers
that take turns.

Such a kernel has a program on each SM, in partitions (experts_one_mx.py, experts_one_float8.py).
Programs exchange results through a buffer whose places are EMPTY until a result has come. There are
two: a launch makes the one EMPTY that it does not use. Which one it uses follows from a counter of
all programs that have begun, of two launches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from octavo.ops.cuda.announcing import EMPTY
from octavo.ops.cuda.hopper import sync_threads
from octavo.ops.experts import Unrouted


class Source(NamedTuple):
    """Where inputs and experts come from: the kernel's first arguments."""

    x: Tensor
    ids: Tensor | None = None
    shares: Tensor | None = None
    residual: Tensor | None = None
    total: Tensor | None = None
    norm_weight: Tensor | None = None
    router_weight: Tensor | None = None
    router_bias: Tensor | None = None
    num_hit: Tensor | None = None
    num_experts: int = 0
    eps: float = 0.0
    scale: float = 0.0

    @classmethod
    def of_norm(cls, x: Unrouted) -> Source:
        """The source of a kernel that norms x and routes by itself."""
        norm, config = x.norm, x.config
        return cls(
            norm.x,
            residual=norm.residual,
            total=norm.total,
            norm_weight=norm.weight,
            router_weight=x.router.weight,
            router_bias=x.router.bias,
            num_hit=x.num_hit,
            num_experts=config.num_experts,
            eps=norm.eps,
            scale=config.scale,
        )


def two_buffers(device: torch.device, *shape: int) -> Tensor:
    """Two buffers of int32 places, all EMPTY. Not to be made in a graph, whose every replay would
    empty them."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    return torch.full((2, *shape), EMPTY.value, dtype=torch.int32, device=device)


@gluon.jit
def expert_of(experts, slot):
    """The expert of a slot, of the experts of all."""
    expert = experts[0]
    for i in gl.static_range(1, len(experts)):
        expert = gl.where(slot == i, experts[i], expert)
    return expert


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and how often it was used before, modulo 2."""
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, 1 - phase, phase)


@gluon.jit
def take_ticket(tickets, launch):
    """Find out which of both buffers the launch uses, and how many of its programs were before this
    one, and tell it to the other partitions; the ticket, of all programs of two launches.

    That is before the wait, as no other atomic is: by `allow_next_with`, the next kernel may start,
    and thus the next launch of this one may take tickets, when all programs have theirs.
    """
    numbers, is_told = launch
    all_programs = 2 * gl.num_programs(0)
    ticket = _add(tickets, 1)
    if ticket == all_programs - 1:  # All programs of both launches have theirs.
        # The largest is the ticket: it is waited for, that is, until the counter is 0.
        ticket = gl.maximum(ticket, _add(tickets, -all_programs) - all_programs)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.store(gl.zeros([1], gl.int32, ONE) + ticket)
    sync_threads()
    mbarrier.arrive(is_told.index(0), count=1)
    return ticket


@gluon.jit
def allow_next_with(ticket, PDL: gl.constexpr):
    """As pdl.allow_next, once the program has its ticket; or ticket: `own_buffer`, which follows
    from it."""
    if PDL and ticket >= 0:  # always: it is waited for
        tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def _add(counter, value):
    """Add to a number in memory, by one lane of a single warp; what it was before."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    none = gl.zeros_like(lanes)
    first = lanes == 0
    before = gl.atomic_add(counter + none, none + value, mask=first, sem="relaxed", scope="gpu")
    return gl.sum(gl.where(first, before, 0), 0)


@gluon.jit
def told_ticket(launch):
    """What `take_ticket` has found, once it is told: the program's number, and the buffer's."""
    numbers, is_told = launch
    mbarrier.wait(is_told.index(0), 0)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ticket = gl.max(numbers.load(ONE), 0)
    buffer = (ticket >= gl.num_programs(0)).to(gl.int32)
    return ticket - buffer * gl.num_programs(0), buffer


@gluon.jit
def own_buffer(launch):
    """Which of both buffers the launch uses."""
    _number, buffer = told_ticket(launch)
    return buffer


@gluon.jit
def empty_other(places, own, words_all):
    """Make all places EMPTY of the buffer that the launch does not use."""
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    empty = gl.zeros_like(lanes) + EMPTY
    others = places + (1 - own) * words_all
    for start in range(gl.program_id(0) * 32, words_all, gl.num_programs(0) * 32):
        gl.store(others + start + lanes, empty, mask=start + lanes < words_all)


@gluon.jit
def store_words(words, places):
    words = gl.where(words == EMPTY, 0, words)
    gl.store(places + gl.arange(0, words.shape[0], layout=words.type.layout), words)
