"""In which form a device holds a model's weights: what each takes, and what "auto" chooses.

Plain Python, no torch: the worker chooses by these numbers, and `octavo memory` prints them on any
machine.

"auto" prefers the weights as the files have them, and rounds them only where they leave too little
room for the KV cache: of `max_num_seqs` sequences, but no more than SEQUENCES, of CONTEXT tokens or
as many as the model takes. It takes the first form, of the weights as they are and of AUTO_FORMS,
that leaves nearly as much room (NEARLY) as is wanted, or as any of them does. Forms that the device
would dequantize are left out, and so are weights that the files have quantized already, or that the
loader cannot quantize.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, chain

from octavo.config import DTYPE_BYTES, EngineConfig, QuantizationName
from octavo.errors import ConfigError, OutOfMemory
from octavo.layers.config import CopyForm, ExpertsConfig, LinearConfig
from octavo.memory_budget import (
    FixedMemory,
    KVShape,
    MemoryBudget,
    check_asked_length,
    cpu_cache,
    estimate_activations,
    format_bytes,
    plan_memory,
)
from octavo.models.config import ModelConfig, map_distinct
from octavo.models.quantization import WeightKernels
from octavo.models.registry import quantized_on_load
from octavo.parallel import Shard

SEQUENCES, CONTEXT = 64, 1024  # that a KV cache should have room for
NEARLY = 0.8  # of the room: less than the rest is not worth rounding weights for
# The share of the room beside the weights that copies of them may take in any case, unless they are
# dequantized and would be those of some layers only: these gain little. They may also take what a
# KV cache of `max_num_seqs` sequences of CONTEXT tokens leaves.
COPIES_SHARE = 0.125
LATER = 2 << 30  # bytes for what is measured once copies are made: CUDA graphs and workspaces
# What "auto" may round weights to on devices with these kernels, the most exact form first. int8
# is not among Hopper's: it takes as many bytes as fp8, whose products are faster.
AUTO_FORMS: Mapping[WeightKernels, tuple[QuantizationName, ...]] = {
    "hopper": ("fp8", "int4"),
    "ada": ("fp8", "int4"),
    "ampere": ("int4",),
    "cpu": ("int8",),
    "none": (),
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one device holds of a model, before anything is allocated."""

    model: ModelConfig  # the device's shard
    shape: KVShape
    fixed: FixedMemory
    budget: MemoryBudget

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        dtype: str,
        total: int,
        kernels: WeightKernels,
    ) -> Estimate:
        """How `total` bytes of a device with such kernels are used by one of
        `config.tensor_parallel_size` shards of a model that is computed in `dtype`.

        KV is counted without an attention backend's padding of heads. Where the settings give it
        no size, it takes the rest of a GPU, and what it takes by default of a CPU.
        Raises OutOfMemory if not even one block, or no sequence of the asked length, fits.
        """
        size = config.tensor_parallel_size
        shard = model_config.sharded(Shard(0, size)).kept_by(kernels)
        scheduler = config.scheduler
        shape = _kv_shape(config, shard, dtype)
        fixed = FixedMemory(
            _weight_bytes(shard, dtype, kernels),
            estimate_activations(shard, scheduler, DTYPE_BYTES[dtype]),
        )
        is_cpu = kernels == "cpu"
        default = cpu_cache(total, fixed, size) if is_cpu else total - fixed.total
        swap_limit = config.cache.swap_space // size
        budget = plan_memory(config.cache, shape, fixed, total, default, swap_limit)
        check_asked_length(budget, shape, config)
        return cls(shard, shape, fixed, budget)

    def fits(self, num_tokens: int, chunk: int) -> int:
        """How many sequences of that length, computed by chunks, fit at once."""
        return self.budget.num_blocks // self.shape.blocks_for(num_tokens, chunk)


@dataclass(frozen=True, slots=True)
class Choice:
    """What "auto" stands for, and why."""

    quantization: QuantizationName | None  # None: as the files have the weights
    reason: str  # a sentence with the numbers

    def __str__(self) -> str:
        return f"{self.quantization or 'as stored'}, because {self.reason}"


def choose_quantization(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: str,
    total: int,
    kernels: WeightKernels,
) -> Choice:
    """What "auto" stands for on a device of which `total` bytes may be taken.

    Args:
        config: its `quantization` is not read.
        model_config: the whole model, as its files have it.
        dtype: what it is computed in.
        kernels: of the device.

    Raises:
        OutOfMemory: the model fits in none of the forms; names the smallest.
    """
    forms: dict[QuantizationName | None, ModelConfig] = {None: model_config}
    refusals: list[str] = []
    for name in AUTO_FORMS[kernels]:
        try:
            forms[name] = quantized_on_load(model_config, name, config.tensor_parallel_size)
        except ConfigError as error:
            refusals.append(error.reason)
    if refusals and len(forms) == 1:
        return Choice(None, refusals[0])
    context = min(CONTEXT, model_config.max_model_len)
    wanted = min(SEQUENCES, config.scheduler.max_num_seqs)
    rooms: dict[QuantizationName | None, int] = {}
    texts: list[str] = []
    stored = _bytes(config, model_config, dtype, kernels)
    for form, model in forms.items():
        num_bytes = _bytes(config, model, dtype, kernels)
        if form is not None and num_bytes >= stored:
            continue  # the device would dequantize it
        taken = f"{form or dtype} takes {format_bytes(num_bytes)}"
        try:
            estimate = Estimate.of(config, model, dtype, total, kernels)
        except OutOfMemory as error:
            texts.append(f"{taken} and does not fit")
            why = error
            continue
        rooms[form] = estimate.fits(context, chunk=1)
        texts.append(f"{taken} and leaves room for {rooms[form]:,} sequences of {context:,} tokens")
        if rooms[form] >= NEARLY * wanted:
            break
    else:
        texts += refusals
    if not rooms:
        raise OutOfMemory(
            f"quantization: the model fits in no form that auto considers: of "
            f"{format_bytes(total)}, {', '.join(texts)}; {why}"
        ) from why
    most = min(max(rooms.values()), wanted)
    chosen = next(form for form, room in rooms.items() if room >= NEARLY * most)
    reason = f"{'; '.join(texts)}; room for {wanted:,} is wanted"
    if len(texts) == 1 and rooms[chosen] < NEARLY * wanted:
        reason += ", but the device would dequantize other forms"
    return Choice(chosen, reason)


def with_copies(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: str,
    total: int,
    kernels: WeightKernels,
) -> ModelConfig:
    """The same model with copies of weights, if they are asked for and the device has kernels for
    them: of the head and of as many layers as the KV cache can spare memory for.

    Args:
        config: with `weight_copies`.
        model_config: the whole model, as it is loaded.
        dtype: what it is computed in.
        total: bytes that may be taken of the device.
        kernels: of the device.
    """
    of_head: CopyForm | None = "float12" if dtype == "bfloat16" else None
    is_unpacked = model_config.copy_form == "dequantized" and DTYPE_BYTES[dtype] == 2
    has_use = of_head is not None or is_unpacked
    if not (config.weight_copies and kernels == "hopper" and has_use):
        return model_config
    whole = model_config.with_copies(of_head=of_head)
    shard = whole.sharded(Shard(0, config.tensor_parallel_size)).kept_by(kernels)
    weights = shard.least_weight_bytes(DTYPE_BYTES[dtype]) - shard.copy_bytes
    # Those of projections, which every token reads, come before those of experts.
    sizes = map_distinct(_copy_bytes, shard.copyable)
    in_order = chain((size for size, _ in sizes), (size for _, size in sizes))
    taken = list(accumulate(in_order, initial=shard.head.copy_bytes))
    room = total - weights
    share = COPIES_SHARE * room
    if shard.copy_form == "dequantized" and taken[-1] > share:
        share = shard.head.copy_bytes
    most = _most_copies(config, shard, dtype, room, share)
    fitting = sum(size <= most for size in taken) - 1
    if fitting < 0:
        return model_config
    num_layers = min(fitting, len(shard.copyable))
    return model_config.with_copies(num_layers, fitting - num_layers, of_head)


def _copy_bytes(layer: tuple[LinearConfig | ExpertsConfig, ...]) -> tuple[int, int]:
    """What a layer's copies take: those of projections, and those of experts."""
    experts = sum(each.copy_bytes for each in layer if isinstance(each, ExpertsConfig))
    return sum(each.copy_bytes for each in layer) - experts, experts


def _most_copies(
    config: EngineConfig, shard: ModelConfig, dtype: str, room: int, share: float
) -> float:
    """How many bytes of the room beside its weights a device has to spare for copies: `share` in
    any case.

    What is asked for by name, a KV cache of some size or a longest sequence, comes first.
    """
    cache, scheduler = config.cache, config.scheduler
    shape = _kv_shape(config, shard, dtype)
    length, chunk = config.max_model_len or 1, scheduler.max_num_batched_tokens
    asked, wanted = (shape.blocks_for(length, chunk) + 1) * shape.block_bytes, 0
    if cache.num_blocks is not None:
        asked = (cache.num_blocks + 1) * shape.block_bytes
    elif cache.kv_cache_memory is not None:
        asked = cache.kv_cache_memory
    else:
        wanted = scheduler.max_num_seqs * shape.held_bytes(min(CONTEXT, shard.max_model_len))
    activations = estimate_activations(shard, scheduler, DTYPE_BYTES[dtype])
    room_beside = room - activations - LATER
    return min(room_beside - asked, max(share, room_beside - wanted))


def _kv_shape(config: EngineConfig, shard: ModelConfig, dtype: str) -> KVShape:
    """The KV of one device, without an attention backend's padding of heads."""
    return KVShape(
        shard.kv_layout(),
        config.cache.block_size,
        config.cache.element_bytes(dtype),
        shard.longest_encoder_input(config.scheduler.max_num_batched_tokens),
    )


def _bytes(
    config: EngineConfig, model_config: ModelConfig, dtype: str, kernels: WeightKernels
) -> int:
    """What one device keeps of the weights."""
    shard = model_config.sharded(Shard(0, config.tensor_parallel_size))
    return _weight_bytes(shard.kept_by(kernels), dtype, kernels)


def _weight_bytes(kept: ModelConfig, dtype: str, kernels: WeightKernels) -> int:
    """What a device with such kernels, which keep the weights so, holds of its shard."""
    count = kept.cpu_weight_bytes if kernels == "cpu" else kept.least_weight_bytes
    return count(DTYPE_BYTES[dtype])


def describe_dequantized(
    model_config: ModelConfig, dtype: str, kernels: WeightKernels, name: str | None = None
) -> str | None:
    """What is lost where a device dequantizes the weights; None where it does not.

    Args:
        model_config: as it is loaded, quantized in the files or on load; the whole model or a
            device's shard.
        dtype: what it is computed in, and dequantized to.
        kernels: of the device.
        name: what the form is called; None: by the method in config.json.
    """
    quantization = model_config.quantization
    if quantization is None:
        return None
    kept = model_config.kept_by(kernels)
    numbers = zip(kept.quantized_parts, kept.dequantized_parts, strict=True)
    parts = zip(("projections", "experts"), numbers, strict=True)
    lost = " and ".join(
        part if number == lost else f"{part} (some of them)"
        for part, (number, lost) in parts
        if lost
    )
    if not lost:
        return None
    size = DTYPE_BYTES[dtype]
    taken, least = kept.least_weight_bytes(size), model_config.least_weight_bytes(size)
    instead = f" instead of {format_bytes(least)}" if least < taken else ""
    return (
        f"{name or quantization.method} {lost} are dequantized to {dtype}, because octavo has no "
        f"kernels for them there; they take {format_bytes(taken)}{instead}"
    )
