"""Lines of each package: of the engine, of the packages beside it, and of what tests them.

`code` leaves out blank lines, comments and docstrings, those of fields among them. The longest file
and function of a package are marked with `!` where they exceed the house's limits: 330 lines per
file, 50 per function.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE = 330
MAX_FUNCTION = 50


@dataclass(frozen=True)
class File:
    """One source file."""

    path: Path
    lines: int
    code_lines: int  # neither blank, nor comments, nor docstrings
    longest: tuple[int, str]  # lines and name of its longest function


def measure(path: Path) -> File:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    documentation = set(_docstring_lines(tree))
    code = [
        line
        for number, line in enumerate(lines, start=1)
        if number not in documentation and line.strip() and not line.lstrip().startswith("#")
    ]
    functions = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, node.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return File(path, len(lines), len(code), max(functions, default=(0, "")))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            yield from _lines_of(node.body[0])
        if isinstance(node, ast.ClassDef):
            for field, after in pairwise(node.body):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and is_text:
                    yield from _lines_of(after)


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def packages() -> dict[str, list[File]]:
    """Files by package: those of src/octavo, those in paper/ and demo/, and the rest by folder."""
    found: dict[str, list[File]] = defaultdict(list)
    for folder in ("src", "paper", "demo"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).parent.parts
            found[".".join(parts[: 2 if folder == "src" else 1])].append(measure(path))
    for folder in ("tests", "benchmarks", "examples", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found[folder].append(measure(path))
    return dict(found)


def _row(name: str, files: list[File]) -> str:
    longest_file = max(files, key=lambda file: file.lines)
    num_lines, function = max(file.longest for file in files)
    file_mark = "!" if longest_file.lines > MAX_FILE else " "
    function_mark = "!" if num_lines > MAX_FUNCTION else " "
    return (
        f"{name:<20}{len(files):>6}{sum(f.lines for f in files):>8}"
        f"{sum(f.code_lines for f in files):>8}"
        f"{longest_file.lines:>6}{file_mark}{longest_file.path.name:<26}"
        f"{num_lines:>4}{function_mark}{function}"
    )


def main() -> None:
    found = packages()
    engine = {name: files for name, files in found.items() if name.partition(".")[0] == "octavo"}
    header = f"{'package':<20}{'files':>6}{'lines':>8}{'code':>8}"
    print(f"{header}{'':>3}{'longest file':<30}{'longest function'}")
    for name, files in engine.items():
        print(_row(name, files))
    print(_row("the engine", [file for files in engine.values() for file in files]))
    print("beside it")
    for name in [name for name in found if name not in engine]:
        print(_row(name, found[name]))


if __name__ == "__main__":
    main()
