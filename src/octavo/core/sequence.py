"""Requests and their sequences, and what a decoding method is to both."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from octavo.core.block_table import BlockTable
from octavo.core.prefix_node import TOKEN_BYTES, PrefixNode, pack_tokens
from octavo.core.prompt_reading import reading_of
from octavo.core.step import SamplingSpec, TokenLogprobs
from octavo.errors import RequestFailed


class Status(Enum):
    """The queue that a request is in. Only `Queues` changes it."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sequence:
    """One chain of tokens, and how many of them have their KV in the cache.

    `num_computed_tokens` counts the tokens that are computed by the end of the latest planned step,
    and `num_expected_tokens` the tokens that exist by then, including those still being sampled.
    The difference is 1 for a sequence that decodes and more for one whose prompt is being
    computed; the scheduler makes no other distinction between prefill and decode.
    """

    __slots__ = (
        "branch_at",
        "copied_from",
        "cumulative_logprob",
        "finish_reason",
        "last_logprobs",
        "leader",
        "num_at_start",
        "num_computed_tokens",
        "num_pending",
        "num_prompt_tokens",
        "prefix_nodes",
        "request",
        "sample_index",
        "score",
        "seq_id",
        "stop_reason",
        "table",
        "token_ids",
    )

    def __init__(
        self, seq_id: int, request: Request, token_ids: list[int], sample_index: int = 0
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.token_ids = token_ids
        self.num_prompt_tokens = request.num_prompt_tokens
        self.sample_index = sample_index
        self.num_at_start = 0  # tokens that it had when its request was last admitted
        self.num_computed_tokens = 0
        self.num_pending = 0  # tokens being sampled by steps in flight
        self.table: BlockTable | None = None  # None while no block is held
        self.prefix_nodes: list[PrefixNode] = []  # hashes of the leading full blocks
        # The cached prefix at whose end it started, where that is not its own to the end.
        self.copied_from: PrefixNode | None = None
        self.last_logprobs: TokenLogprobs | None = None  # of the newest token, if requested
        self.cumulative_logprob = 0.0
        self.score: float | None = None  # beam search: length-penalised
        self.finish_reason: str | None = None  # "stop", "length", "abort" or "error"
        self.stop_reason: int | str | None = None  # the stop token id or string that ended it
        # While a preempted request is recomputed, a sequence without a table waits until `leader`
        # has computed the `branch_at` tokens that both share, and then forks off.
        self.leader: Sequence | None = None
        self.branch_at = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """Tokens, including those that steps in flight will append."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def packed_tokens(self, start: int, end: int) -> bytes:
        """Tokens `start` to `end` - 1 in the form in which prefix nodes hold them."""
        if end <= self.num_prompt_tokens:
            return self.request.packed_prompt[start * TOKEN_BYTES : end * TOKEN_BYTES]
        return pack_tokens(self.token_ids[start:end])

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, request={self.request.request_id!r}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens} tokens)"
        )


class Request:
    """One client call. Its live sequences (the paper's sequence group) are scheduled together and
    preempted together."""

    __slots__ = (
        "arrival_time",
        "avoids_cache",
        "cache_salt",
        "catching_up",
        "encoder_node",
        "encoder_token_ids",
        "error",
        "finished",
        "first_token_time",
        "found_unverified",
        "level",
        "method",
        "num_cached_tokens",
        "num_passes",
        "num_preemptions",
        "num_prompt_tokens",
        "num_swapped_blocks",
        "num_undecided",
        "number",
        "order",
        "packed_prompt",
        "priority",
        "prompt_token_ids",
        "reading",
        "refused_at",
        "request_id",
        "sampling",
        "seed",
        "sequences",
        "status",
        "tenant",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        method: DecodingMethod,
        sampling: SamplingSpec,
        seed: int = 0,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        encoder_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`prompt_token_ids`: what the decoder starts with. `encoder_token_ids`: the input of the
        encoder; () in a model without one."""
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        # Packed when the request is made: waiting prompts are compared while running ones wait.
        self.packed_prompt = pack_tokens(prompt_token_ids)
        self.method = method
        self.sampling = sampling
        self.seed = seed
        self.arrival_time = arrival_time
        self.priority = priority  # lower is more urgent
        self.cache_salt = cache_salt
        self.encoder_token_ids = encoder_token_ids
        self.encoder_node: PrefixNode | None = None  # its name, once a lookup has hashed it
        self.tenant = tenant  # whose share of the service it counts against
        self.status = Status.WAITING
        self.sequences: list[Sequence] = []  # alive, in the order in which they were forked
        self.finished: list[Sequence] = []
        self.error: RequestFailed | None = None  # why it could not be computed
        self.reading = reading_of(sampling)
        self.first_token_time: float | None = None
        self.num_preemptions = 0
        # Whether it has had blocks, which it may have lost without a preemption.
        self.was_admitted = False
        # Tokens of the prompt (with an encoder, of its input) that the prefix cache had when the
        # request was first admitted; 0 if it was computed without the cache since.
        self.num_cached_tokens = 0
        # Whether it took blocks from the prefix cache that were not pinned, when it was last
        # admitted.
        self.found_unverified = False
        # Whether nothing is taken from the prefix cache: what was found may have made it fail.
        self.avoids_cache = False
        # Maintained by the scheduler and its policy.
        self.number = 0  # order of arrival
        self.order: tuple[float, ...] = ()  # fixed place in the queues; lower comes first
        self.level = 0.0  # priority policy: urgency with which it was admitted
        self.num_passes = 0  # later requests admitted while this one did not fit
        # When it last did not fit: the free blocks, and what the cache lacked of its prefix.
        self.refused_at: tuple[int, PrefixNode | None] | None = None
        self.catching_up = False  # several sequences are being recomputed
        # Blocks that it held when it was last swapped out. It may need fewer when it comes back, as
        # samples may have ended since.
        self.num_swapped_blocks = 0
        # Steps in flight whose results decide which sequences live on. Until they are known, the
        # request can neither continue nor be preempted.
        self.num_undecided = 0

    @property
    def num_input_tokens(self) -> int:
        """Tokens to compute before it can draw one: of the encoder's input and of the prompt."""
        return len(self.encoder_token_ids) + self.num_prompt_tokens

    @property
    def input_token_ids(self) -> list[int]:
        """What its client calls the prompt: the encoder's input, if there is one."""
        return list(self.encoder_token_ids) or self.prompt_token_ids

    @property
    def is_pending(self) -> bool:
        """Whether steps in flight will still append tokens to it."""
        return any(seq.num_pending for seq in self.sequences)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {len(self.sequences)} live)"


# -------------------------------------------------------------------- decoding methods


class SequenceVerbs(Protocol):
    """What a decoding method can do to sequences (paper section 5.2)."""

    def fork(self, parent: Sequence, sample_index: int) -> Sequence:
        """A new sequence with the parent's tokens, sharing all of its blocks."""

    def append(self, seqs: Seq[Sequence], token_ids: Seq[int]) -> None:
        """Add one token to each sequence: a token that the worker has not appended itself."""

    def free(self, seq: Sequence) -> None:
        """Drop a sequence; nothing of it is returned to the client."""

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence and give its blocks back; its tokens are part of the result."""

    def pin(self, seq: Sequence, name: str) -> None:
        """End a sequence and keep its blocks as the pinned prefix `name`."""


# A method is one of three kinds, by what it wants once all tokens of a sequence are computed.


class Drawing(Protocol):
    """Wants a token, sampled by the worker."""

    wants: Literal["token"]
    max_sequences: int  # that run at once, at most
    max_length: int  # tokens, prompt included
    num_draws: int  # tokens sampled at the end of the prompt

    def accept(self, seq: Sequence, token_id: int) -> str | None:
        """Append a sampled token; returns the reason if it ends the sequence."""

    def start(self, seq: Sequence, token_ids: Seq[int], verbs: SequenceVerbs) -> None:
        """Take the first tokens, `num_draws` > 1 of them, sampled at the end of the prompt."""


class Continuations(NamedTuple):
    """The best ways to extend a request's sequences by one token, best first."""

    logprobs: list[float]  # of the sequence and the token together
    parents: list[int]  # indices into the request's sequences
    token_ids: list[int]


class Searching(Protocol):
    """Wants the best candidates for the next token of its sequences."""

    wants: Literal["candidates"]
    max_sequences: int
    max_length: int
    num_candidates: int  # considered in a step, of all sequences

    def goes_on(self, request: Request, token_ids: Seq[int], logprob: float) -> bool:
        """Whether this step neither ends a sequence nor the search, as is true of most steps.

        `token_ids` are the tokens of the best continuations, and `logprob` is the log-probability
        of the first. If True, the best `max_sequences` continuations live on and `advance` is not
        called."""

    def advance(
        self, request: Request, best: Continuations, verbs: SequenceVerbs
    ) -> Continuations | None:
        """Choose the continuations that live on among the `num_candidates` best ones. The caller
        forks, appends and frees sequences accordingly. None if the request has ended."""


class Computing(Protocol):
    """Wants no token, only the KV of its sequence."""

    wants: Literal["kv"]
    max_sequences: int
    max_length: int
    keeps_blocks: bool  # whether its blocks stay taken when it has ended

    def computed(self, seq: Sequence, verbs: SequenceVerbs) -> None:
        """All tokens have been computed."""


DecodingMethod = Drawing | Searching | Computing
