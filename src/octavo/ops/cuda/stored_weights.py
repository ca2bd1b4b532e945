"""Quantized weights as kernels on a GPU take them, and the kernels that dequantize them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.quantized import GroupedInt, QuantizedWeight, ScaledFloat8

BLOCK = 128  # inputs of a tile
PIECE = 8  # rows of gates that lie together in a tile, and as many that they gate
CHUNK_ROWS = 64  # of a block of integers of 4 bits that lie side by side
FLOAT8, INT4, INT8 = 0, 1, 2  # FORMAT
_CHUNK_ROWS = tl.constexpr(CHUNK_ROWS)


def row_bytes(format: int) -> int:
    """Bytes that BLOCK inputs of a row of W take."""
    return BLOCK if format == FLOAT8 else BLOCK // (2 if format == INT4 else 1)


def staged_groups(size: int, group: int, splits: int) -> int:
    """How many groups a split of `size` inputs may have, rounded up to a power of 2."""
    if not group:
        return 1
    num_inputs = triton.cdiv(triton.cdiv(size, BLOCK), splits) * BLOCK
    groups = triton.cdiv(num_inputs, group) + (group > BLOCK)
    return power_of_2(groups)


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A quantized W [out_features, in_features] as the kernel takes it."""

    shape: tuple[int, int]
    weight: Tensor  # float8 [out_features, in_features], or int32 words (see pack_integers)
    format: int
    scales: Tensor
    stride_row: int
    stride_group: int
    block_rows: int
    num_groups: int
    group: int  # inputs that share a scale; 0: there is one scale per output
    zeros: Tensor | None  # bfloat16 at the same places as scales, minus half of the range
    quantizes_inputs: bool = False  # see ScaledFloat8

    @property
    def row_bytes(self) -> int:
        """See `row_bytes`."""
        return row_bytes(self.format)

    @property
    def block_columns(self) -> int:
        """Elements of `weight` that BLOCK inputs of a row are."""
        return self.row_bytes // self.weight.element_size()

    @property
    def lines(self) -> Tensor:
        """`weight` as TMA fetches from it: its rows, or chunks of rows one below the other."""
        return self.weight.view(-1, self.weight.shape[-1])

    @property
    def has_whole_gates(self) -> bool:
        """Whether both halves of the rows begin with a chunk, if they lie in chunks."""
        return self.format != INT4 or self.shape[0] % (2 * CHUNK_ROWS) == 0

    def staged_groups(self, splits: int) -> int:
        """See `staged_groups`."""
        return staged_groups(self.shape[1], self.group, splits)

    @property
    def row_scales(self) -> Tensor:
        """float32 [1, out_features]: a scale per output, where there are no blocks of inputs."""
        return self.scales.repeat_interleave(self.block_rows, dim=0)[: self.shape[0]].view(1, -1)

    @classmethod
    def of(cls, form: QuantizedWeight) -> StoredWeight | None:
        """None: the kernel does not take such a weight."""
        num_rows, size = form.shape
        if isinstance(form, ScaledFloat8):
            rows, columns = form.block
            if size % 16 or (columns < size and columns % BLOCK):
                return None
            scales = form.scales.contiguous()
            return cls(
                (num_rows, size),
                form.weight.contiguous(),
                FLOAT8,
                scales,
                scales.shape[1],
                1,
                rows,
                scales.shape[1],
                columns if columns < size else 0,
                None,
                form.quantizes_inputs,
            )
        if isinstance(form, GroupedInt):
            if form.group < size and form.group % BLOCK and form.group not in (32, 64):
                return None
            if size % 8:  # inputs of 16 bits are fetched by TMA, whose rows have whole 16 bytes
                return None
            half = 1 << (form.bits - 1)
            group = form.group if form.group < size else 0
            scales = _of_whole_blocks(form.scales, group)
            zeros = None
            if form.zeros is not None:
                zeros = _of_whole_blocks((form.zeros - half).to(torch.bfloat16), group)
            return cls(
                (num_rows, size),
                pack_integers(form.values(), form.bits),
                INT4 if form.bits == 4 else INT8,
                scales,
                1,
                num_rows,
                1,
                len(scales),
                group,
                zeros,
            )
        return None


def _of_whole_blocks(values: Tensor, group: int) -> Tensor:
    """Of [out_features, groups] the same by group, with zeros for the groups that the last block of
    inputs would have if it were whole: kernels take all that a block may have."""
    per_block = BLOCK // group if 0 < group < BLOCK else 1
    return F.pad(values, (0, -values.shape[1] % per_block)).t().contiguous()


def pack_integers(values: Tensor, bits: int) -> Tensor:
    """Integers in the order in which the kernel unpacks them.

    Args:
        values: uint8 [out_features, in_features], each of `bits`.
        bits: 4 or 8. Integers of 8 bits are stored minus 128.

    Returns:
        Of 8 bits int32 [out_features, in_features / 128 * 32], in_features rounded up. A block of
        128 inputs are `32 / bits` planes of `4 * bits` inputs. Words 2 i and 2 i + 1 hold the
        planes' inputs 2 i in their low halves and 2 i + 1 in their high halves: the first half of
        the planes in the first word, lowest bits first, the others in the second word.
        Of 4 bits int32 [out_features / 64, in_features / 128, 64, 16], both rounded up: a block of
        CHUNK_ROWS rows is contiguous, as tiles of products are fetched.
    """
    num_planes, width = 32 // bits, 4 * bits
    if bits == 8:
        values = values ^ 128
    values = F.pad(values, (0, -values.shape[1] % BLOCK))
    rows = len(values)
    # [rows, blocks, half of the planes, plane, pair, place in the pair]
    planes = values.view(rows, -1, 2, num_planes // 2, width // 2, 2).permute(0, 1, 4, 2, 5, 3)
    words = torch.zeros(planes.shape[:-1], dtype=torch.int32, device=values.device)
    for plane in range(num_planes // 2):
        words |= planes[..., plane].to(torch.int32) << (bits * plane)
    low, high = words.unbind(-1)  # of [rows, blocks, pair, word, place]
    packed = (low | (high << 16)).reshape(rows, -1).contiguous()
    if bits == 8:
        return packed
    chunks = F.pad(packed, (0, 0, 0, -rows % CHUNK_ROWS)).view(-1, CHUNK_ROWS, packed.shape[1])
    return chunks.view(*chunks.shape[:2], -1, width).transpose(1, 2).contiguous()


@triton.jit
def _dequantize_float8_kernel(
    weight,
    scales,
    out,
    num_rows,
    size,
    stride_row,
    block_rows,
    block_columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    places = rows.to(tl.int64)[:, None] * size + columns[None, :]
    values = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    block = tl.program_id(1) * BLOCK // block_columns
    factors = tl.load(
        scales + (rows // block_rows) * stride_row + block, mask=rows < num_rows, other=0.0
    )
    wait_previous(PDL)
    tl.store(out + places, (values * factors[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_int_kernel(
    words,
    scales,
    zeros,
    out,
    num_rows,
    size,
    num_blocks,
    group,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes ROWS rows of a block of 128 inputs; see pack_integers."""
    allow_next(PDL)
    HALF: tl.constexpr = 1 << (BITS - 1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    block = tl.program_id(1)
    inner = tl.arange(0, 4 * BITS)
    wait_previous(PDL)
    first = rows.to(tl.int64) * num_blocks + block
    if BITS == 4:
        chunk = (rows // _CHUNK_ROWS).to(tl.int64) * num_blocks + block
        first = chunk * _CHUNK_ROWS + rows % _CHUNK_ROWS
    sources = words + first[:, None] * (4 * BITS)
    stored = tl.load(sources + inner[None, :], mask=is_row[:, None], other=0)
    first, second = tl.split(tl.reshape(stored, [ROWS, 2 * BITS, 2]))
    if BITS == 4:
        values = tl.join(
            tl.join(
                tl.join(_plane(first, 0, BITS), _plane(second, 0, BITS)),
                tl.join(_plane(first, 2, BITS), _plane(second, 2, BITS)),
            ),
            tl.join(
                tl.join(_plane(first, 1, BITS), _plane(second, 1, BITS)),
                tl.join(_plane(first, 3, BITS), _plane(second, 3, BITS)),
            ),
        )
        values = tl.permute(values, (0, 2, 3, 4, 1))
    else:
        values = tl.join(
            tl.join(_plane(first, 0, BITS), _plane(second, 0, BITS)),
            tl.join(_plane(first, 1, BITS), _plane(second, 1, BITS)),
        )
        values = tl.permute(values, (0, 2, 3, 1)) ^ 128
    values = (tl.reshape(values, [ROWS, 128]) - HALF).to(tl.float32)
    columns = block * 128 + tl.arange(0, 128)
    if ONE_GROUP:
        places = (tl.minimum(block * 128, size - 1) // group * num_rows + rows)[:, None]
        has_place = is_row[:, None]
    else:
        groups = tl.minimum(columns, size - 1) // group
        places = rows[:, None] + groups[None, :] * num_rows
        has_place = is_row[:, None] & (columns < size)[None, :]
    if HAS_ZEROS:
        values -= tl.load(zeros + places, mask=has_place, other=0.0).to(tl.float32)
    values *= tl.load(scales + places, mask=has_place, other=0.0).to(tl.float32)
    inside = is_row[:, None] & (columns < size)[None, :]
    outputs = out + rows.to(tl.int64)[:, None] * size + columns[None, :]
    tl.store(outputs, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _plane(words, plane, BITS: tl.constexpr):
    """A plane of words [rows, n]: integers [rows, 2 n]."""
    low = (words >> (BITS * plane)) & ((1 << BITS) - 1)
    high = (words >> (16 + BITS * plane)) & ((1 << BITS) - 1)
    return tl.reshape(tl.join(low, high), [words.shape[0], words.shape[1] * 2])


def dequantized(stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    """W [out_features, in_features], of one that may have been made just now."""
    out = torch.empty(stored.shape, dtype=dtype, device=stored.weight.device)
    dequantize(stored, out, {"PDL": False})
    return out


def dequantize(stored: StoredWeight, out: Tensor, options: dict[str, Any] | None = None) -> None:
    """Write W to out [out_features, in_features].

    options: of the launch; None: those of a kernel that does not write W coming before it.
    """
    options = launch_options(out.device) if options is None else options
    num_rows, size = stored.shape
    num_blocks = triton.cdiv(size, BLOCK)
    if stored.format == FLOAT8:
        rows, columns = 16, 512 if stored.group == 0 else BLOCK
        _dequantize_float8_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(size, columns))](
            stored.weight,
            stored.scales,
            out,
            num_rows,
            size,
            stored.stride_row,
            stored.block_rows,
            stored.group or size + columns,
            ROWS=rows,
            BLOCK=columns,
            **options,
        )
        return
    rows = 32
    _dequantize_int_kernel[(triton.cdiv(num_rows, rows), num_blocks)](
        stored.weight,
        stored.scales,
        stored.zeros,
        out,
        num_rows,
        size,
        num_blocks,
        stored.group or size + BLOCK,
        BITS=4 if stored.format == INT4 else 8,
        HAS_ZEROS=stored.zeros is not None,
        ONE_GROUP=stored.group == 0 or stored.group >= BLOCK,
        ROWS=rows,
        **options,
    )
