"""Compiling many kernels at once, before they are launched for the first time.

Triton compiles a kernel when it is launched with other constants than before, one after the other.
An engine has some hundred of them, which take a minute. Most of that is outside the interpreter's
lock, so that several threads compile as many kernels in a fraction of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

from triton.runtime import JITFunction

_MAX_THREADS = 8  # that compile; part of it holds the interpreter's lock
_one_at_a_time = Lock()  # Triton's methods are replaced for the whole process


def num_threads() -> int:
    """How many threads compile kernels."""
    return min(_MAX_THREADS, os.cpu_count() or 1)


@contextmanager
def compiled_together() -> Iterator[None]:
    """Compile the kernels that this thread launches inside, and launch none of them. Other threads,
    which may serve another engine, launch theirs.

    What they would have computed is missing: memory keeps what it held before. So this is for work
    whose results have no meaning, in which no index of torch's depends on them. A kernel that
    cannot be compiled is left to its first launch outside, which says why.

    Example:
        >>> with compiled_together():
        ...     for size in (1, 2, 4):
        ...         forward(size)
    """
    thread, begun = get_ident(), dict[tuple[JITFunction[Any], Any], Future[Any]]()

    def run_or_compile(kernel: JITFunction[Any], *args: Any, **options: Any) -> Any:
        if get_ident() == thread:
            options["warmup"] = True
        return run(kernel, *args, **options)

    def begin(kernel: JITFunction[Any], key: Any, *args: Any) -> Any:
        if get_ident() != thread:
            return compile_one(kernel, key, *args)
        if (kernel, key) not in begun:
            begun[kernel, key] = pool.submit(compile_one, kernel, key, *args)
        return None

    with _one_at_a_time, ThreadPoolExecutor(num_threads(), "octavo-compile") as pool:
        run, compile_one = JITFunction.run, JITFunction._do_compile
        JITFunction.run, JITFunction._do_compile = run_or_compile, begin
        try:
            yield
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            JITFunction.run, JITFunction._do_compile = run, compile_one
