"""The seam between deciding and computing: a StepPlan goes in, a StepResult comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.registry import EXECUTORS

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.executor.base import DeviceExecutor
    from octavo.models.config import ModelConfig


def make_executor(config: EngineConfig, model_config: ModelConfig) -> DeviceExecutor:
    """The executor that `config` names. It loads the model and takes the memory.

    Raises:
        ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do.
    """
    name = config.executor
    if name == "auto":
        name = "local" if config.tensor_parallel_size == 1 else "sharded"
    executor: DeviceExecutor = EXECUTORS[name](config, model_config)
    return executor
