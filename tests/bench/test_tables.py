from __future__ import annotations

import pytest

from octavo.bench.tables import columns, facts, show

LONG = "a value of more than eighty characters, which a file or a pipe gets in one line " * 2


def test_what_is_no_terminal_gets_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = columns("ms", "mean", "p99")
    table.add_row("TTFT", "1.25", "110.00")
    show("[a title]", facts([("requests", "3"), ("long", LONG)]), "", table)
    assert capsys.readouterr().out.splitlines() == [
        "[a title]",
        f"requests{' ' * 16}3",
        f"long{' ' * 20}{LONG.rstrip()}",
        "",
        f"ms{' ' * 22}mean     p99",
        f"TTFT{' ' * 20}1.25  110.00",
    ]


def test_a_terminal_gets_lines_that_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    show(facts([("long", LONG)]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60
