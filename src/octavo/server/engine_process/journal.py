"""Open requests as the API process knows them: enough to start each one again where it stood."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from octavo.engine.events import Admitted
from octavo.engine.output_stream import Sample
from octavo.engine.validation import PreparedRequest
from octavo.server.engine_process import messages as m


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request. Times are seconds of `time.monotonic`."""

    request_id: str
    request: PreparedRequest
    prompt: str | None  # its text, if it came as text
    arrival_time: float
    # Its output so far, which its stream writes; empty for beam search.
    samples: list[Sample[bytes]] = field(default_factory=list)
    admission: Admitted | None = None  # the first one
    admitted_time: float | None = None
    first_token_time: float | None = None
    num_preemptions: int = 0
    num_replays: int = 0  # engine processes that died while it was open
    # In the engine process that runs now:
    is_sent: bool = False
    is_accepted: bool = False
    is_running: bool = False  # it has been admitted
    num_steps: int = 0  # since then
    # Engine processes in a row that died while it was running, without its getting any further.
    num_deaths: int = 0
    num_deaths_alone: int = 0  # of these, while no other quarantined request was running
    position_at_death: int = -1

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt found in the prefix cache; known before the first token is."""
        return 0 if self.admission is None else self.admission.num_hit_tokens

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def position(self) -> int:
        """How far it has come. Beam search, which starts again each time, counts steps."""
        return self.num_steps if self.request.beam is not None else self.num_output_tokens

    @property
    def is_quarantined(self) -> bool:
        """Whether it may be what kills engine processes."""
        return self.num_deaths >= 2

    def note_death(self) -> None:
        """The engine process has died. What a process does when it dies in the same place again
        may be this request's doing; if the request has got further, it was something else's."""
        if self.is_running:
            has_advanced = self.position > self.position_at_death
            self.num_deaths = 1 if has_advanced else self.num_deaths + 1
            self.num_deaths_alone = 0 if has_advanced else self.num_deaths_alone
            self.position_at_death = self.position
        if self.is_sent:
            self.num_replays += 1
        self.is_sent = self.is_accepted = self.is_running = False
        self.num_steps = 0

    def add_message(self, ticket: int) -> m.Add:
        """What makes an engine begin with the request, or go on with it."""
        request, samples = self.request, []
        if any(sample.token_ids for sample in self.samples):
            request = request.without_prompt_logprobs()  # they have come before the first token
            samples = [
                m.ResumedSample(sample.index, sample.token_ids)
                for sample in self.samples
                if sample.finish_reason is None
            ]
        return m.Add(ticket, self.request_id, request, self.arrival_time, samples)


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that is to stay in the cache."""

    name: str
    token_ids: list[int]
    cache_salt: str
    computed: asyncio.Future[None]  # done when it is in the cache for the first time
    num_deaths: int = 0  # engine processes that died before that


class Journal:
    """Owns what must survive the engine process. Both dictionaries are in order of arrival."""

    def __init__(self) -> None:
        self.requests: dict[str, OpenRequest] = {}
        self.pins: dict[str, Pin] = {}
        self._waiting: set[OpenRequest] = set()  # open requests that have not run yet
        self._num_waiting_of: Counter[str] = Counter()  # the same by tenant

    def add(self, entry: OpenRequest) -> None:
        self.requests[entry.request_id] = entry
        self._waiting.add(entry)
        self._num_waiting_of[entry.request.tenant] += 1

    def remove(self, entry: OpenRequest) -> None:
        del self.requests[entry.request_id]
        self.note_start(entry)

    def note_start(self, entry: OpenRequest) -> None:
        """A request waits no longer: it runs, or is over."""
        if entry not in self._waiting:
            return
        self._waiting.remove(entry)
        tenant = entry.request.tenant
        self._num_waiting_of[tenant] -= 1
        if not self._num_waiting_of[tenant]:
            del self._num_waiting_of[tenant]

    @property
    def num_waiting(self) -> int:
        """Open requests that have not run yet."""
        return len(self._waiting)

    def is_below_share(self, tenant: str, limit: int) -> bool:
        """Whether a tenant has fewer waiting requests than `limit` divided by the number of tenants
        that have any, this one included."""
        own = self._num_waiting_of[tenant]
        return own < limit // (len(self._num_waiting_of) + (own == 0))
