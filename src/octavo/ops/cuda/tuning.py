"""Measuring kernels on a GPU (octavo.ops.tuning)."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import TritonError

from octavo.ops.communicator import Communicator
from octavo.ops.cuda.compilation import num_threads
from octavo.ops.cuda.shared_workspace import replay
from octavo.ops.tuning import Tunable, TuningFile, Work, distinct

logger = logging.getLogger(__name__)

_REPLAYS = 9
# What an option may raise that does not fit this card.
_FAILURES = (CompilationError, TritonError, torch.cuda.OutOfMemoryError)


def tune(
    kernels: Iterable[object],
    device: torch.device,
    max_tokens: int,
    communicator: Communicator,
) -> None:
    """Have the tunable ones of a model's kernels compute in the fastest way.

    Ranks ask the same questions, and all compute by the answers of the first one.

    Args:
        max_tokens: of a step.
    """
    tunable = [kernel for kernel in kernels if isinstance(kernel, Tunable)]
    asked = (question for kernel in tunable for question in kernel.questions(max_tokens))
    questions = distinct(asked)
    if not questions:
        return
    answers: dict[Hashable, Any] = {}
    if communicator.shard.rank == 0:
        answers = TuningFile(tuning_path(device)).answer(questions, CudaMeter(device))
    if communicator.shard.size > 1:
        own = [each.options.index(answers.get(each.key, each.options[0])) for each in questions]
        chosen = communicator.all_gather(torch.tensor(own, device=device))[0].tolist()
        answers = {
            question.key: question.options[i] for question, i in zip(questions, chosen, strict=True)
        }
    for kernel in tunable:
        kernel.adopt(answers)


def tuning_path(device: torch.device) -> Path:
    """Where the answers of a card are kept, in the user's cache: by the card, the versions of what
    compiles kernels, and their sources."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home
        root = Path(tempfile.gettempdir())
    card = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    versions = f"torch-{torch.__version__}-triton-{triton.__version__}"
    return root / "octavo" / f"kernels-{card}-{versions}-{_version_of_kernels()}.json"


@cache
def _version_of_kernels() -> str:
    """A digest of the sources of kernels and of what chooses among them."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class CudaMeter:
    """See Meter; measures in microseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compile(self, works: Sequence[Work]) -> list[bool]:
        """See Meter.compile: several at once."""
        # A thread has no CUDA context, which TMA's descriptors need, before its first call of CUDA.
        enter = partial(torch.cuda.synchronize, self._device)
        with ThreadPoolExecutor(num_threads(), initializer=enter) as pool:
            return list(pool.map(self._compile, works))

    def _compile(self, work: Work) -> bool:
        try:
            with torch.cuda.device(self._device), torch.inference_mode():
                work()
        except _FAILURES as error:
            logger.debug("an option of a kernel is left out: %s", error)
            return False
        return True

    def measure(self, works: Sequence[Work]) -> float:
        """See Meter.measure."""
        try:
            with torch.cuda.device(self._device), torch.inference_mode():
                return microseconds(works)
        except _FAILURES as error:
            logger.debug("an option of a kernel is not measured: %s", error)
            return math.inf


def microseconds(works: Sequence[Callable[[], object]]) -> float:
    """Microseconds per work, one after the other in a CUDA graph: the median of several runs.

    They should read more weights than the L2 cache holds.
    """
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Thread-local, since other threads may use the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for work in works:
            work()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        replay(graph)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(works))
    return sorted(times)[len(times) // 2]
