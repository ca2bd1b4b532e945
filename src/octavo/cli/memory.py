"""`octavo memory`: the memory budget of a model, without its weights and without the device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import click
from rich.console import RenderableType

from octavo.bench.tables import columns, facts, show
from octavo.cli.options import engine_options, integers, size
from octavo.config import DTYPE_BYTES, EngineConfig, QuantizationName, make_config
from octavo.errors import ConfigError, OutOfMemory
from octavo.host_memory import host_memory
from octavo.memory_budget import format_bytes
from octavo.models.config import ModelConfig
from octavo.models.hub import resolve_model
from octavo.models.quantization import WeightKernels
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.simulation.cost_model import CostModel, ModelSize
from octavo.simulation.gpus import GPU, find_gpu
from octavo.simulation.step_shape import StepShape
from octavo.weight_forms import (
    Choice,
    Estimate,
    choose_quantization,
    describe_dequantized,
    with_copies,
)

DEFAULT_LENGTHS = "512,2048,8192"
GPU_SHARE = 0.9  # of a GPU's memory, as gpu_memory_utilization has it
CONTEXT = 1024  # tokens of each sequence whose decoding is priced
BATCHES = (1, 64, 256)


@click.command()
@click.argument("model")
@click.option(
    "--device-memory",
    type=size,
    help="What octavo may take on each device, such as 80GiB.  [default: what this host has for"
    " its CPUs]",
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
    "model_impl",
    "quantization",
    "weight_copies",
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
    named = None if gpu is None else find_gpu(gpu)
    if named is not None and device_memory is None:
        device_memory = int(GPU_SHARE * named.memory)
    machine = Machine.of(model, device_memory, engine, named)
    forms = [] if named is None else list(machine.forms(named))
    choice = None if named is None else machine.choose()
    try:
        budget = machine.budget(machine.asked(choice))
    except OutOfMemory:
        if forms and not as_json:
            show(forms_table(forms), "")
            if choice is not None:
                show(f"--quantization auto: {choice}", "")
        raise
    if as_json:
        values = budget.values(lengths)
        if choice is not None:
            values["forms"] = [asdict(form) for form in forms]
            values["auto"] = asdict(choice)
        click.echo(json.dumps(values))
        return
    show(*budget.tables(lengths))
    if choice is not None:
        show("", forms_table(forms), "", f"--quantization auto: {choice}")


@dataclass(frozen=True, slots=True)
class Form:
    """What a model with weights of one form takes of a device, and how fast it should be."""

    quantization: str
    weights: int | None  # bytes; None: they leave no room for a KV cache
    kv_slots: int | None
    # Expected of decodes at CONTEXT tokens, by batch size; None: the model has an encoder, whose
    # time the cost model does not know.
    tokens_per_second: dict[int, float] | None
    is_dequantized: bool  # the device has no kernels for it


@dataclass(frozen=True, slots=True)
class Machine:
    """A model, the engine's options, and what may be taken of each device."""

    config: EngineConfig
    model_config: ModelConfig  # as its files have it
    dtype: str
    total: int  # bytes
    kernels: WeightKernels

    @classmethod
    def of(
        cls, model: str, device_memory: int | None, engine: dict[str, Any], gpu: GPU | None
    ) -> Machine:
        """Without a name, a device with memory of its own is one that keeps all forms, and one
        without is this host, whose CPUs compute.

        Raises ConfigError or ModelError as the engine does.
        """
        config = make_config(model, **engine)
        if config.quantization == "auto" and gpu is None:
            raise ConfigError("quantization", "auto depends on the device: name it by --gpu")
        model_config = read_model_config(resolve_model(model, weights=False), config.model_impl)
        if config.max_model_len is not None:
            model_config = model_config.with_max_model_len(config.max_model_len)
        if device_memory is not None:
            if device_memory <= 0:
                raise ConfigError("device_memory", f"{device_memory} bytes is not positive")
            config = config.for_gpu(device_memory)
        total = device_memory or host_memory() // config.tensor_parallel_size
        kernels: WeightKernels = "cpu" if device_memory is None else "hopper"
        if gpu is not None:
            kernels = gpu.kernels
        if kernels == "cpu":
            config = replace(config, device="cpu")
        dtype = config.dtype_for(model_config.dtype)
        return cls(config, model_config, dtype, total, kernels)

    def choose(self) -> Choice | None:
        """What "auto" stands for. Raises OutOfMemory if that was asked for and nothing fits."""
        try:
            return choose_quantization(
                self.config, self.model_config, self.dtype, self.total, self.kernels
            )
        except OutOfMemory:
            if self.config.quantization == "auto":
                raise
            return None

    def asked(self, choice: Choice | None) -> QuantizationName | None:
        """The quantization that the options mean."""
        if self.config.quantization != "auto":
            return self.config.quantization
        return None if choice is None else choice.quantization

    def quantized(self, name: QuantizationName | None) -> ModelConfig:
        """The model as it is loaded."""
        model = self.model_config
        if name is not None:
            model = quantized_on_load(model, name, self.config.tensor_parallel_size)
        return with_copies(self.config, model, self.dtype, self.total, self.kernels)

    def budget(self, name: QuantizationName | None) -> Budget:
        """Raises OutOfMemory if there is no room for a KV cache."""
        model = self.quantized(name)
        estimate = Estimate.of(self.config, model, self.dtype, self.total, self.kernels)
        note = describe_dequantized(model, self.dtype, self.kernels, name)
        return Budget(self.config, model, self.dtype, estimate, note)

    def forms(self, gpu: GPU) -> Iterator[Form]:
        """The budget of the weights as stored, and of each quantization that the loader makes."""
        for name in (None, *get_args(QuantizationName)):
            shown = name or "as stored"
            try:
                budget = self.budget(name)
            except OutOfMemory:
                yield Form(shown, None, None, {}, False)
                continue
            except ConfigError:
                if name is None:
                    raise
                continue
            rates = budget.decode_rates(gpu)
            is_dequantized = budget.note is not None
            yield Form(shown, budget.weight_bytes, budget.kv_slots, rates, is_dequantized)


def forms_table(forms: list[Form]) -> RenderableType:
    """A row per form."""
    titles = [f"tokens/s at {batch}" for batch in BATCHES]
    table = columns("quantization", "weights", "KV tokens", *titles)
    for form in forms:
        if form.weights is None:
            table.add_row(form.quantization, "do not fit", "", *("" for _ in BATCHES))
            continue
        rates, missing = form.tokens_per_second, "no room"
        if rates is None:
            rates, missing = {}, "not known"
        table.add_row(
            f"{form.quantization} (dequantized)" if form.is_dequantized else form.quantization,
            format_bytes(form.weights),
            f"{form.kv_slots:,}",
            *(f"{rates[each]:,.0f}" if each in rates else missing for each in BATCHES),
        )
    return table


class Budget:
    """One device's memory budget, and how many sequences it has room for."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        dtype: str,
        estimate: Estimate,
        note: str | None,
    ) -> None:
        """model_config: the whole model; note: of weights that the device dequantizes."""
        self._config = config
        self._model_config = model_config
        self._dtype = dtype
        self._kv_dtype = config.cache.dtype_for(dtype)
        self._size = config.tensor_parallel_size
        self._shape, self._budget, self._estimate = estimate.shape, estimate.budget, estimate
        self._expert_bytes = estimate.model.read_bytes(DTYPE_BYTES[dtype])[1]
        self._copy_bytes = estimate.model.copy_bytes
        self.weight_bytes = estimate.fixed.weights
        self.note = note

    @property
    def kv_slots(self) -> int:
        """Tokens that the KV cache has room for, while all groups hold each of them."""
        budget = self._budget
        return budget.num_blocks * budget.block_bytes // self._shape.bytes_per_token

    def decode_rates(self, gpu: GPU) -> dict[int, float] | None:
        """Tokens per second that the simulator expects of decodes, by the number of sequences, of
        those whose KV fits; None: see Form."""
        if self._model_config.encoder is not None:
            return None
        element_bytes = self._config.cache.element_bytes(self._dtype)
        kept = self._model_config.kept_by(gpu.kernels)
        size = ModelSize.of(kept, self._dtype, element_bytes, self._size)
        cost = CostModel(size, gpu, self._size, self._shape.block_size)
        context = min(CONTEXT, self._model_config.max_model_len)
        shape = self._shape
        read = shape.read_bytes(context) / shape.token_bytes  # tokens, the mean of layers
        room = self._estimate.fits(context, chunk=1)
        rates = {}
        for batch in BATCHES:
            if batch <= room:
                step = StepShape(batch, batch, batch, batch * read, 0, num_requests=batch)
                rates[batch] = batch / cost.compute_seconds(step)
        return rates

    def fits(self, num_tokens: int) -> int | None:
        """How many sequences of that length fit at once; None if it is beyond the model."""
        if num_tokens > self._model_config.max_model_len:
            return None
        return self._estimate.fits(num_tokens, self._config.scheduler.max_num_batched_tokens)

    def tables(self, lengths: tuple[int, ...]) -> tuple[RenderableType, ...]:
        """What people read: the budget, what a token takes, and how many sequences fit."""
        model, shape = self._model_config, self._shape
        title = (
            f"{model.path}: {model.architecture}, "
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
        if self._copy_bytes:
            size = format_bytes(self._copy_bytes)
            rows.insert(0, ("copies of weights", f"{size} of the weights"))
        if self.note is not None:
            rows.insert(0, ("dequantized", self.note))
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
                "bytes_per_token": group.token_size * shape.element_bytes,
                "block_size": size,
                "blocks": group.spec.max_blocks(shape.followed(group.spec, longest), size, chunk=1),
            }
            for number, (group, size) in enumerate(
                zip(shape.layout.groups, shape.block_sizes, strict=True)
            )
        ]

    def values(self, lengths: tuple[int, ...]) -> dict[str, Any]:
        return {
            "model": str(self._model_config.path),
            "architecture": self._model_config.architecture,
            "parameters": self._model_config.num_parameters(),
            "active_parameters": self._model_config.num_active_parameters(),
            "expert_bytes": self._expert_bytes,
            "weight_copy_bytes": self._copy_bytes,
            "dtype": self._dtype,
            "dequantized": self.note,
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
