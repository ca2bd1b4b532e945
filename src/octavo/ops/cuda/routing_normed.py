"""Routing of few tokens, with the RMS norm before it, in one kernel.

With a kernel for the norm and one for routing, inputs pass through memory twice before logits are
made of them, and the program that finishes last waits for a counter before it loads them. Here

  * some programs make logits of inputs that are scaled but not normed yet: each adds up its part of
    the inputs, of all tokens, and multiplies it by that part of the router's weights;
  * one program for each token norms the whole row, and leaves what the row's logits are still to be
    multiplied by; it also writes the residual stream and what the experts take;
  * the last one waits for all that, chooses the experts of all tokens, and lists their rows.

Logits announce themselves, as partial results of attention do (attention_decode.py): a place holds
EMPTY until its logit has come, and the last program makes it EMPTY again. It is the last one of the
grid: those that it waits for run already, whatever room there is.

Inputs of the router are rounded once, as normed ones would be, but before they are multiplied by
their row's factor and not after.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.announcing import EMPTY, announced
from octavo.ops.cuda.pdl import allow_next, launch_options, not_before, wait_previous
from octavo.ops.cuda.quantize import empty_inputs, store_rounded
from octavo.ops.cuda.routing import CudaRouter, add_product, choose_and_list, empty_lists
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.experts import Routed, RouterWeights
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import Rounding
from octavo.routing import RoutingConfig, Scoring

LEAST_TOKENS, MOST_TOKENS = 4, 8  # with fewer or more, two kernels take less time
MOST_EXPERTS = 128  # whose logits of a token a warp compares
# Inputs of a program that makes logits. Its weights are on their way while the kernel before runs,
# if they find room beside that one's, as those of 256 inputs do not.
_COLUMNS = 128
_MOST_SPLITS = 32  # of the inputs, whose logits the last program has in registers
_WARPS = 8  # so that a warp chooses the experts of a token


class CudaNormRouter(CudaRouter):
    """A CudaRouter that applies the norm before it, too, where that takes less time."""

    def norms_inputs(self, num_tokens: int) -> bool:
        """See RouterKernel.norms_inputs."""
        weight = self._weights.weight
        num_experts, size = weight.shape
        # What is scaled, and not normed, may be beyond the numbers of float16.
        is_wide = weight.dtype != torch.float16
        fits = num_experts <= MOST_EXPERTS and size <= _COLUMNS * _MOST_SPLITS
        return LEAST_TOKENS <= num_tokens <= MOST_TOKENS and is_wide and fits

    def apply(self, x: Tensor | DeferredNorm, rounding: Rounding = Rounding.NONE) -> Routed:
        """See RouterKernel.apply."""
        if isinstance(x, DeferredNorm):
            return norm_and_route(x, self._weights, self._config, self._num_hit, rounding)
        return super().apply(x, rounding)


@cache
def _board(device: torch.device) -> Tensor:
    """Places of logits [splits, num_tokens, num_experts], and of factors of rows, as many for each
    as there are experts; as bits of float32: EMPTY between kernels. For one stream."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    size = (_MOST_SPLITS + 1) * MOST_TOKENS * MOST_EXPERTS
    return torch.full((size,), EMPTY.value, dtype=torch.int32, device=device)


def norm_and_route(
    norm: DeferredNorm,
    weights: RouterWeights,
    config: RoutingConfig,
    num_hit: Tensor,
    rounding: Rounding = Rounding.NONE,
) -> Routed:
    """Apply the norm, with the addition to the residual stream, and route the result.

    Args:
        norm: of [num_tokens, size], or of partial sums [num_splits, num_tokens, size]; without a
            norm of the branch.
        num_hit: see make_router_kernel.
        rounding: see RouterKernel.apply.

    Returns:
        With BlockLists.
    """
    x, residual = norm.x, norm.residual
    assert norm.branch_weight is None
    assert x.stride(-1) == 1
    assert residual is None or residual.is_contiguous()
    num_tokens, size = x.shape[-2:]
    dtype = weights.weight.dtype
    num_experts, top_k = config.num_experts, config.top_k
    device = x.device
    normed = torch.empty((num_tokens, size), dtype=dtype, device=device)
    inputs = None
    if rounding is not Rounding.NONE:
        inputs = empty_inputs(num_tokens, size, rounding, device)
    all_columns = max(power_of_2(size), rounding.group)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    chosen = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    lists = empty_lists(num_tokens, top_k, num_experts, device)
    splits = triton.cdiv(size, _COLUMNS)
    is_softmax = config.scoring is Scoring.SOFTMAX
    _norm_and_route_kernel[(splits + num_tokens + 1,)](
        x,
        residual,
        norm.weight,
        norm.total,
        normed,
        *(inputs[:2] if inputs else (None, None)),
        weights.weight,
        weights.bias,
        weights.correction,
        weights.scales,
        _board(device),
        ids,
        chosen,
        *lists[:5],
        num_hit,
        num_tokens,
        x.stride(0) if x.dim() == 3 else 0,
        x.stride(-2),
        size,
        num_experts,
        0 if inputs is None else inputs.scales.stride(0),
        norm.eps,
        norm.offset,
        config.scale,
        2 * config.jitter,
        TOKENS=MOST_TOKENS,
        X_SPLITS=x.shape[0] if x.dim() == 3 else 1,
        EXPERTS=max(16, power_of_2(num_experts)),
        ALL_EXPERTS=max(32, power_of_2(num_experts)),
        COLUMNS=_COLUMNS,
        SPLITS=splits,
        ALL_COLUMNS=all_columns,
        TOP_K=top_k,
        SCORING=int(config.scoring),
        RENORMALISES=config.renormalised,
        GROUPS=config.num_groups,
        GROUP_SLOTS=power_of_2(config.num_groups),
        TOP_GROUPS=config.top_groups,
        BY_LOGITS=is_softmax and weights.correction is None and config.num_groups == 1,
        IEEE=dtype == torch.float32,
        GROUP=rounding.group or all_columns,
        ROUNDING=int(rounding),
        num_warps=_WARPS,
        **launch_options(device),
    )
    return Routed(ids, chosen, lists, inputs, normed)


@triton.jit
def _sum_of(
    x,
    residual,
    rows,
    stride,
    columns,
    size,
    split_stride,
    inside,
    X_SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The sum of partial sums and the residual stream, rounded as that is; all are asked for before
    the first ones are added."""
    held = 0.0
    if residual is not None:
        held = tl.load(residual + rows * size + columns, mask=inside, other=0.0).to(tl.float32)
    start = x + rows * stride + columns
    parts = (tl.load(start, mask=inside, other=0.0),)
    for split in tl.static_range(1, X_SPLITS):
        part = tl.load(start + split * split_stride, mask=inside, other=0.0)
        parts += (part,)  # type: ignore[assignment]
    values = parts[0].to(tl.float32)
    for split in tl.static_range(1, X_SPLITS):
        values += parts[split].to(tl.float32)
    return (values + held).to(DTYPE)


@triton.jit
def _leave_logits(
    x,
    residual,
    norm_weight,
    weight,
    board,
    split,
    tokens,
    num_tokens,
    split_stride,
    stride,
    size,
    num_experts,
    offset,
    X_SPLITS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Leave what COLUMNS inputs contribute to the logits of all tokens."""
    experts = tl.arange(0, EXPERTS)
    columns = split * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    # Rows beyond the end read the last one; their results are not stored.
    weight_rows = tl.minimum(experts, num_experts - 1)[:, None] * size
    piece = tl.load(weight + weight_rows + columns[None, :], mask=inside[None, :], other=0.0)
    scale = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    wait_previous(PDL)
    is_token = tokens < num_tokens
    values = _sum_of(
        x,
        residual,
        tokens.to(tl.int64)[:, None],
        stride,
        columns[None, :],
        size,
        split_stride,
        is_token[:, None] & inside[None, :],
        X_SPLITS,
        DTYPE,
    )
    values = (values.to(tl.float32) * scale[None, :]).to(values.dtype)
    if not IEEE:
        # Otherwise all partial sums, and not their sum, would pass through shared memory.
        values = not_before(values, PDL)
    result = tl.zeros([EXPERTS, tokens.shape[0]], tl.float32)
    result = add_product(piece, values, result, IEEE)
    places = (split * num_tokens + tokens)[None, :] * num_experts + experts[:, None]
    is_stored = (experts < num_experts)[:, None] & is_token[None, :]
    tl.store(board + places, announced(result), mask=is_stored)


@triton.jit
def _norm_row(
    x,
    residual,
    norm_weight,
    total,
    normed,
    rounded,
    input_scales,
    factors,
    row,
    split_stride,
    stride,
    size,
    num_experts,
    input_scale_stride,
    eps,
    offset,
    X_SPLITS: tl.constexpr,
    ALL_EXPERTS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROUNDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm a row, and leave what its logits are to be multiplied by before all else."""
    columns = tl.arange(0, ALL_COLUMNS)
    inside = columns < size
    scale = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    wait_previous(PDL)
    place = row.to(tl.int64)
    values = _sum_of(
        x,
        residual,
        place,
        stride,
        columns,
        size,
        split_stride,
        inside,
        X_SPLITS,
        normed.dtype.element_ty,
    )
    exact = values.to(tl.float32)
    factor = tl.rsqrt(tl.sum(exact * exact, 0) / size + eps)
    experts = tl.arange(0, ALL_EXPERTS)
    bits = tl.zeros([ALL_EXPERTS], tl.int32) + announced(factor)
    tl.store(factors + row * num_experts + experts, bits, mask=experts < num_experts)
    places = place * size + columns
    if total is not None:
        tl.store(total + places, values, mask=inside)
    result = (exact * factor * scale).to(values.dtype)
    tl.store(normed + places, result, mask=inside)
    if rounded is not None:
        result = result.to(tl.float32)
        store_rounded(
            result, rounded, input_scales, input_scale_stride, place, 0, size, size, GROUP, ROUNDING
        )


@triton.jit
def _collect_logits(board, tokens, every, num_tokens, num_experts, SPLITS: tl.constexpr):
    """Wait for logits [TOKENS, ALL_EXPERTS], add them up in the order of the splits, and leave
    their places EMPTY."""
    is_given = (tokens < num_tokens)[:, None] & (every < num_experts)[None, :]
    places = board + tokens[:, None] * num_experts + every[None, :]
    of_split = num_tokens * num_experts
    logits = tl.zeros([tokens.shape[0], every.shape[0]], tl.float32)
    lowest = tl.cast(EMPTY, tl.int32)  # EMPTY is the least integer
    while lowest == EMPTY:
        factor = tl.load(places + SPLITS * of_split, mask=is_given, other=0, volatile=True)
        loaded = ()
        for split in tl.static_range(SPLITS):
            bits = tl.load(places + split * of_split, mask=is_given, other=0, volatile=True)
            loaded += (bits,)  # type: ignore[assignment]
        least = factor
        logits = tl.zeros([tokens.shape[0], every.shape[0]], tl.float32)
        for split in tl.static_range(SPLITS):
            least = tl.minimum(least, loaded[split])
            logits += loaded[split].to(tl.float32, bitcast=True)
        logits *= factor.to(tl.float32, bitcast=True)
        lowest = tl.min(tl.min(least, 1), 0)
    for split in tl.static_range(SPLITS + 1):
        tl.store(places + split * of_split, EMPTY, mask=is_given)
    return logits


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_and_route_kernel(
    x,
    residual,
    norm_weight,
    total,
    normed,
    rounded,
    input_scales,
    weight,
    bias,
    correction,
    expert_scales,
    board,
    ids,
    weights,
    rows,
    block_experts,
    begins,
    ends,
    num_blocks,
    num_hit,
    num_tokens,
    split_stride,
    stride,
    size,
    num_experts,
    input_scale_stride,
    eps,
    offset,
    scale,
    reach,
    TOKENS: tl.constexpr,
    X_SPLITS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ALL_EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    IEEE: tl.constexpr,
    GROUP: tl.constexpr,
    ROUNDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the top of this file: SPLITS programs that make logits, one for each token, and one that
    chooses.

    Args:
        x: [num_tokens, size] with rows of `stride`, or X_SPLITS times that, `split_stride` apart.
        total: [num_tokens, size], where residual + x is written, in the residual's dtype.
        normed: the same, of the norm; and, if given, in two numbers: `rounded`, `input_scales`.
        board: see _board.
        offset: what is added to norm_weight.
        TOKENS: at least num_tokens.
        EXPERTS: power of 2, at least num_experts; ALL_EXPERTS: the same, of a token's logits, which
            a warp compares.
    """
    allow_next(PDL)
    program = tl.program_id(0)
    tokens = tl.arange(0, TOKENS)
    if program < SPLITS:
        _leave_logits(
            x,
            residual,
            norm_weight,
            weight,
            board,
            program,
            tokens,
            num_tokens,
            split_stride,
            stride,
            size,
            num_experts,
            offset,
            X_SPLITS,
            EXPERTS,
            COLUMNS,
            normed.dtype.element_ty,
            IEEE,
            PDL,
        )
        return
    if program < tl.num_programs(0) - 1:
        _norm_row(
            x,
            residual,
            norm_weight,
            total,
            normed,
            rounded,
            input_scales,
            board + SPLITS * num_tokens * num_experts,
            program - SPLITS,
            split_stride,
            stride,
            size,
            num_experts,
            input_scale_stride,
            eps,
            offset,
            X_SPLITS,
            ALL_EXPERTS,
            ALL_COLUMNS,
            GROUP,
            ROUNDING,
            PDL,
        )
        return
    every = tl.arange(0, ALL_EXPERTS)
    shift = tl.zeros([ALL_EXPERTS], tl.float32)
    if bias is not None:
        shift += tl.load(bias + every, mask=every < num_experts, other=0.0).to(tl.float32)
    wait_previous(PDL)
    logits = _collect_logits(board, tokens, every, num_tokens, num_experts, SPLITS)
    choose_and_list(
        logits + shift[None, :],
        tokens,
        every,
        tokens < num_tokens,
        correction,
        expert_scales,
        ids,
        weights,
        None,
        num_hit,
        rows,
        block_experts,
        begins,
        ends,
        num_blocks,
        num_experts,
        scale,
        reach,
        TOP_K,
        0,
        SCORING,
        RENORMALISES,
        GROUPS,
        GROUP_SLOTS,
        TOP_GROUPS,
        BY_LOGITS,
        PDL,
    )
