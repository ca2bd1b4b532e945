"""Running compiled kernels on the threads that torch already has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

Runner = Callable[[int, int], None]


def make_runner(kernel: Any) -> Runner:
    """run(argument, num_threads): a kernel of jit.py, on several threads at once.

    All threads get the same argument, and the kernel divides the work among them. The GIL is
    released meanwhile.
    """
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)

    def run(argument: int, num_threads: int) -> None:
        if num_threads == 1:
            alone(argument)
        elif (parallel := _openmp_parallel()) is not None:
            parallel(kernel.address, argument, num_threads, 0)
        else:
            helpers = [_pool().submit(alone, argument) for _ in range(num_threads - 1)]
            alone(argument)
            for helper in helpers:
                helper.result()

    return run


@cache
def _openmp_parallel() -> Callable[[int, int, int, int], None] | None:
    """`#pragma omp parallel` of the OpenMP that torch loaded: (function, argument, threads, 0).

    Another pool would have to wait for cores on which torch's idle threads still spin.
    """
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # another OpenMP, or another platform
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    found: Callable[[int, int, int, int], None] = parallel
    return found


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="octavo-kernel")
