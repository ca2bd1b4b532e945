"""One device: loads the model, decides how much KV it can hold, and executes plans."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from octavo.config import EngineConfig
from octavo.errors import OutOfMemory
from octavo.memory_budget import KVShape, MemoryBudget
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.loader import load_model
from octavo.models.quantization_loss import report_loss
from octavo.models.registry import quantized_on_load
from octavo.ops import FP8_KV_CACHE, AttentionBackend, check_score_features, token_size_of
from octavo.ops.communicator import Communicator
from octavo.weight_forms import choose_quantization, describe_dequantized, with_copies
from octavo.worker.device.base import DTYPES, Demand, Device
from octavo.worker.graphs import Graphs
from octavo.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

FP8_DTYPE = torch.float8_e4m3fn  # of cached keys and values
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Worker:
    """Owns what one device holds: the model's weights, and the runner with the KV cache."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        device: Device,
        communicator: Communicator,
    ) -> None:
        """
        Args:
            config: with what follows from the device (Device.adapt).
            model_config: of the whole model; this worker holds the communicator's shard of it.
            communicator: with the workers of the other shards, which run the same plans.

        Raises:
            ConfigError: the settings contradict each other or the device.
            ModelError: the files cannot be loaded.
            OutOfMemory: the model does not fit; the message names settings with which it would.
        """
        if config.owns_process:
            # Modules stay: to look for garbage in them takes most of a second, also at the end.
            gc.freeze()
        self._device = device
        self._is_shut_down = False
        dtype = DTYPES[config.dtype_for(model_config.dtype)]
        config, model_config = _with_chosen(config, model_config, dtype, device, communicator)
        # With the quantization that "auto" stands for, and with copies of weights.
        self.config, self.model_config = config, model_config
        model_config = model_config.sharded(communicator.shard)
        _warn_of_dequantized(config, model_config, dtype, device)
        backend_class = device.resolve_backend(config.attention_backend)
        kv_dtype = device.resolve_kv_dtype(config.cache.kv_cache_dtype, dtype)
        _check_features(backend_class, model_config, kv_dtype)
        shape = _kv_shape(config, model_config, backend_class, kv_dtype)
        self.layout = shape.layout
        with device.computing:
            # Before anything large is taken: what cannot fit is refused at once.
            demand = Demand(config, model_config, shape, dtype, device.num_ranks)
            planned = device.plan_memory(demand)
            started = time.perf_counter()
            model = _load(config, model_config, dtype, kv_dtype, device, communicator)
            loaded = time.perf_counter()

            def runner(num_blocks: int, num_swap_blocks: int, graphs: Graphs | None) -> ModelRunner:
                blocks = (num_blocks, num_swap_blocks)
                return ModelRunner(
                    config, model_config, model, backend_class, blocks, device, communicator, graphs
                )

            budget = planned or device.measure_memory(demand, runner)
            self.budget = _agreed(budget, communicator, device.torch_device)
            measured = time.perf_counter()
            device.prepare(model, config, communicator)
            prepared = time.perf_counter()
            graphs = device.graphs(config.scheduler) if config.cuda_graphs else None
            with _refused(
                "the KV cache and graphs", "lower gpu_memory_utilization or kv_cache_memory"
            ):
                self.runner = runner(self.budget.num_blocks, self.budget.num_swap_blocks, graphs)
        device.settle(config.owns_process)
        logger.info(
            "weights took %.1f s, measuring memory %.1f s, choosing kernels %.1f s, KV cache and "
            "graphs %.1f s",
            loaded - started,
            measured - loaded,
            prepared - measured,
            time.perf_counter() - prepared,
        )

    def shutdown(self) -> None:
        """Free the weights and the KV cache. A second call does nothing."""
        if not self._is_shut_down:
            self._is_shut_down = True
            with self._device.computing:
                self._device.moment().wait()
            self.runner.shutdown()
            del self.runner
            self._device.release()


def _with_chosen(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    communicator: Communicator,
) -> tuple[EngineConfig, ModelConfig]:
    """Both with what `quantization="auto"` stands for, and with copies of weights: the same on all
    ranks, by the memory of the rank that has the least."""
    own = torch.tensor([device.total_memory(config)], device=device.torch_device)
    total = int(communicator.all_gather(own).amin())
    kernels, name = device.weight_kernels(dtype), DTYPE_NAMES[dtype]
    if config.quantization == "auto":
        choice = choose_quantization(config, model_config, name, total, kernels)
        if communicator.shard.rank == 0:
            logger.info("quantization auto on %s: %s", device.name, choice)
        if choice.quantization is not None:
            model_config = quantized_on_load(
                model_config, choice.quantization, config.tensor_parallel_size
            )
        config = replace(config, quantization=choice.quantization)
    return config, with_copies(config, model_config, name, total, kernels)


def _check_features(
    backend_class: type[AttentionBackend], model_config: ModelConfig, kv_dtype: torch.dtype
) -> None:
    """Raises ConfigError if the backend lacks something that a layer's attention needs."""
    of_cache = frozenset({FP8_KV_CACHE}) if kv_dtype == FP8_DTYPE else frozenset[str]()
    for layer_id, attention in enumerate(model_config.attentions):
        check_score_features(backend_class, layer_id, attention.score_features | of_cache)


def _kv_shape(
    config: EngineConfig,
    model_config: ModelConfig,
    backend_class: type[AttentionBackend],
    kv_dtype: torch.dtype,
) -> KVShape:
    """The KV of this device's shard, with the backend's padding of heads."""
    return KVShape(
        model_config.kv_layout(token_size_of(backend_class)),
        config.cache.block_size,
        kv_dtype.itemsize,
        model_config.longest_encoder_input(config.scheduler.max_num_batched_tokens),
    )


def _load(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: Device,
    communicator: Communicator,
) -> CausalLM:
    """The model with its weights, and the communicator's buffers; logs what quantization loses."""
    with _refused("the weights", "use a smaller model or dtype"):
        model = load_model(
            model_config,
            dtype,
            device.torch_device,
            communicator,
            config.load_format,
            config.seed,
            kv_dtype == FP8_DTYPE,
        )
        communicator.reserve(
            config.scheduler.max_num_batched_tokens,
            model_config.hidden_size,
            dtype,
            device.torch_device,
        )
    if config.measure_quantization and model_config.is_quantized_on_load:
        report_loss(model, model_config, communicator, config.load_format == "dummy")
        device.release()
    return model


def _warn_of_dequantized(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: Device
) -> None:
    """Warn once if weights take more memory than in the files, because they are dequantized."""
    if model_config.quantization is None or model_config.shard.rank:
        return
    kernels, name = device.weight_kernels(dtype), DTYPE_NAMES[dtype]
    text = describe_dequantized(model_config, name, kernels, config.quantization)
    if text is not None:
        logger.warning("on %s %s", device.name, text)


def _agreed(budget: MemoryBudget, communicator: Communicator, device: torch.device) -> MemoryBudget:
    """The budget, limited to the blocks that every rank has room for: all run the same plans."""
    own = torch.tensor([budget.num_blocks, budget.num_swap_blocks], device=device)
    num_blocks, num_swap_blocks = communicator.all_gather(own).amin(dim=0).tolist()
    return budget.limited_to(num_blocks, num_swap_blocks)


@contextmanager
def _refused(what: str, instead: str) -> Iterator[None]:
    """Turn the device's out-of-memory error into one that says what may help."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{what} do not fit into what is free on the device (another program may have taken "
            f"memory meanwhile); {instead}, or free some. PyTorch says: {error}"
        ) from error
