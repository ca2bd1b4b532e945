"""One server for all tests that need nothing special of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.live_server import LiveServer, live_server


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live_server("--log-level", "warning") as running:
        yield running
