"""The examples run as they stand, stay short, and show what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SHOWN = {
    "offline": ["Der alte König gibt dem Kind einen roten Ball.", "Answer:\033[1m Rome."],
    "parallel_sampling": ["1. ", "2. ", "3. ", "4. ", "Lena"],
    "beam_search": [
        "das den kleinen Ring fand, will dem König das Schloss zeigen.",
        "läuft er durch den dunklen Wald.",
    ],
    "shared_prefix": ["Der Arzt braucht keinen Schlüssel.", "80 of 97 tokens were cached"],
    "chat": ["Die mutige Maus rettete den Löwen.", "star", "I can tell"],
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) < 40
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    for text in SHOWN[name]:
        assert text in shown
