"""Log-probabilities and ranks of drawn tokens, and the most likely ones beside them, without a
float32 copy of the logits.

As in sampling_candidates.py: one kernel reads every logit once, a program for each chunk of a
draw's row, and a second kernel combines the chunks of each draw. Draws that share a row are
neighbours in the grid, so that all but the first find its logits in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.sampling_candidates import (
    MAX_CANDIDATES,
    Chunks,
    merge_best,
    normaliser_of,
    outline_chunk,
    rounded,
)

SCORE_WORDS = 2 + 2 * MAX_CANDIDATES  # of what is delivered of a token

_MOST = tl.constexpr(MAX_CANDIDATES)
_WORDS = tl.constexpr(SCORE_WORDS)


def score(
    logits: Tensor, rows: Tensor | None, token_ids: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Score a token for each draw by the log-softmax of its row, and find the likeliest tokens.

    Args:
        logits: floating [num_rows, vocab_size], rows dense; left unchanged.
        rows: int64 [num_draws], the row of each draw; None: draw i is of row i.
        token_ids: int64 [num_draws]; a negative one (NO_TOKEN) counts as token 0.
        number: how many of the most likely tokens to find, at most MAX_CANDIDATES and vocab_size.

    Returns:
        The tokens' log-probabilities, float32 [num_draws], and ranks, int64 [num_draws]: 1 and as
        many as the row has larger logits. Then log-probabilities, float32 [num_draws, number], and
        ids, int32 [num_draws, number], of the most likely tokens, best first, and of equal ones
        that with the lower id. The log-probabilities of a row that is not finite are NaN.
    """
    num_draws, device = len(token_ids), logits.device
    logprobs = torch.empty(num_draws, dtype=torch.float32, device=device)
    ranks = torch.empty(num_draws, dtype=torch.int64, device=device)
    top_logprobs = torch.empty((num_draws, number), dtype=torch.float32, device=device)
    top_ids = torch.empty((num_draws, number), dtype=torch.int32, device=device)
    results = logprobs, ranks, top_logprobs, top_ids
    if num_draws:
        _launch(logits, rows, token_ids, None, number, results, None, 0)
    return results


def deliver_scores(
    logits: Tensor, token_ids: Tensor, numbers: Tensor, number: int, place: Tensor, size: int
) -> None:
    """Score a step's tokens, as `score` does, and write what is found where the step's results go.

    Args:
        logits: floating [num_rows, vocab_size], rows dense; left unchanged.
        token_ids: int64 [num_rows].
        numbers: int32 [num_rows]: for each row one of NUMBERS or 0, or -1 for a row that is not
            scored. Others than `number` are not scored now.
        number: of NUMBERS, or 0. As many of the most likely tokens are found, if the vocabulary has
            so many.
        place: int64 [3]: see `keep_tokens` (pending_tokens.py); the last one is the address of
            int32 [steps, size, SCORE_WORDS] in memory of the device, or pinned memory of the host.
            A row's words are its log-probability (the bits of a float32) and rank, MAX_CANDIDATES
            log-probabilities of the most likely tokens, and as many ids.
        size: rows that a step may have.
    """
    least = min(number, logits.shape[1])
    _launch(logits, None, token_ids, numbers, least, (None, None, None, None), place, size)


def _launch(
    logits: Tensor,
    rows: Tensor | None,
    token_ids: Tensor,
    numbers: Tensor | None,
    number: int,
    results: tuple[Tensor | None, ...],
    place: Tensor | None,
    size: int,
) -> None:
    num_draws, vocab_size = len(token_ids), logits.shape[1]
    assert 0 <= number <= min(MAX_CANDIDATES, vocab_size)
    device, found = logits.device, rounded(number)
    chunks = Chunks.of(num_draws, vocab_size, number, device)
    larger = torch.empty((num_draws, chunks.number), dtype=torch.int32, device=device)
    drawn = torch.empty(num_draws, dtype=torch.float32, device=device)
    pdl = launch_options(device)
    # Draws come first: the grid's second dimension ends at 65,535.
    _score_chunk_kernel[(num_draws, chunks.number)](
        *(logits, rows, token_ids, numbers, drawn, *chunks.found, larger),
        *(logits.stride(0), vocab_size, chunks.number),
        FOUND=found,
        **chunks.of_chunk,
        **pdl,
    )
    _score_kernel[(num_draws,)](
        *(drawn, numbers, *chunks.found, larger),
        *(*results, place, chunks.number, number, size),
        FOUND=found,
        **chunks.of_row,
        **pdl,
    )


@triton.jit
def _is_asked(numbers, draw, FOUND: tl.constexpr):
    """Whether a draw is scored now; numbers: None if all are."""
    is_asked = True
    if numbers is not None:
        is_asked = tl.load(numbers + draw) == FOUND
    return is_asked


# Parts of other arrays, of which any may be asked for, begin at any multiple of 8 bytes.
@triton.jit(do_not_specialize=["rows", "token_ids", "num_chunks"])
def _score_chunk_kernel(
    logits,
    rows,
    token_ids,
    numbers,
    drawn,
    best,
    peaks,
    sums,
    larger,
    stride,
    vocab_size,
    num_chunks,
    FOUND: tl.constexpr,
    WIDTH: tl.constexpr,
    NUMBER: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    draw, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab_size
    wait_previous(PDL)
    if not _is_asked(numbers, draw, FOUND):
        return
    row = draw
    if rows is not None:
        row = tl.load(rows + draw)
    start = logits + row * stride
    token = tl.maximum(tl.load(token_ids + draw), 0)
    own = tl.load(start + token).to(tl.float32)
    # Their bits tell the order of the best tokens; by adding 0, -0 becomes 0, which it equals.
    values = tl.load(start + ids, mask=inside, other=-float("inf")).to(tl.float32) + 0.0
    tl.store(larger + draw * num_chunks + chunk, tl.sum((values > own).to(tl.int32), 0))
    tl.store(drawn + draw, own, mask=chunk == 0)
    outline_chunk(values, ids, inside, draw, chunk, num_chunks, best, peaks, sums, WIDTH, NUMBER)


@triton.jit(do_not_specialize=["num_chunks", "number", "size"])
def _score_kernel(
    drawn,
    numbers,
    best,
    peaks,
    sums,
    larger,
    logprobs,
    ranks,
    top_logprobs,
    top_ids,
    place,
    num_chunks,
    number,
    size,
    FOUND: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    draw = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    is_chunk = chunks < num_chunks
    wait_previous(PDL)
    if not _is_asked(numbers, draw, FOUND):
        return
    if place is not None:
        first = (tl.load(place + 1) * size + draw) * _WORDS
        words = tl.load(place + 2).to(tl.pointer_type(tl.int32)) + first
        floats = tl.load(place + 2).to(tl.pointer_type(tl.float32)) + first
        own, rank, values, ids = floats, words + 1, floats + 2, words + 2 + _MOST
    else:
        own, rank = logprobs + draw, ranks + draw
        values, ids = top_logprobs + draw * number, top_ids + draw * number
    normaliser = normaliser_of(peaks, sums, draw, num_chunks, chunks, is_chunk)
    tl.store(own, tl.load(drawn + draw) - normaliser)
    counts = tl.load(larger + draw * num_chunks + chunks, mask=is_chunk, other=0)
    tl.store(rank, 1 + tl.sum(counts, 0))
    if WIDTH > 0:
        merge_best(best, values, ids, normaliser, draw, num_chunks, number, WIDTH, CHUNKS)
