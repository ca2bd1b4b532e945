"""Which requests are quarantined, released and given up when engine processes die; and what a
process may have been computing then."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import count

from octavo.core.step import SamplingSpec
from octavo.engine.output_stream import Sample
from octavo.engine.validation import PreparedRequest
from octavo.sampling_params import BeamSearchParams
from octavo.server.engine_process.assignments import Assignments
from octavo.server.engine_process.exchange import Loss
from octavo.server.engine_process.journal import Assignment, Journal, OpenRequest, Pin
from octavo.server.engine_process.process import Death
from octavo.server.engine_process.quarantine import MAX_KILLS_ALONE, Quarantine

CRASH = Death("it crashed", is_kill_from_outside=False)
KILL = Death("it was killed", is_kill_from_outside=True)


class Prompt(str):
    """One that can be seen to be forgotten with its request."""


@dataclass
class Place:
    number: int
    load: int = 0
    is_serving: bool = True
    is_coming: bool = False
    is_vacant: bool = True


class Processes:
    """Requests "a", "b", ... that run in one engine process after another, of replica 0."""

    def __init__(self, names: str, beams: str = "", num_replicas: int = 1) -> None:
        self.journal = Journal()
        self.places = [Place(number) for number in range(num_replicas)]
        self.quarantine = Quarantine(self.journal, self.places)
        self.tables = [Assignments() for _ in self.places]
        self.tickets = count()
        for name in names:
            beam = BeamSearchParams(2) if name in beams else None
            request = PreparedRequest([1], SamplingSpec(), 100, 1, 0, (), (), beam)
            samples: list[Sample[bytes]] = [] if beam else [Sample(0)]
            self.journal.requests[name] = OpenRequest(name, request, None, 0.0, samples)

    def send(self, name: str, replica: int = 0) -> Assignment:
        entry = self.journal.requests[name]
        entry.assignment = Assignment(entry, replica, next(self.tickets), 1)
        self.tables[replica].begin(entry.assignment)
        return entry.assignment

    def accept(self, name: str) -> Assignment:
        at = self.journal.requests[name].assignment
        assert at is not None
        assert self.tables[at.replica].answer(at.ticket, is_accepted=True) is at
        return at

    def run(self, names: str, advancing: str = "", replica: int = 0) -> None:
        for name in names:
            self.send(name, replica)
            at = self.accept(name)
            assert self.tables[replica].admit(name) is at
            if name in advancing and at.entry.samples:
                at.entry.samples[0].token_ids.append(7)
            at.num_steps = 5 if name in advancing else 1

    def take(self, name: str, num_commands: int) -> None:
        """A request is taken from its replica by a command of this number."""
        entry = self.journal.requests[name]
        at = entry.assignment
        assert at is not None
        at.left_at = num_commands
        self.tables[at.replica].leave(at)
        entry.withdraw()

    def die(self, death: Death, replica: int = 0, pins: tuple[Pin, ...] = ()) -> str | None:
        table = self.tables[replica]
        entries = [each for each in self.journal.requests.values() if each.replica == replica]
        loss = Loss(entries, [*pins], table.at_risk())
        table.clear()
        killer = self.quarantine.note_death(replica, death, loss)
        for entry in entries:
            entry.withdraw()
        if killer is None:
            return None
        del self.journal.requests[killer.request_id]
        return killer.request_id

    @property
    def first(self) -> str | None:
        return None if self.quarantine.first is None else self.quarantine.first.request_id

    def allowed(self, name: str) -> list[int]:
        self.quarantine.in_the_way()
        return self.quarantine.allowed(self.journal.requests[name])


def test_those_that_do_not_get_on_run_alone_in_order() -> None:
    processes = Processes("abc")
    processes.run("abc")
    assert processes.die(CRASH) is None
    assert processes.first is None
    processes.run("abc", advancing="b")
    assert processes.die(CRASH) is None
    assert processes.first == "a"
    processes.run("a", advancing="a")
    assert processes.quarantine.release()
    assert processes.first == "c"
    assert processes.quarantine.in_the_way() == [processes.journal.requests["a"]]
    processes.take("a", num_commands=1)
    processes.tables[0].acknowledge(1)
    processes.run("c")
    assert processes.die(CRASH) == "c"
    assert processes.first is None


def test_a_kill_from_outside_proves_little() -> None:
    processes = Processes("a")
    processes.run("a")
    processes.die(KILL)
    for _ in range(MAX_KILLS_ALONE - 1):
        processes.run("a")
        assert processes.die(KILL) is None
    processes.run("a")
    assert processes.die(KILL) == "a"


def test_progress_between_two_deaths_avoids_quarantine() -> None:
    processes = Processes("ab", beams="b")
    for _ in range(5):
        processes.run("ab", advancing="a")
        search = processes.journal.requests["b"]
        assert search.assignment is not None
        search.assignment.num_steps = 2 + search.position_at_death
        assert processes.die(CRASH) is None
        assert processes.first is None


def test_those_that_wait_are_not_quarantined() -> None:
    processes = Processes("ab")
    for _ in range(3):
        processes.run("a", advancing="a")
        processes.send("b")
        processes.accept("b")
        assert processes.die(CRASH) is None
    assert not processes.journal.requests["b"].num_deaths


def test_a_request_that_ends_is_released() -> None:
    processes = Processes("ab")
    for _ in range(2):
        processes.run("ab")
        processes.die(CRASH)
    assert processes.first == "a"
    assert not processes.quarantine.release()
    del processes.journal.requests["a"]
    assert processes.quarantine.release()
    assert processes.first == "b"


def test_requests_that_have_ended_are_forgotten() -> None:
    """Also if no process dies again; but not before none can be computing them."""
    processes = Processes("ab")
    processes.run("ab")
    processes.die(CRASH)
    processes.run("a")
    processes.take("a", num_commands=1)
    kept = {}
    for name, entry in processes.journal.requests.items():
        entry.prompt = Prompt(name)
        kept[name] = weakref.ref(entry.prompt)
    del entry
    processes.journal.requests.clear()
    processes.quarantine.release()
    assert kept["a"]() is not None
    assert kept["b"]() is None
    processes.tables[0].acknowledge(1)
    processes.quarantine.release()
    assert kept["a"]() is None


def test_only_what_ran_alone_is_given_up() -> None:
    """Two that die together are tried one after the other, whatever else the process had."""
    processes = Processes("ab")
    for _ in range(4):
        processes.run("ab")
        assert processes.die(CRASH) is None
    pin = Pin("p", [1], "", computed=None)  # type: ignore[arg-type]
    processes.run("a")
    assert processes.die(CRASH, pins=(pin,)) is None
    pin.is_proven = True
    processes.run("a")
    assert processes.die(CRASH, pins=(pin,)) == "a"


def test_a_request_that_was_taken_away_is_at_risk_until_that_is_acknowledged() -> None:
    for acknowledged, expected in ((4, {"a", "b"}), (5, {"b"})):
        processes = Processes("ab", num_replicas=2)
        processes.run("ab")
        processes.take("a", num_commands=5)
        processes.tables[0].acknowledge(acknowledged)
        assert {each.request_id for each in processes.tables[0].at_risk()} == expected
        processes.run("a", replica=1)
        processes.die(CRASH)
        suspects = {
            each.request_id for each in processes.journal.requests.values() if each.is_risky
        }
        assert suspects == expected


def test_what_was_admitted_or_refused_after_it_had_left() -> None:
    processes = Processes("abc")
    [table] = processes.tables
    left = processes.send("a")
    assert set(table.at_risk()) == {left.entry}, "the process may be accepting it"
    processes.take("a", num_commands=2)
    processes.send("b")
    assert set(table.at_risk()) == {left.entry}
    table.answer(left.ticket, is_accepted=True)
    assert {each.request_id for each in table.at_risk()} == {"b"}
    assert table.admit("a") is left
    assert {each.request_id for each in table.at_risk()} == {"a", "b"}
    again = processes.send("a")
    table.acknowledge(2)
    assert {each.request_id for each in table.at_risk()} == {"b"}
    processes.accept("b")
    table.answer(again.ticket, is_accepted=False)
    assert table.at_risk() == {}
    assert left.entry.assignments == set()
    assert not table.is_empty, "one waits"
    table.clear()
    assert table.is_empty


def test_an_end_in_a_step_counts_once_the_next_step_is_done_that_was_begun_before() -> None:
    processes = Processes("a")
    [table] = processes.tables
    for is_computing in (False, True):
        processes.run("a")
        table.end(["a"], is_computing)
        assert bool(table.at_risk()) == is_computing
        assert table.is_empty != is_computing
        table.end([], is_computing=False)
        assert table.is_empty
        assert table.admit("a") is None


def test_a_request_that_got_further_elsewhere_is_no_suspect() -> None:
    processes = Processes("ab", num_replicas=2)
    processes.run("ab")
    for name in "ab":
        processes.take(name, num_commands=9)
    processes.run("ab", advancing="b", replica=1)
    assert processes.die(CRASH) is None
    entries = processes.journal.requests
    assert (entries["a"].num_deaths, entries["b"].num_deaths) == (1, 0)


def test_the_first_one_waits_until_nothing_else_is_at_risk() -> None:
    processes = Processes("abc", num_replicas=2)
    for _ in range(2):
        processes.run("a")
        processes.die(KILL)
    processes.run("bc", replica=1)
    first, second = processes.places
    assert processes.first == "a"
    first.is_coming, first.is_serving, second.is_vacant = True, False, False
    assert processes.allowed("a") == [], "the other one may not be cleared"
    first.is_coming, first.is_serving = False, True
    assert processes.allowed("a") == [0]
    assert processes.allowed("c") == [1]
    processes.die(CRASH, replica=1)
    processes.run("b", replica=1)
    assert processes.journal.requests["b"].is_suspect
    assert processes.allowed("a") == []
    processes.take("b", num_commands=3)
    assert processes.allowed("a") == []
    processes.tables[1].acknowledge(3)
    assert processes.allowed("a") == [0]
    assert processes.allowed("b") == []
