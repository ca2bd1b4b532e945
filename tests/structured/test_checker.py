"""Grammars are checked in processes that may die or hang."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

import model_zoo
from octavo.core.step import Grammar
from octavo.errors import InvalidRequest, Unavailable
from octavo.structured import checker
from octavo.structured.checker import GrammarChecker, verdict_on
from octavo.structured.guidance import Guidance

# The library takes a minute for it.
SLOW = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}', "where")


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarChecker]:
    found = GrammarChecker(model_zoo.model_directory("llama3"), model_zoo.VOCAB_SIZE, [1])
    yield found
    found.close()


def test_verdicts_are_those_of_the_library_and_are_remembered(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Grammar("regex", "a|ü\n"), Grammar("regex", "((", "structured_outputs.regex")
    grammars.check(good)
    with pytest.raises(InvalidRequest, match=r"structured_outputs.regex: .*unclosed group"):
        grammars.check(bad)
    with pytest.raises(InvalidRequest, match=r"structured\.begun: the grammar cannot go on"):
        grammars.check(good, [5])
    monkeypatch.setattr(checker, "_read", None)  # nobody is asked again
    grammars.check(good)
    with pytest.raises(InvalidRequest, match="unclosed group"):
        grammars.check(bad)


def test_what_is_remembered_of_a_verdict_is_small(grammars: GrammarChecker) -> None:
    name = "a" * 50_000
    names = {"properties": {name: {"type": "object", "minProperties": 1}}}
    with pytest.raises(InvalidRequest, match="structured") as caught:
        grammars.check(Grammar("json_schema", json.dumps(names), "structured"), [5] * 50_000)
    assert len(str(caught.value)) < 2_000
    kept = [(key, *verdict) for key, verdict in grammars._verdicts.items()]
    assert max(len(each) for parts in kept for each in parts) < 2_000
    assert all(isinstance(key, bytes) for key, _, _ in kept)


def test_what_takes_too_long_or_kills_the_process_is_refused(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.check(Grammar("regex", "b"))  # the process has started
    monkeypatch.setattr(checker, "MAX_WAIT_SECONDS", 0.5)
    with pytest.raises(InvalidRequest, match=r"where: it cannot be compiled within 0.5 s"):
        grammars.check(SLOW)
    monkeypatch.undo()
    grammars.check(Grammar("regex", "c"))  # by another process
    # A process that is ready, and ends with whatever it is asked.
    script = "print('\"ready\"', flush=True); input()"
    grammars._idle[0].kill()
    monkeypatch.setattr(grammars, "_command", [sys.executable, "-c", script])
    with pytest.raises(InvalidRequest, match="the library breaks down on it"):
        grammars.check(Grammar("regex", "d"))
    monkeypatch.undo()
    grammars.check(Grammar("regex", "e"))


def test_a_process_that_was_killed_is_not_the_fault_of_the_next_grammar(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.check(Grammar("regex", "f"))
    [process] = grammars._idle
    process.kill()
    process.wait()
    grammars.check(Grammar("regex", "g"))
    [process] = grammars._idle
    process.kill()
    process.wait()
    monkeypatch.setattr(grammars, "_command", [sys.executable, "-c", ""])
    with pytest.raises(Unavailable, match="the process that compiles grammars did not start"):
        grammars.check(Grammar("regex", "h"))
    monkeypatch.undo()
    grammars.check(Grammar("regex", "h"))  # which was not remembered


def test_what_takes_more_cpu_time_than_others_may_wait_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Guidance(model_zoo.model_directory("llama3"), model_zoo.VOCAB_SIZE, [1])
    grammar = Grammar("regex", "a")
    monkeypatch.setattr(checker, "MAX_SECONDS", 1e9)
    assert verdict_on(library, grammar) == ("", "")
    monkeypatch.setattr(checker, "MAX_SECONDS", 0.0)
    assert "s to compile, more than 0.0 s" in verdict_on(library, Grammar("regex", "b"))[1]


def test_no_process_outlives_the_checker() -> None:
    found = GrammarChecker(model_zoo.model_directory("llama3"), model_zoo.VOCAB_SIZE, [1])
    found.check(Grammar("regex", "a"))
    [process] = found._idle
    found.close()
    found.close()
    assert process.poll() is not None
