"""The norm before a router, its logits and the choice of experts, within the kernel of one token's
experts.

For kernels with a program on each SM, all of which run at once and have partitions
(experts_one_mx.py, experts_one_float8.py). Each program norms the token's row by itself. As many as
there are experts compute a logit each, and announce it: a place holds EMPTY until its logit has
come. One warp of each program polls the places and chooses experts, so that all choose the same
ones. Nothing else is exchanged, and the weights of the experts are asked for as soon as they are
known.

There are two buffers of places, which take turns: a launch makes the one EMPTY that it does not
use. Which one it uses is for the kernel to say, by a counter of programs that have begun, for
example.

What a kernel calls, in this order; BY is any layout [A, B] of its own, a row of `size` being ROUNDS
parts [A, B] of A * B neighbouring elements each:

  before partitions begin
    choice = make_choice(TOP_K)
  in a single warp, before it waits for the preceding kernel
    prefetch_weights(norm_weight, router, num_experts, size)
  in the partition that multiplies, after the wait
    weights = load_weights(norm_weight, router, bias, expert, num_experts, size, ROUNDS, A, B, BY)
    parts, stream, logit = norm_row(norm, weights, size, OFFSET, ROUNDS, A, B, BY), normed in
        float32
    announce_logit(logit, places, own, expert, num_experts, ALL), if it has a router
    store_total(total, stream, size, ROUNDS, A, B, BY), the same
  in a single warp, after the wait
    empty_logits(places, own, expert, num_experts, ALL)
  in a single warp, after the wait
    ids = choose(choice, places, own, num_experts, ALL, TOP_K, RENORMALISES), which polls; or its
        three parts, with what may be done before the last experts are chosen between them
  in other partitions
    ids = told(choice, TOP_K), which waits
    shares = told_shares(choice, scale, TOP_K, RENORMALISES), after told

where own is the number of the launch's buffer, expert another number for each program (programs
whose numbers are below that of experts have logits to compute, so where they are few, early
programs should have these), and
    router, bias: as in RouterWeights; router is None in partitions that compute no logit
    norm: (x, residual or None, eps), and OFFSET, as in DeferredNorm
    places: int32 [2, *logit_shape], and ALL their last dimension; of launches that all route
    ids, shares: tuples of TOP_K numbers, experts and what their results are multiplied by
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from octavo.ops.cuda.announcing import EMPTY
from octavo.ops.cuda.hopper import prefetch, sync_threads
from octavo.ops.cuda.routing import LOWEST_KEY, NAN_KEY
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.experts import RouterWeights
from octavo.routing import RoutingConfig, Scoring

_LINE = tl.constexpr(64)  # elements of 16 bits in a line of the L2 cache
_COPIES = tl.constexpr(4)  # of each logit, so that not all programs read the same line


def routes_in_kernel(router: RouterWeights, config: RoutingConfig, num_programs: int) -> bool:
    """Whether kernels with so many programs can route so: choices are by logits alone."""
    is_plain = config.scoring is Scoring.SOFTMAX and config.num_groups == 1
    is_plain = is_plain and router.correction is None and router.scales is None
    return is_plain and config.num_experts <= num_programs


def logit_shape(num_experts: int) -> tuple[int, int]:
    """The shape of an int32 buffer of places for logits, EMPTY before the first launch."""
    return _COPIES.value, max(32, power_of_2(num_experts))


@gluon.jit
def prefetch_weights(norm_weight, router, num_experts, size):
    """Have the weights of the norm and of the router on their way to the L2 cache: some of each
    program, so that each line is asked for by several, of which some begin late. By a single warp.
    """
    number = gl.program_id(0) * 32 + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    prefetch(norm_weight + number % gl.cdiv(size, _LINE) * _LINE)
    prefetch(router + number % gl.cdiv(num_experts * size, _LINE) * _LINE)


@gluon.jit
def load_row(
    source, size, ROUNDS: gl.constexpr, A: gl.constexpr, B: gl.constexpr, BY: gl.constexpr
):
    """A row in ROUNDS parts; none of None. Volatile: the compiler keeps the order of loads."""
    found = ()
    if source is not None:
        for i in gl.static_range(ROUNDS):
            place = _place(i, A, B, BY)
            part = gl.load(source + place, mask=place < size, other=0.0, volatile=True)
            found += (part,)  # type: ignore[assignment]
    return found


@gluon.jit
def _place(i: gl.constexpr, A: gl.constexpr, B: gl.constexpr, BY: gl.constexpr):
    row = i * A + gl.arange(0, A, layout=gl.SliceLayout(1, BY))
    return row[:, None] * B + gl.arange(0, B, layout=gl.SliceLayout(0, BY))[None, :]


@gluon.jit
def load_weights(
    norm_weight,
    router,
    bias,
    expert,
    num_experts,
    size,
    ROUNDS: gl.constexpr,
    A: gl.constexpr,
    B: gl.constexpr,
    BY: gl.constexpr,
):
    """The norm's weights, and the row and bias of the program's expert.

    Loaded before the wait, they would delay programs that begin late, presumably since the wait
    ends after them.
    """
    weights = load_row(norm_weight, size, ROUNDS, A, B, BY)
    row = ()
    shift = 0.0
    if router is not None:
        expert = gl.minimum(expert, num_experts - 1)
        row = load_row(router + expert * size, size, ROUNDS, A, B, BY)
        if bias is not None:
            shift = gl.load(bias + expert, volatile=True).to(gl.float32)
    return weights, row, shift


@gluon.jit
def norm_row(
    norm,
    weights,
    size,
    OFFSET: gl.constexpr,
    ROUNDS: gl.constexpr,
    A: gl.constexpr,
    B: gl.constexpr,
    BY: gl.constexpr,
):
    """The normed row and the new residual stream in parts, and the logit of the program's expert;
    of any, if it has none."""
    x, residual, eps = norm
    scales, row, shift = weights
    before = load_row(residual, size, ROUNDS, A, B, BY)
    stream = load_row(x, size, ROUNDS, A, B, BY)
    if residual is not None:
        sums = ()
        for i in gl.static_range(ROUNDS):
            # The sum is rounded before it is normalised: later layers see the same numbers.
            value = (stream[i].to(gl.float32) + before[i].to(gl.float32)).to(before[i].dtype)
            sums += (value,)  # type: ignore[assignment]
        stream = sums
    squares = gl.zeros([A, B], gl.float32, BY)
    products = gl.zeros([A, B], gl.float32, BY)
    scaled = ()
    for i in gl.static_range(ROUNDS):
        values = stream[i].to(gl.float32)
        part = values * (scales[i].to(gl.float32) + OFFSET)
        squares += values * values
        if len(row) > 0:
            products += part * row[i].to(gl.float32)
        scaled += (part,)  # type: ignore[assignment]
    # Both at once: threads wait for each other in each.
    both = gl.sum(gl.sum(gl.join(squares, products), 1), 0)
    which = gl.arange(0, 2, layout=both.type.layout)
    factor = gl.rsqrt(gl.sum(gl.where(which == 0, both, 0.0), 0) / size + eps)
    logit = gl.sum(gl.where(which == 1, both, 0.0), 0) * factor + shift
    parts = ()
    for i in gl.static_range(ROUNDS):
        parts += (scaled[i] * factor,)  # type: ignore[assignment]
    return parts, stream, logit


@gluon.jit
def store_total(
    total,
    stream,
    size,
    ROUNDS: gl.constexpr,
    A: gl.constexpr,
    B: gl.constexpr,
    BY: gl.constexpr,
):
    """Write the new residual stream, by one program, where it is asked for."""
    if total is not None:
        is_last = gl.program_id(0) == gl.num_programs(0) - 1  # which often has no logit to compute
        if is_last:
            for i in gl.static_range(ROUNDS):
                place = _place(i, A, B, BY)
                gl.store(total + place, stream[i], mask=place < size)


@gluon.jit
def announce_logit(logit, places, own, expert, num_experts, ALL: gl.constexpr):
    """Store the logit of the program's expert, if it has one, to all copies."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = (gl.zeros([_COPIES], gl.float32, LANES) + logit).to(gl.int32, bitcast=True)
    words = gl.where(words == EMPTY, 0, words)
    _store_copies(words, places, own, expert, num_experts, ALL, LANES)


@gluon.jit
def empty_logits(places, own, expert, num_experts, ALL: gl.constexpr):
    """Make the place of the program's expert EMPTY in the buffer that the launch does not use."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = gl.zeros([_COPIES], gl.int32, LANES) + EMPTY
    _store_copies(words, places, 1 - own, expert, num_experts, ALL, LANES)


@gluon.jit
def _store_copies(
    words, places, buffer, expert, num_experts, ALL: gl.constexpr, LANES: gl.constexpr
):
    copy = gl.arange(0, _COPIES, layout=LANES)
    targets = places + (buffer * (_COPIES * ALL) + expert) + copy * ALL
    is_own = gl.zeros_like(copy) + expert < num_experts
    gl.store(targets, words, mask=is_own)


@gluon.jit
def _keys(scores):
    """As _keys of routing.py."""
    bits = (scores + 0.0).to(gl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return gl.where(scores != scores, NAN_KEY, keys)


@gluon.jit
def _score_of(key):
    """What `_keys` made it of; NaN for LOWEST_KEY."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def choose(
    choice,
    places,
    own,
    num_experts,
    ALL: gl.constexpr,
    TOP_K: gl.constexpr,
    RENORMALISES: gl.constexpr,
):
    """The experts, once all logits have come, as _choose of routing.py with BY_LOGITS; by a single
    warp, which tells the other partitions."""
    state = begin_choice(places, own, num_experts, ALL)
    ids, state = choose_some(choice, state, 0, TOP_K)
    end_choice(choice, state, num_experts, TOP_K, RENORMALISES)
    return ids


@gluon.jit
def begin_choice(places, own, num_experts, ALL: gl.constexpr):
    """Wait for all logits. With `choose_some` and `end_choice` this is `choose` in parts, so that
    the first experts' weights can be asked for before the last experts are chosen."""
    LANES: gl.constexpr = gl.BlockedLayout([ALL // 32], [32], [1], [0])
    expert = gl.arange(0, ALL, layout=LANES)
    is_expert = expert < num_experts
    own_places = places + (own * _COPIES + gl.program_id(0) % _COPIES) * ALL + expert
    found = gl.load(own_places, mask=is_expert, other=0, volatile=True)
    while gl.min(found, 0) == EMPTY:
        found = gl.load(own_places, mask=is_expert, other=0, volatile=True)
    logits = found.to(gl.float32, bitcast=True)
    return logits, gl.where(is_expert, _keys(logits), LOWEST_KEY)


@gluon.jit
def choose_some(choice, state, BEGIN: gl.constexpr, END: gl.constexpr):
    """The experts BEGIN .. END - 1, the best first, and the state without them."""
    id_places, score_places, _is_told = choice
    logits, keys = state
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    expert = gl.arange(0, keys.shape[0], layout=keys.type.layout)
    ids = ()
    for i in gl.static_range(BEGIN, END):
        key = gl.max(keys, 0)
        best = gl.min(gl.where(keys == key, expert, keys.shape[0] - 1), 0)
        keys = gl.where(expert == best, LOWEST_KEY, keys)
        id_places.index(i).store(gl.zeros([1], gl.int32, ONE) + best)
        score_places.index(i).store(gl.zeros([1], gl.float32, ONE) + _score_of(key))
        ids += (best,)  # type: ignore[assignment]
    return ids, (logits, keys)


@gluon.jit
def end_choice(choice, state, num_experts, TOP_K: gl.constexpr, RENORMALISES: gl.constexpr):
    """Tell the other partitions which experts are chosen."""
    _ids, score_places, is_told = choice
    logits, _keys_left = state
    if not RENORMALISES:
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        is_expert = gl.arange(0, logits.shape[0], layout=logits.type.layout) < num_experts
        # As keys are ordered: a NaN is the largest.
        largest = _score_of(gl.max(gl.where(is_expert, _keys(logits), LOWEST_KEY), 0))
        total = gl.sum(gl.where(is_expert, gl.exp(logits - largest), 0.0), 0)
        score_places.index(TOP_K).store(gl.zeros([1], gl.float32, ONE) + total)
    sync_threads()
    mbarrier.arrive(is_told.index(0), count=1)


@gluon.jit
def make_choice(TOP_K: gl.constexpr):
    """Through which a program's partitions learn of the experts: shared memory for their numbers,
    for their logits and a sum of all, and a barrier."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ids = gl.allocate_shared_memory(gl.int32, [TOP_K, 1], FLAT)
    scores = gl.allocate_shared_memory(gl.float32, [TOP_K + 1, 1], FLAT)
    is_told = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(is_told.index(0), count=1)
    return ids, scores, is_told


@gluon.jit
def told(choice, TOP_K: gl.constexpr):
    """What `choose` has found, once it is told."""
    places, _scores, is_told = choice
    mbarrier.wait(is_told.index(0), 0)
    ids = ()
    for i in gl.static_range(TOP_K):
        ids += (_number(places, i),)  # type: ignore[assignment]
    return ids


@gluon.jit
def told_shares(choice, scale, TOP_K: gl.constexpr, RENORMALISES: gl.constexpr):
    """The weights of the experts, after `told`."""
    _ids, scores, _is_told = choice
    largest = _number(scores, 0)
    weights = ()
    for i in gl.static_range(TOP_K):
        weights += (gl.exp(_number(scores, i) - largest),)  # type: ignore[assignment]
    total = weights[0]  # type: ignore[misc]
    if RENORMALISES:
        for i in gl.static_range(1, TOP_K):
            total = total + weights[i]
    else:
        total = _number(scores, TOP_K)
    shares = ()
    for i in gl.static_range(TOP_K):
        shares += (weights[i] / total * scale,)  # type: ignore[assignment]
    return shares


@gluon.jit
def _number(places, i: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(places.index(i).load(ONE), 0)
