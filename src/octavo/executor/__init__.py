"""The seam between deciding and computing: a StepPlan goes in, a StepResult comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.registry import EXECUTORS

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.executor.base import DeviceExecutor
    from octavo.models.config import ModelConfig


def make_executor(config: EngineConfig, model_config: ModelConfig) -> DeviceExecutor:
    """The executor that `config` names. A local one loads the model and takes the memory.

    Raises:
        ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do.
    """
    executor: DeviceExecutor = EXECUTORS[config.executor](config, model_config)
    return executor
