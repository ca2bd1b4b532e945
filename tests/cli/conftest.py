from __future__ import annotations

import logging
from collections.abc import Iterator

import click_harness
import pytest

from model_zoo import model_directory


@pytest.fixture
def octavo() -> Iterator[click_harness.Octavo]:
    """Runs the command in this process; what it did to the log is undone."""
    yield click_harness.run
    logging.getLogger("octavo").handlers.clear()


@pytest.fixture
def model() -> list[str]:
    """Options that choose a tiny model and a small KV pool."""
    return ["--model", str(model_directory("llama")), "--num-blocks", "200"]
