"""Work whose results are kept: each job runs once, in a process of its own, and is never run
again while neither its description nor the code behind it changes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tqdm import tqdm

import octavo
from octavo.errors import ConfigError

# Code that decides what a simulation comes to, besides the modules at octavo's root.
SIMULATED = ("bench", "core", "engine", "evaluation", "simulation", "worker/memory.py")
# The same for a job that computes tokens.
COMPUTED = (*SIMULATED, "attention", "demo", "executor", "layers", "models", "worker")
# Of these rooms, what only runs jobs or shows what they came to.
SHOWING = (
    "evaluation/drawing.py",
    "evaluation/figures",
    "evaluation/jobs.py",
    "evaluation/measurements.py",
    "evaluation/page.py",
    "evaluation/paper_values.py",
    "evaluation/report.py",
    "simulation/plots.py",
    "evaluation/scale.py",
)


class Job(Protocol):
    """A frozen dataclass of plain values, so that it can be hashed and sent to a process."""

    ROOMS: ClassVar[tuple[str, ...]]  # the code that its result depends on
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """About how long it takes: long ones are started first."""
        ...

    def run(self) -> Any:
        """The result, as JSON can hold it."""
        ...


def default_cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "octavo" / "reproduce"


@cache
def source_fingerprint(rooms: tuple[str, ...]) -> str:
    """A digest of the code in some rooms."""
    root = Path(octavo.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if ("/" not in name or name.startswith(rooms)) and not name.startswith(SHOWING):
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def job_key(job: Job) -> str:
    values = {
        "job": type(job).__name__,
        "values": asdict(job),
        "code": source_fingerprint(job.ROOMS),
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


class Store:
    """Results on disk, one file each.

    Raises ConfigError if the directory cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("cache_dir", f"{directory}: {error.strerror}") from error

    def get(self, job: Job) -> Any | None:
        """None if the job has not been run, or its file is broken."""
        with suppress(OSError, ValueError):
            return json.loads(self._path(job).read_text(encoding="utf-8"))["result"]
        return None

    def put(self, job: Job, result: Any) -> None:
        values = {"job": type(job).__name__, "values": asdict(job), "result": result}
        # Written aside and renamed: a reader never sees half a file.
        handle, name = tempfile.mkstemp(dir=self.directory, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(values, file)
        os.replace(name, self._path(job))

    def _path(self, job: Job) -> Path:
        return self.directory / f"{job_key(job)}.json"


Results = Mapping[Job, Any]  # what jobs came to


def run_jobs(jobs: Iterable[Job], store: Store, num_processes: int, show: bool) -> Results:
    """Results of all jobs; those that are not stored are run, the longest first.

    An error in a job is raised here, and those not yet started are dropped.
    """
    results: dict[Job, Any] = {}
    missing = []
    for job in dict.fromkeys(jobs):
        found = store.get(job)
        if found is None:
            missing.append(job)
        else:
            results[job] = found
    missing.sort(key=lambda job: -job.seconds)
    with (
        _progress(missing, show) as bar,
        _pool(min(num_processes, len(missing))) as pool,
    ):
        futures = {pool.submit(_run, job, store.directory): job for job in missing}
        try:
            for future in as_completed(futures):
                job = futures[future]
                results[job] = future.result()
                bar.update(job.seconds)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def _run(job: Job, directory: Path) -> Any:
    result = json.loads(json.dumps(job.run()))  # as the store would give it
    Store(directory).put(job, result)
    return result


def _pool(num_processes: int) -> ProcessPoolExecutor:
    # Not forked: a job may use torch, whose threads do not survive that. Ctrl-C ends the processes
    # at once; what they were at is lost, and nothing that was stored.
    context = multiprocessing.get_context("spawn")
    initializer = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return ProcessPoolExecutor(max(1, num_processes), context, initializer)


@contextmanager
def _progress(jobs: list[Job], show: bool) -> Iterator[Any]:
    total = sum(job.seconds for job in jobs)
    layout = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(
        total=total, desc=f"{len(jobs)} jobs", bar_format=layout, disable=not (show and jobs)
    ) as bar:
        yield bar
