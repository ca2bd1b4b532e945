"""What is simulated: a model on devices, with an engine's options."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from octavo.config import (
    DTYPE_BYTES,
    CacheConfig,
    DTypeName,
    EngineConfig,
    QuantizationChoice,
    SchedulerConfig,
)
from octavo.errors import ConfigError
from octavo.executor.base import KVCapacity
from octavo.memory_budget import FixedMemory, KVShape, estimate_activations, plan_memory
from octavo.models.config import ModelConfig, dense_token_size
from octavo.models.registry import quantized_on_load
from octavo.parallel import Shard
from octavo.simulation.cost_model import Coefficients, CostModel, ModelSize
from octavo.simulation.gpus import GIB, find_gpu
from octavo.simulation.models import find_model
from octavo.weight_forms import choose_quantization, with_copies


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """A model, its devices, and how the engine is set up. Checked when `prepare`d."""

    model: str  # a name in `model_names`, a directory, a GGUF file or a hub id
    gpu: str  # a name in `GPUS`, or a .json file
    num_gpus: int = 1  # tensor parallel
    dtype: DTypeName = "auto"
    quantization: QuantizationChoice | None = None  # of weights that are not quantized yet
    weight_copies: bool = True  # see EngineConfig
    max_model_len: int | None = None
    memory_share: float = 0.95  # of a device's memory
    workspace: int = 1 * GIB  # bytes on each device that no other item accounts for
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    coefficients: Coefficients = field(default_factory=Coefficients)
    overlap: bool = False  # the next step is planned while one is computed, as on GPUs
    beam_spacing: float = 1.0  # see SimulatedExecutor
    copies_extents: bool = False  # forks under Orca's policies cost as in the paper: CopiedExtents
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ConfigError("num_gpus", f"{self.num_gpus} is less than 1")
        if not 0 < self.memory_share <= 1:
            raise ConfigError("memory_share", f"{self.memory_share} is not in the range (0, 1]")
        if not 0 <= self.beam_spacing < float("inf"):
            raise ConfigError("beam_spacing", f"{self.beam_spacing} is not 0 or more")

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            self.model,
            dtype=self.dtype,
            quantization=self.quantization,
            weight_copies=self.weight_copies,
            max_model_len=self.max_model_len,
            seed=self.seed,
            overlap=self.overlap,
            cache=self.cache,
            scheduler=self.scheduler,
        )

    def prepare(self) -> Machine:
        """Look the names up and divide the memory.

        Raises:
            ConfigError, ModelError: an unknown device or model, or one that so many devices cannot
                share.
            OutOfMemory: weights or KV cache do not fit.
        """
        model = find_model(self.model)
        if model.encoder is not None:
            raise ConfigError(
                "model", f"{self.model} has an encoder, whose time the cost model does not know"
            )
        try:
            model.sharded(Shard(0, self.num_gpus))
        except ConfigError as error:
            raise ConfigError("num_gpus", error.reason) from error
        gpu = find_gpu(self.gpu)
        dtype = model.dtype if self.dtype == "auto" else self.dtype
        engine = replace(self.engine_config, tensor_parallel_size=self.num_gpus)
        total = int(gpu.memory * self.memory_share) - self.workspace
        quantization = self.quantization
        if quantization == "auto":
            choice = choose_quantization(engine, model, dtype, total, gpu.kernels)
            quantization = choice.quantization
        if quantization is not None:
            model = quantized_on_load(model, quantization, self.num_gpus)
        model = with_copies(engine, model, dtype, total, gpu.kernels)
        model = model.kept_by(gpu.kernels)
        if self.max_model_len is not None:
            model = model.with_max_model_len(self.max_model_len)
        size = ModelSize.of(model, dtype, self.cache.element_bytes(dtype), self.num_gpus)
        return Machine(
            model,
            CostModel(size, gpu, self.num_gpus, self.cache.block_size, self.coefficients),
            self._capacity(model, gpu.memory, dtype),
        )

    def _capacity(self, model: ModelConfig, gpu_memory: int, dtype: str) -> KVCapacity:
        dtype_bytes, kv_bytes = DTYPE_BYTES[dtype], self.cache.element_bytes(dtype)
        # Where there are fewer KV heads than devices, several keep the same ones.
        layout = model.kv_layout(
            lambda heads, size: dense_token_size(max(heads, self.num_gpus), size)
        )
        shape = KVShape(layout, self.cache.block_size, kv_bytes)
        copies = model.copy_bytes_of(self.num_gpus)
        fixed = FixedMemory(
            model.least_weight_bytes(dtype_bytes) - model.copy_bytes + copies,
            estimate_activations(model, self.scheduler, dtype_bytes)
            + self.workspace * self.num_gpus,
        )
        total = int(gpu_memory * self.num_gpus * self.memory_share)
        budget = plan_memory(
            self.cache, shape, fixed, total, total - fixed.total, self.cache.swap_space
        )
        return KVCapacity(
            budget.num_blocks,
            budget.num_swap_blocks,
            layout,
            budget.block_bytes,
            budget,
            self.num_gpus,
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """What a simulation runs on."""

    model: ModelConfig
    cost_model: CostModel
    capacity: KVCapacity
