"""The best next tokens of many rows by log-probability, without a float32 copy of the logits.

One kernel reads every logit once: a program takes a chunk of a row, and writes its partial
normaliser and its best tokens. A second kernel combines the chunks of each row. Among equal logits,
the lower token id comes first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.sampling_limits import ordered_key, value_of_key
from octavo.ops.cuda.tile_sizes import power_of_2

CHUNK = 4096
# Up to so many are found one after the other, each as the maximum of the rest. On one H200 this
# takes 22 us instead of 41 by a partial sort (128 rows of 50,272 logits, 4 candidates), 77 instead
# of 166 (256, 8), 172 instead of 307 (384, 12), 45 instead of 60 (64, 16); for 32 the sort is
# faster.
FEW = 16
# Numbers are rounded up to one of these, so that few kernels are compiled.
NUMBERS = (4, 8, 12, 16, 32, 64)
MAX_CANDIDATES = NUMBERS[-1]


def rounded(number: int) -> int:
    """As many as are looked for where `number` are wanted; at most MAX_CANDIDATES."""
    return next(each for each in (0, *NUMBERS) if number <= each)


def best_tokens(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The `number` most likely tokens of each row, best first.

    Args:
        logits: floating [num_rows, vocab_size], rows dense.
        number: at most MAX_CANDIDATES and vocab_size.

    Returns:
        Log-probabilities, float32 [num_rows, number], and token ids, int32 [num_rows, number].
    """
    num_rows, vocab_size = logits.shape
    assert 0 < number <= min(MAX_CANDIDATES, vocab_size)
    device = logits.device
    values = torch.empty((num_rows, number), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, number), dtype=torch.int32, device=device)
    if num_rows == 0:
        return values, ids
    chunks, pdl = Chunks.of(num_rows, vocab_size, number, device), launch_options(device)
    _chunk_kernel[(chunks.number, num_rows)](
        *(logits, *chunks.found, logits.stride(0), vocab_size, chunks.number),
        **chunks.of_chunk,
        **pdl,
    )
    _row_kernel[(num_rows,)](
        *(*chunks.found, values, ids, chunks.number, number), **chunks.of_row, **pdl
    )
    return values, ids


class Chunks(NamedTuple):
    """How rows are cut, and memory for what is found in each chunk; see `outline_chunk`."""

    number: int  # of a row
    found: tuple[Tensor, Tensor, Tensor]  # best, peaks and sums
    of_chunk: dict[str, int]  # compile-time arguments of a kernel that works on a chunk
    of_row: dict[str, int]  # and of one that combines those of a row

    @classmethod
    def of(cls, num_rows: int, vocab_size: int, number: int, device: torch.device) -> Chunks:
        """number: how many of the best tokens are looked for; may be 0."""
        found = rounded(number)
        width = power_of_2(found) if found else 0
        chunk = max(width, min(CHUNK, power_of_2(vocab_size)))
        num_chunks = triton.cdiv(vocab_size, chunk)
        peaks = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
        best = torch.empty((num_rows, num_chunks, width), dtype=torch.int64, device=device)
        return cls(
            num_chunks,
            (best, peaks, torch.empty_like(peaks)),
            {
                "WIDTH": width,
                "NUMBER": found if found <= FEW else 0,
                "CHUNK": chunk,
                "num_warps": 4 if found <= FEW else 8,
            },
            {"WIDTH": width, "CHUNKS": power_of_2(num_chunks), "num_warps": 4},
        )


@triton.jit(do_not_specialize=["num_chunks"])
def _chunk_kernel(
    logits,
    best,
    peaks,
    sums,
    stride,
    vocab_size,
    num_chunks,
    WIDTH: tl.constexpr,
    NUMBER: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab_size
    wait_previous(PDL)
    values = tl.load(logits + row * stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    outline_chunk(values, ids, inside, row, chunk, num_chunks, best, peaks, sums, WIDTH, NUMBER)


@triton.jit
def outline_chunk(
    values,
    ids,
    inside,
    row,
    chunk,
    num_chunks,
    best,
    peaks,
    sums,
    WIDTH: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """Write a chunk's partial normaliser and, unless WIDTH is 0, its best tokens.

    Args:
        values: float32 logits [CHUNK] of tokens `ids`, -inf where they are not `inside` the row.
        row: int64.
        best: int64 [num_rows, num_chunks, WIDTH], each with its value. `peaks` and `sums`: float32
            [num_rows, num_chunks].
        NUMBER: so many are found, one after the other; 0: WIDTH, by a partial sort.
    """
    peak = tl.max(values, 0)
    # A chunk of nothing but -inf adds nothing; without the limit it would be -inf - -inf.
    shares = tl.exp(values - tl.maximum(peak, -3.0e38))
    # Value and place in one integer: largest value first, lowest id first among equals.
    packed = (ordered_key(values).to(tl.int64) << 32) | (ids ^ 0x7FFFFFFF).to(tl.int64)
    packed = tl.where(inside, packed, -(2**63))
    place = row * num_chunks + chunk
    if NUMBER > 0:
        for i in tl.static_range(WIDTH):
            top = tl.full((), -(2**63), tl.int64)
            if i < NUMBER:
                top = tl.max(packed, 0)
                packed = tl.where(packed == top, -(2**63), packed)
            tl.store(best + place * WIDTH + i, top)
    elif WIDTH > 0:
        tl.store(best + place * WIDTH + tl.arange(0, WIDTH), tl.topk(packed, WIDTH))
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(shares, 0))


@triton.jit(do_not_specialize=["num_chunks", "number"])
def _row_kernel(
    best,
    peaks,
    sums,
    values,
    ids,
    num_chunks,
    number,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    is_chunk = chunks < num_chunks
    wait_previous(PDL)
    normaliser = normaliser_of(peaks, sums, row, num_chunks, chunks, is_chunk)
    first = row * number
    merge_best(
        best, values + first, ids + first, normaliser, row, num_chunks, number, WIDTH, CHUNKS
    )


@triton.jit
def normaliser_of(peaks, sums, row, num_chunks, chunks, is_chunk):
    """The logarithm of the sum of a row's exponentials, by its `chunks`, [at least num_chunks], of
    which only some are there; NaN if the row is not finite."""
    chunk_peaks = tl.load(peaks + row * num_chunks + chunks, mask=is_chunk, other=-float("inf"))
    chunk_sums = tl.load(sums + row * num_chunks + chunks, mask=is_chunk, other=0.0)
    peak = tl.max(chunk_peaks, 0)
    return peak + tl.log(tl.sum(chunk_sums * tl.exp(chunk_peaks - peak), 0))


@triton.jit
def merge_best(
    best,
    values,
    ids,
    normaliser,
    row,
    num_chunks,
    number,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Write the ids of the `number` best tokens of a row's chunks, best first, to `ids`, and their
    log-probabilities to `values`."""
    places = tl.arange(0, CHUNKS * WIDTH)
    packed = tl.load(
        best + row * num_chunks * WIDTH + places,
        mask=places < num_chunks * WIDTH,
        other=-(2**63),
    )
    packed = tl.topk(packed, WIDTH)
    logprobs = value_of_key((packed >> 32).to(tl.int32), tl.float32) - normaliser
    columns = tl.arange(0, WIDTH)
    tl.store(values + columns, logprobs, mask=columns < number)
    token_ids = (packed & 0x7FFFFFFF).to(tl.int32) ^ 0x7FFFFFFF
    tl.store(ids + columns, token_ids, mask=columns < number)
