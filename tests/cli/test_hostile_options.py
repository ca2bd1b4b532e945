"""Options and files that no command can work with: one line on stderr, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from click_harness import Octavo

HUGE = 10**30
SIMULATE = ("simulate", "--rate", 1, "--duration", 5)
PLAN = ("plan", "--rate", 1, "--duration", 5, "--sizes", 1, "--max-gpus", 2, "--target-ttft", 1e-9)

COMMANDS: list[tuple[object, ...]] = [
    *((*SIMULATE, option, value)
      for option in ("--rate", "--duration", "--burstiness", "--watermark")
      for value in ("nan", "inf", -1, 1e308, "x")),
    *((*SIMULATE, option, value)
      for option in ("--n", "--beam-width", "--prefix-tokens", "--hash-block-size", "--num-gpus",
                     "--max-model-len", "--num-blocks", "--max-num-seqs", "--seed")
      for value in (-1, HUGE, "nan")),
    *((*SIMULATE, "--target-latency", value) for value in ("nan", "inf", -1, "x")),
    *((*PLAN, option, value)
      for option in ("--rate", "--target-ttft", "--target-tpot")
      for value in ("nan", "inf", -1)),
    (*PLAN, "--rate", 1e9),
    (*PLAN, "--rate", 1e-300),
    (*PLAN, "--sizes", "1,x"),
    *(("memory", "demo", "--device-memory", value)
      for value in ("nan", -5, 0, "x", "1XiB", "9" * 400)),
    *(("memory", "demo", option, value)
      for option in ("--num-blocks", "--kv-cache-memory", "--max-num-batched-tokens",
                     "--max-model-len", "--block-size")
      for value in (-1, HUGE, "nan")),
    ("memory", "x" * 5000),
    ("memory", "~nouser"),
    ("memory", "\0"),
    *(("generate", "hi", option, value)
      for option in ("--temperature", "--top-p", "--max-tokens", "--num-threads", "--beam-width",
                     "--num-blocks", "--n")
      for value in (-1, HUGE, "nan")),
    ("generate", "hi", "--beam-width", 2, "--length-penalty", "nan"),
    ("generate", "hi", "--seed", HUGE),
    ("generate", "hi", "--model", "x" * 5000),
    *(("bench", "throughput", option, value)
      for option in ("--n", "--beam-width", "--temperature", "--num-prompts", "--input-len")
      for value in (-1, "nan")),
    *(("bench", "latency", option, HUGE)
      for option in ("--input-len", "--n", "--beam-width", "--batch-size")),
    *((*command, "--beam-width", 2, "--n", 2)
      for command in (SIMULATE, ("bench", "throughput"), ("bench", "latency"), ("generate", "hi"))),
    ("bench", "throughput", "--beam-width", 2, "--temperature", 0.5),
    ("bench", "throughput", "--num-prompts", HUGE),
    *(("bench", "serve", option, HUGE)
      for option in ("--num-prompts", "--input-len", "--vocab-size")),
    *(("bench", "serve", option, value)
      for option in ("--scale", "--overload", "--timeout")
      for value in ("nan", "inf")),
    ("bench", "serve", "--url", "foo"),
    ("reproduce", "fig99"),
    ("models", "x"),
]  # fmt: skip

FILES: list[tuple[object, ...]] = [
    ("generate", "--file"),
    ("generate", "--model"),
    ("memory",),
    ("simulate", "--trace"),
    (*SIMULATE, "--trace"),
    (*SIMULATE, "--calibration"),
    ("calibrate",),
    ("bench", "throughput", "--trace"),
    ("reproduce", "table1", "--measurements"),
]


def refused(octavo: Octavo, *args: object) -> None:
    result = octavo(*args)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2)
    last = result.stderr.splitlines()[-1]
    assert last.lower().startswith("error: ")
    assert len(last) < 600


@pytest.mark.parametrize("args", COMMANDS, ids=lambda args: " ".join(map(str, args))[:80])
def test_hostile_values(octavo: Octavo, args: tuple[object, ...]) -> None:
    refused(octavo, *args)


@pytest.mark.parametrize("args", FILES, ids=lambda args: " ".join(map(str, args)))
def test_hostile_files(octavo: Octavo, tmp_path: Path, args: tuple[object, ...]) -> None:
    folder = tmp_path / "folder.csv"
    folder.mkdir()
    for name in ("file", "file.csv", "file.jsonl", "file.csv.gz"):
        for number, content in enumerate((b"\xff\xfe\x00\x9f" * 99, b"\x00" * 99, b'[1, {"a": ')):
            file = tmp_path / f"{number}-{name}"
            file.write_bytes(content)
            if args[:2] != ("generate", "--file") or number == 0:  # the others are text
                refused(octavo, *args, file)
    (tmp_path / "empty.csv").touch()
    refused(octavo, *args, tmp_path / "empty.csv")
    refused(octavo, *args, tmp_path / "missing.csv")
    if args[0] != "reproduce":
        refused(octavo, *args, folder)


def test_a_batch_that_is_no_file(octavo: Octavo, tmp_path: Path) -> None:
    """What is wrong with a line is the reply to it."""
    for path in (tmp_path, tmp_path / "missing.jsonl"):
        refused(octavo, "run-batch", "-o", tmp_path / "replies.jsonl", "-i", path)
