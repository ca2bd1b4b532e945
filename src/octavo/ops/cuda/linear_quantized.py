"""y = x W^T on Hopper with W quantized in memory.

Up to 2,048 tokens are computed with W as it is stored (linear_hopper_quantized.py, and from 65 on
linear_hopper_persistent.py; one token times FP8 is linear_gemv.py's, or where products follow each
other linear_ring.py's, and times 4 bits it may be linear_gemv_packed.py's). Up to 32 tokens times
4 bits are linear_hopper_packed.py's, with two integers for each input. Up to 64 bfloat16
tokens times FP8 with scales of outputs are linear_hopper.py's, with two e4m3 numbers for each
input, of all its bits. A model that was made for it has its inputs rounded to FP8, too, if
they are more than a few: with a scale for each token, for each 512 inputs where attention rounds
up to 64 tokens, or for each 128 where weights have scales for blocks. Otherwise, and where scales
of small groups find no room beside W, that is dequantized into a workspace first, and cuBLAS
multiplies: that costs as much as writing W, and the product with many tokens costs more. Where
there is memory for a dequantized copy of W, nothing has to be written, and with more than 128
tokens products may read the copy. Few tokens times a large W in FP8 may read a copy in 7 bits
(float7.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.float7 import PIECE_INPUTS, PIECE_ROWS, UNIT, copied_tokens
from octavo.ops.cuda.activation import apply_gate
from octavo.ops.cuda.devices import is_hopper, num_sms
from octavo.ops.cuda.float7 import Float7Weight, pack_float7, takes_float7
from octavo.ops.cuda.hopper import swizzled_descriptor
from octavo.ops.cuda.linear import (
    PARTIAL_DTYPE,
    block_descriptor,
    block_layout,
    launch_dense,
    linear,
    linear_partial,
    split_workspace,
)
from octavo.ops.cuda.linear_gemv import MAX_ROWS, Scales, linear_one, pays_to_norm
from octavo.ops.cuda.linear_gemv_packed import PackedPrograms, linear_packed
from octavo.ops.cuda.linear_hopper_packed import (
    PackedTiles,
    linear_few_packed,
    takes_integers,
)
from octavo.ops.cuda.linear_hopper_persistent import (
    HALF,
    persistent_linear_kernel,
    unpacking,
)
from octavo.ops.cuda.linear_hopper_quantized import (
    SCALE_RESULT,
    SCALE_SUMS,
    SCALE_WEIGHTS,
    quantized_linear_kernel,
)
from octavo.ops.cuda.linear_ring import linear_by_ring, takes_ring
from octavo.ops.cuda.linear_table import Tiles as DenseTiles
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.quantize import empty_inputs, round_inputs
from octavo.ops.cuda.quantized_tiles import (
    LIBRARY,
    MOST_IN_INTEGERS,
    MOST_IN_SPANS,
    MOST_IN_TWO,
    MOST_MADE_TWO,
    SIZES,
    Choice,
    Division,
    Product,
    Tiles,
    candidates,
    with_words,
)
from octavo.ops.cuda.shared_workspace import in_workspace
from octavo.ops.cuda.stored_weights import (
    BLOCK,
    CHUNK_ROWS,
    FLOAT8,
    INT4,
    PIECE,
    StoredWeight,
    dequantize,
    dequantized,
)
from octavo.ops.cuda.tile_sizes import registers_for
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import GroupedInt, QuantizedWeight, RoundedInputs, Rounding
from octavo.ops.tuning import Answers, Question

# With more tokens than these, a product of FP8 with FP8 and rounding its inputs take less time.
MAX_EXACT_TOKENS = 32
MAX_PROGRAMS = 144  # of the persistent kernel: each needs 320 KB of the workspace
_MEASURED_BYTES = 160e6  # of several weights: they do not fit the L2 cache


def launch(
    x: Tensor,
    stored: StoredWeight,
    bias: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    tiles: Tiles,
    is_partial: bool,
    x_scales: Tensor | None = None,
) -> None:
    """Run linear_hopper_quantized's kernel, or linear_hopper_persistent's.

    x_scales: of x in float8, with Rounding.GROUPS; for the former.
    """
    if tiles.x_stages:
        _launch_persistent(x, stored, bias, out, epilogue, tiles)
        return
    num_tokens, size = x.shape
    num_rows = out.shape[-1]
    rows = tiles.rows // 2 if epilogue.is_gated else tiles.rows
    grid = (triton.cdiv(num_tokens, tiles.tokens), triton.cdiv(num_rows, rows), tiles.splits)
    num_blocks = triton.cdiv(size, BLOCK)
    scale = SCALE_RESULT
    if stored.group:
        scales_weights = tiles.scales_weights or stored.group < BLOCK
        scale = SCALE_WEIGHTS if scales_weights else SCALE_SUMS
    assert x_scales is None or (scale == SCALE_SUMS and stored.format == FLOAT8)
    reduces = tiles.splits > 1 and not is_partial
    sums, arrivals = split_workspace(x.device)
    if reduces:
        num_tiles = grid[0] * grid[1]
        assert num_tiles <= len(arrivals)
        assert num_tiles * tiles.splits * tiles.tokens * tiles.rows <= len(sums)
    quantized_linear_kernel[grid](
        block_descriptor(x, tiles.tokens, BLOCK),
        _weight_descriptor(stored, rows, epilogue),
        x_scales,
        stored.scales,
        stored.scales if stored.zeros is None else stored.zeros,
        bias,
        out,
        sums,
        arrivals,
        num_tokens,
        num_rows,
        num_blocks,
        tiles.splits,
        stored.num_groups,
        0 if x_scales is None else x_scales.stride(0),
        stored.stride_row,
        stored.stride_group,
        stored.block_rows,
        STAGES=tiles.stages,
        SPLITS=tiles.splits if reduces else 1,
        PARTIAL=is_partial,
        FORMAT=stored.format,
        SCALE=scale,
        HAS_ZEROS=stored.zeros is not None,
        GROUP_BLOCKS=max(1, stored.group // BLOCK) if stored.group else num_blocks,
        PARTS=max(1, BLOCK // stored.group) if stored.group else 1,
        GROUPS=stored.staged_groups(tiles.splits),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        BY_WARP=tiles.by_warp,
        EARLY=tiles.early,
        num_warps=tiles.warps,
        maxnreg=registers_for(tiles.warps + 4, tiles.per_sm),
        **launch_options(x.device),
    )


def _launch_persistent(
    x: Tensor,
    stored: StoredWeight,
    bias: Tensor | None,
    out: Tensor,
    epilogue: Epilogue,
    tiles: Tiles,
) -> None:
    (num_tokens, size), num_rows = x.shape, out.shape[-1]
    rows = tiles.rows // 2 if epilogue.is_gated else tiles.rows
    num_blocks = triton.cdiv(size, BLOCK)
    num_tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_tokens, tiles.tokens)
    division = Division.of(num_tiles, num_blocks, _num_sms(x.device), tiles.is_shared)
    sums, arrivals = split_workspace(x.device)
    bits = 4 if stored.format == INT4 else 8
    low, high = (unpacking(bits, word, x.dtype == torch.float16) for word in range(2))
    if epilogue.is_gated:
        weight = _gate_descriptor(stored, tiles.rows)
    else:
        weight = _weight_descriptor(stored, tiles.rows, epilogue)
    if division.num_shared:
        assert 2 * division.num_programs * tiles.rows * tiles.tokens <= sums.numel()
        assert division.num_shared <= len(arrivals)
    first = 1 << (tiles.tokens.bit_length() - 1)  # tokens of a tile: a power of two
    rest = tiles.tokens - first
    persistent_linear_kernel[(division.num_programs,)](
        block_descriptor(x, first, HALF),
        block_descriptor(x, rest or first, HALF),
        weight,
        stored.scales,
        stored.scales if stored.zeros is None else stored.zeros,
        bias,
        out,
        sums,
        arrivals,
        num_tokens,
        num_rows,
        num_blocks,
        num_tiles - division.num_shared,
        division.num_shared,
        division.per_program,
        stored.stride_row,
        stored.stride_group,
        stored.block_rows,
        max(1, stored.group // BLOCK) if stored.group else num_blocks,
        REST=rest,
        ROWS=tiles.rows,
        STAGES=tiles.stages,
        X_STAGES=tiles.x_stages,
        HALVES=tiles.halves,
        FORMAT=stored.format,
        SCALE=SCALE_WEIGHTS if stored.group else SCALE_RESULT,
        HAS_ZEROS=stored.zeros is not None,
        PARTS=max(1, BLOCK // stored.group) if stored.group else 1,
        UNPACK_LOW=low,
        UNPACK_HIGH=high,
        TILE=block_layout(tiles.rows, stored.block_columns, stored.weight.dtype),
        EPILOGUE=int(epilogue),
        GATED=epilogue.is_gated,
        HAS_BIAS=bias is not None,
        num_warps=tiles.warps,
        maxnreg=registers_for(tiles.warps + 4),
        **launch_options(x.device),
    )


def _weight_descriptor(stored: StoredWeight, rows: int, epilogue: Epilogue) -> Any:
    """The TMA descriptor for fetching so many rows of W, or a chunk, of a block of inputs."""
    if stored.format == INT4:
        assert not epilogue.is_gated or stored.has_whole_gates
        rows = min(rows, CHUNK_ROWS)
    return block_descriptor(stored.lines, rows, stored.block_columns)


def _gate_descriptor(stored: StoredWeight, rows: int) -> Any:
    """The TMA descriptor for fetching so many rows of a block of inputs, PIECE gates and PIECE rows
    that they gate in turns."""
    assert stored.has_whole_gates
    assert stored.format != INT4 or rows == 2 * CHUNK_ROWS
    lines, columns = stored.lines, stored.block_columns
    pieces = lines.view(2, -1, PIECE, lines.shape[1]).transpose(0, 1)
    swizzle = block_layout(rows, columns, lines.dtype).swizzle_byte_width
    return swizzled_descriptor(pieces, [rows // (2 * PIECE), 2, PIECE, columns], swizzle)


@cache
def _num_sms(device: torch.device) -> int:
    """The number of SMs; at most as many as there is room for in the workspace."""
    return min(num_sms(device), MAX_PROGRAMS)


class QuantizedCudaLinear:
    """Owns W as StoredWeight has it."""

    keeps_weight = True

    def __init__(
        self,
        stored: StoredWeight,
        permutation: Tensor | None,
        dtype: torch.dtype,
        is_chained: bool = False,
        dequantized_copy: bool = False,
        float7_copy: bool = False,
        follows_experts: bool = False,
    ) -> None:
        """
        Args:
            stored: W.
            permutation: int64 [in_features], of the inputs (GroupedInt).
            dtype: of inputs and results.
            is_chained: see make_linear_kernel.
            dequantized_copy, float7_copy, follows_experts: see make_quantized_kernel.
        """
        self._stored = stored
        self._permutation = permutation
        self._dtype = dtype
        self._uses: dict[bool, Epilogue] = {}  # by whether they are gated
        self._answers: Answers = {}
        self._choices: dict[tuple[int, bool], Choice] = {}  # by places in SIZES, and as of _uses
        # What torch's product of FP8 with FP8 takes.
        is_served = dtype == torch.bfloat16 and all(each % 16 == 0 for each in stored.shape)
        self._rounding = Rounding.NONE
        if stored.quantizes_inputs and stored.group:
            self._rounding = Rounding.GROUPS
        elif stored.quantizes_inputs and is_served:
            self._rounding = Rounding.TOKENS
        # Inputs that are rounded are multiplied by W as it is, so a copy would not be read.
        is_copied = dequantized_copy and self._rounding is Rounding.NONE
        self._copy = dequantized(stored, dtype) if is_copied else None
        # A float16 has more bits than two numbers in e4m3. TMA fetches whole 16 bytes.
        is_plain = stored.format == FLOAT8 and stored.group == 0 and stored.shape[1] % 16 == 0
        self._takes_two = is_plain and dtype == torch.bfloat16
        self._float7: Float7Copy | None = None
        if float7_copy and is_plain:
            self._float7 = Float7Copy.of(stored)
        self._takes_integers = takes_integers(stored)
        self._row_scales = stored.row_scales if stored.group == 0 else stored.scales
        self._scales: Scales | None = None  # if a GEMV takes one token
        has_even_blocks = stored.block_rows % MAX_ROWS == 0 and stored.shape[0] % MAX_ROWS == 0
        if stored.format == FLOAT8 and (stored.group == 0 or has_even_blocks):
            self._scales = Scales(stored.scales, stored.block_rows, stored.group)
        # A float16 has more bits than the two numbers of linear_ring.py.
        takes_one = self._scales is not None and dtype == torch.bfloat16
        has_whole_pieces = stored.group in (0, BLOCK) and takes_ring(*stored.shape, is_float8=True)
        self._is_in_ring = (is_chained or follows_experts) and takes_one and has_whole_pieces
        self._follows_experts = follows_experts
        # For good, once it is used: captured graphs have its address.
        self._workspace: Tensor | None = None
        if self._copy is None:
            _reserve(stored, dtype)

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply."""
        return self._apply(self._aligned(x), bias, epilogue)

    def rounding(self, num_tokens: int) -> Rounding:
        """See RoundingKernel.rounding."""
        # Who rounds inputs does not know their permutation.
        return Rounding.NONE if self._permutation is not None else self._own_rounding(num_tokens)

    def _own_rounding(self, num_tokens: int) -> Rounding:
        """See RoundingKernel.rounding: that of inputs in the order of W's columns."""
        if num_tokens > MAX_EXACT_TOKENS and self._rounding is not Rounding.NONE:
            return self._rounding
        if self._takes_integers and 1 < num_tokens <= MOST_IN_INTEGERS:
            return Rounding.INTEGERS
        is_in_two = self._takes_two and 1 < num_tokens <= MOST_IN_TWO
        return Rounding.IN_TWO if is_in_two else Rounding.NONE

    def part_rounding(self, num_tokens: int) -> Rounding:
        """See RoundingKernel.part_rounding."""
        rounding = self.rounding(num_tokens)
        if rounding is not Rounding.TOKENS:
            return rounding
        # A scale for less than a token is as good.
        choice = self._choose(num_tokens, Epilogue.NONE) if num_tokens <= MOST_IN_SPANS else None
        return Rounding.SPANS if isinstance(choice, DenseTiles) else Rounding.NONE

    def apply_rounded_partial(self, x: RoundedInputs, bias: Tensor | None) -> Tensor:
        """See RoundingKernel.apply_rounded_partial."""
        choice = self._choose(len(x.values), Epilogue.NONE)
        return self._multiply_rounded(x, bias, Epilogue.NONE, choice, is_partial=True)

    def rounds_results(self, num_tokens: int, epilogue: Epilogue, rounding: Rounding) -> bool:
        """See RoundingKernel.rounds_results: what a program has of a token shares a scale."""
        are_in_two = rounding is self._own_rounding(num_tokens) is Rounding.IN_TWO
        if not are_in_two or num_tokens > MOST_MADE_TWO:
            return False
        choice = self._choose(num_tokens, epilogue)
        return isinstance(choice, DenseTiles) and choice.splits == 1

    def apply_and_round(
        self,
        x: Tensor | RoundedInputs,
        bias: Tensor | None,
        epilogue: Epilogue,
        rounding: Rounding,
    ) -> RoundedInputs:
        """See RoundingKernel.apply_and_round."""
        if isinstance(x, Tensor):
            x = round_inputs(self._aligned(x), self._own_rounding(len(x)))
        choice, num_tokens = self._choose(len(x.values), epilogue), len(x.values)
        assert isinstance(choice, DenseTiles)
        num_rows = self._num_results(epilogue)
        out = empty_inputs(num_tokens, num_rows, rounding, x.values.device, group=choice.rows)
        self._launch_dense(x, bias, out, epilogue, choice, is_partial=False)
        return out

    def apply_rounded(self, x: RoundedInputs, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See RoundingKernel.apply_rounded."""
        if self._cuts_gates(epilogue):
            return apply_gate(self.apply_rounded(x, bias, Epilogue.NONE), epilogue)
        choice = self._choose(len(x.values), epilogue)
        return self._multiply_rounded(x, bias, epilogue, choice, is_partial=False)

    def norms_inputs(self, num_tokens: int, norms_branch: bool) -> bool:
        """See NormingKernel.norms_inputs."""
        is_served = num_tokens == 1 and self._scales is not None
        num_rows, size = self._stored.shape
        if self._is_in_ring:
            return is_served
        return is_served and pays_to_norm(num_rows, size, norms_branch, is_float8=True)

    def apply_normed(self, x: DeferredNorm, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See NormingKernel.apply_normed."""
        return self._apply_one(x, bias, epilogue)

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        stored, num_tokens, x = self._stored, len(x), self._aligned(x)
        if num_tokens == 1 and self._scales is not None:
            return self._apply_one(x, bias, Epilogue.NONE)
        rounding = self._own_rounding(num_tokens)
        if rounding is not Rounding.NONE:
            return self.apply_rounded_partial(round_inputs(x, rounding), bias)
        choice = self._choose(num_tokens, Epilogue.NONE)
        if isinstance(choice, PackedPrograms):
            return self._multiply_packed(x, bias, Epilogue.NONE, choice)
        if not isinstance(choice, Tiles):
            with in_workspace:
                return linear_partial(x, self._dense(x.dtype), bias, is_new=self._copy is None)
        if choice.splits == 1:
            return self._apply(x, bias, Epilogue.NONE)
        shape = (choice.splits, num_tokens, stored.shape[0])
        out = x.new_empty(shape, dtype=PARTIAL_DTYPE)
        launch(x, stored, bias, out, Epilogue.NONE, choice, is_partial=True)
        return out

    def questions(self, max_tokens: int) -> list[Question]:
        """See Tunable.questions: for each number of tokens in SIZES, and up to the next of them."""
        copies = Copies(self._stored)
        found = []
        for is_gated, epilogue in sorted(self._uses.items()):
            for tokens, before in zip(SIZES, (0, *SIZES), strict=False):
                if before >= max_tokens:
                    break
                if tokens == 1 and self._scales is not None:
                    continue  # _apply_one
                product = self._product(tokens, is_gated)
                assert product is not None
                options = candidates(product)
                work = partial(self._work, product, epilogue, copies)
                key = self._dtype, product
                found.append(Question(key, options, tokens, work, copies.count))
        return found

    def adopt(self, answers: Answers) -> None:
        """See Tunable.adopt."""
        self._answers = answers
        self._choices.clear()

    def _work(
        self, product: Product, epilogue: Epilogue, copies: Copies, choice: Choice, i: int
    ) -> Callable[[], Tensor]:
        """See Question.work. What it needs is made when it is first called."""
        return partial(self._measured, product, epilogue, copies, choice, i)

    def _measured(
        self, product: Product, epilogue: Epilogue, copies: Copies, choice: Choice, i: int
    ) -> Tensor:
        x = copies.inputs(product.tokens, self._dtype)
        kernel = copy(self)
        kernel._stored, kernel._float7 = copies.weight(i), None
        if self._copy is not None and choice == LIBRARY:
            kernel._copy = copies.dequantized(i, self._copy)
        if product.rounding is not Rounding.NONE:
            rounded = copies.rounded(product.tokens, self._dtype, product.rounding)
            return kernel._multiply_rounded(rounded, None, epilogue, choice, False)
        if isinstance(choice, PackedPrograms):
            return kernel._multiply_packed(x, None, epilogue, choice)
        return kernel._multiply(x, None, epilogue, choice)

    def _apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        if len(x) == 1 and self._scales is not None:
            return self._apply_one(x, bias, epilogue)
        if self._cuts_gates(epilogue):
            return apply_gate(self._apply(x, bias, Epilogue.NONE), epilogue)
        rounding = self._own_rounding(len(x))
        if rounding is not Rounding.NONE:
            return self.apply_rounded(round_inputs(x, rounding), bias, epilogue)
        choice = self._choose(len(x), epilogue)
        return self._multiply(x, bias, epilogue, choice)

    def _cuts_gates(self, epilogue: Epilogue) -> bool:
        """Whether kernels that fetch gates and what they gate by chunks cannot do that."""
        return epilogue.is_gated and not self._stored.has_whole_gates

    def _apply_one(
        self, x: Tensor | DeferredNorm, bias: Tensor | None, epilogue: Epilogue
    ) -> Tensor:
        """One token, where there are `_scales`."""
        weight, scales = self._stored.weight, self._scales
        if not self._is_in_ring:
            return linear_one(x, weight, bias, epilogue, scales=scales)
        return linear_by_ring(x, weight, bias, epilogue, scales, self._follows_experts)

    def _choose(self, num_tokens: int, epilogue: Epilogue) -> Choice:
        place = bisect_left(SIZES, num_tokens), epilogue.is_gated
        choice = self._choices.get(place)
        if choice is None:
            self._uses.setdefault(epilogue.is_gated, epilogue)
            product = self._product(num_tokens, epilogue.is_gated)
            if product is None:
                choice = LIBRARY
            else:
                choice = self._answers.get((self._dtype, product)) or candidates(product)[0]
            self._choices[place] = choice
        return choice

    def _product(self, num_tokens: int, is_gated: bool) -> Product | None:
        rounding, has_copy = self._own_rounding(num_tokens), self._copy is not None
        return Product.of(num_tokens, self._stored, is_gated, rounding, has_copy)

    def _multiply(
        self, x: Tensor, bias: Tensor | None, epilogue: Epilogue, choice: Choice
    ) -> Tensor:
        stored = self._stored
        if isinstance(choice, PackedPrograms):
            if choice.splits == 1:
                return self._multiply_packed(x, bias, epilogue, choice)
            parts = self._multiply_packed(x, bias, Epilogue.NONE, choice)
            return apply_epilogue(parts.sum(dim=0).to(x.dtype), epilogue)
        if not isinstance(choice, Tiles):
            with in_workspace:
                return linear(x, self._dense(x.dtype), bias, epilogue, is_new=self._copy is None)
        out = x.new_empty((len(x), self._num_results(epilogue)))
        launch(x, stored, bias, out, epilogue, choice, is_partial=False)
        return out

    def _multiply_packed(
        self, x: Tensor, bias: Tensor | None, epilogue: Epilogue, programs: PackedPrograms
    ) -> Tensor:
        """One token's product by linear_gemv_packed.py's kernel; with splits, partial sums."""
        num_rows = self._num_results(epilogue)
        out = self._output(len(x), num_rows, programs.splits if programs.splits > 1 else 0)
        linear_packed(x, self._stored, bias, out, epilogue, programs)
        return out

    def _dense(self, dtype: torch.dtype) -> Tensor:
        """The copy of W, or W in a workspace, until another weight is dequantized."""
        if self._copy is not None:
            return self._copy
        num_rows, size = self._stored.shape
        if self._workspace is None:
            self._workspace = _workspaces[self._stored.weight.device, dtype]
        dense = self._workspace[: num_rows * size]
        dequantize(self._stored, dense.view(num_rows, size))
        return dense.view(num_rows, size)

    def _multiply_rounded(
        self,
        x: RoundedInputs,
        bias: Tensor | None,
        epilogue: Epilogue,
        choice: Choice,
        is_partial: bool,
    ) -> Tensor:
        """is_partial: the caller takes partial sums."""
        (rounded, scales, _), stored = x, self._stored
        num_tokens, num_rows = len(rounded), self._num_results(epilogue)
        if isinstance(choice, PackedTiles):
            is_partial = is_partial and choice.splits > 1
            out = self._output(num_tokens, num_rows, choice.splits if is_partial else 0)
            workspace = split_workspace(out.device)
            linear_few_packed(x, stored, bias, out, epilogue, choice, is_partial, workspace)
            return out
        if isinstance(choice, Tiles):
            is_partial = is_partial and choice.splits > 1
            out = self._output(num_tokens, num_rows, choice.splits if is_partial else 0)
            launch(rounded, stored, bias, out, epilogue, choice, is_partial, scales)
            return out
        if not isinstance(choice, DenseTiles):
            y = torch._scaled_mm(
                rounded,
                stored.weight.t(),
                scale_a=scales,
                scale_b=self._row_scales,
                bias=bias,
                out_dtype=self._dtype,
                use_fast_accum=True,
            )
            return apply_gate(y, epilogue) if epilogue.is_gated else apply_epilogue(y, epilogue)
        is_partial = is_partial and choice.splits > 1
        out = self._output(num_tokens, num_rows, choice.splits if is_partial else 0)
        self._launch_dense(x, bias, out, epilogue, choice, is_partial)
        return out

    def _launch_dense(
        self,
        x: RoundedInputs,
        bias: Tensor | None,
        out: Tensor | RoundedInputs,
        epilogue: Epilogue,
        tiles: DenseTiles,
        is_partial: bool,
    ) -> None:
        stored, copied = self._stored, self._float7
        scales, words = stored.scales, None
        if copied is not None and copied.takes(len(x.values), x.group, tiles):
            numbers = x.values.dim() - 1
            tiles = with_words(tiles, numbers, epilogue.is_gated)
            scales, words = copied.scales, copied.words
        of_rows = scales, stored.block_rows
        launch_dense(x, stored.weight, bias, out, epilogue, tiles, is_partial, of_rows, words)

    def _num_results(self, epilogue: Epilogue) -> int:
        """Results per token."""
        return self._stored.shape[0] // (2 if epilogue.is_gated else 1)

    def _output(self, num_tokens: int, num_rows: int, splits: int) -> Tensor:
        """The tensor for a product's results; splits: for so many partial sums, 0 for results."""
        device = self._stored.weight.device
        if splits:
            return torch.empty((splits, num_tokens, num_rows), dtype=PARTIAL_DTYPE, device=device)
        return torch.empty((num_tokens, num_rows), dtype=self._dtype, device=device)

    def _aligned(self, x: Tensor) -> Tensor:
        """The inputs in the order of W's columns, where TMA can fetch them."""
        if self._permutation is not None:
            return x.index_select(1, self._permutation)
        is_aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        return x if is_aligned else x.contiguous().clone()


class Float7Copy(NamedTuple):
    """W in 7 bits, for few tokens."""

    words: Float7Weight
    scales: Tensor  # of W / 2 ** UNIT, which products have

    @classmethod
    def of(cls, stored: StoredWeight) -> Float7Copy | None:
        """None: W has no such form, or what gates gate does not begin with a piece of rows."""
        if stored.shape[0] % (2 * PIECE_ROWS) or not takes_float7(stored.weight):
            return None
        return cls(pack_float7(stored.weight), stored.scales * 2.0**UNIT)

    def takes(self, num_tokens: int, group: int, tiles: DenseTiles) -> bool:
        """Whether the copy is read for so many tokens, of which so many inputs share a scale."""
        is_in_pieces = tiles.columns % PIECE_INPUTS == 0
        is_in_pieces &= group % PIECE_INPUTS == 0 or group == PIECE_INPUTS // 2
        return num_tokens in copied_tokens(*self.words.shape) and is_in_pieces and not tiles.swap


class Copies:
    """Copies of a weight that together do not fit the L2 cache, and inputs, made when they are
    needed: for measuring."""

    def __init__(self, stored: StoredWeight) -> None:
        self._stored = stored
        self.count = int(_MEASURED_BYTES // stored.weight.nbytes) + 2
        self._weights = {0: stored}
        self._dequantized: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        self._rounded: dict[int, RoundedInputs] = {}

    def weight(self, i: int) -> StoredWeight:
        """The i-th; the first one is the weight itself."""
        if i not in self._weights:
            self._weights[i] = replace(self._stored, weight=self._stored.weight.clone())
        return self._weights[i]

    def dequantized(self, i: int, copy: Tensor) -> Tensor:
        """A copy of W that is dequantized, for the i-th product; the first one is `copy`."""
        i %= int(_MEASURED_BYTES // copy.nbytes) + 2
        if i not in self._dequantized:
            self._dequantized[i] = copy.clone() if i else copy
        return self._dequantized[i]

    def inputs(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """Random ones."""
        if num_tokens not in self._inputs:
            shape, device = (num_tokens, self._stored.shape[1]), self._stored.weight.device
            self._inputs[num_tokens] = torch.randn(shape, device=device, dtype=dtype)
        return self._inputs[num_tokens]

    def rounded(self, num_tokens: int, dtype: torch.dtype, rounding: Rounding) -> RoundedInputs:
        """The same, rounded."""
        if num_tokens not in self._rounded:
            self._rounded[num_tokens] = round_inputs(self.inputs(num_tokens, dtype), rounding)
        return self._rounded[num_tokens]


# Where weights are dequantized, one after the other: as large as the largest one needs. A thread
# that uses one holds `in_workspace`.
_workspaces: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def _reserve(stored: StoredWeight, dtype: torch.dtype) -> None:
    device, numel = stored.weight.device, stored.shape[0] * stored.shape[1]
    present = _workspaces.get((device, dtype))
    if present is None or present.numel() < numel:
        _workspaces[device, dtype] = torch.empty(numel, dtype=dtype, device=device)


def make_kernel(
    form: QuantizedWeight,
    dtype: torch.dtype,
    is_chained: bool = False,
    dequantized_copy: bool = False,
    float7_copy: bool = False,
    follows_experts: bool = False,
) -> QuantizedCudaLinear | None:
    """None: no kernel here takes the form, the dtype or the device.

    is_chained, dequantized_copy, float7_copy, follows_experts: see QuantizedCudaLinear.
    """
    if dtype not in (torch.bfloat16, torch.float16) or not is_hopper(form.device):
        return None
    stored = StoredWeight.of(form)
    if stored is None:
        return None
    permutation = form.permutation if isinstance(form, GroupedInt) else None
    return QuantizedCudaLinear(
        stored,
        permutation,
        dtype,
        is_chained=is_chained,
        dequantized_copy=dequantized_copy,
        float7_copy=float7_copy,
        follows_experts=follows_experts,
    )
