"""Jobs whose results are kept: each runs once, in a process of its own, and runs again only when
its description or the code behind it changes."""

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
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tqdm import tqdm

from octavo.errors import ConfigError

# The code that a simulation's result depends on, besides the modules at octavo's root.
SIMULATED = (
    "octavo.bench",
    "octavo.core",
    "octavo.engine",
    "octavo.models",
    "octavo.simulation",
    "octavo_paper",
)
# The same for a job that computes tokens.
COMPUTED = (
    *SIMULATED,
    "octavo.demo",
    "octavo.executor",
    "octavo.layers",
    "octavo.ops",
    "octavo.worker",
    "octavo_demo",
)
# Part of the above, but it only runs jobs or presents their results.
PRESENTING = (
    "octavo.simulation.drawing",
    "octavo.simulation.plots",
    "octavo_paper.command",
    "octavo_paper.drawing",
    "octavo_paper.figures",
    "octavo_paper.jobs",
    "octavo_paper.measurements",
    "octavo_paper.page",
    "octavo_paper.paper_values",
    "octavo_paper.report",
    "octavo_paper.scale",
)


class Job(Protocol):
    """A frozen dataclass of plain values, so that it can be hashed and sent to a process.

    Its class can be imported there.
    """

    DEPENDS_ON: ClassVar[tuple[str, ...]]  # packages and modules that can change its result
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def seconds(self) -> float:
        """Estimated running time; long jobs are started first."""
        ...

    def run(self) -> Any:
        """The result, as plain values that JSON can hold."""
        ...


def default_cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "octavo" / "reproduce"


@cache
def source_fingerprint(names: tuple[str, ...]) -> str:
    """A digest of the source of some packages and modules, and of the modules at octavo's root."""
    digest = hashlib.sha256()
    for name, path in _modules({"octavo", *(each.partition(".")[0] for each in names)}):
        at_root = name.count(".") <= 1 and name.startswith("octavo.")
        if (at_root or _belongs(name, names)) and not _belongs(name, PRESENTING):
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _modules(roots: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of these packages; a root may be a single module, too."""
    for name in sorted(roots):
        root = import_module(name)
        if root.__spec__ is None or root.__spec__.submodule_search_locations is None:
            yield name, Path(str(root.__file__))
            continue
        [folder] = map(Path, root.__path__)
        for path in sorted(folder.rglob("*.py")):
            yield ".".join([name, *path.relative_to(folder).with_suffix("").parts]), path


def _belongs(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in packages)


def job_key(job: Job) -> str:
    values = {
        "job": type(job).__name__,
        "values": asdict(job),
        "code": source_fingerprint(job.DEPENDS_ON),
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


Results = Mapping[Job, Any]


def run_jobs(jobs: Iterable[Job], store: Store, num_processes: int, show: bool) -> Results:
    """Results of all jobs; those that are not stored are run, the longest first.

    An error in a job is raised here, and jobs that have not started are dropped.
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
    # Not forked: a job may use torch, whose threads do not survive a fork. Ctrl-C ends the
    # processes at once; their unfinished jobs are lost, but no stored result is.
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
