"""The seam between deciding and computing: a StepPlan goes in, a StepResult comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.executor.base import DeviceExecutor
    from octavo.models.config import ModelConfig


def make_executor(config: EngineConfig, model_config: ModelConfig) -> DeviceExecutor:
    """The executor for what `config` asks for. Imports torch, loads the model and takes the memory.

    Raises:
        ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do.
    """
    from octavo.executor.local import LocalExecutor

    return LocalExecutor(config, model_config)
