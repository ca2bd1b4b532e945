"""The experts' projections on NVIDIA GPUs, as grouped products.

On Hopper GPUs FP8 has kernels of its own for one token (experts_one_float8.py) and while an expert
has few tokens (experts_hopper.py), and MXFP4 has others (experts_mx_hopper.py).

Two kernels compute all experts that were hit: gates and ups with the activation, for which rows of
x are gathered; then the down projection, whose rows are weighted and put where the norm that
follows adds up each token's experts in their order. One token has kernels of its own
(experts_one.py, and experts_one_packed.py for 4-bit weights).

Weights may be quantized (expert_weights.py): they become x's dtype in registers, on their way to
the tensor cores, so only their bytes count while tokens are few.

Programs find their rows in the lists of routing.py. Their number follows from the number of tokens:
those that find no block end at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.float7 import PIECE_ROWS
from octavo.ops.cuda.devices import is_on_hopper, num_sms, shared_memory
from octavo.ops.cuda.epilogues import activate_gated
from octavo.ops.cuda.expert_tiles import (
    EXACT_TOKENS,
    FLOAT8_GATHERING_REGISTERS,
    GATHERING_WARPS,
    HOPPER_EXACT_TOKENS,
    HOPPER_REGISTERS,
    HopperTiles,
    Tiles,
    choose_hopper_tiles,
    choose_tiles,
    max_blocks,
    tokens_per_tile,
)
from octavo.ops.cuda.expert_weights import (
    BLOCK,
    FLOAT8,
    MX_FLOAT4,
    WORDS,
    ExpertMatrices,
    Format,
    has_bfloat16_pairs,
    load_tile,
    unpack,
)
from octavo.ops.cuda.experts_hopper import ROWS, grouped_kernel
from octavo.ops.cuda.experts_one import mix_one as mix_one_plain
from octavo.ops.cuda.experts_one_float8 import (
    Float8Projection,
    mix_one_float8,
    norm_route_and_mix_one_float8,
    takes_one,
)
from octavo.ops.cuda.experts_one_packed import mix_one_packed
from octavo.ops.cuda.float7 import Float7Weight, pack_float7, takes_float7
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.quantize import round_inputs
from octavo.ops.cuda.routing import BlockLists
from octavo.ops.cuda.routing_in_kernel import routes_in_kernel
from octavo.ops.cuda.tile_sizes import MUCH_SHARED_MEMORY
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import (
    ExpertWeights,
    QuantizedExpertWeights,
    Routed,
    RouterWeights,
    Unrouted,
)
from octavo.ops.quantized import RoundedInputs, Rounding
from octavo.routing import RoutingConfig

MAX_BLOCKS = 1 << 12  # that experts_hopper.py counts tiles of
_WORDS, _BLOCK = tl.constexpr(WORDS), tl.constexpr(BLOCK)


class CudaExperts:
    """Uses the experts' weights in place, but for packed ones, which are rearranged; may own copies
    of FP8 in 7 bits."""

    def __init__(
        self,
        up: ExpertMatrices,
        down: ExpertMatrices,
        biases: tuple[Tensor | None, Tensor | None],
        epilogue: Epilogue,
        float7_tokens: range = range(0),
    ) -> None:
        """float7_tokens: see make_quantized_experts_kernel."""
        assert epilogue.is_gated
        self._up, self._down = up, down
        self._biases = biases
        self._epilogue = epilogue
        self._float7_tokens = float7_tokens
        self._words: tuple[Float7Weight, Float7Weight] | None = None
        if float7_tokens and _takes_words(up) and _takes_words(down):
            self._words = _in_words(up), _in_words(down)
        # For one token on Hopper GPUs; None: other kernels compute it.
        self._one_float8: tuple[Float8Projection, Float8Projection] | None = None
        if is_on_hopper(up.values.device) and biases == (None, None):
            one = Float8Projection.of(up), Float8Projection.of(down)
            if one[0] is not None and one[1] is not None:
                self._one_float8 = one[0], one[1]

    @classmethod
    def of(
        cls,
        weights: ExpertWeights | QuantizedExpertWeights,
        epilogue: Epilogue,
        float7_tokens: range = range(0),
    ) -> CudaExperts | None:
        """None: the kernels do not know their form, or not on this GPU."""
        up, down = ExpertMatrices.of(weights.up), ExpertMatrices.of(weights.down)
        if up is None or down is None or up.format.is_packed != down.format.is_packed:
            return None
        biases = weights.up_bias, weights.down_bias
        return cls(up, down, biases, epilogue, float7_tokens)

    def rounding(self, num_tokens: int, top_k: int) -> Rounding:
        """See ExpertsKernel.rounding."""
        has_tiles = self._tiles_on_hopper(num_tokens, top_k) is not None
        return Rounding.IN_TWO if has_tiles else Rounding.NONE

    def routes_inputs(self, num_tokens: int, router: RouterWeights, config: RoutingConfig) -> bool:
        """See RoutingExpertsKernel.routes_inputs."""
        one, weight = self._one_float8, router.weight
        if num_tokens > 1 or one is None or not takes_one(weight.dtype, *one, config.top_k):
            return False
        return routes_in_kernel(router, config, num_sms(weight.device))

    def apply_unrouted(self, x: Unrouted) -> Tensor:
        """See RoutingExpertsKernel.apply_unrouted."""
        assert self._one_float8 is not None, "it does not route"
        return norm_route_and_mix_one_float8(x, *self._one_float8, self._epilogue)

    def apply_partial(self, x: Tensor, routed: Routed) -> Tensor:
        """See ExpertsKernel.apply_partial; x dense in its last dimension."""
        assert x.stride(1) == 1
        up, down, (up_bias, down_bias) = self._up, self._down, self._biases
        num_tokens, top_k = routed.ids.shape
        if num_tokens == 1:
            one = self._one_float8
            if one is not None and takes_one(x.dtype, *one, top_k):
                return mix_one_float8(x, routed, *one, self._epilogue)
            mix_one = mix_one_packed if up.format.is_packed else mix_one_plain
            return mix_one(x, routed, up, down, up_bias, down_bias, self._epilogue)
        tiles = self._tiles_on_hopper(num_tokens, top_k)
        if x.dtype == torch.float32:
            tiles = None
        exact_tokens = EXACT_TOKENS if tiles is None else HOPPER_EXACT_TOKENS
        out = empty_parts(x, top_k, exact_tokens)
        if tiles is not None:
            inputs = routed.inputs or round_inputs(x, Rounding.IN_TWO)
            words = self._words if num_tokens in self._float7_tokens else None
            launch_on_hopper(
                inputs, (up, down), self._biases, out, routed, self._epilogue, tiles, words
            )
        else:
            inner = x.new_empty((num_tokens * top_k, down.size))
            _launch(x, up, up_bias, inner, routed, self._epilogue)
            _launch(inner, down, down_bias, out, routed, Epilogue.NONE)
        return out

    def _tiles_on_hopper(self, num_tokens: int, top_k: int) -> HopperTiles | None:
        """None: experts_hopper.py does not compute products of so many tokens, or not on this
        GPU."""
        up, down = self._up, self._down
        num_experts = len(up.values)
        tokens = tokens_per_tile(num_tokens, num_experts, top_k)
        values = up.values, down.values
        if not is_on_hopper(up.values.device) or not all(map(_has_tma, values)):
            return None
        if num_tokens == 1 or max_blocks(num_tokens, num_experts, top_k, tokens) > MAX_BLOCKS:
            return None
        return choose_hopper_tiles(num_tokens, tokens, up, down)


def mix(x: Tensor, routed: Routed, weights: ExpertWeights, epilogue: Epilogue) -> Tensor:
    """See ExpertsKernel.apply_partial, of weights that are not quantized."""
    experts = CudaExperts.of(weights, epilogue)
    assert experts is not None, "kernels know all dense weights"
    return experts.apply_partial(x, routed)


def empty_parts(x: Tensor, top_k: int, exact_tokens: int) -> Tensor:
    """For what each of a token's experts contributes, [top_k, num_tokens, size]: in float32 for up
    to `exact_tokens` tokens, and otherwise in x's dtype."""
    dtype = torch.float32 if len(x) <= exact_tokens else x.dtype
    return torch.empty((top_k, *x.shape), dtype=dtype, device=x.device)


@cache
def progress_of(device: torch.device) -> Tensor:
    """What programs of experts_hopper.py count; 0 between kernels. For one stream."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    return torch.zeros(MAX_BLOCKS + 2, dtype=torch.int32, device=device)


def launch_on_hopper(
    x: RoundedInputs,
    weights: tuple[ExpertMatrices, ExpertMatrices],
    biases: tuple[Tensor | None, Tensor | None],
    out: Tensor,
    routed: Routed,
    epilogue: Epilogue,
    tiles: HopperTiles,
    words: tuple[Float7Weight, Float7Weight] | None = None,
) -> None:
    """Both projections of all experts, by experts_hopper.py.

    words: of the same weights in 7 bits, which are read instead.
    """
    from triton.experimental.gluon import language as gl

    lists: BlockLists = routed.lists
    num_tokens, top_k = routed.ids.shape
    tokens = tiles.tokens
    up, down = weights
    assert up.scales is not None
    assert down.scales is not None
    num_blocks = len(lists.experts)
    down_steps = triton.cdiv(down.size, BLOCK)
    inner = up.values.new_empty((num_tokens * top_k, 2, down_steps * BLOCK))
    grouped_kernel[(min(down_steps * num_blocks, num_sms(out.device)),)](
        x.values,
        x.scales,
        x.scales.stride(0),
        inner,
        up.scales.new_empty((num_blocks, down_steps, tokens)),
        out,
        *_stored_descriptors(up, words and words[0]),
        up.values if words is None else words[0].words.view(torch.uint8),
        up.scales,
        biases[0],
        *_stored_descriptors(down, words and words[1]),
        down.scales,
        biases[1],
        lists.rows,
        lists.experts,
        lists.begins,
        lists.ends,
        lists.num_blocks,
        routed.weights,
        progress_of(out.device),
        num_tokens,
        down.size,
        up.size,
        len(up.values),
        up.scales.stride(0),
        up.scales.shape[2],
        down.scales.stride(0),
        down.scales.shape[2],
        up.size * (1 if words is None else 7),
        TOP_K=top_k,
        TOKENS=tokens,
        STAGES=tiles.stages,
        SCALE_ROWS=(up.scale_rows, down.scale_rows),
        SCALE_COLUMNS=(up.scale_columns, down.scale_columns),
        EPILOGUE=int(epilogue),
        X_LAYOUT=gl.NVMMASharedLayout.get_default_for([2 * tokens, BLOCK], gl.float8e4nv),
        AHEAD=min(tiles.ahead, up.size) * (1 if words is None else 7),
        GATHERING_WARPS=GATHERING_WARPS,
        GATHERING_REGISTERS=FLOAT8_GATHERING_REGISTERS,
        num_warps=ROWS // 16,
        maxnreg=HOPPER_REGISTERS,
        **launch_options(out.device),
    )


def _takes_words(weight: ExpertMatrices) -> bool:
    """Whether the weights of experts may be stored in 7 bits: pieces of rows begin where experts
    and the ups of each begin."""
    if weight.format != Format.FLOAT8 or weight.scale_columns or weight.num_rows % (2 * PIECE_ROWS):
        return False
    return takes_float7(weight.values.flatten(0, 1))


def _in_words(weight: ExpertMatrices) -> Float7Weight:
    return pack_float7(weight.values.flatten(0, 1))


def _stored_descriptors(weight: ExpertMatrices, words: Float7Weight | None) -> tuple[Any, ...]:
    """The TMA descriptors of the rows of all experts, for experts_hopper.py."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if words is not None:
        return words.descriptors(ROWS)
    shape = [ROWS, BLOCK]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float8e4nv)
    return TensorDescriptor.from_tensor(weight.values.flatten(0, 1), shape, layout), None, None


def _launch(
    x: Tensor,
    weight: ExpertMatrices,
    bias: Tensor | None,
    out: Tensor,
    routed: Routed,
    epilogue: Epilogue,
) -> None:
    """One projection of all experts: gates and ups, if the epilogue is gated, else down."""
    lists: BlockLists = routed.lists
    num_tokens, top_k = routed.ids.shape
    has_tma = _has_tma(weight.values)
    block_rows = lists.block_rows
    tiles = choose_tiles(block_rows, weight, x.element_size(), epilogue.is_gated, has_tma)
    num_outputs = out.shape[-1]
    grid = (triton.cdiv(num_outputs, tiles.rows), len(lists.experts))
    scales = weight.scales
    _experts_kernel[grid](
        x,
        _descriptor(weight.values, tiles) if has_tma else weight.values,
        scales,
        weight.zeros,
        weight.factors,
        bias,
        out,
        lists.rows,
        lists.experts,
        lists.begins,
        lists.ends,
        lists.num_blocks,
        routed.weights,
        num_tokens,
        num_outputs,
        weight.size,
        x.stride(0),
        weight.values.shape[2],
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.shape[2],
        TOP_K=top_k,
        TOKENS=block_rows,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        EVEN=weight.size % tiles.columns == 0,
        FORMAT=int(weight.format),
        SCALE_ROWS=weight.scale_rows,
        SCALE_COLUMNS=weight.scale_columns,
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        TMA=has_tma,
        IEEE=x.dtype == torch.float32,
        ASM=x.dtype == torch.bfloat16 and has_bfloat16_pairs(x.device),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launch_options(x.device),
    )


def _has_tma(values: Tensor) -> bool:
    """Whether weights are fetched by TMA, which needs rows aligned to 16 bytes."""
    aligned = values.stride(1) * values.element_size() % 16 == 0 and values.data_ptr() % 16 == 0
    if not aligned or shared_memory(values.device) < MUCH_SHARED_MEMORY:
        return False
    return values.device.type != "cuda" or torch.cuda.get_device_capability(values.device)[0] >= 9


def _descriptor(values: Tensor, tiles: Tiles) -> Any:
    """The TMA descriptor of the rows of all experts, for blocks of the tiles' size."""
    columns = WORDS if values.dtype == torch.int32 else tiles.columns
    return TensorDescriptor.from_tensor(values.flatten(0, 1), [tiles.rows, columns])


@triton.jit
def _dot(a, b, acc, IEEE: tl.constexpr):
    acc = tl.dot(a, b, acc, input_precision="ieee") if IEEE else tl.dot(a, b, acc)
    return acc


@triton.jit
def _columns_of(x_rows, is_row, first, size, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """x [COLUMNS, TOKENS], transposed, from column `first` on."""
    columns = first + tl.arange(0, COLUMNS)
    mask = is_row[:, None]
    if not EVEN:
        mask = mask & (columns < size)[None, :]
    return tl.trans(tl.load(x_rows + columns[None, :], mask=mask, other=0.0))


@triton.jit
def _add_block(
    acc,
    values,
    words,
    scales,
    zeros,
    block,
    FORMAT: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    IEEE: tl.constexpr,
    ASM: tl.constexpr,
):
    """acc plus the product of a block of packed weights.

    Args:
        values: eight of [16, TOKENS].
        words: int32 [ROWS, WORDS].
        scales, zeros: pointers [ROWS, 1] to those of a row.
        block: of the row.
    """
    if FORMAT == MX_FLOAT4:
        pieces = unpack(words, tl.load(scales + block), None, FORMAT, DTYPE, ASM)
        for i in tl.static_range(8):
            acc = _dot(pieces[i], values[i], acc, IEEE)
    else:
        GROUPS: tl.constexpr = _BLOCK // SCALE_COLUMNS
        given = ()
        for i in tl.static_range(4):
            if zeros is None:
                zero = tl.full([words.shape[0], 1], 8, tl.int32)
            else:
                zero = tl.load(zeros + block * GROUPS + i * GROUPS // 4)
            given += (zero,)  # type: ignore[assignment]
        pieces = unpack(words, None, given, FORMAT, DTYPE, ASM)
        for group in tl.static_range(GROUPS):
            part = tl.zeros(acc.shape, tl.float32)
            for i in tl.static_range(group * 8 // GROUPS, (group + 1) * 8 // GROUPS):
                part = _dot(pieces[i], values[i], part, IEEE)
            acc += part * tl.load(scales + block * GROUPS + group)
    return acc


@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])
def _experts_kernel(
    x,
    weight,
    weight_scales,
    weight_zeros,
    weight_factors,
    bias,
    out,
    rows,
    experts,
    begins,
    ends,
    num_blocks,
    scales,
    num_tokens,
    num_outputs,
    size,
    stride,
    row_stride,
    scale_stride,
    num_scales,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    GATED: tl.constexpr,
    TMA: tl.constexpr,
    IEEE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one block: rows of an expert's weights, times rows that were routed to it.

    Weights are the first operand of the tensor cores, whose 64 rows they fill, so that few tokens
    cost little.

    Args:
        x: if GATED [num_tokens, size], else [num_tokens * TOP_K, size] in the order of `rows`.
        weight: ExpertMatrices.values with num_outputs or 2 * num_outputs rows of `row_stride` for
            each expert: a pointer or, with TMA, a descriptor.
        weight_scales, weight_zeros, weight_factors: of ExpertMatrices.
        out: if GATED [num_tokens * TOP_K, num_outputs] in the order of `rows`, else
            [TOP_K, num_tokens, num_outputs].
        rows, experts, begins, ends, num_blocks: BlockLists.
        scales: [num_tokens, TOP_K], weights of the results if not GATED.
        scale_stride: from an expert's weight scales to the next one's.
        num_scales: weight scales of a row, or of a row of blocks.
    """
    allow_next(PDL)
    wait_previous(PDL)
    block = tl.program_id(1)
    if block < tl.load(num_blocks):
        expert = tl.load(experts + block)
        places = tl.load(begins + block) + tl.arange(0, TOKENS)
        is_row = places < tl.load(ends + block)
        assigned = tl.load(rows + places, mask=is_row, other=0)
        output = tl.program_id(0) * ROWS
        per_expert = 2 * num_outputs if GATED else num_outputs
        row = expert * per_expert + output
        last_row = (expert + 1) * per_expert
        source = assigned // TOP_K if GATED else places
        x_rows = x + source.to(tl.int64)[:, None] * stride
        outputs = output + tl.arange(0, ROWS)
        is_output = outputs < num_outputs
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
        up = acc
        safe = tl.minimum(outputs, num_outputs - 1)
        if FORMAT == FLOAT8:
            first_scale = weight_scales + expert.to(tl.int64) * scale_stride
            row_scales = first_scale + safe // SCALE_ROWS * num_scales
            up_scales = first_scale + (safe + num_outputs) // SCALE_ROWS * num_scales
        elif FORMAT >= MX_FLOAT4:
            first = (expert * per_expert + safe).to(tl.int64)[:, None] * num_scales
            up_first = first + tl.cast(num_outputs, tl.int64) * num_scales
            row_scales = weight_scales + first
            up_scales = weight_scales + up_first
            row_zeros = None
            up_zeros = None
            if weight_zeros is not None:
                row_zeros = weight_zeros + first
                up_zeros = weight_zeros + up_first
        if FORMAT >= MX_FLOAT4:
            for step in range(0, tl.cdiv(size, COLUMNS)):
                values = ()
                for i in tl.static_range(8):
                    piece = _columns_of(
                        x_rows, is_row, step * COLUMNS + _WORDS * i, size, _WORDS, EVEN
                    )
                    values += (piece,)  # type: ignore[assignment]
                words = load_tile(
                    weight, row, last_row, step * _WORDS, row_stride, ROWS, _WORDS, True, TMA
                )
                acc = _add_block(
                    acc,
                    values,
                    words,
                    row_scales,
                    row_zeros,
                    step,
                    FORMAT,
                    SCALE_COLUMNS,
                    x.dtype.element_ty,
                    IEEE,
                    ASM,
                )
                if GATED:
                    words = load_tile(
                        weight,
                        row + num_outputs,
                        last_row,
                        step * _WORDS,
                        row_stride,
                        ROWS,
                        _WORDS,
                        True,
                        TMA,
                    )
                    up = _add_block(
                        up,
                        values,
                        words,
                        up_scales,
                        up_zeros,
                        step,
                        FORMAT,
                        SCALE_COLUMNS,
                        x.dtype.element_ty,
                        IEEE,
                        ASM,
                    )
        else:
            for start in range(0, size, COLUMNS):
                values = _columns_of(x_rows, is_row, start, size, COLUMNS, EVEN)
                piece = load_tile(weight, row, last_row, start, size, ROWS, COLUMNS, EVEN, TMA)
                piece = piece.to(x.dtype.element_ty)
                if SCALE_COLUMNS > 0:
                    part = _dot(piece, values, tl.zeros([ROWS, TOKENS], tl.float32), IEEE)
                    acc += part * tl.load(row_scales + start // SCALE_COLUMNS)[:, None]
                else:
                    acc = _dot(piece, values, acc, IEEE)
                if GATED:
                    piece = load_tile(
                        weight, row + num_outputs, last_row, start, size, ROWS, COLUMNS, EVEN, TMA
                    )
                    piece = piece.to(x.dtype.element_ty)
                    if SCALE_COLUMNS > 0:
                        part = _dot(piece, values, tl.zeros([ROWS, TOKENS], tl.float32), IEEE)
                        up += part * tl.load(up_scales + start // SCALE_COLUMNS)[:, None]
                    else:
                        up = _dot(piece, values, up, IEEE)
        if FORMAT == FLOAT8 and SCALE_COLUMNS == 0:
            acc *= tl.load(row_scales)[:, None]
            if GATED:
                up *= tl.load(up_scales)[:, None]
        if weight_factors is not None:
            factor = tl.load(weight_factors + expert)
            acc *= factor
            up *= factor
        if bias is not None:
            bias_places = bias + expert * per_expert + safe
            acc += tl.load(bias_places).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias_places + num_outputs).to(tl.float32)[:, None]
        if GATED:
            acc = activate_gated(acc, up, EPILOGUE)
            target = places
        else:
            acc = acc * tl.load(scales + assigned, mask=is_row, other=0.0)[None, :]
            target = assigned % TOP_K * num_tokens + assigned // TOP_K
        targets = out + target.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        result = tl.trans(acc).to(out.dtype.element_ty)
        tl.store(targets, result, mask=is_row[:, None] & is_output[None, :])
