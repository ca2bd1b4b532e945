"""docs/extending.md promises only what a test carries out."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| (?P<what>an? [^|]+) \| (?P<registry>[^|]+) \| [^|]+ \| `(?P<test>[^`]+)` \|$", re.M
)


def test_every_promise_has_a_test() -> None:
    rows = [match.groupdict() for match in ROW.finditer(DOCS)]
    named = {row["test"] for row in rows} | {"tests/extending/test_plugin.py"}
    tests = {f"tests/extending/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert named == tests - {"tests/extending/test_promises.py"}
    sections = re.findall(r"^## (.*)$", DOCS, re.M)
    assert len(sections) == len(rows) + 1
    for path in re.findall(r"`((?:tests|src)/[\w/.]+)`", DOCS):
        assert (ROOT / path).exists(), path


def test_every_registry_is_where_it_says() -> None:
    names = re.findall(r"`(octavo[\w.]*\.[A-Z_]+)`", DOCS)
    assert len(names) == 9
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert len(getattr(import_module(module), attribute)) >= 1
