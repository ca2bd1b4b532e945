"""The command as a module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from octavo.cli.main import fail

SOURCES = Path(__file__).resolve().parents[2] / "src"


ENVIRONMENT = os.environ | {"PYTHONPATH": str(SOURCES)}


def full_disk() -> IO[str]:
    return open("/dev/full", "w")


def closed_pipe() -> IO[str]:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def run_with(
    stdout: IO[str], command: list[str], unbuffered: str
) -> subprocess.CompletedProcess[str]:
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    with stdout:
        return subprocess.run(
            command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True
        )


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "octavo", "memory", "no-such-model"]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert run.returncode == 1
    assert "no-such-model" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_told_in_one_line_and_a_closed_pipe_in_none(unbuffered: str) -> None:
    """Of what is buffered, Python learns at its end, when it is too late for that."""
    said = "error: the output cannot be written (No space left on device)\n"
    for arguments in (["models"], ["--help"]):
        for stdout, text in ((full_disk(), said), (closed_pipe(), "")):
            run = run_with(stdout, [sys.executable, "-m", "octavo", *arguments], unbuffered)
            assert (run.returncode, run.stderr) == (1, text)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_server_says_that_it_is_ready_to_its_log_if_stdout_is_full(unbuffered: str) -> None:
    program = """
import sys
from octavo.cli.serve import say
from octavo.server.observability.logs import set_up_logs
set_up_logs("text")
say("octavo serves at http://here")
say("and goes on")
"""
    for stdout, why in (
        (full_disk(), "No space left on device"),
        (closed_pipe(), "Broken pipe"),
    ):
        run = run_with(stdout, [sys.executable, "-c", program], unbuffered)
        [line] = run.stderr.splitlines()
        assert line.endswith(f"stdout cannot be written ({why}): octavo serves at http://here")
        assert run.returncode == 0


def test_names_in_a_models_file_cannot_steer_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        fail("error: tensor \x1b]0;mine\x07\x9bä\n名 is empty", 1)
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: tensor \\x1b]0;mine\\x07\\x9bä 名 is empty\n"
