"""`octavo memory`: the memory budget of a model, without its weights and without the device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

import click
from rich.console import RenderableType

from octavo.bench.tables import columns, facts, show
from octavo.cli.options import engine_options, integers, size
from octavo.config import DTYPE_BYTES, EngineConfig, QuantizationName, make_config
from octavo.core.kv.specs import group_layers
from octavo.errors import ConfigError, OutOfMemory
from octavo.host_memory import host_memory
from octavo.memory_budget import (
    FixedMemory,
    KVShape,
    check_asked_length,
    estimate_activations,
    format_bytes,
    plan_memory,
)
from octavo.models.config import ModelConfig
from octavo.models.hub import resolve_model
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.parallel import Shard
from octavo.simulation.cost_model import CostModel, ModelSize
from octavo.simulation.gpus import GPU, find_gpu
from octavo.simulation.step_shape import StepShape

DEFAULT_LENGTHS = "512,2048,8192"
GPU_SHARE = 0.9  # of a GPU's memory, as gpu_memory_utilization has it
CONTEXT = 1024  # tokens of each sequence whose decoding is priced
BATCHES = (1, 64, 256)


@click.command()
@click.argument("model")
@click.option(
    "--device-memory",
    type=size,
    help="What octavo may take on each device, such as 80GiB.  [default: what is free here]",
)
@click.option(
    "--lengths",
    type=integers,
    default=DEFAULT_LENGTHS,
    show_default=True,
    help="How many sequences of these lengths fit.",
)
@click.option(
    "--gpu",
    help="What a device is, with its memory: one of the simulator's names, or a .json file; adds "
    "what each quantization takes, and how fast it is expected to decode.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@engine_options(
    "dtype",
    "quantization",
    "max_model_len",
    "block_size",
    "num_blocks",
    "kv_cache_memory",
    "kv_cache_dtype",
    "swap_space",
    "tensor_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
)
def memory(
    model: str,
    device_memory: int | None,
    lengths: tuple[int, ...],
    gpu: str | None,
    as_json: bool,
    engine: dict[str, Any],
) -> None:
    """Print how MODEL's memory would be divided: weights, activations, KV blocks.

    Needs only its config.json, or the header of its GGUF file; weights of a hub id are not
    fetched. Activations are the worker's own estimate of the largest step; KV is counted without
    a backend's padding of heads. With --tensor-parallel-size, all sizes are those of one device.
    """
    if gpu is not None:
        named = find_gpu(gpu)
        device_memory = device_memory or int(GPU_SHARE * named.memory)
        forms = list(compare_forms(model, device_memory, engine, named))
    budget = Budget.of(model, device_memory, engine)
    if as_json:
        values = budget.values(lengths)
        if gpu is not None:
            values["forms"] = [asdict(form) for form in forms]
        click.echo(json.dumps(values))
        return
    show(*budget.tables(lengths))
    if gpu is not None:
        show("", forms_table(forms))


@dataclass(frozen=True, slots=True)
class Form:
    """What a model with weights of one form takes of a device, and how fast it should be."""

    quantization: str
    weights: int | None  # bytes; None: they leave no room for a KV cache
    kv_slots: int | None
    tokens_per_second: dict[int, float]  # expected of decodes at CONTEXT tokens, by batch size


def compare_forms(
    model: str, device_memory: int, engine: dict[str, Any], gpu: GPU
) -> Iterator[Form]:
    """As the files have the weights and, if they are not quantized, with each `quantization`."""
    own = read_model_config(resolve_model(model, weights=False)).quantization
    names = ["as stored", *(get_args(QuantizationName) if own is None else ())]
    for name in names:
        options = {**engine, "quantization": name if name in get_args(QuantizationName) else None}
        try:
            budget = Budget.of(model, device_memory, options)
        except OutOfMemory:
            yield Form(name, None, None, {})
            continue
        yield Form(name, budget.weight_bytes, budget.kv_slots, budget.decode_rates(gpu))


def forms_table(forms: list[Form]) -> RenderableType:
    """A row per form."""
    titles = [f"tokens/s at {batch}" for batch in BATCHES]
    table = columns("quantization", "weights", "KV tokens", *titles)
    for form in forms:
        if form.weights is None:
            table.add_row(form.quantization, "do not fit", "", *("" for _ in BATCHES))
            continue
        rates = [form.tokens_per_second.get(batch) for batch in BATCHES]
        table.add_row(
            form.quantization,
            format_bytes(form.weights),
            f"{form.kv_slots:,}",
            *("no room" if rate is None else f"{rate:,.0f}" for rate in rates),
        )
    return table


class Budget:
    """One device's memory budget, and how many sequences it has room for."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, dtype: str, total: int
    ) -> None:
        self._config = config
        self._model_config = model_config
        self._dtype = dtype
        self._kv_dtype = config.cache.dtype_for(dtype)
        self._size = size = config.tensor_parallel_size
        dtype_bytes = DTYPE_BYTES[dtype]
        shard = model_config.sharded(Shard(0, size))
        self._expert_bytes = shard.num_expert_parameters() * dtype_bytes
        self._shape = KVShape.dense(
            group_layers(shard.kv_specs()),
            config.cache.block_size,
            shard.num_kv_heads,
            shard.head_dim,
            config.cache.element_bytes(dtype),
            model_config.longest_encoder_input(config.scheduler.max_num_batched_tokens),
        )
        self.weight_bytes = shard.least_weight_bytes(dtype_bytes)
        fixed = FixedMemory(
            self.weight_bytes,
            estimate_activations(shard, config.scheduler, dtype_bytes),
        )
        swap_limit = config.cache.swap_space // size
        self._budget = plan_memory(
            config.cache, self._shape, fixed, total, total - fixed.total, swap_limit
        )
        check_asked_length(self._budget, self._shape, config)

    @classmethod
    def of(cls, model: str, device_memory: int | None, engine: dict[str, Any]) -> Budget:
        """Raises ConfigError, ModelError or OutOfMemory as the engine does."""
        config = make_config(model, **engine)
        directory = resolve_model(model, weights=False)
        model_config = read_model_config(directory, config.model_impl)
        if config.quantization is not None:
            model_config = quantized_on_load(model_config, config.quantization)
        if config.max_model_len is not None:
            model_config = model_config.with_max_model_len(config.max_model_len)
        dtype = config.dtype_for(model_config.dtype)
        if device_memory is not None:
            if device_memory <= 0:
                raise ConfigError("device_memory", f"{device_memory} bytes is not positive")
            config = config.for_gpu(device_memory)
        total = device_memory or host_memory() // config.tensor_parallel_size
        return cls(config, model_config, dtype, total)

    @property
    def kv_slots(self) -> int:
        """Tokens that the KV cache has room for."""
        return self._budget.num_blocks * self._shape.block_size

    def decode_rates(self, gpu: GPU) -> dict[int, float]:
        """Tokens per second that the simulator expects of decodes, by the number of sequences, of
        those whose KV fits."""
        element_bytes = self._config.cache.element_bytes(self._dtype)
        size = ModelSize.of(self._model_config, self._dtype, element_bytes)
        cost = CostModel(size, gpu, self._size, self._shape.block_size)
        context = min(CONTEXT, self._model_config.max_model_len)
        rates = {}
        for batch in BATCHES:
            if batch * context <= self.kv_slots:
                step = StepShape(batch, batch, batch, batch * context, 0, num_requests=batch)
                rates[batch] = batch / cost.compute_seconds(step)
        return rates

    def fits(self, num_tokens: int) -> int | None:
        """How many sequences of that length fit at once; None if it is beyond the model."""
        if num_tokens > self._model_config.max_model_len:
            return None
        chunk = self._config.scheduler.max_num_batched_tokens
        return self._budget.num_blocks // self._shape.blocks_for(num_tokens, chunk)

    def tables(self, lengths: tuple[int, ...]) -> tuple[RenderableType, ...]:
        """For people: the budget, what a token takes, and how many sequences fit."""
        model, shape = self._model_config, self._shape
        title = (
            f"{model.directory}: {model.architecture}, "
            f"{model.num_parameters() / 1e6:,.1f} M parameters, {self._dtype}"
        )
        if model.num_expert_parameters():
            title += f"; a token takes {model.num_active_parameters() / 1e6:,.1f} M of them"
        if self._size > 1:
            title += f"; each of {self._size} devices"
        rows = [
            (
                "KV per token",
                f"{shape.bytes_per_token:,} bytes ({format_bytes(shape.bytes_per_token)}): "
                f"{shape.layout}, {self._kv_dtype}",
            ),
            (
                "KV slots",
                f"{self.kv_slots:,} tokens in {self._budget.num_blocks:,} blocks",
            ),
        ]
        if shape.encoder_len:
            rows.append(("encoder input", f"up to {shape.encoder_len:,} tokens, counted below"))
        if self._expert_bytes:
            size = format_bytes(self._expert_bytes)
            rows.insert(0, ("experts", f"{size} of the weights"))
        for length in lengths:
            count = self.fits(length)
            note = f"more than the model's {model.max_model_len:,} positions"
            shown = note if count is None else self._shown(length, count)
            rows.append((f"of {length:,} tokens", shown))
        return title, "", str(self._budget), "", facts(rows), "", self._groups_table()

    def _shown(self, length: int, count: int) -> str:
        """What sequences of a length take."""
        held, read = self._shape.held_bytes(length), self._shape.read_bytes(length)
        return (
            f"{count:,} sequences at once; {format_bytes(held)} of KV each, "
            f"{held / read:.2f} times what their layers read"
        )

    def _groups_table(self) -> RenderableType:
        """A row per KV group: its layers, and what the longest sequence holds."""
        longest = self._model_config.max_model_len
        titles = ("layers", "bytes per token", "tokens per block", f"blocks for {longest:,} tokens")
        table = columns("KV group", *titles)
        for group in self._groups():
            table.add_row(
                f"{group['number']}: {group['spec']}",
                f"{len(group['layers'])}",
                f"{group['bytes_per_token']:,}",
                f"{group['block_size']}",
                f"{group['blocks']:,}",
            )
        return table

    def _groups(self) -> list[dict[str, Any]]:
        shape, longest = self._shape, self._model_config.max_model_len
        return [
            {
                "number": number,
                "spec": str(group.spec),
                "layers": list(group.layer_ids),
                "bytes_per_token": len(group.layer_ids) * shape.layer_bytes // shape.block_size,
                "block_size": size,
                "blocks": group.spec.max_blocks(shape.followed(group.spec, longest), size, chunk=1),
            }
            for number, (group, size) in enumerate(
                zip(shape.layout.groups, shape.block_sizes, strict=True)
            )
        ]

    def values(self, lengths: tuple[int, ...]) -> dict[str, Any]:
        return {
            "model": str(self._model_config.directory),
            "architecture": self._model_config.architecture,
            "parameters": self._model_config.num_parameters(),
            "active_parameters": self._model_config.num_active_parameters(),
            "expert_bytes": self._expert_bytes,
            "dtype": self._dtype,
            "kv_cache_dtype": self._kv_dtype,
            "tensor_parallel_size": self._size,
            "max_model_len": self._model_config.max_model_len,
            "max_encoder_len": self._shape.encoder_len,
            "budget": asdict(self._budget) | {"unused": self._budget.unused},
            "kv_bytes_per_token": self._shape.bytes_per_token,
            "kv_slots": self.kv_slots,
            "kv_groups": self._groups(),
            "sequences": {str(length): self.fits(length) for length in lengths},
            "kv_bytes": {str(length): self._shape.held_bytes(length) for length in lengths},
        }
