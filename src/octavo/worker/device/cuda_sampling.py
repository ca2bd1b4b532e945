"""How a GPU draws tokens: by kernels that read the logits as they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import upload
from octavo.ops.cuda.sampling import (
    FEW_DRAWS,
    FEW_LIMITED,
    SOME_DRAWS,
    DeviceDraws,
    sample,
    sample_sharded,
)
from octavo.ops.cuda.sampling_candidates import MAX_CANDIDATES, NUMBERS, best_tokens, rounded
from octavo.ops.cuda.sampling_scores import score
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.vocabulary import VocabularyShard
from octavo.structured.constraint import Words, num_words
from octavo.worker.logprobs import Scores, Tops, rows_at_once
from octavo.worker.sampler import Drawer, DrawMode, Int64s, SamplingBatch, best_of
from octavo.worker.staging import UploadStaging

# Fields of DeviceDraws that say how a token is drawn. All but the last two are read early.
_SETTINGS = (
    *("temperature", "log_min_p", "seeds", "sample_indices", "positions", "mask_places"),
    *("top_k", "top_p"),
)


class CudaDrawer(Drawer):
    """See Drawer; what it stages are DeviceDraws."""

    score_kinds = (0, *NUMBERS)

    def __init__(self, staging: UploadStaging, vocab_size: int) -> None:
        self._staging = staging
        self._most_scored = min(MAX_CANDIDATES, vocab_size)
        self._each_row: Tensor | None = None
        # Masks come when the step computes already, so they have an upload of their own.
        most, self._num_words = staging.max_num_seqs, num_words(vocab_size)
        size = most * self._num_words
        self._uploads = UploadStaging(staging.device, most, 0, num_bytes=4 * size)
        self._masks = self._uploads.put("masks", np.zeros(size, np.int32), size).view(most, -1)
        self._room: Words | None = None  # for the next step's

    def room_for_masks(self, num_masks: int, num_words: int) -> Words:
        """See Drawer.room_for_masks: where their upload begins, so that they need no copy."""
        self._uploads.begin()
        room = self._uploads.room("masks", num_masks * num_words)
        self._room = room.reshape(num_masks, num_words)
        return self._room

    def take_masks(self, words: Words) -> Tensor:
        if words is not self._room:
            self.room_for_masks(*words.shape)[:] = words
        self._uploads.flush()
        return self._masks[: len(words)]

    def rows_at_once(self, vocab_size: int) -> int:
        """See Drawer.rows_at_once. Candidates behind masks take 19 bytes of memory for each logit;
        the largest steps that it is measured with copy all rows, which takes 4."""
        return max(1, self._staging.max_num_seqs // 5)

    def stage(self, batch: SamplingBatch, owners: Int64s | None, mode: DrawMode) -> DeviceDraws:
        with np.errstate(divide="ignore"):
            log_min_p = np.log(batch.min_p)
        rows: Int64s = np.arange(batch.num_sampled)
        of_draw: slice | Int64s = slice(batch.num_sampled)
        sample_indices = batch.sample_indices[of_draw]
        if owners is not None:
            rows = of_draw = owners
            # The j-th draw of a row is for its j-th next sample.
            number = np.arange(len(owners)) - np.searchsorted(owners, owners)
            sample_indices = batch.sample_indices[owners] + number
        places = batch.mask_places
        if places is None:
            places = np.full(batch.num_sampled, -1, np.int32)
        of_rows = self._put("rows", rows)
        settings: dict[str, NDArray[Any]] = {
            "temperature": batch.temperature[of_draw],
            "top_k": batch.top_k[of_draw],
            "top_p": batch.top_p[of_draw],
            "log_min_p": log_min_p[of_draw],
            "seeds": batch.seeds[of_draw],
            "sample_indices": sample_indices,
            "positions": batch.positions[of_draw],
            "mask_places": places[of_draw],
        }
        staged = {name: self._put(name, values) for name, values in settings.items()}
        return self._draws(of_rows, staged, mode)

    def select(
        self, draws: DeviceDraws, rows: Int64s, index: Tensor, owners: Int64s
    ) -> DeviceDraws:
        return DeviceDraws(
            upload(owners, index.device),
            **{name: getattr(draws, name)[index] for name in _SETTINGS},
            masks=self._masks,
            is_greedy=draws.is_greedy,
            is_limited=draws.is_limited,
        )

    def slice_rows(self, draws: DeviceDraws, begin: int, end: int) -> DeviceDraws:
        return DeviceDraws(
            draws.rows[: end - begin],
            **{name: getattr(draws, name)[begin:end] for name in _SETTINGS},
            masks=self._masks,
            is_greedy=draws.is_greedy,
            is_limited=draws.is_limited,
        )

    def draw(self, logits: Tensor, draws: DeviceDraws, vocabulary: VocabularyShard) -> Tensor:
        if vocabulary.is_whole:
            return sample(logits, draws)
        return sample_sharded(logits, draws, vocabulary)

    def captured_draws(self, num_rows: int, mode: DrawMode) -> DeviceDraws:
        settings = {name: self._staging.padded(f"draws.{name}", num_rows) for name in _SETTINGS}
        if self._each_row is None:
            device = settings["seeds"].device
            self._each_row = torch.arange(self._staging.max_num_seqs, device=device)
        return self._draws(self._each_row[:num_rows], settings, mode)

    def best_tokens(self, logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
        if number > MAX_CANDIDATES:
            return super().best_tokens(logits, number)
        return best_tokens(logits, number)

    def stage_scores(self, batch: SamplingBatch) -> tuple[int, ...] | None:
        """See Drawer.stage_scores: a row's kind is how many likely tokens are looked for."""
        if max(batch.num_logprobs.values()) > self._most_scored:
            return None
        kinds = np.full(batch.num_sampled, -1, np.int32)
        kinds[list(batch.num_logprobs)] = [rounded(each) for each in batch.num_logprobs.values()]
        self._put("scores", kinds)
        return tuple(sorted({*kinds.tolist()} - {-1}))

    def captured_scores(self, num_rows: int) -> Tensor:
        return self._staging.padded("draws.scores", num_rows)

    def score_tokens(
        self,
        logits: Tensor,
        rows: Int64s,
        token_ids: Tensor,
        num_tokens: Sequence[int],
        num_top: Sequence[int],
    ) -> Scores:
        """See Drawer.score_tokens: those of rows with the same rounded number by one launch."""
        device, vocab_size = logits.device, logits.shape[1]
        owners = np.arange(len(rows)).repeat(num_tokens)
        kinds = np.array([_rounded(number) for number in num_top])[owners]
        order = np.argsort(kinds, kind="stable")
        owners, kinds = owners[order], kinds[order]
        is_uniform = kinds[0] == kinds[-1]
        if not is_uniform:
            token_ids = token_ids[upload(order, device)]
        index = None
        if not (is_uniform and np.array_equal(rows[owners], np.arange(len(owners)))):
            index = upload(rows[owners], device)
        logprobs, ranks, tops = [], [], list[Tops]()
        ends = [*np.flatnonzero(np.diff(kinds, prepend=-1)).tolist(), len(owners)]
        for begin, end in pairwise(ends):
            part: list[int] = owners[begin:end].tolist()
            number = min(max(num_top[owner] for owner in part), vocab_size)
            of_rows = None if index is None else index[begin:end]
            few = number if number <= MAX_CANDIDATES else 0
            scored = score(logits, of_rows, token_ids[begin:end], few)
            logprobs.append(scored[0])
            ranks.append(scored[1])
            if few:
                tops.append(Tops(part, scored[3], scored[2]))
            elif number:
                tops += _many_tops(logits, rows, np.unique(part), number)
        all_logprobs, all_ranks = map(_joined, (logprobs, ranks))
        return Scores(owners.tolist(), num_top, token_ids, all_logprobs, all_ranks, tops)

    def compile(self, logits: Tensor, vocabulary: VocabularyShard) -> None:
        """See Drawer.compile."""
        whole = VocabularyShard.whole(vocabulary.size)
        edited = torch.zeros((1, vocabulary.size), dtype=torch.float32, device=logits.device)
        for num_draws in (1, FEW_DRAWS + 1, SOME_DRAWS + 1, FEW_LIMITED + 1):
            zeros = torch.zeros(num_draws, dtype=torch.int64, device=logits.device)
            settings = dict.fromkeys(_SETTINGS, zeros) | {
                "temperature": zeros.float(),
                "top_p": zeros.double() + 1,
                "log_min_p": zeros.float(),
                "mask_places": zeros.int() - 1,
            }
            for mode in get_args(DrawMode):
                self.draw(edited, self._draws(zeros, settings, mode), whole)
        for number in NUMBERS:
            # Rows begin at multiples of 16 bytes, or do not.
            for row in torch.split(logits.new_zeros((2, logits.shape[1])), 1):
                self.best_tokens(row, min(number, logits.shape[1]))
        # What is scored are whole rows, of all or of some.
        scored = vocabulary.gather(logits.new_zeros((2, logits.shape[1])))
        zeros = torch.zeros(2, dtype=torch.int64, device=logits.device)
        for number, rows in product((0, *NUMBERS), (None, zeros)):
            score(scored, rows, zeros, min(number, vocabulary.size))

    def _draws(self, rows: Tensor, settings: dict[str, Tensor], mode: DrawMode) -> DeviceDraws:
        return DeviceDraws(
            rows,
            **settings,
            masks=self._masks,
            is_greedy=mode == "greedy",
            is_limited=mode == "limited",
        )

    def _put(self, name: str, values: NDArray[Any]) -> Tensor:
        return self._staging.put(f"draws.{name}", values, self._staging.max_num_seqs)


def _rounded(number: int) -> int:
    """Equal for numbers of top tokens that are looked for together."""
    return rounded(number) if number <= MAX_CANDIDATES else power_of_2(number)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _many_tops(logits: Tensor, rows: Int64s, owners: Int64s, number: int) -> list[Tops]:
    """More of the most likely tokens than the kernels find, of `rows[owners]`."""
    tops, size = [], rows_at_once(logits.shape[1])
    for first in range(0, len(owners), size):
        part = owners[first : first + size]
        logprobs, ids = best_of(logits[upload(rows[part], logits.device)], number)
        tops.append(Tops(part.tolist(), ids, logprobs))
    return tops
