"""Documents to rows of one length, made by many processes, the same for the same seed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from octavo_demo.corpus import EOS, Document, documents

# A cell holds a token id (below 2 ** 13) and, in the top bits, what the token counts in the loss.
WEIGHT_SHIFT = 13
Row = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """All that a shard of rows depends on, so that any process can make it."""

    tokenizer: Path
    seed: str
    num_rows: int
    row_length: int  # one more than the model's length: inputs and targets overlap
    skill: str = ""
    held_out: bool = False


def encode(tokenizer: Tokenizer, batch: list[Document]) -> list[Row]:
    segments = list(chain.from_iterable(batch))
    encodings = iter(
        tokenizer.encode_batch_fast([text for text, _ in segments], add_special_tokens=False)
    )
    rows = []
    for document in batch:
        parts = [
            np.array(next(encodings).ids, dtype=np.uint16) | (weight << WEIGHT_SHIFT)
            for _, weight in document
        ]
        rows.append(np.concatenate(parts).astype(np.uint16))
    return rows


def make_shard(spec: ShardSpec, index: int) -> NDArray[np.uint16]:
    """Shard `index` of the corpus: [num_rows, row_length]. Every row begins with a document."""
    tokenizer = Tokenizer.from_file(str(spec.tokenizer))
    source = documents(f"{spec.seed}/{index}", spec.skill, spec.held_out)
    rows = np.full((spec.num_rows, spec.row_length), tokenizer.token_to_id(EOS), dtype=np.uint16)
    encoded = (row for batch in _batches(source) for row in encode(tokenizer, batch))
    waiting: list[Row] = []
    for row in rows:
        at = 0
        while True:
            waiting.extend(
                islice((d for d in encoded if len(d) <= spec.row_length), 64 - len(waiting))
            )
            free = spec.row_length - at
            # First the document that has waited longest; once it doesn't fit, whatever fits best.
            fitting = (
                waiting[:1] if len(waiting[0]) <= free else [d for d in waiting if len(d) <= free]
            )
            if not fitting:
                break
            document = max(fitting, key=len)
            waiting = [other for other in waiting if other is not document]
            row[at : at + len(document)] = document
            at += len(document)
    return rows


def _batches(source: Iterator[Document]) -> Iterator[list[Document]]:
    while True:
        yield list(islice(source, 64))


def _make(task: tuple[ShardSpec, int]) -> NDArray[np.uint16]:
    return make_shard(*task)


def shards(
    spec: ShardSpec, first: int, count: int, num_workers: int
) -> Iterator[NDArray[np.uint16]]:
    """Shards in order, whatever worker was first, so that training doesn't depend on timing."""
    tasks = [(spec, index) for index in range(first, first + count)]
    if num_workers == 0:
        yield from map(_make, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        yield from pool.imap(_make, tasks)
