"""Choosing the fastest option of each product, with a meter and a clock that are made up."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from filelock import FileLock

from octavo.ops.communicator import SingleRank
from octavo.ops.cuda import tuning
from octavo.ops.tuning import Answers, Question, TuningFile, Work, distinct
from octavo.parallel import Shard


class Key(NamedTuple):
    rows: int
    name: str = "product"


@dataclass
class FakeMeter:
    """Says that options take as long as `times` says, and that a measurement takes a second."""

    times: dict[str, float]
    now: float = 0.0
    measured: list[Key] = field(default_factory=list)

    def compile(self, works: Sequence[Work]) -> list[bool]:
        return [work() != "broken" for work in works]

    def measure(self, works: Sequence[Work]) -> float:
        self.now += 1
        (option,) = {work() for work in works}
        return self.times[str(option)]


def asked(*rows: int, options: Sequence[str] = ("usual", "other", "third")) -> list[Question]:
    def work(option: str, i: int) -> Work:
        return lambda: option

    return [Question(Key(each), tuple(options), each, work, 3) for each in rows]


def test_the_fastest_is_taken_and_kept(tmp_path: Path) -> None:
    file = TuningFile(tmp_path / "new" / "tiles.json")
    meter = FakeMeter({"usual": 3.0, "other": 2.0, "third": 2.5})
    assert file.answer(asked(8, 16), meter) == {Key(8): "other", Key(16): "other"}
    again = FakeMeter({})
    assert file.answer(asked(16, 8), again) == {Key(8): "other", Key(16): "other"}
    assert again.now == 0, "measured again"
    more = FakeMeter({"usual": 1.0, "other": 2.0, "third": 3.0})
    assert file.answer(asked(8, 32), more) == {Key(8): "other", Key(32): "usual"}
    assert set(json.loads(file.path.read_text())) == {repr(Key(each)) for each in (8, 16, 32)}


def test_a_difference_that_does_not_matter_changes_nothing(tmp_path: Path) -> None:
    meter = FakeMeter({"usual": 100.0, "other": 99.5, "third": 120.0})
    assert TuningFile(tmp_path / "t").answer(asked(8), meter) == {Key(8): "usual"}


def test_what_fails_is_left_out(tmp_path: Path) -> None:
    meter = FakeMeter({"slow": 2.0, "slower": 3.0})
    found = TuningFile(tmp_path / "t").answer(asked(8, options=("broken", "slower", "slow")), meter)
    assert found == {Key(8): "slow"}
    found = TuningFile(tmp_path / "u").answer(asked(8, options=("broken",) * 2), meter)
    assert found == {}
    meter = FakeMeter({"usual": math.inf, "other": 2.0, "third": math.inf})
    assert TuningFile(tmp_path / "v").answer(asked(8), meter) == {Key(8): "other"}
    meter = FakeMeter(dict.fromkeys(("usual", "other", "third"), math.inf))
    assert TuningFile(tmp_path / "w").answer(asked(8), meter) == {}


def test_time_is_bounded_and_the_rest_is_measured_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo.ops.tuning")
    meter = FakeMeter({"usual": 3.0, "other": 2.0, "third": 2.5})
    file = TuningFile(tmp_path / "t", max_seconds=4.0, clock=lambda: meter.now)
    assert list(file.answer(asked(8, 16, 32), meter)) == [Key(8), Key(16)]
    assert (
        "measured 2 of 3 products in 6.0 s (what is missing, at a later start): 2 take less"
        in caplog.text
    )
    assert list(file.answer(asked(8, 16, 32), meter)) == [Key(8), Key(16), Key(32)]
    assert meter.now == 9


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', "\0", "[" * 10_000, '{"Key(rows=8'])
def test_a_damaged_file_is_measured_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = TuningFile(tmp_path / "t")
    file.path.write_text(text)
    meter = FakeMeter({"usual": 3.0, "other": 2.0, "third": 2.5})
    assert file.answer(asked(8), meter) == {Key(8): "other"}
    assert f"{file.path} cannot be read, and is measured again" in caplog.text
    assert file.answer(asked(8), FakeMeter({})) == {Key(8): "other"}


def test_an_option_of_another_version_is_measured_anew(tmp_path: Path) -> None:
    file = TuningFile(tmp_path / "t")
    file.path.write_text(json.dumps({repr(Key(8)): repr("gone")}))
    meter = FakeMeter({"usual": 1.0, "other": 2.0, "third": 2.5})
    assert file.answer(asked(8), meter) == {Key(8): "usual"}


def test_a_place_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    meter = FakeMeter({"usual": 3.0, "other": 2.0, "third": 2.5})
    file = TuningFile(tmp_path / "file" / "octavo" / "t")
    assert file.answer(asked(8), meter) == {Key(8): "other"}
    assert "kernels are measured, but not for later starts" in caplog.text


def test_processes_wait_for_the_one_that_measures(tmp_path: Path) -> None:
    file = TuningFile(tmp_path / "t")
    second = FakeMeter({})
    found: list[Answers] = []
    other = threading.Thread(target=lambda: found.append(file.answer(asked(8), second)))
    with FileLock(f"{file.path}.lock"):
        other.start()
        file.path.write_text(json.dumps({repr(Key(8)): repr("third")}))
    other.join()
    assert found == [{Key(8): "third"}]
    assert second.now == 0


def test_who_waits_too_long_measures_for_itself(tmp_path: Path) -> None:
    file = TuningFile(tmp_path / "t", max_seconds=0.05)
    meter = FakeMeter({"usual": 3.0, "other": 2.0, "third": 2.5})
    file._clock = lambda: 0.0
    with FileLock(f"{file.path}.lock"):
        assert file.answer(asked(8), meter) == {Key(8): "other"}
    assert not file.path.exists()


def test_layers_of_equal_shapes_ask_once() -> None:
    found = distinct([*asked(64, 8), *asked(8, 16)])
    assert [question.rows for question in found] == [8, 16, 64]


class Kernel:
    """Tunable."""

    def __init__(self) -> None:
        self.answers: Answers = {}

    def questions(self, max_tokens: int) -> list[Question]:
        return asked(*(rows for rows in (8, 16, 32) if rows <= max_tokens))

    def adopt(self, answers: Answers) -> None:
        self.answers = answers


class Follower(SingleRank):
    """Rank 1 of two, of which rank 0 has chosen these options."""

    shard = Shard(1, 2)

    def __init__(self, chosen: list[int]) -> None:
        self._chosen = chosen

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack((torch.tensor(self._chosen), x))


def test_ranks_compute_as_the_first_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    meter = FakeMeter({"usual": 3.0, "other": 2.0, "third": 2.5})
    monkeypatch.setattr(tuning, "tuning_path", lambda device: path)
    monkeypatch.setattr(tuning, "CudaMeter", lambda device: meter)
    run = partial(tuning.tune, device=torch.device("cpu"), max_tokens=16)
    alone, plain = Kernel(), object()
    run([plain, alone], communicator=SingleRank())
    assert alone.answers == {Key(8): "other", Key(16): "other"}
    path.unlink()
    follower = Kernel()
    run([follower], communicator=Follower([2, 0]))
    assert follower.answers == {Key(8): "third", Key(16): "usual"}
    assert not path.exists(), "only the first rank measures"


def test_who_measures_forbids_other_threads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine of the process may wait for its steps, and take memory, during the capture."""
    for name in ("CUDAGraph", "Event", "graph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    torch.cuda.Event.return_value.elapsed_time.return_value = 0.006  # type: ignore[attr-defined]
    work = MagicMock()
    assert tuning.microseconds([work, work]) == pytest.approx(3.0)
    graph: MagicMock = torch.cuda.graph  # type: ignore[assignment]
    assert graph.call_args.kwargs == {"capture_error_mode": "thread_local"}


def test_the_file_is_of_a_card_and_of_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some card")
    path = tuning.tuning_path(torch.device("cpu"))
    assert path.parent == Path("/cache/octavo")
    assert path.name.startswith(f"kernels-Some-card-torch-{torch.__version__}-triton-")
