"""Penalties and biases (worker/logit_edits.py) by what the device knows of its rows: without the
host, which learns each token a step later.

A row whose logits are edited has a record: its penalties and biases, and for each token whether the
prompt holds it, and how often the output does. Kernels that keep drawn tokens count them there
(pending_tokens.py). One kernel turns rows of logits into edited ones in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import upload
from octavo.ops.cuda.block_copy import copy_blocks
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import power_of_2

MAX_BIASES = 512  # of a row
MAX_COUNT = 0x7FFF  # of a token; more are not counted
CHANGE_FIELDS = 4  # integers of a change: see EditRecords.count
# Words of a record: penalties (of repetition, frequency and presence), the number of biases, their
# tokens and their values; then two tokens' counts in each.
_NUM_BIASES, _BIASES = 3, 4
_HEADER = _BIASES + 2 * MAX_BIASES
_CHUNK = 4096  # logits that a program edits
_BLOCK = 128  # biases, or changes, that a program has at once

_HEADER_WORDS = tl.constexpr(_HEADER)
_BIAS_WORDS = tl.constexpr(_BIASES)
_MOST = tl.constexpr(MAX_BIASES)
_COUNT = tl.constexpr(MAX_COUNT)  # bits of a token's count; the sign says that the prompt holds it
_FIELDS = tl.constexpr(CHANGE_FIELDS)


@dataclass(frozen=True, slots=True)
class EditSettings:
    """How the logits of a row are edited."""

    repetition: float  # penalties; this one is finite and positive, and 1 changes nothing
    frequency: float
    presence: float
    bias_ids: NDArray[np.int64]  # at most MAX_BIASES
    biases: NDArray[np.float32]


class EditRecords:
    """Owns the records, and which row has which one."""

    def __init__(self, num_rows: int, num_records: int, num_tokens: int, device: torch.device):
        """
        Args:
            num_rows: rows of the batch; row 0, which is padding's, never has a record.
            num_tokens: of the vocabulary, those that this rank has.
        """
        num_words = _HEADER + -(-num_tokens // 2)
        self.words = torch.zeros((num_records, num_words), dtype=torch.int32, device=device)
        self.places = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        self.num_tokens = num_tokens

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Records become copies of others; no target is a source."""
        copies = np.array([sources, targets, [1] * len(targets)], np.int32).T
        copy_blocks(self.words.unsqueeze(1), upload(np.ascontiguousarray(copies), self.device))

    def open(self, records: Sequence[int], settings: Sequence[EditSettings]) -> None:
        """Begin records of rows without a text."""
        headers = np.zeros((len(records), _HEADER), np.int32)
        floats = headers.view(np.float32)
        for header, values, each in zip(headers, floats, settings, strict=True):
            number = len(each.bias_ids)
            values[:3] = each.repetition, each.frequency, each.presence
            header[_NUM_BIASES] = number
            header[_BIASES : _BIASES + number] = each.bias_ids
            values[_BIASES + MAX_BIASES : _BIASES + MAX_BIASES + number] = each.biases
        index = upload(np.array(records, np.int64), self.device)
        self.words.index_fill_(0, index, 0)
        self.words[:, :_HEADER].index_copy_(0, index, upload(headers, self.device))

    def place(self, rows: Sequence[int], records: Sequence[int]) -> None:
        """Say which record each of these rows has; -1: none."""
        index = upload(np.array(rows, np.int64), self.device)
        self.places.index_copy_(0, index, upload(np.array(records, np.int32), self.device))

    def count(self, changes: NDArray[np.int32], first_token: int) -> None:
        """Change counts.

        Args:
            changes: [num_changes, CHANGE_FIELDS]: record, token, by how much its count in the
                output changes, and whether the prompt holds it (else that stays as it is). No two
                are of the same token of a record.
            first_token: the first one that this rank has.
        """
        number = len(changes)
        _, counts, words, num_tokens = self.counted
        _count_kernel[(triton.cdiv(number, _BLOCK),)](
            *(upload(changes, self.device), counts, words, first_token, num_tokens, number),
            BLOCK=_BLOCK,
        )

    def edit(self, logits: Tensor, rows: Tensor, first_token: int) -> Tensor:
        """The logits of rows, edited where they have records.

        Args:
            logits: floating [num_rows, num_tokens], rows dense; left unchanged.
            rows: int32 [at least num_rows]: of the batch.
            first_token: see `count`.

        Returns:
            float32 [num_rows, num_tokens], dense.
        """
        num_rows, num_tokens = logits.shape
        edited = torch.empty((num_rows, num_tokens), dtype=torch.float32, device=self.device)
        chunk = min(_CHUNK, power_of_2(num_tokens))
        _edit_kernel[(triton.cdiv(num_tokens, chunk), num_rows)](
            *(logits, edited, rows, self.places),
            *(self.words, self.words.view(torch.float32), self.words.view(torch.int16)),
            *(self.words.shape[1], logits.stride(0), num_tokens, first_token),
            CHUNK=chunk,
            BLOCK=_BLOCK,
            num_warps=8,
            enable_fp_fusion=False,  # the host rounds products before it adds them
            **launch_options(self.device),
        )
        return edited

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def counted(self) -> tuple[Tensor, Tensor, int, int]:
        """Arguments of kernels that count: which rows have which records, where the counts are, the
        words of a record, and its tokens."""
        return self.places, self.words.view(torch.int16), self.words.shape[1], self.num_tokens


@triton.jit
def _count_place(counts, words, record, token):
    """Where the count of a token is, of those that this rank has."""
    return counts + (record.to(tl.int64) * words + _HEADER_WORDS) * 2 + token


@triton.jit
def count_drawn(counts, words, record, token, num_tokens):
    """Count a token once more in each record that is not negative, if this rank has the token; no
    record occurs twice. The arguments are those of EditRecords.counted."""
    is_own = (record >= 0) & (token >= 0) & (token < num_tokens)
    place = _count_place(counts, words, record, token)
    entry = tl.load(place, mask=is_own, other=0).to(tl.int32)
    tl.store(place, (entry + 1).to(tl.int16), mask=is_own & ((entry & _COUNT) < _COUNT))


@triton.jit(do_not_specialize=["number"])
def _count_kernel(changes, counts, words, first_token, num_tokens, number, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < number
    change = changes + index.to(tl.int64) * _FIELDS
    record = tl.load(change, mask=inside, other=0)
    token = tl.load(change + 1, mask=inside, other=0) - first_token
    amount = tl.load(change + 2, mask=inside, other=0)
    in_prompt = tl.load(change + 3, mask=inside, other=0) != 0
    inside &= (token >= 0) & (token < num_tokens)
    place = _count_place(counts, words, record, token)
    before = tl.load(place, mask=inside, other=0).to(tl.int32)
    count = tl.minimum(tl.maximum((before & _COUNT) + amount, 0), _COUNT)
    after = tl.where((before < 0) | in_prompt, count - _COUNT - 1, count)
    tl.store(place, after.to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["first_token"])
def _edit_kernel(
    logits,
    edited,
    rows,
    places,
    record_ints,
    record_floats,
    counts,
    words,
    stride,
    num_tokens,
    first_token,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program edits CHUNK logits of a row."""
    allow_next(PDL)
    # Rows and records are what they are since the step began; counts, since its first kernels ran.
    first, index = tl.program_id(0) * CHUNK, tl.program_id(1)
    ids = first + tl.arange(0, CHUNK)
    inside = ids < num_tokens
    row = tl.load(rows + index, cache_modifier=".cg")
    record = tl.load(places + row, cache_modifier=".cg")
    wait_previous(PDL)
    source = logits + index.to(tl.int64) * stride
    target = edited + index.to(tl.int64) * num_tokens
    values = tl.load(source + ids, mask=inside, other=0.0).to(tl.float32)
    if record < 0:
        tl.store(target + ids, values, mask=inside)
    else:
        start = record.to(tl.int64) * words
        repetition = tl.load(record_floats + start)
        frequency = tl.load(record_floats + start + 1)
        presence = tl.load(record_floats + start + 2)
        num_biases = tl.load(record_ints + start + 3)
        entry = tl.load(_count_place(counts, words, record, ids), mask=inside, other=0).to(tl.int32)
        repeated = tl.where(values < 0, values * repetition, tl.div_rn(values, repetition))
        values = tl.where(entry != 0, repeated, values)
        count = entry & _COUNT
        less = frequency * count.to(tl.float32) + presence
        values = tl.where(count > 0, values - less, values)
        tl.store(target + ids, values, mask=inside)
        if num_biases > 0:
            tl.debug_barrier()  # other threads may have written what is changed now
            for begin in range(0, num_biases, BLOCK):
                bias = begin + tl.arange(0, BLOCK)
                place = start + _BIAS_WORDS + bias
                is_bias = bias < num_biases
                token = tl.load(record_ints + place, mask=is_bias, other=-1) - first_token
                is_own = is_bias & (token >= first) & (token < first + CHUNK) & (token < num_tokens)
                value = tl.load(record_floats + place + _MOST, mask=is_own, other=0.0)
                before = tl.load(target + token, mask=is_own, other=0.0)
                tl.store(target + token, before + value, mask=is_own)
