"""Who is suspected, tried alone, acquitted and convicted when engine processes die."""

from __future__ import annotations

from octavo.core.step import SamplingSpec
from octavo.engine.output_stream import Sample
from octavo.engine.validation import BeamSpec, PreparedRequest
from octavo.server.engine_process.journal import Journal, OpenRequest
from octavo.server.engine_process.process import Death
from octavo.server.engine_process.quarantine import MAX_KILLS_ALONE, Suspects

CRASH = Death("it crashed", is_kill_from_outside=False)
KILL = Death("it was killed", is_kill_from_outside=True)


class Court:
    """Requests "a", "b", ... that run in one engine process after another."""

    def __init__(self, names: str, beams: str = "") -> None:
        self.journal = Journal()
        self.suspects = Suspects(self.journal)
        for name in names:
            beam = BeamSpec(2, 1.0, False, None) if name in beams else None
            request = PreparedRequest([1], SamplingSpec(), 100, 1, 0, (), (), beam)
            samples = [] if beam else [Sample(0)]
            self.journal.requests[name] = OpenRequest(name, request, None, 0.0, samples)

    def run(self, names: str, advancing: str = "") -> None:
        for name in names:
            entry = self.journal.requests[name]
            entry.is_sent = entry.is_accepted = entry.is_running = True
            if name in advancing and entry.samples:
                entry.samples[0].token_ids.append(7)
            entry.num_steps = 5 if name in advancing else 1

    def die(self, death: Death) -> str | None:
        convicted = self.suspects.note_death(death)
        if convicted is None:
            return None
        del self.journal.requests[convicted.request_id]
        return convicted.request_id

    @property
    def first(self) -> str | None:
        return None if self.suspects.first is None else self.suspects.first.request_id


def test_those_that_do_not_get_on_are_tried_in_order() -> None:
    court = Court("abc")
    court.run("abc")
    assert court.die(CRASH) is None
    assert court.first is None
    court.run("abc", advancing="b")
    assert court.die(CRASH) is None
    assert court.first == "a"
    court.run("a", advancing="a")
    assert court.suspects.acquit()
    assert court.first == "c"
    court.run("ac")
    assert court.die(CRASH) == "c"
    assert court.first is None


def test_a_kill_from_outside_proves_little() -> None:
    court = Court("a")
    court.run("a")
    court.die(KILL)
    for _ in range(MAX_KILLS_ALONE - 1):
        court.run("a")
        assert court.die(KILL) is None
    court.run("a")
    assert court.die(KILL) == "a"


def test_progress_between_two_deaths_is_an_alibi() -> None:
    court = Court("ab", beams="b")
    for _ in range(5):
        court.run("ab", advancing="a")
        court.journal.requests["b"].num_steps = 2 + court.journal.requests["b"].position_at_death
        assert court.die(CRASH) is None
        assert court.first is None


def test_those_that_wait_are_not_suspected() -> None:
    court = Court("ab")
    waiting = court.journal.requests["b"]
    for _ in range(3):
        court.run("a", advancing="a")
        waiting.is_sent = waiting.is_accepted = True
        assert court.die(CRASH) is None
    assert not waiting.is_suspect


def test_who_ends_is_acquitted() -> None:
    court = Court("ab")
    for _ in range(2):
        court.run("ab")
        court.die(CRASH)
    assert court.first == "a"
    assert not court.suspects.acquit()
    del court.journal.requests["a"]
    assert court.suspects.acquit()
    assert court.first == "b"
