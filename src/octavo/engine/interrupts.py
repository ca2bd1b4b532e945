"""Delays Ctrl-C until a step has ended."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import ClassVar


class InterruptsAfter:
    """A context at whose end KeyboardInterrupt is raised, if SIGINT arrived in it.

    A step that stops halfway would leave scheduler and worker in different states. If the program
    has a handler of its own, that stays in place.

    Contexts inside of another one raise at their ends what arrived since that one began, and leave
    the handler alone: to set one costs some ten microseconds, which are a part of short steps.
    """

    _outermost: ClassVar[InterruptsAfter | None] = None  # of the main thread

    def __init__(self) -> None:
        self._installed = False
        self._interrupted = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread gets signals
        if InterruptsAfter._outermost is not None:
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._installed = True
            InterruptsAfter._outermost = self
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        noted = self
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            InterruptsAfter._outermost = None
        elif threading.current_thread() is threading.main_thread():
            noted = InterruptsAfter._outermost or self
        if noted._interrupted and error is None:
            noted._interrupted = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
