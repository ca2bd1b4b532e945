"""What crosses from deciding to computing and back: plain, frozen, picklable values.

A plan carries *deltas*. The worker keeps one row per running sequence (its tokens, its block
tables, how it is sampled), and a plan says only what changed since the plan before it. The worker
applies a plan in this order, which the scheduler relies on:

    forks, closed rows, opened rows, token writes, table writes       (host state)
    swap out, swap in, block copies, compute                          (device work)
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo.errors import RequestFailed


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must look like, as text that a library compiles (`octavo.structured`)."""

    # A lenient schema is kept to as far as the library knows its keywords.
    kind: Literal["json_schema", "lenient_schema", "regex", "choice", "lark", "parts"]
    # The source of a "choice" is a JSON list of strings. That of "parts" is a JSON list of [name,
    # kind, source]: the first is the grammar, which refers to the others by their names.
    source: str
    field: str = field(default="structured", compare=False)  # what errors about it name


@dataclass(frozen=True, slots=True)
class ThinkingSpec:
    """After `num_tokens` tokens of reasoning, the tokens that end it are forced."""

    num_tokens: int
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    is_open: bool  # the prompt ends within reasoning


class LogitBias(NamedTuple):
    """What is added to the logits of some tokens: arrays, so that no step converts many numbers."""

    token_ids: bytes  # int64 [num_tokens], in the machine's byte order
    biases: bytes  # float32 [num_tokens]

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> LogitBias:
        """Pack a mapping of token ids to what is added to their logits."""
        return cls(array("q", biases).tobytes(), array("f", biases.values()).tobytes())


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How a row's next token is chosen: a request's parameters, resolved to token ids.

    Defaults are the neutral values: they change nothing.
    """

    temperature: float = 1.0  # 0 means greedy
    top_k: int = 0  # 0 means off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: LogitBias | None = None
    allowed_token_ids: tuple[int, ...] = ()  # empty means all
    bad_words: tuple[tuple[int, ...], ...] = ()  # that the output does not contain
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # the same, also where the prompt begins them
    no_repeat_ngram_size: int = 0  # so many tokens never come twice in the same order; 0: off
    # (number of output tokens, the tokens of which one must then come next: all are as likely).
    forced_tokens: tuple[tuple[int, tuple[int, ...]], ...] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    # Tokens at the end of the prompt that are the beginning of what the grammar describes.
    num_begun: int = 0
    thinking: ThinkingSpec | None = None
    # End-of-sequence and stop ids, if min_tokens or a grammar forbids them for a while.
    end_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only
    num_prompt_logprobs: int | None = None
    pools_prompt: bool = False  # return the sum of hidden states of the prompt
    # With either: the positions whose hidden states are read, to the end of the prompt if None.
    # What is before them may come from the prefix cache.
    first_read: int = 0
    end_read: int | None = None
    num_candidates: int = 0  # beam search: return this many best tokens instead of drawing one
    renormalises: bool = False  # scores of candidates, after all that changes them

    @property
    def reads_prompt(self) -> bool:
        """Whether hidden states of the prompt are read, beside the last one to draw a token."""
        return self.num_prompt_logprobs is not None or self.pools_prompt


class OpenedRow(NamedTuple):
    """A sequence that starts to run on the worker: new, swapped in, or to be recomputed."""

    seq_id: int
    token_ids: tuple[int, ...]  # prompt and, after a preemption, the tokens generated so far
    num_prompt_tokens: int
    num_computed_tokens: int  # tokens whose KV is already in the cache
    sampling: SamplingSpec
    seed: int
    sample_index: int  # which of the request's samples this is
    num_draws: int = 1  # tokens to draw at the end of the prompt (parallel sampling)
    encoder_token_ids: tuple[int, ...] = ()  # the encoder's input; () without an encoder


class Fork(NamedTuple):
    """`child_id` becomes a copy of `parent_id`'s row (tokens, tables, sampling).

    It gets a row, or has one whose contents are given up.
    """

    parent_id: int
    child_id: int
    sample_index: int


class TokenWrites(NamedTuple):
    """Writes into rows, in their order, as columns: token `position` becomes `token_id`, the row's
    length `position + 1`, and what was computed from `position` on is computed again."""

    seq_ids: list[int]
    positions: list[int]
    token_ids: list[int]

    @classmethod
    def none(cls) -> TokenWrites:
        return cls([], [], [])


class TableWrite(NamedTuple):
    """Entries `start`, `start + 1`, ... of a row's block table in one KV group."""

    seq_id: int
    group: int
    start: int
    block_ids: tuple[int, ...]


class BlockCopy(NamedTuple):
    """The KV of a block's first tokens is copied into another block. The slots after them are
    written before they are read."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: which tokens of which sequences are computed, and which blocks move before."""

    step_id: int
    # What is computed, in batch order: rows of one token first. A row's tokens
    # [num_computed, num_computed + n) are run.
    seq_ids: list[int]
    num_scheduled_tokens: list[int]
    # Rows that reach their last token in this step: a token is drawn for each of `sampled`; for
    # each of `expanded` (beam search) the best candidates are returned.
    sampled: list[int]
    expanded: list[int]
    # Rows of `seq_ids` whose encoder input is run before their tokens: the K and V of all of it are
    # written into the blocks of the row's cross-attention groups. The other rows' are there.
    encoded: list[int] = field(default_factory=list)
    # Changes of the worker's rows.
    forks: list[Fork] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    opened: list[OpenedRow] = field(default_factory=list)
    token_writes: TokenWrites = field(default_factory=TokenWrites.none)
    table_writes: list[TableWrite] = field(default_factory=list)
    # Moves of whole blocks, (source, destination) ids.
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device -> swap tier
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # swap tier -> device
    # Copies of the filled part of blocks, device -> device.
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def ending(self) -> list[int]:
        """Rows that reach their last token, in the order of their logits."""
        return [*self.sampled, *self.expanded]

    @property
    def only_decodes(self) -> bool:
        """Whether the step computes exactly one token of each sequence, and has any, and runs no
        encoder."""
        return 0 < len(self.seq_ids) == self.num_tokens and not self.encoded

    def continues(self, seq_ids: list[int]) -> bool:
        """Whether the step draws one more token of each of these sequences, and changes nothing of
        them but that they get blocks."""
        if self.seq_ids != seq_ids or self.sampled != seq_ids or not self.only_decodes:
            return False
        rows = (self.expanded, self.forks, self.opened, self.token_writes.seq_ids)
        blocks = (self.swap_out, self.swap_in, self.copies)
        return not any(rows) and not any(blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens of sequences that are computed."""
        return sum(self.num_scheduled_tokens)

    @property
    def num_encoder_tokens(self) -> int:
        """Tokens that the encoder runs for. Its rows are opened in the same step."""
        if not self.encoded:
            return 0
        lengths = {opened.seq_id: len(opened.encoder_token_ids) for opened in self.opened}
        return sum(lengths[seq_id] for seq_id in self.encoded)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token itself, and of the most likely ones.

    Example:
        >>> [output] = llm.generate("Once upon a time", SamplingParams(logprobs=2))
        >>> for entry in output.outputs[0].logprobs:
        ...     print(entry.token_id, entry.logprob, entry.top)
    """

    token_id: int
    """The token at this position."""
    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """Its place by probability: 1 is the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most likely tokens, best first; as many as asked for."""


class Candidates(NamedTuple):
    """The best next tokens of rows, best first: [num_rows, n], for the largest n that a row asks
    for, or the whole vocabulary."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]


@dataclass(slots=True)
class StepResult:
    """What a step computed. Dictionaries hold entries only for rows that asked."""

    step_id: int
    token_ids: list[int]  # one per entry of plan.sampled, in its order
    # All draws of a row with num_draws > 1, the first equal to its entry in token_ids.
    draws: dict[int, list[int]] = field(default_factory=dict)
    candidates: Candidates | None = None  # a row per entry of plan.expanded, if it has any
    # One entry per draw.
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # For the positions of this step's chunk that are read: entry i scores token (first read + 1 +
    # i). The last prompt position's successor is not a prompt token and is left out.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # The sum of the chunk's hidden states that are pooled: float32 [hidden_size].
    pooled: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    # Rows that could not be computed, which end their requests. What else is said of them has no
    # meaning; the other rows are as they would be without them.
    errors: dict[int, RequestFailed] = field(default_factory=dict)
    # Rows of this step for which no token could be drawn yet. What else is said of their tokens and
    # candidates has no meaning. Steps that continue such a row do not draw for it either, until a
    # token write has taken it back.
    undrawn: frozenset[int] = frozenset()
    # Rows, of this step and of earlier ones, for which none could be drawn now, either. A step that
    # consists of such rows alone waits for one of them.
    waiting: frozenset[int] = frozenset()
    # How many experts were computed since the start, added up over layers and steps; 0 if there are
    # no mixtures of experts.
    num_hit_experts: int = 0
    # Measured by the worker, for the cost-based choice between swap and recompute; seconds.
    compute_seconds: float = 0.0
    swap_seconds: float = 0.0
    # Host seconds that passed between the end of the step and its result, to draw the next step's
    # tokens, which depend on this one's.
    following_seconds: float = 0.0
    # Host seconds to start the step, where `submit` returns before it is started.
    launch_seconds: float = 0.0


class PendingStep(Protocol):
    """A step in flight."""

    def result(self) -> StepResult:
        """Wait for it. Raises what went wrong."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was carried out at once."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome
