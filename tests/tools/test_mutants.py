"""The defects that tools/mutants.py inserts fit the sources as they are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mutmut")

ROOT = Path(__file__).resolve().parents[2]
DEFECTS: tuple[Any, ...] = runpy.run_path(str(ROOT / "tools" / "mutants.py"))["DEFECTS"]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.what)
def test_a_defect_changes_exactly_one_place(defect: Any) -> None:
    text = (ROOT / "src" / "octavo" / "core" / defect.file).read_text(encoding="utf-8")
    assert text.count(defect.code) == 1
    assert defect.changed != defect.code
