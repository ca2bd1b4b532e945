"""A CPU: loads the model, decides how much KV it can hold, and executes plans."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.core.kv.specs import KVLayout, group_layers
from octavo.core.step import FinishedStep, PendingStep, StepPlan
from octavo.errors import ConfigError
from octavo.host_memory import host_memory, keep_freed_memory, num_cpus, return_freed_memory
from octavo.memory_budget import (
    CPU_CACHE_LIMIT,
    CPU_CACHE_SHARE,
    FixedMemory,
    KVShape,
    MemoryBudget,
    check_asked_length,
    estimate_activations,
    plan_memory,
)
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.loader import load_model
from octavo.ops import BACKENDS, AttentionBackend, LayerPlace, load_backend
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Worker:
    """Owns the CPU's part: the model's weights, the KV cache and the rows."""

    is_asynchronous = False

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        """Raises ConfigError, ModelError or OutOfMemory, the last with settings that would do."""
        check_threads(config.num_threads)
        self._num_threads = config.num_threads
        with torch_threads(config.num_threads):
            self._load(config, model_config)

    def _load(self, config: EngineConfig, model_config: ModelConfig) -> None:
        device = torch.device("cpu")
        dtype = resolve_dtype(config.dtype, model_config.dtype)
        if config.attention_backend == "triton":
            raise ConfigError("attention_backend", "'triton' runs on a GPU, and this is a CPU")
        backend_class = resolve_backend(config.attention_backend, "cpu")
        self.layout = group_layers(model_config.kv_specs())
        block_shape = kv_block_shape(config, model_config, backend_class)
        layer_bytes = math.prod(block_shape[1:]) * dtype.itemsize
        shape = KVShape(self.layout, config.cache.block_size, layer_bytes)
        # Before anything large is taken: what cannot fit is refused at once.
        self.budget = plan_cpu_memory(config, model_config, shape, dtype.itemsize)
        logger.info("memory budget:\n%s", self.budget)

        self._model: CausalLM | None = load_model(
            model_config, dtype, device, config.load_format, config.seed
        )
        return_freed_memory()
        if config.owns_process:
            keep_freed_memory()
        self._kv_cache: KVCache | None = KVCache(
            self.budget.num_blocks, self.budget.num_swap_blocks, block_shape, dtype
        )
        self._runner: ModelRunner | None = ModelRunner(
            self._model,
            make_backend(
                backend_class, self._model, self.layout, self._kv_cache.blocks, shape.block_size
            ),
            self._kv_cache,
            InputBatch(shape.block_size, len(self.layout.groups)),
            model_config.vocab_size,
        )

    def submit(self, plan: StepPlan) -> PendingStep:
        assert self._runner is not None, "the worker was shut down"
        with torch_threads(self._num_threads):
            return FinishedStep(self._runner.execute(plan))

    def shutdown(self) -> None:
        """Let go of weights and KV cache. A second call does nothing."""
        self._runner = self._kv_cache = self._model = None


def check_threads(count: int | None) -> None:
    """Raises ConfigError for more threads than CPUs: each would take memory and wait its turn, and
    OpenMP ends the process where it can make no more."""
    available = num_cpus()
    if count is not None and count > available:
        raise ConfigError(
            "num_threads", f"{count} is more than the {available} CPUs that this process may use"
        )


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """A context in which torch computes with `count` threads; then with as many as before. None:
    nothing changes."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_backend(
    backend_class: type[AttentionBackend],
    model: CausalLM,
    layout: KVLayout,
    blocks: Tensor,
    block_size: int,
) -> AttentionBackend:
    """The backend, told where each of the model's layers keeps its KV among `blocks`."""
    places = layout.places()
    layers = model.attention_layers
    layer_places = [LayerPlace(*places[layer.layer_id]) for layer in layers]
    return backend_class(layers, layer_places, blocks, block_size)


def kv_block_shape(
    config: EngineConfig, model_config: ModelConfig, backend_class: type[AttentionBackend]
) -> tuple[int, ...]:
    """Of one block of all layers of a group."""
    layout = group_layers(model_config.kv_specs())
    shape = backend_class.kv_block_shape(
        config.cache.block_size, model_config.num_kv_heads, model_config.head_dim
    )
    return (layout.layers_per_group, *shape)


def resolve_backend(name: str, fast: str) -> type[AttentionBackend]:
    """The class of that name; "auto" is `fast`, the fast one of the device.

    Raises:
        ConfigError: there is no such backend.
    """
    name = fast if name == "auto" else name
    if name not in BACKENDS:
        choices = ", ".join(["auto", *sorted(BACKENDS)])
        raise ConfigError("attention_backend", f"{name!r} is not one of {choices}")
    return load_backend(name)


def resolve_dtype(asked: str, stored: str) -> torch.dtype:
    """What a CPU computes in: "auto" keeps the files' type, float16 becomes float32.

    Raises:
        ConfigError: float16 was asked for, which CPUs do not compute in.
    """
    if asked == "float16":
        raise ConfigError("dtype", "float16 is not served on a CPU; use bfloat16 or float32")
    if asked == "auto":
        return torch.bfloat16 if stored == "bfloat16" else torch.float32
    return DTYPES[asked]


def plan_cpu_memory(
    config: EngineConfig, model_config: ModelConfig, shape: KVShape, dtype_bytes: int
) -> MemoryBudget:
    """The budget on a CPU, before anything is loaded.

    Raises:
        OutOfMemory: weights or KV cache do not fit, or no sequence of the max_model_len that was
            asked for; names settings that do.
    """
    weights = model_config.weight_bytes(dtype_bytes)
    if model_config.tied_embeddings:
        # A table to look up, and the same once more packed for the projection to logits.
        weights += model_config.head.num_parameters * dtype_bytes
    fixed = FixedMemory(weights, estimate_activations(model_config, config.scheduler, dtype_bytes))
    total = host_memory()
    default = min(CPU_CACHE_LIMIT, int(CPU_CACHE_SHARE * (total - fixed.total)))
    budget = plan_memory(config.cache, shape, fixed, total, default)
    check_asked_length(budget, shape, config)
    return budget
