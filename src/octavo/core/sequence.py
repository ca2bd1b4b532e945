"""Requests and their sequences: who wants tokens, and how far each chain of tokens has come."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from octavo.core.kv.block_table import BlockTable
from octavo.core.kv.prefix_cache import PrefixNode
from octavo.core.step import SamplingSpec, TokenLogprobs
from octavo.errors import RequestFailed

if TYPE_CHECKING:
    from octavo.core.decoding import DecodingMethod


class Status(Enum):
    """Where a request stands. Only the scheduler's queues change it."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sequence:
    """One chain of tokens, and how many of them have their KV in the cache.

    `num_computed_tokens` counts tokens up to the end of the latest planned step, and
    `num_expected_tokens` the tokens that it will have drawn by then. What remains between the two
    is 1 for a sequence that decodes and more for one whose prompt is being computed: there is no
    other difference.
    """

    __slots__ = (
        "branch_at",
        "cumulative_logprob",
        "finish_reason",
        "leader",
        "logprobs",
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
        self.num_computed_tokens = 0
        self.num_pending = 0  # tokens being drawn by steps that are under way
        self.table: BlockTable | None = None  # None while no block is held
        self.prefix_nodes: list[PrefixNode] = []  # names of the leading full blocks
        self.logprobs: list[TokenLogprobs] = []  # one per output token, if asked for
        self.cumulative_logprob = 0.0
        self.score: float | None = None  # beam search: length-penalised
        self.finish_reason: str | None = None  # "stop", "length", "abort" or "error"
        self.stop_reason: int | str | None = None  # the stop id or string that ended it
        # While a preempted request is recomputed, a sequence without a table waits until
        # `leader` has computed the `branch_at` tokens that both share, and then forks off.
        self.leader: Sequence | None = None
        self.branch_at = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """With those that steps under way will append."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, request={self.request.request_id!r}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens} tokens)"
        )


class Request:
    """One client call. Its live sequences are the paper's sequence group: scheduled together,
    preempted together."""

    __slots__ = (
        "arrival_time",
        "cache_salt",
        "catching_up",
        "error",
        "finished",
        "first_token_time",
        "level",
        "method",
        "num_cached_tokens",
        "num_passes",
        "num_preemptions",
        "num_prompt_tokens",
        "num_undecided",
        "number",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "rank",
        "refused_with_free",
        "request_id",
        "sampling",
        "seed",
        "sequences",
        "status",
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
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.method = method
        self.sampling = sampling
        self.seed = seed
        self.arrival_time = arrival_time
        self.priority = priority  # lower is more urgent
        self.cache_salt = cache_salt
        self.status = Status.WAITING
        self.sequences: list[Sequence] = []  # alive, in the order in which they were forked
        self.finished: list[Sequence] = []
        self.error: RequestFailed | None = None  # what ended it, if it could not be computed
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.first_token_time: float | None = None
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache at first admission
        # Kept by the scheduler, its policy and its admission.
        self.number = 0  # order of arrival
        self.rank: tuple[float, ...] = ()  # lower runs first; constant while the request lives
        self.level = 0.0  # urgency that it was admitted with
        self.num_passes = 0  # later requests admitted while this one did not fit
        self.refused_with_free: int | None = None  # free blocks when it last did not fit
        self.catching_up = False  # several sequences are being recomputed
        # Steps under way whose results decide which sequences live on: until they are in, the
        # request can neither continue nor leave the device.
        self.num_undecided = 0

    @property
    def is_pending(self) -> bool:
        """Whether steps under way will still append to it."""
        return any(seq.num_pending for seq in self.sequences)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {len(self.sequences)} live)"
