from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SIZE = Path(__file__).resolve().parents[2] / "tools" / "size.py"
SAMPLE = '''"""What this is.

Two paragraphs.
"""

# A comment.
import os


def f() -> str:
    """A docstring."""
    return os.sep  # a comment behind code


TEXT = """not
a docstring"""
'''


@pytest.fixture(scope="module")
def size() -> dict[str, Any]:
    return runpy.run_path(str(SIZE))


def test_code_has_neither_blank_lines_nor_comments_nor_docstrings(
    size: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    measured = size["measure"](path)
    assert measured.lines == 16
    assert measured.code_lines == 5
    assert measured.longest == (3, "f")


def test_docstrings_of_fields_are_no_code(size: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        'class A:\n    x: int = 1\n    """What it\n    is."""\n    print("no docstring")\n'
    )
    assert size["measure"](path).code_lines == 3


@pytest.mark.slow
def test_the_paper_and_the_demo_are_counted_beside_the_engine(
    size: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    size["main"]()
    engine, beside = capsys.readouterr().out.split("beside it\n")
    counts = {line[:20].strip(): line[20:].split()[:3] for line in engine.splitlines()[1:]}
    *packages, total = counts.items()
    assert total[0] == "the engine"
    assert {"octavo", "octavo.core", "octavo.demo"} <= dict(packages).keys()
    for column in range(3):
        assert sum(int(values[column]) for _, values in packages) == int(total[1][column])
    names = [line.split()[0] for line in beside.splitlines()]
    assert names == ["octavo_paper", "octavo_demo", "tests", "benchmarks", "examples", "tools"]
