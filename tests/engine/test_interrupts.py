"""When Ctrl-C takes effect."""

from __future__ import annotations

import signal
import threading

import pytest

from octavo.engine.interrupts import InterruptsAfter


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("in_inner", [True, False])
def test_the_end_of_an_inner_context_raises_what_came_in_it_or_before(in_inner: bool) -> None:
    done = []

    def work() -> None:
        with InterruptsAfter():
            with InterruptsAfter():
                done.append("first")
            if not in_inner:
                interrupt()
            with InterruptsAfter():
                if in_inner:
                    interrupt()
                done.append("whole")
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert done == ["first", "whole"]
    with InterruptsAfter(), InterruptsAfter():
        pass  # nothing is left of what was raised


def test_the_end_of_a_context_raises_what_came_in_it() -> None:
    done = []

    def work() -> None:
        with InterruptsAfter():
            interrupt()
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]


def test_errors_come_before_interrupts() -> None:
    def work() -> None:
        with InterruptsAfter(), InterruptsAfter():
            interrupt()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_s_own_stays_in_place() -> None:
    noted = []
    before = signal.signal(signal.SIGINT, lambda *_: noted.append("own"))
    try:
        with InterruptsAfter(), InterruptsAfter():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == ["own"]


def test_other_threads_have_nothing_to_do_with_it() -> None:
    entered = []

    def other() -> None:
        with InterruptsAfter():
            entered.append("other")

    def work() -> None:
        with InterruptsAfter():
            interrupt()
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            entered.append("main")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert entered == ["other", "main"]
