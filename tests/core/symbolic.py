"""A KV cache of symbols: the main test of the core.

The "KV" of a token is a name for the whole chain of tokens up to it. An executor that obeys plans
literally then proves, slot by slot, that attention would read exactly the right keys, whatever
was forked, swapped, copied, shared, windowed, preempted or aborted before. The next token is a
pure function of that chain, so what a request gets must not depend on its company either.

With an encoder, the chain of the decoder's tokens begins with the encoder's input, and the KV of
an input's token is a name for the whole input and the token's place in it. Every query must find
all of its own request's input in the blocks of each cross-attention group.

KV can be unsound, as NaN is on a real device: a token that harms makes it so, and whatever reads
it. A row that ends in unsound KV is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from octavo.core.block_table import NULL_BLOCK
from octavo.core.decoding import BeamSearch, PinPrefix, PromptReader, Sampling
from octavo.core.kv.specs import KVSpec, Source
from octavo.core.sequence import DecodingMethod, Request
from octavo.core.step import Candidates, SamplingSpec, StepPlan, StepResult, TokenLogprobs
from octavo.errors import LogitsNotFinite
from octavo.sampling_params import Pooling, PoolingParams

VOCABULARY = 7
EOS = 6
HARMFUL = 7  # is never drawn


def digest_of(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=1 << 16)  # each step names all tokens of its sequences again
def chain(previous: int, token_id: int) -> int:
    """The symbol of a token after everything that `previous` stands for."""
    return digest_of(previous, token_id)


def origin(encoder_token_ids: Seq[int]) -> int:
    """What a chain begins with: the encoder's input, or nothing."""
    return digest_of("encoder", tuple(encoder_token_ids)) if encoder_token_ids else 0


def symbols_of(token_ids: list[int], encoder_token_ids: Seq[int] = ()) -> list[int]:
    """Of each token after those before it."""
    symbols, symbol = [], origin(encoder_token_ids)
    for token_id in token_ids:
        symbol = chain(symbol, token_id)
        symbols.append(symbol)
    return symbols


def scores_of(token_ids: list[int], encoder_token_ids: Seq[int] = ()) -> list[TokenLogprobs]:
    """What log-probabilities are asked for here: of each token, a name for all up to it."""
    pairs = zip(token_ids, symbols_of(token_ids, encoder_token_ids), strict=True)
    return [TokenLogprobs(token_id, -float(symbol), 1) for token_id, symbol in pairs]


def sum_of(symbols: Seq[int]) -> NDArray[np.float64]:
    """What is pooled of tokens here: the sum of small vectors that name them."""
    return np.sum([[symbol % 1009, symbol % 997] for symbol in symbols], axis=0, dtype=np.float64)


def drawn_token(symbol: int, seed: int, sample_index: int) -> int:
    return digest_of("draw", symbol, seed, sample_index) % VOCABULARY


def best_tokens(symbol: int, num_candidates: int) -> list[tuple[int, float]]:
    scores = [-(digest_of("score", symbol, t) % 10_000) / 1000 for t in range(VOCABULARY)]
    ranked = sorted(enumerate(scores), key=lambda pair: -pair[1])
    return ranked[:num_candidates]


@dataclass
class Row:
    token_ids: list[int]
    num_computed: int
    tables: list[list[int]]
    sampling: SamplingSpec
    seed: int
    sample_index: int
    num_draws: int
    num_prompt: int
    encoder_token_ids: tuple[int, ...]
    is_void: bool = False  # it has a token that was not drawn

    def fork(self, sample_index: int) -> Row:
        return Row(
            list(self.token_ids),
            self.num_computed,
            [list(t) for t in self.tables],
            self.sampling,
            self.seed,
            sample_index,
            self.num_draws,
            self.num_prompt,
            self.encoder_token_ids,
        )


@dataclass
class SymbolicExecutor:
    """Obeys plans; block contents are symbols. Stale contents stay, as on a real device."""

    specs: tuple[KVSpec, ...]  # of all KV groups
    block_sizes: tuple[int, ...]  # by KV group
    rows: dict[int, Row] = field(default_factory=dict)
    device: dict[int, list[object]] = field(default_factory=dict)
    swap: dict[int, list[object]] = field(default_factory=dict)
    num_computed: int = 0  # tokens run through the model
    num_encoded: int = 0  # rows for which the encoder has run
    harmful_token: int = HARMFUL
    strikes: Callable[[], bool] = lambda: False  # whether a row's step goes wrong by chance
    holds: Callable[[], bool] = lambda: False  # whether no token can be drawn for a row by chance
    num_undrawn: int = 0
    waiting: set[int] = field(default_factory=set)  # rows that are held still

    def execute(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        for source, target in plan.swap_out:
            self.swap[target] = list(self._block(source))
        for source, target in plan.swap_in:
            self.device[target] = list(self.swap[source])
        contents = [self._block(copy.source)[: copy.num_tokens] for copy in plan.copies]
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        for target, content in zip(targets, contents, strict=True):
            self.device[target] = content + self._block(target)[len(content) :]
        assert len(set(plan.seq_ids)) == len(plan.seq_ids)
        self._encode(plan)
        self._write(plan)
        result = StepResult(plan.step_id, [])
        unsound: set[int] = set()
        for seq_id, count in zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True):
            row = self.rows[seq_id]
            start, end = row.num_computed, row.num_computed + count
            is_harmed = self.harmful_token in row.token_ids[start:end] or self.strikes()
            if not self._read(row, start, end) or is_harmed:
                self._spoil(row, start, end)
                unsound.add(seq_id)
            spec = row.sampling
            first, last = max(start, spec.first_read), min(end + 1, row.num_prompt)
            if spec.num_prompt_logprobs is not None and first + 1 < last:
                scores = scores_of(row.token_ids[:last], row.encoder_token_ids)
                result.prompt_logprobs[seq_id] = scores[first + 1 :]
            if spec.pools_prompt and first < (pooled_end := min(end, spec.end_read or end)):
                symbols = symbols_of(row.token_ids[:pooled_end])[first:]
                result.pooled[seq_id] = sum_of(symbols).astype(np.float32)
            row.num_computed = end
            self.num_computed += count
        self._sample(plan, result)
        noticed = unsound & {*plan.ending, *result.prompt_logprobs, *result.pooled}
        result.errors = {seq_id: LogitsNotFinite("they are not") for seq_id in noticed}
        return result

    def _apply(self, plan: StepPlan) -> None:
        for fork in plan.forks:
            self.rows[fork.child_id] = self.rows[fork.parent_id].fork(fork.sample_index)
        for seq_id in plan.closed:
            del self.rows[seq_id]
        for opened in plan.opened:
            assert opened.seq_id not in self.rows, "a row is opened twice"
            self.rows[opened.seq_id] = Row(
                list(opened.token_ids),
                opened.num_computed_tokens,
                [[] for _ in self.specs],
                opened.sampling,
                opened.seed,
                opened.sample_index,
                opened.num_draws,
                opened.num_prompt_tokens,
                opened.encoder_token_ids,
            )
        for seq_id, position, token_id in zip(*plan.token_writes, strict=True):
            row = self.rows[seq_id]
            assert position <= len(row.token_ids)
            row.token_ids[position:] = [token_id]
            row.num_computed = min(row.num_computed, position)
            row.is_void = False
        for table_write in plan.table_writes:
            table = self.rows[table_write.seq_id].tables[table_write.group]
            if not table:  # of a row that has just been opened: its windows may have moved on
                table += [NULL_BLOCK] * table_write.start
            assert table_write.start <= len(table)
            table[table_write.start :] = table_write.block_ids

    def _block(self, block_id: int) -> list[object]:
        assert block_id != NULL_BLOCK, "the null block is used"
        if block_id not in self.device:
            self.device[block_id] = [None] * max(self.block_sizes)
        return self.device[block_id]

    def _groups(self, source: Source) -> list[int]:
        return [group for group, spec in enumerate(self.specs) if spec.follows == source]

    def _encode(self, plan: StepPlan) -> None:
        """Write the KV of whole encoder inputs, once each."""
        opened = {row.seq_id for row in plan.opened}
        written: set[int] = set()
        for seq_id in plan.encoded:
            assert seq_id in plan.seq_ids, "the encoder runs for a row that computes nothing"
            assert seq_id in opened, "the encoder runs for a row again"
            row = self.rows[seq_id]
            is_sound = self.harmful_token not in row.encoder_token_ids and not self.strikes()
            whole = origin(row.encoder_token_ids)
            for group in self._groups("encoder"):
                table = row.tables[group]
                assert not written & set(table), "I3: one block is written by two rows"
                written.update(table)
                for place in range(len(row.encoder_token_ids)):
                    index, offset = divmod(place, self.block_sizes[group])
                    symbol = chain(whole, place)
                    self._block(table[index])[offset] = (group, symbol, is_sound)
            self.num_encoded += 1

    def _input_is_sound(self, row: Row) -> bool:
        """Whether all of a row's encoder input is; it must be in the row's blocks."""
        is_sound, whole = True, origin(row.encoder_token_ids)
        for group in self._groups("encoder"):
            size, num_tokens = self.block_sizes[group], len(row.encoder_token_ids)
            assert len(row.tables[group]) == -(-num_tokens // size), "a table of another length"
            for place in range(num_tokens):
                content = self._block(row.tables[group][place // size])[place % size]
                symbol = chain(whole, place)
                if content != (group, symbol, True):
                    assert content == (group, symbol, False), (
                        f"token {place} of the encoder input in group {group} is another one's"
                    )
                    is_sound = False
        return is_sound

    def _write(self, plan: StepPlan) -> None:
        written: set[tuple[int, int]] = set()
        for seq_id, count in zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True):
            row = self.rows[seq_id]
            assert row.num_computed + count <= len(row.token_ids)
            symbols = self._symbols(row)
            for position in range(row.num_computed, row.num_computed + count):
                for group in self._groups("sequence"):
                    table = row.tables[group]
                    index, offset = divmod(position, self.block_sizes[group])
                    block_id, slot = table[index], (table[index], offset)
                    assert slot not in written, "I3: one slot is written by two sequences"
                    written.add(slot)
                    self._block(block_id)[slot[1]] = (group, symbols[position], True)

    def _spoil(self, row: Row, start: int, end: int) -> None:
        symbols = self._symbols(row)
        for group in self._groups("sequence"):
            table = row.tables[group]
            for position in range(start, end):
                index, offset = divmod(position, self.block_sizes[group])
                self._block(table[index])[offset] = (group, symbols[position], False)

    def _read(self, row: Row, start: int, end: int) -> bool:
        """Whether it is all sound."""
        symbols, is_sound = self._symbols(row), self._input_is_sound(row)
        for group in self._groups("sequence"):
            size, table = self.block_sizes[group], row.tables[group]
            for key in range(self.specs[group].first_needed_token(start), end):
                content = self._block(table[key // size])[key % size]
                if content != (group, symbols[key], True):
                    assert content == (group, symbols[key], False), (
                        f"token {key} of group {group} reads another sequence's KV"
                    )
                    is_sound = False
        return is_sound

    def _symbols(self, row: Row) -> list[int]:
        return symbols_of(row.token_ids, row.encoder_token_ids)

    def _sample(self, plan: StepPlan, result: StepResult) -> None:
        scheduled = set(plan.seq_ids)
        void = {
            seq_id
            for seq_id in plan.ending
            if self.rows[seq_id].is_void
            or (self.holds() and not self.rows[seq_id].sampling.pools_prompt)
        }
        self.num_undrawn += len(void)
        result.undrawn = frozenset(void)
        self.waiting = {seq_id for seq_id in [*self.waiting, *void] if self.holds()}
        result.waiting = frozenset(self.waiting)
        for seq_id in plan.sampled:
            row = self.rows[seq_id]
            assert seq_id in scheduled
            assert row.num_computed == len(row.token_ids), "sampled before the last token"
            symbol = self._symbols(row)[-1]
            draws = row.num_draws if len(row.token_ids) == row.num_prompt else 1
            tokens = [drawn_token(symbol, row.seed, row.sample_index + i) for i in range(draws)]
            if seq_id in void:
                tokens = [(token + 1) % VOCABULARY for token in tokens]
                row.is_void = True
            if draws > 1:
                result.draws[seq_id] = tokens
            if row.sampling.num_logprobs is not None:
                texts = [[*row.token_ids, token] for token in tokens]
                scored = [scores_of(text, row.encoder_token_ids)[-1] for text in texts]
                result.logprobs[seq_id] = scored
            result.token_ids.append(tokens[0])
            row.token_ids.append(tokens[0])
        expanded = [self.rows[seq_id] for seq_id in plan.expanded]
        if expanded:
            for row in expanded:
                assert row.num_computed == len(row.token_ids), "expanded before the last token"
            number = max(row.sampling.num_candidates for row in expanded)
            best = np.array([best_tokens(self._symbols(row)[-1], number) for row in expanded])
            for index, seq_id in enumerate(plan.expanded):
                if seq_id in void:
                    best[index] = best[index, ::-1]
            result.candidates = Candidates(best[..., 0].astype(np.int64), best[..., 1])


# -------------------------------------------------------------------- what must come out


@dataclass(frozen=True)
class Ask:
    """One request of a random workload."""

    name: str
    prompt: tuple[int, ...]
    kind: str  # "sample", "beam" or "pin"
    width: int
    max_tokens: int
    seed: int
    salt: str = ""
    priority: int = 0
    tenant: str = ""
    early_stopping: bool | str = False
    length_penalty: float = 1.0
    stop_id: int | None = None  # ends a sample, besides EOS; beams know EOS alone
    wants_logprobs: bool = False  # of the prompt and of the output
    start: int = 0  # the first token of the prompt of which they are wanted
    pooling: Pooling = "mean"  # of a "read"
    encoder_input: tuple[int, ...] = ()

    @property
    def ending_ids(self) -> frozenset[int]:
        knows_eos_alone = self.stop_id is None or self.kind == "beam"
        return frozenset({EOS} if knows_eos_alone else {EOS, self.stop_id})

    def method(self) -> DecodingMethod:
        length = len(self.prompt) + self.max_tokens
        if self.kind == "beam":
            return BeamSearch(
                self.width,
                length,
                frozenset({EOS}),
                self.length_penalty,
                self.early_stopping,  # type: ignore[arg-type]
            )
        if self.kind == "pin":
            return PinPrefix(self.name, len(self.prompt))
        if self.kind == "read":
            return PromptReader(len(self.prompt))
        return Sampling(self.width, length, frozenset({EOS}), self.ending_ids - {EOS})

    @property
    def first_read(self) -> int:
        return min(max(0, self.start - 1), len(self.prompt) - 1)

    def spec(self) -> SamplingSpec:
        if self.kind == "read":
            return PoolingParams(pooling=self.pooling).to_spec(len(self.prompt))
        method = self.method()
        candidates = method.num_candidates if isinstance(method, BeamSearch) else 0
        num_logprobs = 0 if self.wants_logprobs else None
        return SamplingSpec(
            num_candidates=candidates,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_logprobs,
            first_read=self.first_read if self.wants_logprobs else 0,
        )

    def request(self, now: float) -> Request:
        return Request(
            self.name,
            list(self.prompt),
            self.method(),
            self.spec(),
            seed=self.seed,
            arrival_time=now,
            priority=self.priority,
            cache_salt=self.salt,
            tenant=self.tenant,
            encoder_token_ids=self.encoder_input,
        )


def expected_samples(ask: Ask) -> list[list[int]]:
    """The tokens of each sample, by the definition and without any cache."""
    results = []
    for index in range(ask.width):
        symbol = origin(ask.encoder_input)
        for token_id in ask.prompt:
            symbol = chain(symbol, token_id)
        tokens: list[int] = []
        while len(tokens) < ask.max_tokens and not ask.ending_ids.intersection(tokens[-1:]):
            tokens.append(drawn_token(symbol, ask.seed, index))
            symbol = chain(symbol, tokens[-1])
        results.append(tokens)
    return results


def expected_beams(ask: Ask) -> list[list[int]]:
    """Beam search as transformers does it, on plain lists."""
    width, early = ask.width, ask.early_stopping
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, ask.max_tokens + 1):
        candidates = []
        for logprob, tokens in running:
            symbol = origin(ask.encoder_input)
            for token_id in [*ask.prompt, *tokens]:
                symbol = chain(symbol, token_id)
            for token_id, score in best_tokens(symbol, 2 * width):
                candidates.append((logprob + score, [*tokens, token_id]))
        candidates.sort(key=lambda candidate: -candidate[0])
        candidates = candidates[: 2 * width]
        ends = [tokens[-1] == EOS or length == ask.max_tokens for _, tokens in candidates]
        for (logprob, tokens), end in list(zip(candidates, ends, strict=True))[:width]:
            if end:
                finished.append((logprob / length**ask.length_penalty, tokens))
        finished.sort(key=lambda hypothesis: -hypothesis[0])
        del finished[width:]
        running = [c for c, end in zip(candidates, ends, strict=True) if not end][:width]
        if not running:
            break
        if len(finished) == width:
            far = early == "never" and ask.length_penalty > 0
            reach = (ask.max_tokens if far else length) ** ask.length_penalty
            if early is True or running[0][0] / reach <= finished[-1][0]:
                break
    return [tokens for _, tokens in finished]
