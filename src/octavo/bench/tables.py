"""Tables for people: aligned by rich, which also wraps them on a terminal that is too narrow."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table

NAME_WIDTH = 22  # of the first column, so that tables below each other are aligned
PLAIN_WIDTH = 1000  # of lines that no terminal shows: they are never wrapped


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """A name and a value per row."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=NAME_WIDTH)
    for row in rows:
        table.add_row(*row)
    return table


def columns(name: str, *titles: str) -> Table:
    """An empty table of a column of names, and of columns of numbers with these titles."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(name, min_width=NAME_WIDTH)
    for title in titles:
        table.add_column(title, justify="right")
    return table


def show(*parts: RenderableType) -> None:
    """Print tables and texts on stdout; if that is not a terminal, as plain text."""
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        console.print(*parts, sep="\n")
        return
    console.width = PLAIN_WIDTH
    with console.capture() as plain:
        console.print(*parts, sep="\n")
    for line in plain.get().splitlines():
        print(line.rstrip())
