"""Install octavo into the environment of the Python that runs this, and tell what it fetches.

    python tools/install.py        # what octavo itself needs, and calls of tools and JSON schemas
    python tools/install.py dev    # and what its development needs: the extra `dev`, the packages
                                   # in paper/ and demo/

It is pip with less to read: a line per file that is fetched, with its size, and a last line with
what is installed and how long that took. In a terminal the seconds run while pip is at work.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

FILE = re.compile(
    r"(Downloading|Using cached|Processing) (\S+\.(?:whl|tar\.gz))(?!\S)"
    r"(?: \(([\d.]+ (?:bytes|kB|MB|GB))\))?"
)
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


class Report:
    """Owns the terminal's last line, which says what pip does and for how many seconds it has."""

    def __init__(self, name: str) -> None:
        self.num_fetched = self.num_at_hand = 0  # files
        self.num_bytes = 0.0  # fetched
        self._name = name
        self._start = time.monotonic()
        self._doing = ""
        self._is_terminal = sys.stdout.isatty()
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def follow(self, lines: Iterable[str]) -> None:
        """Tell what pip's output means, line by line."""
        for line in map(str.strip, lines):
            if file := FILE.match(line):
                self._count(*file.groups())
            elif line.startswith("Installing build dependencies") and line.endswith("started"):
                self._say("looking for what it needs")
            elif line.startswith("Installing collected packages:"):
                self._say(f"unpacking {line.count(',') + 1} distributions")

    def _count(self, how: str, path: str, size: str | None) -> None:
        name = "-".join(path.rsplit("/", 1)[-1].split("-")[:2]).replace("%2B", "+")
        if how != "Downloading":
            self.num_at_hand += 1
            return self._say(f"at hand: {name}")
        self.num_fetched += 1
        if size:
            number, unit = size.split()
            self.num_bytes += float(number) * UNITS[unit]
        self._say(f"fetching {name} ({size or 'of unknown size'})")

    def _say(self, doing: str) -> None:
        if self._is_terminal and self._doing:
            print()
        self._doing = doing
        print(f"  {doing}", end="" if self._is_terminal else "\n", flush=True)

    def _tick(self) -> None:
        while self._is_terminal and not self._over.wait(1):
            print(f"\r  {self._doing}  {self.seconds:.0f} s", end="", flush=True)

    def close(self) -> None:
        """Give the terminal back, at the start of a line."""
        self._over.set()
        self._ticker.join()
        if self._is_terminal and self._doing:
            print()

    def summary(self) -> str:
        """What was fetched, what is there now, and how long it took."""
        names = {each.metadata["Name"] for each in importlib.metadata.distributions()}
        return (
            f"{self._name}: {self.num_fetched} files, {self.num_bytes / 1e6:,.0f} MB fetched, "
            f"{self.num_at_hand} files were at hand; {len(names)} distributions, "
            f"{size_of(Path(sys.prefix)) / 1e6:,.0f} MB installed; {self.seconds:.0f} s"
        )


def size_of(directory: Path) -> int:
    """Bytes of all files in a directory; links are not followed."""
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(directory)
        for name in names
    )


def main() -> int:
    for_development = sys.argv[1:] == ["dev"]
    if sys.argv[1:] and not for_development:
        print(f"usage: {sys.argv[0]} [dev]", file=sys.stderr)
        return 2
    name = "octavo[dev]" if for_development else "octavo"
    print(f"Installing {name} into {os.path.relpath(sys.prefix)}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    # Modules are compiled when they are imported first: most of those that are installed never are.
    command += ["--progress-bar", "off", "--no-compile"]
    for project in (".[dev]", "./demo", "./paper") if for_development else (".[structured]",):
        command += ["--editable", project]
    report = Report(name)
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pip:
            assert pip.stdout is not None, "it was asked for"
            report.follow(pip.stdout)
    finally:
        report.close()
    if pip.returncode == 0:
        print(report.summary())
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main())
