"""Settings for all tests; read before anything imports torch."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise

# What is imported and collected stays: until pytest_collection_finish, there is no garbage to find.
gc.disable()

# Test processes share the cores. With a thread a core each, tiny matrix products wait for threads
# that the system has put aside, and take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tests that are not about GPUs mean the CPU, also on a machine with one: they see it only with
# `-m gpu`, or another expression that asks for such tests. The processes that pytest starts find
# the answer in the environment.
asked = " ".join(b for a, b in pairwise(sys.argv) if a == "-m")
asks_for_gpus = bool(re.search(r"\bgpu\b", asked)) and "not gpu" not in asked
on_gpu = os.environ.setdefault("OCTAVO_TESTS_ON", "gpu" if asks_for_gpus else "cpu") == "gpu"
if not on_gpu:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell lets what it starts in the background ignore Ctrl-C, and so would the programs under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from triton_interpreter import prepare_the_interpreter  # noqa: E402

# Triton's kernels run in its interpreter where there is no GPU. Read when kernels are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    prepare_the_interpreter()


# A busy machine may be slow at any of the examples.
hypothesis.settings.register_profile(
    "busy",
    hypothesis.settings.default,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("busy")


def pytest_collection_finish() -> None:
    """From here on the collector looks through what tests make, and not each time through a million
    objects of modules and tests, which takes a second."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def collecting_all() -> Iterator[None]:
    """For tests that ask what the collector leaves out: nothing is left out before."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands that run inside a test set up logging for a process of their own."""
    logger = logging.getLogger("octavo")
    before = logger.level, list(logger.handlers), logger.propagate
    yield
    level, logger.handlers, logger.propagate = before
    logger.setLevel(level)
