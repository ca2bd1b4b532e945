"""One device, computed in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.core.step import PendingStep, StepPlan
from octavo.errors import ConfigError
from octavo.executor.base import KVCapacity
from octavo.host_memory import limited_spinning
from octavo.models.config import ModelConfig

if TYPE_CHECKING:
    from octavo.worker.gpu_worker import GpuWorker
    from octavo.worker.worker import Worker


class LocalExecutor:
    """Owns one worker and calls it directly; `config` is what was asked for, on this device."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        """Load the model and take the memory.

        Raises:
            ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do.
        """
        self.config, self._worker = _make_worker(config, model_config)
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


def _make_worker(
    config: EngineConfig, model_config: ModelConfig
) -> tuple[EngineConfig, Worker | GpuWorker]:
    with limited_spinning():
        import torch

    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device", "'cuda' was asked for, but PyTorch finds no NVIDIA GPU here")
    wants_cpu = config.device == "cpu" or config.attention_backend in ("cpu", "reference")
    if (wants_cpu and config.device != "cuda") or not has_gpu:
        from octavo.worker.worker import Worker

        return config, Worker(config, model_config)
    from octavo.worker.device_limits import check_gpu

    check_gpu(torch.version.cuda is not None, torch.cuda.get_device_capability())
    from octavo.worker.gpu_worker import GpuWorker  # loads Triton

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    config = config.for_gpu(properties.total_memory)
    return config, GpuWorker(config, model_config)
