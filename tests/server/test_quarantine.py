"""Which requests are quarantined, released and given up when engine processes die."""

from __future__ import annotations

from octavo.core.step import SamplingSpec
from octavo.engine.output_stream import Sample
from octavo.engine.validation import PreparedRequest
from octavo.sampling_params import BeamSearchParams
from octavo.server.engine_process.journal import Journal, OpenRequest
from octavo.server.engine_process.process import Death
from octavo.server.engine_process.quarantine import MAX_KILLS_ALONE, Quarantine

CRASH = Death("it crashed", is_kill_from_outside=False)
KILL = Death("it was killed", is_kill_from_outside=True)


class Processes:
    """Requests "a", "b", ... that run in one engine process after another."""

    def __init__(self, names: str, beams: str = "") -> None:
        self.journal = Journal()
        self.quarantine = Quarantine(self.journal)
        for name in names:
            beam = BeamSearchParams(2) if name in beams else None
            request = PreparedRequest([1], SamplingSpec(), 100, 1, 0, (), (), beam)
            samples = [] if beam else [Sample(0)]
            self.journal.requests[name] = OpenRequest(name, request, None, 0.0, samples)

    def run(self, names: str, advancing: str = "") -> None:
        for name in names:
            entry = self.journal.requests[name]
            entry.replica = 0
            entry.is_accepted = entry.is_running = True
            if name in advancing and entry.samples:
                entry.samples[0].token_ids.append(7)
            entry.num_steps = 5 if name in advancing else 1

    def die(self, death: Death) -> str | None:
        entries = [each for each in self.journal.requests.values() if each.replica == 0]
        killer = self.quarantine.note_death(0, death, entries)
        if killer is None:
            return None
        del self.journal.requests[killer.request_id]
        return killer.request_id

    @property
    def first(self) -> str | None:
        return None if self.quarantine.first is None else self.quarantine.first.request_id


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
    processes.run("ac")
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
        processes.journal.requests["b"].num_steps = (
            2 + processes.journal.requests["b"].position_at_death
        )
        assert processes.die(CRASH) is None
        assert processes.first is None


def test_those_that_wait_are_not_quarantined() -> None:
    processes = Processes("ab")
    waiting = processes.journal.requests["b"]
    for _ in range(3):
        processes.run("a", advancing="a")
        waiting.replica, waiting.is_accepted = 0, True
        assert processes.die(CRASH) is None
    assert not waiting.is_quarantined


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
