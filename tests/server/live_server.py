"""A real server process with the demo model, and what is sent to it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import httpx

# Small, so that several servers fit beside each other.
OPTIONS = ("--num-blocks", "512", "--num-threads", "1", "--swap-space", "16MiB")
TIMEOUT = 120.0  # seconds; a hang must end a test
# To read the certificates of all authorities takes longer than most requests.
OPEN: dict[str, Any] = {"timeout": TIMEOUT, "verify": False}


@dataclass
class LiveServer:
    """A running `octavo serve`."""

    url: str
    process: subprocess.Popen[str]

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, **OPEN)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=headers, **OPEN)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed; greedy unless told otherwise."""
        body = {"prompt": prompt, "temperature": 0, **fields}
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT)


@contextlib.contextmanager
def live_server(
    *options: str, stderr: IO[str] | None = None, **environment: str
) -> Iterator[LiveServer]:
    """Start `octavo serve demo` on a free port; without `stderr`, its log goes to ours."""
    program = "from octavo.cli.main import main; main()"
    command = [sys.executable, "-c", program, "serve", "--port", "0", *OPTIONS, *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | environment,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.search(r"at (https?://\S+) \(ready", line)
        assert ready is not None, f"the server said {line!r}"
        yield LiveServer(ready[1], process)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
