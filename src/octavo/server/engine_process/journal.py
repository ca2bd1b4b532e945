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
from octavo.server.engine_process.routing import Chain


@dataclass(slots=True, eq=False)
class Assignment:
    """A request at one engine process: from the command that sends it there until the process can
    no longer be computing it, also if it was taken away meanwhile."""

    entry: OpenRequest
    replica: int  # whose process it is
    ticket: int  # of the message that sent it
    load: int  # tokens, as counted by the router
    is_accepted: bool = False
    is_running: bool = False  # it has been admitted
    num_steps: int = 0  # since then
    left_at: int = 0  # the number of the last command that ends it or one of its samples
    last_position: int = -1  # how far the request had come when it was taken away


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request. Times are seconds of `time.monotonic`."""

    request_id: str
    request: PreparedRequest
    prompt: str | None  # its text, if it came as text
    arrival_time: float
    # Its output so far, which its stream writes; empty for beam search.
    samples: list[Sample[bytes]] = field(default_factory=list)
    chain: Chain = ()  # what the router knows its prompt by
    admission: Admitted | None = None  # the first one
    admitted_time: float | None = None
    first_token_time: float | None = None
    num_preemptions: int = 0
    num_replays: int = 0  # how often it was taken from one engine process to be sent to another
    # The replica that has its prompt cached, if that is known better than by routing.
    home: int | None = None
    accepted: asyncio.Future[None] | None = None  # done when an engine has accepted it
    assignment: Assignment | None = None  # the present one; None: it was not sent to any replica
    # This one, and earlier ones of processes that may be computing the request still.
    assignments: set[Assignment] = field(default_factory=set)
    # Engine processes in a row that died while they may have been computing it, without its getting
    # any further.
    num_deaths: int = 0
    num_deaths_alone: int = 0  # of these, of processes that computed nothing else
    position_at_death: int = -1
    has_crashed: bool = False  # the last of them was not killed from outside
    last_death: int | None = None  # the replica whose process it was

    @property
    def replica(self) -> int | None:
        """Which replica has it now, if one does."""
        return None if self.assignment is None else self.assignment.replica

    @property
    def load(self) -> int:
        """The load of its replica by this request in tokens, as the router counts it."""
        return 0 if self.assignment is None else self.assignment.load

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
        return 0 if self.admission is None else self.admission.num_cached_tokens

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Of its prompt and its output so far, all of which go to the engine that has it next."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def position(self) -> int:
        """How far it has come. Beam search, which starts again each time, counts steps."""
        if self.request.beam is None:
            return self.num_output_tokens
        return 0 if self.assignment is None else self.assignment.num_steps

    @property
    def is_suspect(self) -> bool:
        """Whether the last engine process that ran it crashed, and it has got no further since."""
        return self.has_crashed and self.position <= self.position_at_death

    @property
    def is_quarantined(self) -> bool:
        """Whether it may be what kills engine processes."""
        return self.num_deaths >= 2

    @property
    def is_risky(self) -> bool:
        """Whether the process that computes it may die of it."""
        return self.is_suspect or self.is_quarantined

    @property
    def is_movable(self) -> bool:
        """Whether another replica may have it instead at no cost: it waits where it is, and nothing
        holds it there. One that is not accepted yet may be what its process is about to die of."""
        at = self.assignment
        return at is not None and at.is_accepted and not at.is_running and not self.is_risky

    def note_death(self, assignment: Assignment, is_crash: bool) -> None:
        """An engine process has died that may have been computing it. What a process does when it
        dies in the same place again may be this request's doing; if the request has got further,
        it was something else's."""
        position = self.position if assignment is self.assignment else assignment.last_position
        if self.position > position:
            return  # it was taken away before, and has got further elsewhere
        if position > self.position_at_death:
            self.num_deaths = self.num_deaths_alone = 0
            self.position_at_death = position
        self.num_deaths += 1
        self.has_crashed, self.last_death = is_crash, assignment.replica

    def withdraw(self) -> None:
        """No replica has it any more, and it is to go on elsewhere."""
        self.num_replays += 1
        self.assignment = None
        self.home = None  # what was cached there may be gone

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
