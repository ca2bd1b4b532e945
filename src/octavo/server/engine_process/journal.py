"""Open requests as the API process knows them: enough to start each one again where it stood.

Requests belong to the API process. A replica computes them for a while; when its process dies or
drains, another one goes on with them.
"""

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
    num_replays: int = 0  # how often it was taken from one engine process to be sent to another
    # The replica that has its prompt cached, if that is known better than by routing.
    home: int | None = None
    accepted: asyncio.Future[None] | None = None  # done when an engine has accepted it
    # Of the engine process that has it now:
    replica: int | None = None  # which replica's; None: it has not been sent to any
    ticket: int = -1  # of the message that sent it
    load: int = 0  # tokens, as counted by the router
    is_accepted: bool = False
    is_running: bool = False  # it has been admitted
    num_steps: int = 0  # since then
    # Engine processes in a row that died while it was running, without its getting any further.
    num_deaths: int = 0
    num_deaths_alone: int = 0  # of these, while no other quarantined request was running
    position_at_death: int = -1
    has_crashed: bool = False  # the last of them was not killed from outside
    last_death: int | None = None  # the replica whose process it was

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.input_token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def input_token_ids(self) -> list[int]:
        return self.request.input_token_ids

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
    def is_suspect(self) -> bool:
        """Whether the last engine process that ran it crashed, and it has got no further since."""
        return self.has_crashed and self.position <= self.position_at_death

    @property
    def is_quarantined(self) -> bool:
        """Whether it may be what kills engine processes."""
        return self.num_deaths >= 2

    @property
    def is_movable(self) -> bool:
        """Whether another replica may have it instead at no cost: it waits where it is, and nothing
        holds it there. One that is not accepted yet may be what its process is about to die of."""
        waits = self.is_accepted and not self.is_running
        return waits and not self.is_suspect and not self.is_quarantined

    def note_death(self, is_crash: bool) -> None:
        """Its engine process has died. What a process does when it dies in the same place again
        may be this request's doing; if the request has got further, it was something else's."""
        if self.is_running:
            has_advanced = self.position > self.position_at_death
            self.num_deaths = 1 if has_advanced else self.num_deaths + 1
            self.num_deaths_alone = 0 if has_advanced else self.num_deaths_alone
            self.position_at_death = self.position
            self.has_crashed, self.last_death = is_crash, self.replica
        self.withdraw()

    def withdraw(self) -> None:
        """No engine process has it any more, or what one still says of it does not count."""
        self.num_replays += 1
        self.replica, self.load = None, 0
        self.home = None  # what was cached there may be gone
        self.is_accepted = self.is_running = False
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
    computed: asyncio.Future[None]  # done when it is in the caches of all replicas that run
    is_proven: bool = False  # an engine process has computed it
    holders: set[int] = field(default_factory=set)  # replicas that were told to pin it
    computing: set[int] = field(default_factory=set)  # those of them that have not done so yet
    num_deaths: int = 0  # engine processes that died before it was proven
    last_death: int | None = None  # the replica of the last of them


class Journal:
    """Owns what must survive engine processes. Both dictionaries are in order of arrival."""

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
