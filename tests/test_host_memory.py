from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo import host_memory as host_memory_module
from octavo.host_memory import HUGE_PAGE, host_memory, num_cpus, use_huge_pages
from octavo.ops.cpu.linear import empty_weights


def test_host_memory_keeps_to_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = host_memory()
    assert 0 < free < 1 << 50
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.setattr(host_memory_module, "_cgroup_folders", lambda _: iter([inner, tmp_path]))
    for folder, limit in ((inner, "max"), (tmp_path, str(1 << 20))):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(700_000))
        (folder / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert host_memory() == (1 << 20) - 700_000 + 100_000


def test_host_memory_keeps_to_the_limit_of_the_process() -> None:
    code = (
        "import resource; from octavo.host_memory import host_memory;"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31));"
        "assert (1 << 30) < host_memory() < (1 << 31)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 64),
        ({}, 64),
    ],
)
def test_cpus_are_those_that_the_process_may_keep_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(host_memory_module, "_cgroup_folders", lambda _: iter([tmp_path]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert num_cpus() == expected


def test_freed_memory_is_kept_for_the_next_step() -> None:
    code = """
import resource, torch
from octavo.host_memory import keep_freed_memory
torch.set_num_threads(1)
keep_freed_memory()
for step in range(40):
    if step == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.zeros(1 << 18) for _ in range(24)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(done.stdout) < 10_000  # page faults; without it 120,000


def test_what_was_freed_before_goes_back() -> None:
    """The last tensor keeps the heap from shrinking by itself."""
    code = """
import torch
from pathlib import Path
from octavo.host_memory import return_freed_memory
def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
tensors = [torch.ones(1 << 13) for _ in range(4000)]  # 125 MiB
del tensors[:-1]
before = resident_mib()
return_freed_memory()
print(before - resident_mib())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert int(done.stdout) > 100


def test_huge_pages_are_asked_for_where_they_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int | None, int, int]] = []

    def advise(address: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
        asked.append((address.value, size.value, advice))
        return -1  # refused, which changes nothing

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(madvise=advise))
    use_huge_pages(HUGE_PAGE, HUGE_PAGE - 1)
    use_huge_pages(3 * HUGE_PAGE, 2 * HUGE_PAGE + 5)
    assert asked == [(3 * HUGE_PAGE, 2 * HUGE_PAGE, 14)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    use_huge_pages(0, HUGE_PAGE)  # a C library without madvise


def test_weights_begin_with_a_huge_page() -> None:
    """Those that fill one; the memory around them is not theirs."""
    for rows in (3, 1025):
        weights = empty_weights((rows, 512, 2), torch.bfloat16)
        assert weights.shape == (rows, 512, 2)
        assert weights.is_contiguous()
        weights.fill_(rows)
        assert (weights == rows).all()
        if rows > 3:
            assert weights.data_ptr() % HUGE_PAGE == 0
            assert weights.nbytes > HUGE_PAGE
