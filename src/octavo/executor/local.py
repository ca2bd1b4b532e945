"""One device, computed in this process."""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import EngineConfig
from octavo.core.step import PendingStep, StepPlan
from octavo.executor.base import KVCapacity
from octavo.models.config import ModelConfig
from octavo.worker.device import find_device


class LocalExecutor:
    """Owns one worker."""

    submit: Callable[[StepPlan], PendingStep]
    """See Executor.submit: the runner's own, so that a step passes no frame for nothing."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        """Load the model and take the memory.

        Raises:
            ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do.
        """
        device = find_device(config)
        # These load torch, as the device wants it loaded.
        from octavo.ops.communicator import SingleRank
        from octavo.worker.worker import Worker

        self.is_asynchronous = device.is_asynchronous
        self._worker = Worker(device.adapt(config), model_config, device, SingleRank())
        self.config = self._worker.config
        self.model_config = self._worker.model_config
        self.capacity = KVCapacity.of(
            self._worker.budget, self._worker.layout, device_name=device.name
        )
        self.submit = self._worker.runner.submit

    def check(self) -> None:
        """See Executor.check: the device fails in a step, if at all."""

    def shutdown(self) -> None:
        """See Executor.shutdown."""
        self.submit = _refuse
        self._worker.shutdown()


def _refuse(plan: StepPlan) -> PendingStep:
    raise AssertionError(f"step {plan.step_id}: the executor was shut down")
