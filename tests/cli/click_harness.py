"""How the tests of the commands call them."""

from __future__ import annotations

from typing import Protocol

from click.testing import CliRunner, Result

from octavo.cli.main import main


class Octavo(Protocol):
    def __call__(self, *args: object, stdin: str | bytes | None = None) -> Result: ...


def run(*args: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)
