"""Which requests can run to their end at all; others are refused before they are queued."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

from octavo.config import SchedulerConfig
from octavo.core.kv.manager import KVCacheManager
from octavo.core.sequence import Request
from octavo.errors import RequestTooLong


class RequestLimits:
    """Knows the worst case of every request, so that no queued request ever gets stuck.

    Blocks that pinned prefixes hold, or will hold once they are computed, are not available to
    other requests.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._kv = kv
        self._worst_cases: dict[Request, int] = {}  # in blocks, of all unfinished requests
        self._num_coming = 0  # the sum of those that pin a prefix
        # Those that pin nothing: how many have which worst case, and the different ones, sorted.
        self._counts: Counter[int] = Counter()
        self._sizes: list[int] = []

    def worst_case_blocks(self, request: Request) -> int:
        """The most blocks that a request may come to hold."""
        return self._kv.worst_case_blocks(request, self._config.max_num_batched_tokens)

    @property
    def worst_cases(self) -> dict[Request, int]:
        """The worst cases of all unfinished requests; for inspection."""
        return dict(self._worst_cases)

    @property
    def largest(self) -> int:
        """The largest worst case of the unfinished requests that pin nothing."""
        return self._sizes[-1] if self._sizes else 0

    def num_available_blocks(self) -> int:
        """Blocks that no pinned prefix holds or will hold."""
        return self._kv.pool.num_blocks - self._kv.num_pinned_blocks - self._num_coming

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
        if keeps_blocks(request):
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
        needed = self._worst_cases[request] = self.worst_case_blocks(request)
        if keeps_blocks(request):
            self._num_coming += needed
            return
        if not self._counts[needed]:
            insort(self._sizes, needed)
        self._counts[needed] += 1

    def forget(self, request: Request) -> None:
        """A request that was queued has ended; nothing happens if that is known."""
        needed = self._worst_cases.pop(request, None)
        if needed is None:
            return
        if keeps_blocks(request):
            self._num_coming -= needed
            return
        self._counts[needed] -= 1
        if not self._counts[needed]:
            del self._counts[needed]
            del self._sizes[bisect_left(self._sizes, needed)]

    def _check_leaves_room(self, pin: Request, left: int, leave: int) -> None:
        needed = max(leave, self.largest)
        if left < needed:
            raise RequestTooLong(
                "prefix",
                f"pinning {pin.num_prompt_tokens} tokens would leave {left} KV blocks, but a "
                f"request may need {needed}; enlarge the KV cache or lower max_model_len",
            )


def keeps_blocks(request: Request) -> bool:
    """Whether a request pins the prefix that it computes."""
    return request.method.wants == "kv" and request.method.keeps_blocks


def _beside(request: Request) -> str:
    num_tokens = len(request.encoder_token_ids)
    return f" beside an encoder input of {num_tokens} tokens" if num_tokens else ""
