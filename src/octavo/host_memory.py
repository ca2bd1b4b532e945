"""The memory and CPUs of this process, and the tuning of a dedicated process. No torch."""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_MADV_HUGEPAGE = 14  # <sys/mman.h>
HUGE_PAGE = 2 << 20  # bytes
# Iterations that an idle thread spins before it sleeps. By default OpenMP spins for milliseconds,
# and where another program holds one of two cores, everything waits for a thread that does not run:
# small linear layers took 40 times as long. On an idle machine this number costs nothing.
_SPIN_COUNT = "1000"


@contextmanager
def limited_spinning() -> Iterator[None]:
    """A context to import torch in, so that OpenMP's idle threads sleep soon, unless the user has
    set the variable.

    OpenMP reads it when it is loaded, so it is removed at the end of the context.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for huge pages for as much memory as fills them, from a multiple of HUGE_PAGE on, before
    anything is written there. Does nothing where the system has none, or refuses."""
    size = num_bytes // HUGE_PAGE * HUGE_PAGE
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if size > 0 and advise is not None:
        advise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_HUGEPAGE)


def return_freed_memory() -> None:
    """Return freed memory (of weights that have been packed) to the system, once.

    glibc only; does nothing with other C libraries.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def keep_freed_memory() -> None:
    """Let glibc keep memory that is freed from now on, since the next step needs as much again.

    By default large blocks are returned to the system after each use, and the next use costs a
    page fault every 4 KiB: a tenth of the time of a small model's step. The budget includes the
    activations anyway. Only for a dedicated process, since this affects all of its allocations.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc takes
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def host_memory() -> int:
    """Bytes this process can still allocate: free memory, within its cgroups and its own limits."""
    limits = [_meminfo_available(), *_cgroup_headrooms(), *_own_headroom()]
    return max(0, min(limits))


def num_cpus() -> int:
    """CPUs that this process may use: those it may run on, within its cgroups' quotas."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, math.ceil(min([allowed or 1, *_cgroup_quotas()])))


def _cgroup_quotas() -> Iterator[float]:
    """CPUs' worth of time that each cgroup (v1 or v2) around this process grants."""
    for folder in _cgroup_folders("cpu"):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if int(quota) > 0:  # -1: no limit
                yield int(quota) / int(period)
        except (OSError, ValueError):  # "max": no limit
            continue


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: half of the installed memory.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _own_headroom() -> Iterator[int]:
    """What RLIMIT_AS leaves, if it is set."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    try:
        used_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        used_pages = 0
    yield limit - used_pages * resource.getpagesize()


def _cgroup_headrooms() -> Iterator[int]:
    """What each cgroup (v1 or v2) around this process leaves."""
    for folder in _cgroup_folders("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                limit = int((folder / limit_name).read_text())  # "max": no limit
                yield limit - int((folder / used_name).read_text()) + _page_cache(folder)
            except (OSError, ValueError):
                continue


def _page_cache(folder: Path) -> int:
    """Bytes in the page cache: counted as used, but dropped by the kernel when memory is short."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """The cgroup by which `controller` limits this process, and its ancestors, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / controller if controllers else _CGROUP_ROOT
        folder = root / path.lstrip("/")
        while folder != root.parent:
            yield folder
            folder = folder.parent
