"""The processes of a tensor-parallel group: what they are told, and how their ends are noticed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import model_zoo
from octavo.child_process import describe_exit
from octavo.config import make_config
from octavo.core.step import (
    BlockCopy,
    Candidates,
    Fork,
    LogitBias,
    OpenedRow,
    SamplingSpec,
    StepPlan,
    StepResult,
    TableWrite,
    TokenLogprobs,
    TokenWrites,
)
from octavo.errors import EngineFailed, LogitsNotFinite, ModelError, ProcessKilled
from octavo.executor.launching import LocalLauncher, LocalRank
from octavo.executor.messages import ASK, decode, decode_plan, encode, encode_plan
from octavo.executor.ranks import RankGroup
from octavo.models.registry import read_model_config
from processes import assert_gone, children

PROGRAM = Path(__file__).with_name("counting_rank.py")
COMMAND = (sys.executable, str(PROGRAM))
# Ranks that go on must be seen to within this time, also on a machine with much else to do.
SHORT = {"rank_timeout": 2.0}
LATE = r"a step has not been computed within rank_timeout \(2 s\)"


def make_group(model: str = "counting", size: int = 3, **options: float) -> RankGroup:
    model_config = read_model_config(model_zoo.model_directory("llama3"))
    config = make_config(model, tensor_parallel_size=size, **options)
    return RankGroup(config, model_config, LocalLauncher(COMMAND))


def program_with_group(program: str) -> str:
    """A program that has a group of three counting ranks; its argument is their `config.model`."""
    return f"""
import os, signal, sys
from octavo.config import make_config
from octavo.core.step import StepPlan
from octavo.executor.launching import LocalLauncher
from octavo.executor.messages import ASK, encode_plan
from octavo.executor.ranks import RankGroup
from octavo.models.registry import read_model_config
model_config = read_model_config({str(model_zoo.model_directory("llama3"))!r})
config = make_config(sys.argv[1], tensor_parallel_size=3)
group = RankGroup(config, model_config, LocalLauncher({COMMAND!r}))
{program}"""


def pids_of(group: RankGroup) -> list[int]:
    pids = []
    for process in group._ranks:
        assert isinstance(process, LocalRank)
        pids.append(process.pid)
    return pids


def step(group: RankGroup, step_id: int) -> list[int]:
    ids = [10 * step_id, 10 * step_id + 5]
    group.send(encode_plan(StepPlan(step_id, ids, [1, 1], ids, [])))
    group.send(ASK)
    return group.receive_result().token_ids


def run_on(group: RankGroup) -> None:
    """Run steps until one fails."""
    for number in range(2, 1000):
        step(group, number)


def send_on(group: RankGroup) -> None:
    """Send plans, and ask for no result, until that fails."""
    large = OpenedRow(1, tuple(range(30_000)), 1, 0, SamplingSpec(), 0, 0)
    for number in range(1000):
        group.send(encode_plan(StepPlan(number, [], [], [], [], opened=[large])))


def test_plans_and_results_arrive_as_they_were_sent() -> None:
    spec = SamplingSpec(temperature=0.5, logit_bias=LogitBias.of({3: 1.5}), num_logprobs=2)
    plan = StepPlan(
        7,
        [1, 2],
        [1, 30],
        [1],
        [2],
        forks=[Fork(1, 2, 3)],
        closed=[4],
        opened=[OpenedRow(2, tuple(range(30)), 30, 0, spec, seed=-5, sample_index=1)],
        token_writes=TokenWrites([1], [8], [9]),
        table_writes=[TableWrite(2, 0, 0, (4, 5)), TableWrite(1, 0, 3, (6,))],
        swap_out=[(1, 2)],
        swap_in=[(3, 4)],
        copies=[BlockCopy(5, 6, 7)],
    )
    again = decode_plan(encode_plan(plan))
    assert again == plan
    rows = (*again.forks, *again.opened, *again.table_writes, *again.copies)
    assert [type(each) for each in rows] == [Fork, OpenedRow, TableWrite, TableWrite, BlockCopy]
    scores = [TokenLogprobs(4, -0.25, 1, ((4, -0.25), (5, -2.0)))]
    found = Candidates(np.array([[1, 2]]), np.array([[-1.0, -2.0]]))
    result = StepResult(
        7, [4], {1: [4, 5]}, found, {1: scores}, {2: scores}, errors={3: _not_finite()}
    )
    back = decode(encode(result))
    assert (back.token_ids, back.draws, back.logprobs) == ([4], {1: [4, 5]}, {1: scores})
    assert back.candidates.token_ids.tolist() == [[1, 2]]
    assert isinstance(back.errors[3], LogitsNotFinite)
    assert str(back.errors[3]) == "NaN"


def _not_finite() -> LogitsNotFinite:
    return LogitsNotFinite("NaN")


def test_results_come_in_order_with_several_steps_under_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "octavo"):
        group = make_group()
    pids = pids_of(group)
    logged = [record.getMessage() for record in caplog.records]
    assert logged.count("rank 0 is here") == 1
    assert "rank 1 is here" not in logged  # what all of them do is logged once
    assert {"rank 0 warns", "rank 1 warns", "rank 2 warns"} <= set(logged)
    assert len(set(pids)) == 3
    assert [step(group, number) for number in range(3)] == [[1, 6], [11, 16], [21, 26]]
    start = time.monotonic()
    for number in range(50):
        group.send(encode_plan(StepPlan(number, [number], [1], [number], [])))
    for number in range(50):
        group.send(ASK)
        result = group.receive_result()
        assert 0 < result.launch_seconds < time.monotonic() - start
        assert replace(result, launch_seconds=0.0) == StepResult(number, [number + 1])
    group.check()
    group.close()
    group.close()
    assert_gone(pids)
    with pytest.raises(EngineFailed, match="the executor was shut down"):
        group.send(ASK)


@pytest.mark.parametrize(
    ("model", "kind", "text", "options"),
    [
        ("1:exit", EngineFailed, "rank 1 .*: it exited with status 4", {}),
        ("0:exit", EngineFailed, "rank 0 .*: it exited with status 4", {}),
        ("2:kill", ProcessKilled, "rank 2 .*: it was ended by signal 9", {}),
        ("0:raise", EngineFailed, "rank 0: ArithmeticError: the step went wrong", {}),
        ("1:raise", EngineFailed, "rank 1: ArithmeticError: the step went wrong", {}),
        ("0:sleep", EngineFailed, rf"{LATE}; raise it", SHORT),
        ("0:stop", EngineFailed, rf"{LATE}: rank 0 .* was stopped", SHORT),
    ],
)
def test_a_rank_that_fails_ends_all(
    model: str, kind: type[EngineFailed], text: str, options: dict[str, float]
) -> None:
    group = make_group(model, **options)
    pids = pids_of(group)
    assert [step(group, 0), step(group, 1)] == [[1, 6], [11, 16]]
    with pytest.raises(EngineFailed, match=text) as failure:
        run_on(group)
    assert type(failure.value) is kind
    assert_gone(pids)
    with pytest.raises(EngineFailed, match=r"the ranks were ended: .*rank"):
        step(group, 3)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (3, "it exited with status 3"),
        (-9, "it was ended by signal 9 (SIGKILL)"),
        (-40, "it was ended by signal 40"),  # a real-time signal, which has no name
    ],
)
def test_every_end_of_a_process_can_be_told(status: int, text: str) -> None:
    assert describe_exit(status) == text


def test_an_error_that_comes_with_a_result_is_not_lost() -> None:
    group = make_group("0:raise")
    group.send(encode_plan(StepPlan(1, [5], [1], [5], [])))
    group.send(ASK)
    group.send(encode_plan(StepPlan(2, [6], [1], [6], [])))
    assert_gone(pids_of(group)[:1])
    with pytest.raises(EngineFailed, match="rank 0: ArithmeticError: the step went wrong"):
        group.receive_result()


def test_a_rank_that_reads_nothing_is_noticed_when_its_socket_is_full() -> None:
    group = make_group("1:stop", **SHORT)
    pids = pids_of(group)
    with pytest.raises(EngineFailed, match=r"rank 1 .* reads no messages within rank_timeout"):
        send_on(group)
    assert_gone(pids)


@pytest.mark.parametrize(
    ("model", "kind", "text", "options"),
    [
        ("1:bad-file", ModelError, r"model.safetensors is truncated", {}),
        ("2:exit-at-start", EngineFailed, r"rank 2 .*: it exited with status 3", {}),
        ("1:stop-at-start", EngineFailed, r"said nothing .*: rank 1 \(.*\) was stopped", SHORT),
    ],
)
def test_a_rank_that_cannot_start(
    model: str, kind: type[Exception], text: str, options: dict[str, float]
) -> None:
    before = children(os.getpid())
    with pytest.raises(kind, match=text):
        make_group(model, **options)
    assert children(os.getpid()) <= before


def test_ranks_that_start_leave_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parent may be killed at any time: it has none that it would have to remove."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model_config = read_model_config(model_zoo.model_directory("llama3"))
    launcher = LocalLauncher(COMMAND)
    config = make_config("counting", tensor_parallel_size=2)
    try:
        launcher.launch(config, model_config, logging.INFO)
        assert list(tmp_path.iterdir()) == []
    finally:
        launcher.close()


def test_ranks_of_a_group_that_was_forgotten_end() -> None:
    group = make_group()
    pids = pids_of(group)
    del group
    assert_gone(pids)


def test_a_fork_that_exits_leaves_the_ranks_alone() -> None:
    program = """
pid = os.fork()
if pid == 0:
    sys.exit()
os.waitpid(pid, 0)
group.check()
group.send(encode_plan(StepPlan(1, [5], [1], [5], [])))
group.send(ASK)
print(group.receive_result().token_ids)
"""
    run = subprocess.run(
        [sys.executable, "-c", program_with_group(program), "counting"],
        capture_output=True,
        text=True,
    )
    assert (run.stdout, run.returncode) == ("[6]\n", 0), run.stderr
    assert "have not ended" not in run.stderr  # nor did it wait for them


def test_ranks_end_with_a_parent_that_was_killed() -> None:
    """Also if one of them is stuck in a call, and another does not run."""
    program = """
group.send(encode_plan(StepPlan(2, [1], [1], [1], [])))
pids = [each.pid for each in group._ranks]
os.kill(pids[1], signal.SIGSTOP)
print(*pids, flush=True)
input()
"""
    command = [sys.executable, "-c", program_with_group(program), "0:sleep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        parent.kill()
    assert_gone(pids)
