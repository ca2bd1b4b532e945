"""Which requests can run to their end at all; others are refused before they are queued."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.config import SchedulerConfig
from octavo.core.kv.manager import KVCacheManager
from octavo.core.sequence import Request
from octavo.errors import RequestTooLong


class RequestLimits:
    """Knows the worst case of every request, so that no queued request ever gets stuck.

    Blocks that pinned prefixes hold, or will hold once they are computed, are not available to
    other requests.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, queued: Mapping[str, Request]
    ) -> None:
        """`queued`: all unfinished requests by id, kept up to date by the caller."""
        self._config = config
        self._kv = kv
        self._queued = queued
        self._pinning: list[Request] = []  # requests that pin a prefix; some may have finished

    def worst_case_blocks(self, request: Request) -> int:
        """The most blocks that a request may come to hold."""
        return self._kv.worst_case_blocks(request, self._config.max_num_batched_tokens)

    def num_available_blocks(self) -> int:
        """Blocks that no pinned prefix holds or will hold."""
        coming = sum(self.worst_case_blocks(r) for r in self._pinning if not r.is_finished)
        return self._kv.pool.num_blocks - self._kv.num_pinned_blocks - coming

    def check(self, request: Request, leave: int = 0) -> None:
        """Raises RequestTooLong if a request could never run to its end.

        A request that pins a prefix must also leave enough blocks for each queued request, and at
        least `leave` blocks.
        """
        method = request.method
        if method.max_sequences > self._config.max_num_seqs:
            raise RequestTooLong(
                "beam_width" if method.wants == "candidates" else "n",
                f"{method.max_sequences} sequences exceed max_num_seqs "
                f"({self._config.max_num_seqs})",
            )
        self._check_encoder_input(request)
        needed, available = self.worst_case_blocks(request), self.num_available_blocks()
        if needed > available:
            unpinned = (
                "" if available == self._kv.pool.num_blocks else " that no prefix is pinned in"
            )
            raise RequestTooLong(
                "max_tokens",
                f"{method.max_sequences} sequence(s) of up to {method.max_length} tokens"
                f"{_beside(request)} need {needed} KV blocks of {self._kv.block_size} tokens, but "
                f"the pool has {available}{unpinned}; lower max_tokens, n or the beam width, or "
                "enlarge the KV cache",
            )
        if _keeps_blocks(request):
            self._check_leaves_room(request, available - needed, leave)

    def _check_encoder_input(self, request: Request) -> None:
        """The step that runs the encoder takes its whole input, and at least a token besides."""
        num_tokens, budget = len(request.encoder_token_ids), self._config.max_num_batched_tokens
        besides = 1 if self._config.enable_chunked_prefill else request.method.max_length
        if num_tokens and num_tokens + besides > budget:
            raise RequestTooLong(
                "prompt",
                f"{num_tokens} tokens of encoder input and {besides} of the decoder's exceed the "
                f"{budget} that a step computes (max_num_batched_tokens)",
            )

    def note(self, request: Request) -> None:
        """A checked request has been queued."""
        if _keeps_blocks(request):
            self._pinning = [r for r in self._pinning if not r.is_finished] + [request]

    def _check_leaves_room(self, pin: Request, left: int, leave: int) -> None:
        others = [r for r in self._queued.values() if not _keeps_blocks(r)]
        needed = max([leave, *map(self.worst_case_blocks, others)])
        if left < needed:
            raise RequestTooLong(
                "prefix",
                f"pinning {pin.num_prompt_tokens} tokens would leave {left} KV blocks, but a "
                f"request may need {needed}; enlarge the KV cache or lower max_model_len",
            )


def _keeps_blocks(request: Request) -> bool:
    return request.method.wants == "kv" and request.method.keeps_blocks


def _beside(request: Request) -> str:
    num_tokens = len(request.encoder_token_ids)
    return f" beside an encoder input of {num_tokens} tokens" if num_tokens else ""
