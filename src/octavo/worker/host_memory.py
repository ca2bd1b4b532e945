"""What the machine gives this process, and how malloc is asked to treat it. No torch."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


def keep_freed_memory() -> None:
    """Let glibc keep what is freed from now on, for the next step, which needs the same again.

    By default large blocks go back to the system after each use, and the next one pays a page
    fault every 4 KiB: a tenth of the time of a small model's step. The activations' share of the
    budget stays taken anyhow. What was freed before (weights that have been packed) goes back now.
    Other C libraries are left as they are.
    """
    libc = ctypes.CDLL(None)
    mallopt, malloc_trim = getattr(libc, "mallopt", None), getattr(libc, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc takes
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def host_memory() -> int:
    """Bytes this process can still take: what is free, within its cgroups and its own limits."""
    limits = [_meminfo_available(), *_cgroup_headrooms(), *_own_headroom()]
    return max(0, min(limits))


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: half of what is installed.
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
    for folder in _cgroup_folders():
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
    """File pages that the kernel drops when memory is short count as used, yet can be had."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _cgroup_folders() -> Iterator[Path]:
    """This process's cgroup and all that hold it, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / "memory" if controllers else _CGROUP_ROOT
        folder = root / path.lstrip("/")
        while folder != root.parent:
            yield folder
            folder = folder.parent
