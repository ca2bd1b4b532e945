"""Delays Ctrl-C until a step has ended."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class InterruptsAfter:
    """A context at whose end KeyboardInterrupt is raised, if SIGINT arrived in it.

    A step that stops halfway would leave scheduler and worker in different states. If the program
    has a handler of its own, that stays in place.
    """

    def __init__(self) -> None:
        self._installed = False
        self._interrupted = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread gets signals
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._installed = True
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._interrupted and error is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
