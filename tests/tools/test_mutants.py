"""The defects that tools/mutants.py inserts fit the sources, and it notices what fails."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mutmut")

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "mutants.py"))
DEFECTS: tuple[Any, ...] = TOOL["DEFECTS"]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.what)
def test_a_defect_changes_exactly_one_place(defect: Any) -> None:
    text = (ROOT / "src" / "octavo" / "core" / defect.file).read_text(encoding="utf-8")
    assert text.count(defect.code) == 1
    assert defect.changed != defect.code


def test_mutants_that_were_not_tested_are_no_survivors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a test fails without any change: each defect would count as noticed, too."""
    said = "print('    a: killed'); print('    b: not checked')"
    run_mutants = TOOL["run_mutants"]
    monkeypatch.setitem(run_mutants.__globals__, "MUTMUT", [sys.executable, "-c", said])
    monkeypatch.chdir(tmp_path)
    assert run_mutants(["a"], 1) == {"a": "killed"}
    with pytest.raises(SystemExit, match="mutmut has failed"):
        run_mutants(["a", "b"], 1)
    with pytest.raises(SystemExit, match="mutmut has failed"):
        run_mutants(["a", "c"], 1)
