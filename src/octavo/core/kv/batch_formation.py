"""When requests may join and leave those that run: a property of how memory is managed."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from octavo.core.sequence import Request, Status


class BatchFormation(Protocol):
    """Belongs to a KV cache manager; the scheduler asks it in every step."""

    def is_open(self, running: Seq[Request]) -> bool:
        """Whether requests may be admitted beside those that run."""

    def prefill_quota(self, quota: int | None) -> int | None:
        """The prompt tokens that newly admitted requests may add to a step, if the scheduling
        policy allows `quota` of them."""

    def leaving(self, ended: Iterable[Request], running: Seq[Request]) -> list[Request]:
        """Those of the requests without live sequences that leave now; the others keep their
        place."""


class ContinuousBatching:
    """Requests join and leave in every step (Orca's iteration-level scheduling)."""

    def is_open(self, running: Seq[Request]) -> bool:
        return True

    def prefill_quota(self, quota: int | None) -> int | None:
        return quota

    def leaving(self, ended: Iterable[Request], running: Seq[Request]) -> list[Request]:
        return list(ended)


class RequestLevelBatching:
    """A batch is formed when nothing runs, from all that fits, and ends as a whole."""

    def is_open(self, running: Seq[Request]) -> bool:
        return not running

    def prefill_quota(self, quota: int | None) -> int | None:
        return None

    def leaving(self, ended: Iterable[Request], running: Seq[Request]) -> list[Request]:
        is_over = not any(request.sequences for request in running)
        outside = [request for request in ended if request.status is not Status.RUNNING]
        return [*outside, *running] if is_over else outside
