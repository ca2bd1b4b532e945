"""From logits to tokens on the device: what worker/sampler.py defines, without the host.

Kernels over the logits as they are (no float32 copy); static shapes, so a CUDA graph can hold them.
A draw is a row of logits with its settings; several draws may share a row.
  1. Per part of a row: the largest logit and its place. What the draw's mask rules out becomes
     -inf in the logits first, so that the other kernels need no masks.
  2. Per draw with top_k or top_p: the limits, by search over the logits' bit patterns in order
     (sampling_limits.py), most often of a few likely ones (sampling_shortlist.py).
  3. Per chunk: the sum of the tokens' integer weights.
  4. Per draw: invert the sum at the draw's uniform number; the chunk first, then the token in it.
Weights are exp((logit - largest) / temperature) * 2 ** WEIGHT_BITS, rounded down. Their sums are
exact in any order, so a draw's token depends neither on the rest of the batch nor on the chunks.

What draws ask for, but for top_k and top_p, is complete before the kernel that precedes the first
of these has begun. So it is read before the wait (pdl.py), past the L1 cache.

Where the vocabulary is divided among ranks, each works on the chunks of its part, and what kernels
1 and 3 find in all ranks' chunks is exchanged. Kernel 4 finds a token on the rank that has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.sampling_limits import SORTED, find_limits
from octavo.ops.cuda.sampling_shortlist import Shortlists, gather, outline
from octavo.ops.cuda.sampling_weights import load_early, row_peak, weights_of
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.vocabulary import VocabularyShard, pack

CHUNK = 4096  # logits whose weights a program adds up
# Few draws are a matter of latency: they get many small programs.
SMALL_CHUNK, FEW_DRAWS = 1024, 8
# A program looks for the largest logit of a strip; of more draws than some, of several strips.
STRIP, STRIPS, SOME_DRAWS = 2048, 8, 32
FEW_LIMITED = 128  # draws with limits that get an SM each; of more, two share one
NO_TOKEN = tl.constexpr(-1)


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    """What each draw asks for; arrays [num_draws] on the device of the logits."""

    rows: Tensor  # int64, of the logits
    temperature: Tensor  # float32; 0 takes the most likely token
    top_k: Tensor  # int64; 0 is off
    top_p: Tensor  # float64 in (0, 1]
    log_min_p: Tensor  # float32; -inf is off
    seeds: Tensor  # int64
    sample_indices: Tensor  # int64
    positions: Tensor  # int64, of the token to be drawn
    mask_places: Tensor  # int32, rows of `masks`; -1: every token may be drawn
    # int32 [any, num_words]: bit i % 32 of word i // 32 says whether token i may be drawn.
    masks: Tensor
    is_greedy: bool = False  # every temperature is 0: kernel 1 is enough
    is_limited: bool = True  # some draw may use top_k or top_p


def sample(logits: Tensor, draws: DeviceDraws) -> Tensor:
    """Draw tokens.

    Args:
        logits: floating [num_rows, vocab_size], rows dense; left unchanged, except for -infinity
            where a row's mask rules a token out. Draws that share a row have the same mask.

    Returns:
        int64 [num_draws]; NO_TOKEN where a row holds NaN, infinity or nothing but -infinity, which
        no mask hides.
    """
    num_draws, vocab_size = draws.rows.shape[0], logits.shape[1]
    token_ids = torch.empty(num_draws, dtype=torch.int64, device=logits.device)
    if num_draws == 0:
        return token_ids
    cut = _Cut.of(num_draws, vocab_size)
    num_chunks, num_parts = cut.num_chunks(vocab_size), cut.num_parts(vocab_size)
    peaks = torch.empty((num_draws, num_parts), dtype=torch.float32, device=logits.device)
    peak_ids = torch.empty((num_draws, num_parts), dtype=torch.int32, device=logits.device)
    sums = torch.empty((num_draws, num_chunks), dtype=torch.int64, device=logits.device)
    pdl = launch_options(logits.device)
    sizes = (logits.stride(0), vocab_size)
    parts = power_of_2(num_parts)
    masked = (logits, draws.rows, draws.mask_places, draws.masks, peaks, peak_ids)
    _peak_kernel[(num_parts, num_draws)](
        *masked, *sizes, num_parts, draws.masks.shape[1], 0, **cut.of_peaks, **pdl
    )
    limited = draws.is_limited and not draws.is_greedy
    limits = _find_limits(logits, draws, cut, peaks) if limited else None
    setting = (logits, draws.rows, draws.temperature, draws.log_min_p, peaks, limits)
    if not draws.is_greedy:
        _sum_kernel[(num_chunks, num_draws)](
            *(*setting, sums, *sizes, num_chunks, num_parts),
            LIMITED=limited,
            CHUNK=cut.chunk,
            PARTS=parts,
            **pdl,
        )
    _draw_kernel[(num_draws,)](
        *setting,
        sums,
        peak_ids,
        draws.seeds,
        draws.sample_indices,
        draws.positions,
        token_ids,
        *sizes,
        *(num_chunks, num_parts, 0, num_chunks, 0),
        LIMITED=limited,
        GREEDY=draws.is_greedy,
        SHARDED=False,
        CHUNK=cut.chunk,
        CHUNKS=power_of_2(num_chunks),
        PARTS=parts,
        **pdl,
    )
    return token_ids


def _find_limits(logits: Tensor, draws: DeviceDraws, cut: _Cut, peaks: Tensor) -> Tensor:
    """The limits of top_k, top_p and min_p: see `find_limits`."""
    num_draws, vocab_size = len(peaks), logits.shape[1]
    num_chunks, num_parts = cut.num_chunks(vocab_size), cut.num_parts(vocab_size)
    limits = torch.empty((num_draws, 2), dtype=torch.float32, device=logits.device)
    short = Shortlists.empty(num_draws, num_chunks, logits)
    asked = (
        *(logits, draws.rows, draws.temperature, draws.top_k, draws.top_p),
        *(draws.log_min_p, peaks),
    )
    sizes = (logits.stride(0), vocab_size, num_chunks, num_parts)
    chunks, parts = power_of_2(num_chunks), power_of_2(num_parts)
    pdl = launch_options(logits.device)
    outline[(num_chunks, num_draws)](
        *(*asked, *short[:3], *sizes), CHUNK=cut.chunk, PARTS=parts, **pdl
    )
    gather[(num_chunks, num_draws)](
        *(*asked, short.amounts, short.lengths, short.logits, *sizes),
        CHUNK=cut.chunk,
        CHUNKS=chunks,
        PARTS=parts,
        **pdl,
    )
    for is_short, warps in ((True, 8), (False, 16 if num_draws <= FEW_LIMITED else 8)):
        find_limits[(num_draws,)](
            *(*asked, limits, *short[1:], *sizes),
            SHORT=is_short,
            SORTED=min(SORTED, power_of_2(vocab_size)),
            CHUNKS=chunks,
            PARTS=parts,
            BLOCK=max(64, min(512 * warps, power_of_2(vocab_size))),
            num_warps=warps,
            **pdl,
        )
    return limits


def sample_sharded(logits: Tensor, draws: DeviceDraws, vocabulary: VocabularyShard) -> Tensor:
    """Draw the tokens that `sample` draws from whole rows, on all ranks.

    Args:
        logits: floating [num_rows, num_tokens], this rank's part, rows dense; left unchanged.
        draws: without top_k and top_p, which need whole rows.
    """
    assert draws.is_greedy or not draws.is_limited
    num_draws, num_tokens = draws.rows.shape[0], logits.shape[1]
    device, communicator = logits.device, vocabulary.communicator
    token_ids = torch.empty(num_draws, dtype=torch.int64, device=device)
    if num_draws == 0:
        return token_ids
    rank, size = communicator.shard.rank, communicator.shard.size
    cut = _Cut.of(num_draws, vocabulary.num_rows)  # equal on all ranks
    own, own_parts = cut.num_chunks(vocabulary.num_rows), cut.num_parts(vocabulary.num_rows)
    first, num_chunks, num_parts = own * rank, own * size, own_parts * size
    pdl, stride = launch_options(device), logits.stride(0)
    peaks = torch.empty((num_draws, own_parts), dtype=torch.float32, device=device)
    peak_ids = torch.empty((num_draws, own_parts), dtype=torch.int32, device=device)
    masked = (logits, draws.rows, draws.mask_places, draws.masks, peaks, peak_ids)
    places = (stride, num_tokens, own_parts, draws.masks.shape[1], vocabulary.start)
    _peak_kernel[(own_parts, num_draws)](*masked, *places, **cut.of_peaks, **pdl)
    both = communicator.all_gather(pack(peaks, peak_ids + vocabulary.start))
    peaks, peak_ids = (
        part.transpose(0, 1).contiguous().view(num_draws, num_parts)
        for part in torch.split(both, own_parts, dim=2)
    )
    parts = power_of_2(num_parts)
    setting = (
        *(logits, draws.rows, draws.temperature, draws.log_min_p),
        *(peaks.view(torch.float32), None),
    )
    sums = None
    if not draws.is_greedy:
        sums = torch.empty((num_draws, num_chunks), dtype=torch.int64, device=device)
        own_sums = sums[:, first : first + own]
        _sum_kernel[(own, num_draws)](
            *(*setting, own_sums, stride, num_tokens, num_chunks, num_parts),
            LIMITED=False,
            CHUNK=cut.chunk,
            PARTS=parts,
            **pdl,
        )
        gathered = communicator.all_gather(own_sums)
        sums = gathered.transpose(0, 1).contiguous().view(num_draws, num_chunks)
    _draw_kernel[(num_draws,)](
        *setting,
        sums,
        peak_ids,
        draws.seeds,
        draws.sample_indices,
        draws.positions,
        token_ids,
        *(stride, num_tokens, num_chunks, num_parts, first, own, vocabulary.start),
        LIMITED=False,
        GREEDY=draws.is_greedy,
        SHARDED=True,
        CHUNK=cut.chunk,
        CHUNKS=power_of_2(num_chunks),
        PARTS=parts,
        **pdl,
    )
    return token_ids if draws.is_greedy else vocabulary.largest(token_ids)


class _Cut(NamedTuple):
    """How the kernels divide rows of logits."""

    chunk: int  # logits whose weights are added up to one sum
    strip: int  # logits that a program has at once while it looks for the largest one
    strips: int  # that it goes through, one after the other: a part of the row
    num_warps: int  # of such a program

    @classmethod
    def of(cls, num_draws: int, num_logits: int) -> _Cut:
        """num_logits: of a row, on this rank."""
        most = power_of_2(num_logits)
        if num_draws <= FEW_DRAWS:
            return cls(min(SMALL_CHUNK, most), min(SMALL_CHUNK, most), 1, 4)
        if num_draws <= SOME_DRAWS:
            return cls(min(CHUNK, most), min(STRIP, most), 1, 4)
        return cls(min(CHUNK, most), min(STRIP, most), STRIPS, 8)

    def num_chunks(self, num_logits: int) -> int:
        return -(-num_logits // self.chunk)

    def num_parts(self, num_logits: int) -> int:
        return -(-num_logits // (self.strip * self.strips))

    @property
    def of_peaks(self) -> dict[str, int]:
        """Compile-time arguments of `_peak_kernel`."""
        return {"STRIP": self.strip, "STRIPS": self.strips, "num_warps": self.num_warps}


@triton.jit(do_not_specialize=["num_parts", "first_token"])
def _peak_kernel(
    logits,
    rows,
    mask_places,
    masks,
    peaks,
    peak_ids,
    stride,
    vocab_size,
    num_parts,
    num_words,
    first_token,
    STRIP: tl.constexpr,
    STRIPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program finds the largest logit of STRIPS times STRIP."""
    allow_next(PDL)
    part, draw = tl.program_id(0), tl.program_id(1)
    first = part * (STRIPS * STRIP)
    lanes = tl.arange(0, STRIP)
    row = tl.load(rows + draw, cache_modifier=".cg")
    mask_place = tl.load(mask_places + draw, cache_modifier=".cg")
    wait_previous(PDL)
    start = logits + row * stride
    if mask_place >= 0:
        words = masks + mask_place.to(tl.int64) * num_words
        for i in tl.range(0, STRIPS):
            _rule_out(start, words, first + i * STRIP + lanes, vocab_size, first_token)
        tl.debug_barrier()  # some of them may have been written by other threads
    best = tl.full([STRIP], -float("inf"), tl.float32)
    best_strip = tl.zeros([STRIP], tl.int32)
    for i in tl.static_range(STRIPS):
        ids = first + i * STRIP + lanes
        values = tl.load(start + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        values = tl.where(values != values, float("inf"), values)  # so that NaN is noticed
        best_strip = tl.where(values > best, i, best_strip)
        best = tl.maximum(best, values)
    # One after the other: reducing pairs of both takes more operations for each logit.
    peak = tl.max(best, 0)
    places = best_strip * STRIP + lanes
    place = tl.min(tl.where(best == peak, places, STRIPS * STRIP), 0)
    tl.store(peaks + draw * num_parts + part, peak)
    tl.store(peak_ids + draw * num_parts + part, first + place)


@triton.jit
def _rule_out(start, words, ids, vocab_size, first_token):
    """Logits that a mask rules out become -inf; but infinity and NaN stay, to be noticed."""
    inside = ids < vocab_size
    values = tl.load(start + ids, mask=inside, other=-float("inf")).to(tl.float32)
    bits = first_token + ids
    kept = ((tl.load(words + (bits >> 5), mask=inside, other=0) >> (bits & 31)) & 1) != 0
    kept |= (values == float("inf")) | (values != values)
    never = tl.full(ids.shape, -float("inf"), tl.float32).to(start.dtype.element_ty)
    tl.store(start + ids, never, mask=inside & (kept == 0))


@triton.jit(do_not_specialize=["num_chunks", "num_parts"])
def _sum_kernel(
    logits,
    rows,
    temperatures,
    log_min_p,
    peaks,
    limits,
    sums,
    stride,
    vocab_size,
    num_chunks,
    num_parts,
    LIMITED: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    chunk, draw = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row, temperature, least = load_early(rows, temperatures, log_min_p, draw)
    wait_previous(PDL)
    if temperature > 0:
        values = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=-float("inf"))
        peak = row_peak(peaks, draw, num_parts, PARTS)[0]
        weights = weights_of(values, draw, peak, temperature, least, limits, LIMITED)
        tl.store(sums + draw * num_chunks + chunk, tl.sum(weights, 0))


@triton.jit
def _mix(x):
    """SplitMix64's finaliser (worker/randomness.py), of uint64."""
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, sample_index, position):
    """float64 in [0, 1), the same as worker/randomness.py's `uniforms`."""
    gamma = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed.to(tl.uint64) + gamma)
    state = _mix(state + (sample_index + 1).to(tl.uint64) * gamma)
    state = _mix(state + (position + 1).to(tl.uint64) * gamma)
    return (state >> 11).to(tl.float64) * tl.full((), 2.0**-53, tl.float64)


@triton.jit(
    do_not_specialize=["num_chunks", "num_parts", "first_chunk", "own_chunks", "first_token"]
)
def _draw_kernel(
    logits,
    rows,
    temperatures,
    log_min_p,
    peaks,
    limits,
    sums,
    peak_ids,
    seeds,
    sample_indices,
    positions,
    token_ids,
    stride,
    vocab_size,
    num_chunks,
    num_parts,
    first_chunk,
    own_chunks,
    first_token,
    LIMITED: tl.constexpr,
    GREEDY: tl.constexpr,
    SHARDED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    draw = tl.program_id(0)
    row, temperature, least = load_early(rows, temperatures, log_min_p, draw)
    noise = _uniform(
        tl.load(seeds + draw, cache_modifier=".cg"),
        tl.load(sample_indices + draw, cache_modifier=".cg"),
        tl.load(positions + draw, cache_modifier=".cg"),
    )
    wait_previous(PDL)
    peak, best = row_peak(peaks, draw, num_parts, PARTS)
    token = tl.load(peak_ids + draw * num_parts + best).to(tl.int64)
    if not GREEDY:
        chunks = tl.arange(0, CHUNKS)
        if temperature > 0:
            places = sums + draw * num_chunks + chunks
            parts = tl.load(places, mask=chunks < num_chunks, other=0)
            ends = tl.cumsum(parts, 0)
            target = (noise * tl.sum(parts, 0).to(tl.float64)).to(tl.int64)
            chunk = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), num_chunks - 1)
            before = tl.sum(tl.where(chunks < chunk, parts, 0), 0)
            is_own = True
            if SHARDED:
                # Whether this rank has the chunk, and where.
                is_own = (chunk >= first_chunk) & (chunk < first_chunk + own_chunks)
                chunk = tl.where(is_own, chunk - first_chunk, 0)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            source = logits + row * stride + ids
            values = tl.load(source, mask=ids < vocab_size, other=-float("inf"))
            weights = weights_of(values, draw, peak, temperature, least, limits, LIMITED)
            passed = tl.sum((tl.cumsum(weights, 0) <= target - before).to(tl.int32), 0)
            token = (chunk * CHUNK + passed).to(tl.int64)
            if SHARDED:
                token = tl.where(is_own, tl.minimum(token, vocab_size - 1) + first_token, NO_TOKEN)
    is_finite = (peak > -float("inf")) & (peak < float("inf"))
    if not SHARDED:
        token = tl.minimum(token, vocab_size - 1)
    tl.store(token_ids + draw, tl.where(is_finite, token, NO_TOKEN))
