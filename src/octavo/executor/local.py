"""One device, computed in this process."""

from __future__ import annotations

from octavo.config import EngineConfig
from octavo.core.step import StepPlan, StepResult
from octavo.executor.base import KVCapacity
from octavo.model_config import ModelConfig
from octavo.worker.worker import Worker


class LocalExecutor:
    """Owns one worker and calls it directly."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        """Load the model and take the memory.

        Raises:
            ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do.
        """
        self._worker = Worker(config, model_config)
        budget = self._worker.budget
        self.capacity = KVCapacity(
            num_blocks=budget.num_blocks,
            num_swap_blocks=budget.num_swap_blocks,
            layout=self._worker.layout,
            block_bytes=budget.block_bytes,
            budget=budget,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        return self._worker.execute(plan)

    def shutdown(self) -> None:
        self._worker.shutdown()
