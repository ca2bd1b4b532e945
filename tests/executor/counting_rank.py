"""A rank without a model: the token after n is n + 1. It breaks down where a test wants it to.

`config.model` says how: "counting", or "RANK:WHAT", such as "1:exit" for the second rank.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from octavo.core.kv.specs import FullAttention, group_layers
from octavo.core.step import FinishedStep, PendingStep, StepPlan, StepResult
from octavo.errors import ModelError
from octavo.executor.base import KVCapacity
from octavo.executor.messages import Ready, Start
from octavo.executor.rank import Submit, main
from octavo.memory_budget import MemoryBudget


def make_counting(start: Start) -> tuple[Ready, Submit]:
    who, _, what = start.config.model.partition(":")
    is_mine = who == str(start.shard.rank)
    logging.getLogger("octavo.counting").info("rank %d is here", start.shard.rank)
    logging.getLogger("octavo.counting").warning("rank %d warns", start.shard.rank)
    if is_mine and what == "bad-file":
        raise ModelError("model.safetensors is truncated")
    if is_mine and what == "exit-at-start":
        os._exit(3)
    if is_mine and what == "stop-at-start":
        os.kill(os.getpid(), signal.SIGSTOP)

    def submit(plan: StepPlan) -> PendingStep:
        if is_mine and plan.step_id == 2:
            if what == "exit":
                os._exit(4)
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "sleep":
                time.sleep(1000)
            if what == "raise":
                raise ArithmeticError("the step went wrong")
        return FinishedStep(StepResult(plan.step_id, [seq_id + 1 for seq_id in plan.sampled]))

    budget = MemoryBudget(0, 0, 0, 0, 0, 1, 16, 20, 0, 0)
    capacity = KVCapacity.of(budget, group_layers([FullAttention()]), start.shard.size)
    return Ready(start.config, start.model_config, False, capacity), submit


if __name__ == "__main__":
    main(int(sys.argv[1]), make_counting)
