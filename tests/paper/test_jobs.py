from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from octavo.errors import ConfigError, OctavoError
from octavo_paper import jobs
from octavo_paper.jobs import COMPUTED, SIMULATED, Store, job_key, run_jobs, source_fingerprint


@dataclass(frozen=True, slots=True)
class Square:
    """Leaves a mark each time it runs."""

    DEPENDS_ON: ClassVar[tuple[str, ...]] = SIMULATED

    number: int
    marks: str

    @property
    def seconds(self) -> float:
        return float(self.number)

    def run(self) -> Any:
        if self.number < 0:
            raise ConfigError("number", f"{self.number} is negative")
        Path(self.marks, f"{self.number}-{os.getpid()}").touch()
        return {"square": self.number**2}


def test_jobs_run_once(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    store = Store(tmp_path / "kept" / "results")
    wanted = [Square(n, str(marks)) for n in (2, 3, 2)]
    for _ in range(2):
        results = run_jobs(wanted, store, 2, show=False)
        assert [results[job]["square"] for job in wanted] == [4, 9, 4]
        assert len(list(marks.iterdir())) == 2
    assert not list(store.directory.glob("*.part"))


def test_an_error_of_a_job_is_raised_here(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    with pytest.raises(OctavoError, match="number: -1 is negative"):
        run_jobs([Square(-1, str(tmp_path))], store, 1, show=False)


def test_a_broken_file_is_as_good_as_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    job = Square(5, str(tmp_path))
    assert store.get(job) is None
    store.put(job, {"square": 25})
    assert store.get(job) == {"square": 25}
    [path] = tmp_path.glob("*.json")
    path.write_text("{")
    assert store.get(job) is None


def test_a_key_knows_the_values_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    key = job_key(Square(1, "a"))
    assert key == job_key(Square(1, "a"))
    assert key != job_key(Square(2, "a"))
    monkeypatch.setattr(jobs, "source_fingerprint", lambda names: "other code")
    assert key != job_key(Square(1, "a"))


def test_the_store_needs_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cache_dir"):
        Store(tmp_path / "file" / "below")


def test_code_that_computes_tokens_is_not_simulations_business() -> None:
    assert source_fingerprint(SIMULATED) != source_fingerprint(COMPUTED)
