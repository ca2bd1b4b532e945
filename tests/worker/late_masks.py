"""Masks of llguidance that are late when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from octavo.core.step import Grammar
from octavo.engine.engine import Engine
from octavo.structured.constraint import Company, Filled, Filling
from octavo.structured.guidance import (
    NUM_TRIED,
    GuidanceConstraint,
    GuidanceFilling,
    constraint_library,
)
from octavo.worker import model_runner
from octavo.worker.row_masks import PendingMasks


class GatedConstraint:
    """See TokenConstraint: llguidance's, whose masks may be late."""

    def __init__(self, inner: GuidanceConstraint, is_slow: bool) -> None:
        self.inner = inner
        self.is_slow = is_slow
        self.company: Company = "none" if is_slow else "quick"
        self.accept, self.rollback = inner.accept, inner.rollback

    def fork(self) -> GatedConstraint:
        return GatedConstraint(self.inner.fork(), self.is_slow)


class GatedFilling(NamedTuple):
    """See Filling."""

    computed: Future[None]
    inner: Filling

    def note_late(self) -> None:
        pass

    def result(self) -> Filled:
        assert self.computed.done(), "a late mask is waited for"
        self.computed.result()
        return self.inner.result()


class Gate:
    """Says when late masks are there: `delay` says after how many steps, or never. All are there
    when an engine has nothing else to do than wait."""

    def __init__(self, is_late: Callable[[Grammar], bool], delay: Callable[[], float]) -> None:
        self._is_late = is_late
        self._delay = delay
        self._step = 0
        self._is_open = False
        self._held: list[tuple[float, Future[None]]] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Engines that are made now have masks that may be late."""
        wait = PendingMasks.wait_for_one

        def wait_for_one(masks: PendingMasks) -> None:
            self._is_open = True
            self.step()
            wait(masks)
            self._is_open = False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_runner, "constraint_library", self._library)
            patch.setattr(PendingMasks, "wait_for_one", wait_for_one)
            yield

    def attach(self, engine: Engine) -> None:
        """Count the engine's steps."""
        engine.observers.append(lambda *_: self.step())

    def step(self) -> None:
        """A step is over."""
        self._step += 1
        for due, computed in self._held:
            if (self._is_open or due <= self._step) and not computed.done():
                computed.set_result(None)

    def hold(self) -> Future[None]:
        """What is done when the next late mask is there."""
        computed, due = Future[None](), self._step + self._delay()
        self._held.append((due, computed))
        if self._is_open or due <= self._step:
            computed.set_result(None)
        return computed

    def _library(self, *args: Any) -> Any:
        gate, inner = self, constraint_library(*args)

        class Library:
            load, shutdown = inner.load, inner.shutdown

            def compile(self, grammar: Grammar) -> GatedConstraint:
                return GatedConstraint(inner.compile(grammar), gate._is_late(grammar))

            def fill(
                self, constraints: list[GatedConstraint], *args: Any
            ) -> GatedFilling | GuidanceFilling:
                for each in constraints:  # the gate alone says what is late
                    each.inner.pace.trial.num_masks = NUM_TRIED
                    each.inner.pace.is_slow = False
                filling = inner.fill([each.inner for each in constraints], *args)
                if constraints[0].is_slow:
                    assert len(constraints) == 1
                    return GatedFilling(gate.hold(), filling)
                return filling

        return Library()
