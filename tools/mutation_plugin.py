"""A pytest plugin for `make mutants`: bounds what a mutant may take, and lets it run at full speed.

mutmut loads it in the process of each mutant, which has been forked for it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from types import FrameType, FunctionType, ModuleType

import pytest

MAX_CPU_SECONDS = 20  # of one test; the longest takes less than 3
MAX_MEMORY = 4 << 30  # bytes of address space; the tests take less than a quarter
TIMEOUT = 36  # the exit status by which mutmut knows a mutant that was stopped


def pytest_configure() -> None:
    """Any example kills a mutant: do not look for the smallest one."""
    from hypothesis import Phase, settings  # not before pytest has prepared to rewrite it

    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")


def pytest_collection_finish() -> None:
    if "__mutmut_" in os.environ.get("MUTANT_UNDER_TEST", ""):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, hard))
        signal.signal(signal.SIGPROF, _stop)
        _remove_trampolines(os.environ["MUTANT_UNDER_TEST"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    if "__mutmut_" not in os.environ.get("MUTANT_UNDER_TEST", ""):
        return (yield)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(signum: int, frame: FrameType | None) -> None:
    os._exit(TIMEOUT)


def _remove_trampolines(mutant: str) -> None:
    """Put mutmut's choice in the place of the function that chooses at each call.

    The process has one mutant for life, and the core's functions are so short that choosing takes
    twice as long as they do.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("octavo.core."):
            for table_name, functions in list(vars(module).items()):
                if table_name.startswith("mutants_x"):
                    _settle(module, functions, mutant)


def _settle(module: ModuleType, functions: dict[str, FunctionType], mutant: str) -> None:
    original = functions["_mutmut_orig"]
    owner_name, _, mangled = original.__qualname__.rpartition(".")
    name = mangled.removesuffix("__mutmut_orig").rpartition("ǁ")[2]
    owner = vars(module)[owner_name] if owner_name else module
    name = name if owner_name else name.removeprefix("x_")
    if type(vars(owner)[name]) is FunctionType:  # else it is a static or a class method
        prefix = module.__name__ + "."
        chosen = functions.get(mutant.removeprefix(prefix)) if mutant.startswith(prefix) else None
        setattr(owner, name, chosen or original)
