"""How long the steps of a running engine should take: the cost model, on the device that it has.

A server's metrics have the sum beside that of the measured times (docs/observability.md).
"""

from __future__ import annotations

from octavo.core.step import StepPlan
from octavo.engine.engine import Engine
from octavo.simulation.cost_model import CostModel, ModelSize
from octavo.simulation.gpus import find_driver_name
from octavo.simulation.step_shape import RowLengths


class StepPredictor:
    """Prices each plan of an engine, from a moment on at which nothing ran."""

    def __init__(self, engine: Engine, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        self._rows = RowLengths(engine.model_config.window_sizes)

    @property
    def device(self) -> str:
        """Whose rates are taken: a name of GPU."""
        return self._cost_model.gpu.name

    def seconds(self, plan: StepPlan) -> float:
        """Seconds that a step takes, and its moves of blocks; called once for each plan, in
        order."""
        return self._cost_model.seconds(self._rows.follow(plan))


def find_predictor(engine: Engine) -> StepPredictor | None:
    """None where no prediction would be better than one that is wrong: the rates of the device are
    not known (a CPU, other GPUs than those of gpus.py), or its products of float32, or the model
    has an encoder."""
    capacity, config, model = engine.executor.capacity, engine.config, engine.model_config
    gpu = find_driver_name(capacity.device_name)
    if gpu is None or model.encoder is not None:
        return None
    dtype = config.dtype_for(model.dtype)
    if dtype == "float32":
        return None
    kept, element_bytes = model.kept_by(gpu.kernels), config.cache.element_bytes(dtype)
    size = ModelSize.of(kept, dtype, element_bytes, capacity.num_ranks)
    return StepPredictor(engine, CostModel(size, gpu, capacity.num_ranks, engine.kv.block_size))
