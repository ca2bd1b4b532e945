"""One device, computed in this process."""

from __future__ import annotations

import os

from octavo.config import EngineConfig
from octavo.core.step import PendingStep, StepPlan
from octavo.executor.base import KVCapacity
from octavo.model_config import ModelConfig

# Turns that an idle thread spins before it sleeps. By default OpenMP spins for milliseconds, and
# where another program holds one of two cores, everybody waits for a thread that does not run:
# small linear layers took 40 times as long. Quiet machines lose nothing by this number.
SPIN_COUNT = "1000"


class LocalExecutor:
    """Owns one worker and calls it directly."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        """Load the model and take the memory.

        Raises:
            ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do.
        """
        limit_spinning()
        # torch comes only now, because OpenMP reads the variable when it is loaded.
        from octavo.worker.worker import Worker

        self._worker = Worker(config, model_config)
        budget = self._worker.budget
        self.capacity = KVCapacity(
            num_blocks=budget.num_blocks,
            num_swap_blocks=budget.num_swap_blocks,
            layout=self._worker.layout,
            block_bytes=budget.block_bytes,
            budget=budget,
        )

    @property
    def is_asynchronous(self) -> bool:
        return self._worker.is_asynchronous

    def submit(self, plan: StepPlan) -> PendingStep:
        return self._worker.submit(plan)

    def shutdown(self) -> None:
        self._worker.shutdown()


def limit_spinning() -> None:
    """Let idle threads sleep soon, unless the user has decided otherwise.

    Has no effect on a process that has already loaded torch.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
