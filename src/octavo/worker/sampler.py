"""Turns logits into tokens, on the device of the logits, without waiting for it.

Order of a row's filters: penalties and bias (logit_edits.py), its mask (row_masks.py), temperature,
min_p, top_k, top_p. Each filter sees what the ones before it left over. Rows are drawn by the
device's own routines (`Drawer`), which all give the same tokens; whatever surrounds that is here.

A row is not finite if it holds NaN or +inf, or nothing but -inf. It gets NO_TOKEN; the others are
drawn as if it were not there.

With tensor parallelism a rank has a part of every row (ops/vocabulary.py). What needs whole rows
(edits, log-probabilities) gathers them; for draws by top_k and top_p, each rank gets some of the
rows, whole, and draws for those. Other draws, and candidates, do without whole rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import Candidates, TokenLogprobs
from octavo.errors import LogitsNotFinite, RequestFailed
from octavo.ops import Staging, upload
from octavo.ops.vocabulary import VocabularyShard, pack
from octavo.structured.constraint import Words
from octavo.worker.logit_edits import EditedRow, edit_logits
from octavo.worker.logprobs import FoundScores, Scores, largest_of, score_tokens
from octavo.worker.row_edits import DeviceEdits

Int64s = NDArray[np.int64]
# Every row's most likely token; or by temperature and min_p; or by top_k and top_p besides.
DrawMode = Literal["greedy", "random", "limited"]

NO_TOKEN = -1
# With tensor parallelism: so many rows that are needed whole are dealt to the ranks; of fewer, each
# rank gathers all, which takes one exchange instead of two.
DEALT_ROWS = 8


class DrawKind(NamedTuple):
    """What it takes to draw a token for each row of a step."""

    mode: DrawMode
    has_records: bool  # the device edits some of the rows
    scored: tuple[int, ...] = ()  # see Drawer.stage_scores; none where `Sampler` scores tokens


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row of logits is turned into tokens; arrays have one entry per row."""

    num_sampled: int  # rows that draw; the rest are expanded to candidates
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    sample_indices: NDArray[np.int64]
    positions: NDArray[np.int64]  # of the token to be drawn
    num_draws: NDArray[np.int64]
    # Where each row's mask is among the step's masks, or -1; None if no row has one.
    mask_places: NDArray[np.int32] | None = None
    has_records: bool = False  # by which the device edits some sampled rows (row_edits.py)
    # Rows that the host edits, in order of their index.
    edited: list[EditedRow] = field(default_factory=list)
    num_logprobs: dict[int, int] = field(default_factory=dict)  # row -> how many most likely tokens
    num_candidates: list[int] = field(default_factory=list)  # of each expanded row
    renormalises: bool = False  # expanded rows, behind edits and masks

    @property
    def owners(self) -> Int64s | None:
        """int64 [num_draws]: the row of each draw, ascending; None if every row draws once."""
        num_draws = self.num_draws[: self.num_sampled]
        if (num_draws == 1).all():
            return None
        return np.arange(self.num_sampled).repeat(num_draws)

    @property
    def mode(self) -> DrawMode:
        """What it takes to draw for all sampled rows."""
        n = self.num_sampled
        is_random = self.temperature[:n] > 0
        if not is_random.any():
            return "greedy"
        has_limits = (self.top_k[:n] > 0) | (self.top_p[:n] < 1)
        return "limited" if (is_random & has_limits).any() else "random"

    def subset(self, rows: Int64s) -> SamplingBatch:
        """How some of the rows are drawn, edited or not."""
        places = None if self.mask_places is None else self.mask_places[rows]
        values = {name: getattr(self, name)[rows] for name in _ROW_FIELDS}
        return SamplingBatch(len(rows), **values, mask_places=places)


_ROW_FIELDS = [each.name for each in fields(SamplingBatch)[1:9]]  # those with an entry per row


class Drawer(ABC):
    """A device's routines that draw tokens. What `stage` returns is known to the device alone.

    Attributes:
        score_kinds: all that `stage_scores` may return.
    """

    score_kinds: tuple[int, ...] = ()

    def room_for_masks(self, num_masks: int, num_words: int) -> Words:
        """Memory for the next step's masks, [num_masks, num_words]; `take_masks` takes any, but
        may have to copy it."""
        return np.empty((num_masks, num_words), np.int32)

    @abstractmethod
    def take_masks(self, words: Words) -> Tensor:
        """The masks of a step, [num_masks, num_words], for its draws, and where they are then."""

    @abstractmethod
    def rows_at_once(self, vocab_size: int) -> int:
        """Into parts of how many rows logits are cut that are copied in float32."""

    @abstractmethod
    def stage(self, batch: SamplingBatch, owners: Int64s | None, mode: DrawMode) -> Any:
        """Put where the next upload takes it along how the sampled rows are drawn."""

    @abstractmethod
    def select(self, draws: Any, rows: Int64s, index: Tensor, owners: Int64s) -> Any:
        """A part of what was staged, for logits of `rows` alone.

        Args:
            rows: int64 [n], ascending.
            index: int64 [num_draws] on the device: the rows' draws.
            owners: int64 [num_draws]: for each of them the place of its row in `rows`.
        """

    @abstractmethod
    def slice_rows(self, draws: Any, begin: int, end: int) -> Any:
        """A part of what was staged, for logits of the rows from `begin` to `end` alone, where
        every row draws once."""

    @abstractmethod
    def draw(self, logits: Tensor, draws: Any, vocabulary: VocabularyShard) -> Tensor:
        """int64 [num_draws]: row by row from logits; NO_TOKEN for rows that are not finite. What a
        row's mask rules out becomes -inf in the logits, which are left unchanged otherwise.

        logits: floating [num_rows, ...], those of `vocabulary`; whole if some draw is limited.
        """

    def captured_draws(self, num_rows: int, mode: DrawMode) -> Any:
        """What makes `draw` draw a token for each row by what is staged when its kernels run; for
        devices with graphs. Rows beyond those that were staged get tokens of no meaning."""
        raise NotImplementedError

    def best_tokens(self, logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """See best_of, without edits."""
        size = self.rows_at_once(logits.shape[1])
        return joined([best_of(part, number) for part in torch.split(logits, size)])

    def stage_scores(self, batch: SamplingBatch) -> tuple[int, ...] | None:
        """Put where the next upload takes it along how tokens are scored in a graph: for each row a
        kind, or -1 if its token is not scored. Returns the kinds that occur; None if tokens of such
        rows cannot be scored in a graph."""
        return None

    def captured_scores(self, num_rows: int) -> Tensor:
        """What `stage_scores` has put, on the device: int32 [num_rows]. Beyond its rows they may be
        any of an earlier step."""
        raise NotImplementedError

    def score_tokens(
        self,
        logits: Tensor,
        rows: Int64s,
        token_ids: Tensor,
        num_tokens: Sequence[int],
        num_top: Sequence[int],
    ) -> Scores:
        """See logprobs.score_tokens. What a row costs does not depend on how many of the most
        likely tokens others ask for."""
        return score_tokens(logits, rows, token_ids, num_tokens, num_top)

    def compile(self, logits: Tensor, vocabulary: VocabularyShard) -> None:
        """Compile what draws from edited logits, what finds the best tokens and what scores tokens,
        for logits of this kind; for devices with graphs."""
        raise NotImplementedError


class StagedSampling(NamedTuple):
    """How a step's logits become tokens, ready to be uploaded."""

    batch: SamplingBatch
    draws: Any  # the device's; None if no row draws
    owners: Int64s | None  # see SamplingBatch
    firsts: tuple[Int64s, Tensor] | None  # see Choice
    kind: DrawKind
    is_plain: bool  # all that is to be done is what `kind` says, with a token for each row


class Choice:
    """What a step has chosen, on the device and, after `read_back`, soon on the host."""

    def __init__(
        self,
        token_ids: Tensor,
        firsts: tuple[Int64s, Tensor] | None = None,
        is_delivered: bool = False,
    ) -> None:
        """token_ids int64 [num_draws], row by row.

        `firsts`: where each row's draws begin, on host and device; None: each row has one.
        is_delivered: token_ids is the host's, where the device writes them.
        """
        self._token_ids = token_ids
        self._is_delivered = is_delivered
        self._best: tuple[Tensor, Tensor] | None = None
        self._scores: tuple[list[int], FoundScores] | None = None
        self._firsts = None if firsts is None else firsts[0]
        self._device_firsts = None if firsts is None else firsts[1]

    @classmethod
    def nothing(cls, device: torch.device) -> Choice:
        """The choice of a step in which no row reaches its end."""
        return cls(torch.zeros(0, dtype=torch.int64, device=device))

    @property
    def first(self) -> Tensor:
        """int64 [num_sampled] on the device: the first draw of each row."""
        if self._device_firsts is None:
            return self._token_ids
        return self._token_ids[self._device_firsts]

    def expand(self, logprobs: Tensor, token_ids: Tensor) -> None:
        """Keep the candidates of expanded rows, best first: [num_rows, n] each."""
        self._best = (logprobs, token_ids)

    def score(self, rows: list[int], scores: FoundScores) -> None:
        """Keep the log-probabilities of what rows have drawn."""
        self._scores = rows, scores

    def read_back(self, to_host: Callable[[Tensor], Tensor]) -> None:
        """Start the copies to the host."""
        if self._scores is not None:
            rows, scores = self._scores
            self._scores = rows, scores.read_back(to_host)
        if not self._is_delivered:
            self._token_ids = to_host(self._token_ids)
        if self._best is not None:
            self._best = (to_host(self._best[0]), to_host(self._best[1]))

    # After `read_back`, once the device has come so far.

    def first_tokens(self) -> Int64s:
        """int64 [num_sampled]; negative for a row that is not finite."""
        tokens: Int64s = self._token_ids.numpy()
        return tokens if self._firsts is None else tokens[self._firsts]

    def draws(self) -> dict[int, list[int]]:
        """All draws of rows with several."""
        if self._firsts is None:
            return {}
        tokens = self._token_ids.tolist()
        ends = np.append(self._firsts[1:], len(tokens)).tolist()
        pairs = zip(self._firsts.tolist(), ends, strict=True)
        return {row: tokens[a:b] for row, (a, b) in enumerate(pairs) if b - a > 1}

    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Of rows that asked for them: one entry per draw."""
        if self._scores is None:
            return {}
        rows, scores = self._scores
        return dict(zip(rows, scores.entries(), strict=True))

    def candidates(self) -> Candidates | None:
        """Those of the expanded rows, if there are any.

        The first log-probability of a row that is not finite is not either.
        """
        if self._best is None:
            return None
        logprobs, token_ids = self._best
        return Candidates(token_ids.long().numpy(), logprobs.double().numpy())


class Sampler:
    """Chooses the tokens of one step after another; equal logits and batches give equal tokens."""

    def __init__(
        self,
        drawer: Drawer,
        staging: Staging,
        vocabulary: VocabularyShard,
        edits: DeviceEdits | None = None,
    ) -> None:
        """edits: of devices that edit rows by themselves."""
        self.drawer = drawer
        self._edits = edits
        self.vocabulary = vocabulary
        self._staging = staging
        self._whole = VocabularyShard.whole(vocabulary.size)

    def stage(self, batch: SamplingBatch) -> StagedSampling:
        """Put where the next upload takes it along how rows of logits become tokens."""
        if not batch.num_sampled and batch.num_candidates:
            kind = DrawKind("greedy", has_records=False)
            return StagedSampling(batch, None, None, None, kind, False)
        owners, mode, firsts = batch.owners, batch.mode, None
        draws = self.drawer.stage(batch, owners, mode)
        if owners is not None:
            begins = np.searchsorted(owners, np.arange(batch.num_sampled))
            firsts = (begins, self._staging.put("draws.firsts", begins, self._staging.max_num_seqs))
        is_plain = not (batch.edited or batch.num_candidates or owners is not None)
        kind = DrawKind(mode, batch.has_records)
        if is_plain and batch.num_logprobs:
            # Masks change logits, whose own log-probabilities are asked for.
            can_score = self.vocabulary.is_whole and batch.mask_places is None
            scored = self.drawer.stage_scores(batch) if can_score else None
            is_plain, kind = scored is not None, kind._replace(scored=scored or ())
        return StagedSampling(batch, draws, owners, firsts, kind, is_plain)

    def __call__(
        self,
        logits: Tensor,
        staged: StagedSampling,
        masks: Words | None = None,
        rows: Tensor | None = None,
    ) -> Choice:
        """Choose the next tokens.

        Args:
            logits: this rank's, floating [num_rows, ...]: sampled rows, then expanded. What masks
                rule out becomes -inf in them.
            masks: [num_masks, num_words]: those that the batch refers to; None if to none.
            rows: int32, those of the batch that are sampled, where some of them have records.
        """
        batch, n = staged.batch, staged.batch.num_sampled
        words = None if masks is None else self.drawer.take_masks(masks)
        scored = sorted(row for row in batch.num_logprobs if row < n)
        own, sampled = logits, logits[:n]
        if staged.kind.has_records:
            assert rows is not None, "by which the records are found"
            sampled = self._edited(sampled, rows)
        elif scored and words is not None:  # log-probabilities are the model's own
            own = logits.clone()
        if staged.draws is None:
            choice = Choice.nothing(logits.device)
        else:
            is_single = staged.owners is None
            token_ids = self._draw(sampled, staged.draws, staged.kind.mode, is_single)
            edited = [edit for edit in batch.edited if edit.index < n]
            if edited:
                self._redraw(token_ids, logits, staged, edited)
            choice = Choice(token_ids, staged.firsts)
            if scored:
                choice.score(scored, self._score(own, staged, scored, token_ids))
        if batch.num_candidates:
            choice.expand(*self._expand(logits[n:], batch, words))
        return choice

    def draw_captured(self, logits: Tensor, kind: DrawKind, rows: Tensor) -> Tensor:
        """A token for each row, int32, of the batch; see Drawer.captured_draws."""
        draws = self.drawer.captured_draws(len(logits), kind.mode)
        if kind.has_records:
            logits = self._edited(logits, rows)
        return self._draw(logits, draws, kind.mode, is_single=True)

    def _edited(self, logits: Tensor, rows: Tensor) -> Tensor:
        """See DeviceEdits.edit."""
        assert self._edits is not None, "rows have records on devices that edit"
        return self._edits.edit(logits, rows)

    def _draw(self, logits: Tensor, draws: Any, mode: DrawMode, is_single: bool) -> Tensor:
        """See Drawer.draw. `is_single`: every row draws once."""
        vocabulary, num_rows = self.vocabulary, len(logits)
        if mode != "limited" or vocabulary.is_whole:
            return self.drawer.draw(logits, draws, vocabulary)
        if num_rows < DEALT_ROWS or not is_single:
            return self.drawer.draw(vocabulary.gather(logits), draws, self._whole)
        rows, first = vocabulary.deal(logits)
        dealt = self.drawer.slice_rows(draws, first, first + len(rows))
        return vocabulary.collect(self.drawer.draw(rows, dealt, self._whole), num_rows)

    def _redraw(
        self, token_ids: Tensor, logits: Tensor, staged: StagedSampling, edited: Sequence[EditedRow]
    ) -> None:
        """Draw again for rows whose logits are not taken as they are."""
        size = self.drawer.rows_at_once(self.vocabulary.size)
        for begin in range(0, len(edited), size):
            part = edited[begin : begin + size]
            rows = np.array([edit.index for edit in part])
            own = logits[upload(rows, logits.device)]
            copy = self.vocabulary.gather(own).float()
            edit_logits(copy, [replace(edit, index=i) for i, edit in enumerate(part)])
            where, places = draws_of(rows, staged.owners)
            index = upload(where, logits.device)
            draws = self.drawer.select(staged.draws, rows, index, places)
            drawn = self.drawer.draw(copy, draws, self._whole)
            # No mask hides that the logits, as they were, are not finite.
            token_ids[index] = drawn.where(token_ids[index] >= 0, token_ids[index])

    def _expand(
        self, logits: Tensor, batch: SamplingBatch, words: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See best_of, for all expanded rows; `words`: the step's masks."""
        number = min(max(batch.num_candidates), self.vocabulary.size)
        has_edits = any(edit.index >= batch.num_sampled for edit in batch.edited)
        if words is None and not has_edits:
            return self._best(logits, number)
        size = self.drawer.rows_at_once(self.vocabulary.size)
        found = []
        for begin in range(0, len(logits), size):
            first = batch.num_sampled + begin
            edits = [
                replace(edit, index=edit.index - first)
                for edit in batch.edited
                if first <= edit.index < first + size
            ]
            part = logits[begin : begin + size]
            masked = None
            if words is not None and batch.mask_places is not None:
                masked = _masked(batch.mask_places[first : first + len(part)], words)
            if edits or masked is not None:
                whole = self.vocabulary.gather(part)
                found.append(best_of(whole, number, edits, masked, batch.renormalises))
            else:
                found.append(self._best(part, number))
        return joined(found)

    def _best(self, logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """See best_of, without edits."""
        vocabulary = self.vocabulary
        if number > vocabulary.least_rows:
            logits, vocabulary = vocabulary.gather(logits), self._whole
        logprobs, ids = self.drawer.best_tokens(logits, number)
        return (logprobs, ids) if vocabulary.is_whole else _merge(logits, logprobs, ids, vocabulary)

    def _score(
        self, logits: Tensor, staged: StagedSampling, rows: list[int], token_ids: Tensor
    ) -> Scores:
        """The log-probabilities of rows that asked for them; token_ids: of all rows."""
        device = logits.device
        places: Int64s = np.array(rows)
        where, of_rows = draws_of(places, staged.owners)
        drawn = token_ids
        if len(where) < len(token_ids):
            drawn = token_ids[upload(where, device)]
        num_drawn: list[int] = np.bincount(of_rows, minlength=len(rows)).tolist()
        num_top = [staged.batch.num_logprobs[row] for row in rows]
        if not self.vocabulary.is_whole:
            logits = self.vocabulary.gather(logits[upload(places, device)])
            places = np.arange(len(rows))
        return self.drawer.score_tokens(logits, places, drawn, num_drawn, num_top)


def joined(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What was found for some rows after the other, as one."""
    if len(found) == 1:
        return found[0]
    values, indices = zip(*found, strict=True)
    return torch.cat(values), torch.cat(indices)


def best_of(
    logits: Tensor,
    number: int,
    edits: Sequence[EditedRow] = (),
    masked: tuple[Tensor, Tensor] | None = None,
    renormalises: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of each row's best next tokens, best first, and of equal ones that
    with the lower id: [num_rows, number].

    As in transformers' beam search, edits and masks act on log-probabilities. Those of a row that
    is not finite are all NaN, which no mask hides.

    Args:
        masked: indices of rows that have masks, int64 [n], and their masks, int32 [n, num_words].
        renormalises: whether the results are log-probabilities again.
    """
    scores = logits.float().log_softmax(dim=-1)
    edit_logits(scores, edits)
    if masked is not None:
        rows, words = masked
        own = scores[rows]
        is_out = ~unpacked(words, scores.shape[1]) & ~own.isnan()
        scores[rows] = own.masked_fill_(is_out, -torch.inf)
    if renormalises:
        scores = scores.log_softmax(dim=-1)
    return largest_of(scores, number)


def _masked(places: NDArray[np.int32], words: Tensor) -> tuple[Tensor, Tensor] | None:
    """Which rows have masks, by their places, and these masks; None if there are none."""
    rows = np.flatnonzero(places >= 0)
    if not len(rows):
        return None
    index = upload(places[rows].astype(np.int64), words.device)
    return upload(rows, words.device), words[index]


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """Masks as booleans: int32 [n, num_words] -> [n, vocab_size]."""
    bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (bits & 1).bool().flatten(1)[:, :vocab_size]


def _merge(
    logits: Tensor, logprobs: Tensor, ids: Tensor, vocabulary: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """The best of all ranks' best tokens; `logprobs` are normalised by this rank's logits alone."""
    number = ids.shape[1]
    values = logits.gather(1, ids.long()).float()
    normaliser = values[:, :1] - logprobs[:, :1]
    normaliser = normaliser.where(values[:, :1] > -torch.inf, values[:, :1])
    own = pack(values, (ids + vocabulary.start).int(), normaliser)
    parts = vocabulary.communicator.all_gather(own)
    columns = torch.split(parts, [number, number, 1], dim=2)
    values, ids, normaliser = (each.transpose(0, 1).flatten(1) for each in columns)
    values, normaliser = values.view(torch.float32), normaliser.view(torch.float32)
    # Among equal ones, the lower id comes first: ranks are in that order.
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :number]
    values = values.gather(1, order) - normaliser.logsumexp(dim=1, keepdim=True)
    return values, ids.gather(1, order)


def draws_of(rows: Int64s, owners: Int64s | None) -> tuple[Int64s, Int64s]:
    """Which draws belong to `rows` (ascending), and for each of them the place of its row there."""
    if owners is None:
        return rows, np.arange(len(rows))
    where = np.flatnonzero(np.isin(owners, rows))
    return where, np.searchsorted(rows, owners[where])


def rows_not_finite(token_ids: Int64s, candidates: Candidates | None) -> list[int]:
    """Rows that are not finite, by what was drawn, one token per row, and by the candidates of the
    rows behind them."""
    rows: list[int] = np.flatnonzero(token_ids < 0).tolist()
    if candidates is not None:
        is_finite = np.isfinite(candidates.logprobs[:, 0])
        rows += (len(token_ids) + np.flatnonzero(~is_finite)).tolist()
    return rows


def logits_not_finite(seq_ids: Iterable[int]) -> dict[int, RequestFailed]:
    """Errors of rows that hold NaN or infinity: there is nothing to choose from."""
    message = (
        "the model's logits for this request are not finite numbers: its weights are damaged, or "
        "too large for their dtype"
    )
    return {seq_id: LogitsNotFinite(message) for seq_id in seq_ids}
