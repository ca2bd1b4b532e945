"""An engine process without a model: the real engine loop over the symbolic executor.

What a request must get follows from its tokens and its seed (`expected_tokens`), and some tokens do
harm: the process that computes them dies, raises or hangs. Run with a file descriptor as the last
argument; the arguments before it are FLAGS.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.symbolic import SymbolicExecutor, chain, drawn_token
from octavo.config import EngineConfig
from octavo.core.kv.specs import FullAttention, group_layers
from octavo.core.sequence import Request
from octavo.core.step import FinishedStep, PendingStep, StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.validation import PreparedRequest
from octavo.errors import ModelError, ProcessKilled
from octavo.executor.base import KVCapacity
from octavo.memory_budget import MemoryBudget
from octavo.models.registry import read_model_config
from octavo.server.engine_process import loop as engine_loop

FLAGS = {
    "refuse": "the engine cannot be made",
    "exit": "the process ends while it starts",
    "exit-if=FILE": "the same, if FILE exists",
    "broken=FILE": "one process at a time crashes in its first step: the one that made FILE",
    "step=SECONDS": "how long a step takes",
    "blocks=NUMBER": "in the pool, and in the swap tier",
    "memory=FILE": "the quantization auto is fp8 in the process that makes FILE, and int4 later",
    "stuck": "the devices never let go: the process does not end by itself",
    "measured=FILE": "gets a line from each process that is to measure what quantization loses",
}
# Tokens that do harm when they are computed.
DEADLY, RAISING, HANGING = 1000, 1001, 1002
UNACCEPTABLE = 1003  # the process dies as soon as it gets a request with it
# Tokens that harm nothing but their own request.
NOT_QUEUED = 1004  # to queue it raises
NOT_FINITE = 1005  # of their logits
RANK_KILLED = 1006  # a process that computes with it is killed from outside


class HarmfulExecutor(SymbolicExecutor):
    """Symbolic, and as dangerous as its tokens say."""

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        step_seconds: float,
        is_asynchronous: bool = False,
    ) -> None:
        layout = group_layers([FullAttention()])
        super().__init__(layout.specs, (block_size,), harmful_token=NOT_FINITE)
        self._step_seconds = step_seconds
        self.is_asynchronous = is_asynchronous
        self.broken: Path | None = None
        self.is_stuck = False
        budget = MemoryBudget(0, 0, 0, 0, 0, 1, block_size, num_blocks, 0, num_blocks)
        self.capacity = KVCapacity(num_blocks, num_blocks, layout, 1, budget)

    def submit(self, plan: StepPlan) -> PendingStep:
        return LateStep(self, plan) if self.is_asynchronous else FinishedStep(self.compute(plan))

    def compute(self, plan: StepPlan) -> StepResult:
        """Carry out a step, and do the harm that it does."""
        time.sleep(self._step_seconds)
        self._harm(plan)
        return self.execute(plan)

    def check(self) -> None:
        """It fails in steps alone."""

    def shutdown(self) -> None:
        if self.is_stuck:
            time.sleep(1000)

    def _harm(self, plan: StepPlan) -> None:
        if self.broken is not None:
            self.broken.unlink()
            os.abort()
        opened = {row.seq_id: row for row in plan.opened}
        for seq_id in plan.seq_ids:
            tokens = opened[seq_id].token_ids if seq_id in opened else ()
            if DEADLY in tokens:
                os.abort()
            if RAISING in tokens:
                raise RuntimeError("a token that raises")
            if RANK_KILLED in tokens:
                raise ProcessKilled("rank 1: it was ended by signal 9 (SIGKILL)")
            if HANGING in tokens:
                time.sleep(1000)


@dataclass(frozen=True)
class LateStep:
    """A step that is carried out when its result is asked for, as late as a device might."""

    executor: HarmfulExecutor
    plan: StepPlan

    def result(self) -> StepResult:
        return self.executor.compute(self.plan)


class FragileEngine(Engine):
    def die(self) -> NoReturn:
        """End the process at once."""
        os.abort()

    def make_request(self, prepared: PreparedRequest, request_id: str | None = None) -> Request:
        if UNACCEPTABLE in prepared.prompt_token_ids:
            self.die()
        return super().make_request(prepared, request_id)

    def add_request(
        self,
        request: Request,
        outputs: Mapping[int, list[int]] | None = None,
        arrival_time: float | None = None,
    ) -> None:
        super().add_request(request, outputs, arrival_time)
        if NOT_QUEUED in request.prompt_token_ids:
            raise RuntimeError("a token that raises late")


def expected_tokens(prompt: list[int], seed: int, index: int, num_tokens: int) -> list[int]:
    """What a sample must be, by the definition."""
    symbol = 0
    for token_id in prompt:
        symbol = chain(symbol, token_id)
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(drawn_token(symbol, seed, index))
        symbol = chain(symbol, tokens[-1])
    return tokens


def load(config: EngineConfig, path: Path) -> Engine:
    flags = dict(flag.partition("=")[::2] for flag in sys.argv[1:-1])
    if "refuse" in flags:
        raise ModelError("there is no such model")
    if "exit" in flags or Path(flags.get("exit-if", "/nonexistent")).exists():
        os._exit(3)
    if config.quantization == "auto":
        memory = Path(flags["memory"])
        config = replace(config, quantization="int4" if memory.exists() else "fp8")
        memory.touch()
    if "measured" in flags and config.measure_quantization:
        with Path(flags["measured"]).open("a") as file:
            print(os.getpid(), file=file)
    executor = HarmfulExecutor(
        config.cache.block_size, int(flags.get("blocks", 200)), float(flags.get("step", 0))
    )
    executor.is_stuck = "stuck" in flags
    if (broken := Path(flags.get("broken", "/nonexistent/broken"))).parent.exists():
        with contextlib.suppress(FileExistsError):
            broken.touch(exist_ok=False)
            executor.broken = broken
    model_config = read_model_config(path, config.model_impl)
    return FragileEngine(config, model_config, executor)


if __name__ == "__main__":
    sys.exit(engine_loop.main(int(sys.argv[-1]), load))
