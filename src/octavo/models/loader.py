"""Loads a model's files into a model that is ready to run.

Tensors are read from memory-mapped files straight into the parameters, so the model is in memory
once. Every parameter must be loaded and every tensor must be used.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from octavo.config import LoadFormat
from octavo.errors import ConfigError, ModelError, few
from octavo.host_memory import return_freed_memory
from octavo.layers.base import WeightOwner, WeightSlice, WeightSlot, WeightTarget, WeightTargets
from octavo.layers.config import AttentionConfig
from octavo.layers.experts import Router
from octavo.layers.linear import LinearMethod, warn_once
from octavo.layers.norm import Norm, StreamScale
from octavo.models.base import CausalLM, Checkpoint, FileTensor, WeightFiles
from octavo.models.config import ModelConfig
from octavo.models.dequantize import QuantizedTensor, StoredTensor, is_unused_bias
from octavo.models.kv_scales import is_kv_scale
from octavo.models.quantization import SMALLEST_GROUP, Quantization, halved
from octavo.ops import KVScales
from octavo.ops.communicator import Communicator
from octavo.ops.quantized import (
    FormError,
    GroupedInt,
    MxFloat4,
    QuantizedWeight,
    ScaledFloat8,
    chunks,
)
from octavo.registry import import_place

logger = logging.getLogger(__name__)

DUMMY_STD = 0.02
# Dummy weights repeat one array of noise; its prime length makes the rows of a matrix differ.
NOISE_LENGTH = 1_000_003
NOISE_ELEMENTS = 1 << 22  # that are filled in at once
PASSED_ELEMENTS = 1 << 23  # of weights, after whose copies freed memory is returned
MODULES_TOGETHER = 4  # after which it is, too, when they are rearranged


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    communicator: Communicator,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    fp8_kv_cache: bool = False,
) -> CausalLM:
    """Load a model with its weights, cast to `dtype`, on `device`.

    `config` is of the communicator's shard (ModelDescription.sharded).

    With load_format "dummy" the weights are random, from `seed`, and no file is read. With
    fp8_kv_cache the attention layers have the checkpoint's scales (KVScales).
    Raises ModelError if the weights do not fit the configuration.
    """
    model = build_model(config, dtype, device, communicator)
    if load_format == "dummy":
        fill_with_noise(model, config, seed)
    else:
        load_weights(model, config)
    if model.checkpoint is not None:
        # They would keep the memory of weights that are packed from here on.
        model.checkpoint.targets.clear()
    freed = FreedMemory(device)
    for module in model.modules():
        if isinstance(module, WeightOwner):
            module.finalize()
            freed.after(PASSED_ELEMENTS // MODULES_TOGETHER)
    model.check()
    if fp8_kv_cache:
        scales = [KVScales()] * len(model.attention_layers)
        if load_format != "dummy":
            scales = open_weights(config).kv_scales()
        scales = [scales[source] for source in config.kv_sources]
        layers = zip(model.attention_layers, scales, strict=True)
        model.attention_layers = [replace(layer, kv_scales=each) for layer, each in layers]
    return model


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, communicator: Communicator
) -> CausalLM:
    """The model with uninitialised weights, before any `finalize`."""
    model_class = import_place(config.model_class)
    with torch.device("meta"):  # shapes only, until dtype and device are set
        model: CausalLM = model_class(config, device, communicator)
    model.allocate(dtype, device)
    if config.tied_embeddings:
        model.tie()
    return model


def open_weights(config: ModelConfig) -> WeightFiles:
    """The files that the model's tensors are in; nothing is read yet."""
    files: WeightFiles = import_place(config.weight_files)(config)
    return files


def load_weights(model: CausalLM, config: ModelConfig) -> None:
    """Copy the tensors of the model's files into the parameters.

    Raises ModelError that names the tensor and the file: missing, unknown, wrong shape or dtype,
    two different values for one parameter, unreadable file.
    """
    checkpoint = checkpoint_of(model, config)
    targets = checkpoint.targets
    dtype, device = model.token_table.dtype, model.token_table.device
    # See _identity: where each was loaded from; tied weights have two names.
    loaded: dict[object, str] = {}
    unknown: list[str] = []
    rounding, freed = Rounding(config), FreedMemory(device)
    files = open_weights(config)
    with files.tensors(dtype, device) as tensors:
        for key, (path, name, tensor) in checkpoint.translate(tensors):
            target = targets.get(key)
            if target is None:
                is_left_out = config.is_stored_quantized and is_unused_bias(name, tensor)
                if not (is_left_out or checkpoint.is_ignored(key) or is_kv_scale(name)):
                    unknown.append(f"{name} ({path.name})")
                continue
            where, identity = f"{path}: {name}", _identity(key, target)
            is_first = identity not in loaded
            earlier = loaded.setdefault(identity, where)
            for part, destination in _parts(tensor, target, where, files.config_name):
                if isinstance(destination, WeightSlot):
                    if not is_first:
                        raise ModelError(f"{where} is also in another file")
                    if isinstance(part, Tensor):
                        part = rounding.of(key, where, part, destination, dtype, device)
                    destination.put(part, dtype)
                    continue
                assert isinstance(part, Tensor)
                rows = destination[: len(part)] if part.dim() else destination
                part = part.view(rows.shape)  # whose dimensions may be cut up
                if is_first:
                    rows.copy_(part)
                    rounding.check(where, rows)
                    if part.dim():
                        destination[len(part) :].zero_()
                elif not part.to(rows).allclose(rows, rtol=0, atol=0, equal_nan=True):
                    _check_no_nan(earlier, rows)
                    _check_no_nan(where, part)
                    is_embedding = rows.data_ptr() == model.token_table.data_ptr()
                    raise ModelError(f"{where} {_contradiction(is_embedding, earlier, config)}")
            freed.after(math.prod(target.shape))
    if unknown:
        raise ModelError(
            f"{config.path}: tensors that {config.family} does not have: {few(unknown)}"
        )
    missing = [name for name, target in targets.items() if _identity(name, target) not in loaded]
    if missing:
        raise ModelError(f"{config.path}: the weights lack {few(missing)}")
    rounding.report()


class FreedMemory:
    """Returns freed memory to the system now and then while weights are loaded.

    On a CPU, copies in float32 come and go between what is kept. malloc fits the next ones into few
    of the gaps that they leave, and would take as much as the whole model again.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_needed = device.type == "cpu"
        self._num_elements = 0

    def after(self, num_elements: int) -> None:
        """Called when weights with so many elements have been read or rearranged."""
        self._num_elements += num_elements
        if self._is_needed and self._num_elements >= PASSED_ELEMENTS:
            return_freed_memory()
            self._num_elements = 0


class FamilyCheckpoint:
    """See Checkpoint: the names of a family's description, without prefix."""

    def __init__(self, model: CausalLM, config: ModelConfig) -> None:
        self._model = model
        self._config = config
        self._names = config.weight_names

    @cached_property
    def targets(self) -> WeightTargets:
        """See Checkpoint.targets; of a model that is not finalized."""
        return _family_targets(self._model, self._config)

    def translate(self, tensors: Iterable[FileTensor]) -> Iterator[tuple[str, FileTensor]]:
        """See Checkpoint.translate."""
        for each in tensors:
            yield self._names.without_prefix(each[1]), each

    def is_ignored(self, name: str) -> bool:
        """See Checkpoint.is_ignored."""
        # Old checkpoints carry the rotary frequencies, which follow from config.json.
        is_known = name.endswith("rotary_emb.inv_freq")
        return is_known or any(re.fullmatch(pattern, name) for pattern in self._names.ignored)

    def names_of(self, path: str, owner: WeightOwner) -> Sequence[str]:
        """See Checkpoint.names_of."""
        return self._names.of(path)


def checkpoint_of(model: CausalLM, config: ModelConfig) -> Checkpoint:
    """What the model's checkpoints call its weights."""
    return model.checkpoint or FamilyCheckpoint(model, config)


def weight_targets(model: CausalLM, config: ModelConfig) -> WeightTargets:
    """Where the checkpoint's tensors go, by their names (Checkpoint.targets)."""
    return checkpoint_of(model, config).targets


def _family_targets(model: CausalLM, config: ModelConfig) -> WeightTargets:
    names = config.weight_names
    targets: WeightTargets = {}
    for path, module in model.named_modules():
        if not isinstance(module, WeightOwner):
            continue
        own = module.targets(names.of(path))
        if names.transposed and path.startswith("layers.") and isinstance(module, LinearMethod):
            own = {name: target.transposed() for name, target in own.items()}
        if names.qkv_by_head and path.endswith(".attention.qkv"):
            attention = config.layers[0].attention
            own = {name: _by_head(target, attention) for name, target in own.items()}
        targets |= own
    return targets


def _by_head(target: WeightTarget, attention: AttentionConfig) -> WeightTarget:
    """For a checkpoint that has the queries, the key and the value of each KV head together.

    target: of all queries, then all keys, then all values.
    """
    size = attention.head_dim
    num_heads = attention.num_heads * attention.shard.size
    num_kv_heads = (target.shape[0] // size - num_heads) // 2
    per_kv_head = num_heads // num_kv_heads
    slices = []
    for part, (rows, *others) in target.slices:
        assert isinstance(part, Tensor), "slots take weights as they are computed with"
        for begin in range(rows.start, rows.stop, size):
            head = begin // size
            if head < num_heads:
                kv_head, offset = divmod(head, per_kv_head)
            else:
                kind, kv_head = divmod(head - num_heads, num_kv_heads)
                offset = per_kv_head + kind
            there = size * (kv_head * (per_kv_head + 2) + offset)
            here = part[begin - rows.start : begin - rows.start + size]
            slices.append(WeightSlice(here, (slice(there, there + size), *others)))
    return WeightTarget(target.shape, tuple(slices))


def fill_with_noise(model: CausalLM, config: ModelConfig, seed: int) -> None:
    """Random weights: scales are 1, everything else is normal with a small deviation.

    Each of a checkpoint's tensors has the same values however the model is sharded.
    """
    first = next(model.parameters())
    generator = torch.Generator(first.device).manual_seed(seed)
    noise = torch.randn(NOISE_LENGTH, generator=generator, device=first.device)
    noise = (noise * DUMMY_STD).to(first.dtype)
    begin, filled = 0, set()
    for name, target in weight_targets(model, config).items():
        identity = _identity(name, target)
        if identity in filled:
            continue
        filled.add(identity)
        for destination, index in target.slices:
            if isinstance(destination, WeightSlot):
                dense = noise.new_empty(destination.shape)
                _fill_slice(dense, index, target.shape, noise, begin)
                is_in_layer = name.startswith(f"{config.weight_names.layers}.")
                form = None
                if is_in_layer and config.quantization is not None:
                    form = _rounded(dense, config.quantization, destination)
                destination.put(dense if form is None else form, noise.dtype)
            else:
                _fill_slice(destination, index, target.shape, noise, begin)
        begin = (begin + math.prod(target.shape)) % NOISE_LENGTH
    for module in model.modules():
        if isinstance(module, Norm) and module.weight is not None:
            module.weight.fill_(1.0 - module.config.offset)
        elif isinstance(module, StreamScale):
            module.weight.fill_(1.0)
        elif isinstance(module, Router) and module.scales is not None:
            module.scales.fill_(1.0)


class Rounding:
    """Quantizes dense weights while they are loaded, where the option `quantization` asks for it,
    and keeps account of what that loses."""

    def __init__(self, config: ModelConfig) -> None:
        self._quantization = None if config.is_stored_quantized else config.quantization
        self._errors: dict[str, float] = {}  # by names of weights
        self._layer = re.compile(rf"{re.escape(config.weight_names.layers)}\.(\d+)\.")
        self._layers: dict[int, tuple[float, float]] = {}  # squares of what is lost, and of all
        self._left: list[str] = []  # names of those that are not quantized

    def check(self, where: str, dense: Tensor) -> None:
        """Raise ModelError if weights are quantized, and values of this one, quantized or not, are
        not finite; where: its file and name."""
        if self._quantization is None or not dense.numel():
            return
        least, largest = (float(each) for each in dense.aminmax())  # NaN if there is one
        for value in (least, largest):
            if not math.isfinite(value):
                raise ModelError(
                    f"{where} has {value:g} as {dense.dtype}; weights of a model that is quantized "
                    "on load must be finite"
                )

    def of(
        self,
        name: str,
        where: str,
        stored: Tensor,
        slot: WeightSlot,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor | QuantizedWeight:
        """A weight of that name in `dtype` on `device`, quantized or not; where: see `check`.

        Experts that are one tensor are taken to the device and quantized one after the other.
        """
        if self._quantization is None:
            return stored.to(device, dtype)
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # read once

        def load(matrix: Tensor) -> Tensor:
            matrix = matrix.to(device, dtype)
            self.check(where, matrix)
            return matrix

        def compare(matrix: Tensor, form: QuantizedWeight) -> None:
            num_rows, num_columns = matrix.shape
            for rows in chunks(num_rows, num_columns, form.rows_together):
                exact = matrix[rows].float()
                there = form.cut(rows, slice(0, num_columns)).dequantize()
                sums[0] += (there - exact).square().sum()
                sums[1] += exact.square().sum()

        form = _rounded(stored, self._quantization, slot, load, compare)
        if form is None:
            self._left.append(name)
            return load(stored)
        lost, size = sums.tolist()
        self._errors[name] = math.sqrt(lost / size) if size else 0.0
        if match := self._layer.match(name):
            layer = int(match[1])
            before = self._layers.get(layer, (0.0, 0.0))
            self._layers[layer] = before[0] + lost, before[1] + size
        return form

    def report(self) -> None:
        """Log how far the quantized weights are from those in the files, and which stay as they
        are.

        Raises ConfigError if that is all of them.
        """
        if self._left:
            logger.warning("%d weights are not quantized: %s", len(self._left), few(self._left))
        if self._left and not self._errors:
            raise ConfigError(
                "quantization",
                f"none of the weights can be quantized so: groups of {SMALLEST_GROUP} do not "
                f"divide the inputs of {few(self._left)}",
            )
        if not self._errors:
            return
        ordered = sorted(self._errors, key=lambda name: self._errors[name])
        for name in ordered:
            logger.debug("%s: relative error %.4f", name, self._errors[name])
        median, worst = ordered[len(ordered) // 2], ordered[-1]
        logger.info(
            "%d weights were quantized; relative errors: median %.2f %%, worst %.2f %% (%s)",
            len(ordered),
            100 * self._errors[median],
            100 * self._errors[worst],
            worst,
        )
        errors = [
            f"{100 * math.sqrt(lost / size):.2f}" if size else "0.00"
            for _, (lost, size) in sorted(self._layers.items())
        ]
        logger.info("relative errors of the layers, in %%: %s", ", ".join(errors))


def _rounded(
    stored: Tensor,
    quantization: Quantization,
    slot: WeightSlot,
    load: Callable[[Tensor], Tensor] = lambda matrix: matrix,
    note: Callable[[Tensor, QuantizedWeight], None] = lambda matrix, form: None,
) -> QuantizedWeight | None:
    """What goes into a slot, in the form that a checkpoint's weight would have; None if it cannot
    have it.

    Args:
        stored: [out_features, in_features], or of several experts [num_experts, ...].
        load: what makes the weight of each matrix, one after the other.
        note: takes each such weight and its form.
    """
    if slot.is_of_experts:
        quantization = quantization.of_experts

    def form_of(matrix: Tensor) -> QuantizedWeight | None:
        weight = load(matrix)
        weight = weight.mT if slot.is_transposed else weight
        form = _form_of(weight, quantization)
        if form is not None:
            note(weight, form)
        return form

    if stored.dim() == 2:
        return form_of(stored)
    first = form_of(stored[0])
    if first is None:
        return None

    def forms() -> Iterator[QuantizedWeight]:
        yield first
        for matrix in stored[1:]:
            form = form_of(matrix)
            assert form is not None, "all have the shape of the first"
            yield form

    return type(first).stack_each(forms(), len(stored))


def _form_of(dense: Tensor, quantization: Quantization) -> QuantizedWeight | None:
    """Quantize a weight [out_features, in_features]; None: it does not fit the format."""
    if quantization.block:  # parts would have lower ones
        return _form_of_rows(dense, quantization)
    num_rows, num_columns = dense.shape
    parts = []
    for rows in chunks(num_rows, num_columns):
        part = _form_of_rows(dense[rows], quantization)
        if part is None:
            return None
        parts.append(part)
    return parts[0] if len(parts) == 1 else type(parts[0]).join(parts)


def _form_of_rows(dense: Tensor, quantization: Quantization) -> QuantizedWeight | None:
    """The same for a few outputs [num_rows, in_features] at once."""
    size = dense.shape[-1]
    if quantization.form == "float8":
        block = quantization.block or (1, size)
        return ScaledFloat8.quantize(dense, block, quantization.quantizes_inputs)
    try:
        if quantization.form == "mxfloat4":
            return MxFloat4.quantize(dense)
        if quantization.form == "int":
            # Scales of fewer inputs, where their number does not divide.
            groups = halved(quantization.group_size or size)
            group = next((each for each in groups if size % each == 0), groups[-1])
            return GroupedInt.quantize(
                dense, quantization.num_bits, group, quantization.quantizes_inputs
            )
    except FormError as error:
        warn_once(f"weights of {size} inputs stay as they are: {error}")
    return None


def _fill_slice(
    destination: Tensor,
    index: tuple[slice, ...],
    shape: tuple[int, ...],
    noise: Tensor,
    begin: int,
) -> None:
    """Fill in a slice of a tensor whose elements, in their order, are the noise from `begin` on."""
    if not shape:
        destination.copy_(noise[begin])
        return
    if len(index) == 3:  # one matrix after the other
        size = math.prod(shape[1:])
        for i, part in enumerate(destination):
            first = begin + (index[0].start + i) * size
            _fill_slice(part, index[1:], shape[1:], noise, first)
        return
    rows, columns = index[0], index[1] if len(index) > 1 else slice(0, 1)
    width, num_columns = math.prod(shape[1:]), columns.stop - columns.start
    num_rows = rows.stop - rows.start
    destination[num_rows:].zero_()
    destination = destination[:num_rows]
    begin += rows.start * width + columns.start
    is_whole = all(
        each.stop - each.start == size for each, size in zip(index[1:], shape[1:], strict=True)
    )
    if is_whole and destination.is_contiguous():
        _fill_run(destination.view(-1), noise, begin % NOISE_LENGTH)
        return
    inner = torch.arange(num_columns, device=noise.device)
    for part in torch.split(destination, max(1, NOISE_ELEMENTS // num_columns)):
        starts = torch.arange(len(part), device=noise.device) * width + begin
        part.copy_(noise[(starts.unsqueeze(1) + inner) % NOISE_LENGTH].view(part.shape))
        begin += len(part) * width


def _fill_run(flat: Tensor, noise: Tensor, begin: int) -> None:
    done = 0
    while done < flat.numel():
        part = noise[begin : begin + flat.numel() - done]
        flat[done : done + part.numel()].copy_(part)
        done += part.numel()
        begin = 0


def _identity(name: str, target: WeightTarget) -> object:
    """Equal for names of the same parameters."""
    places = [
        each.target
        if isinstance(each.target, WeightSlot)
        else (each.target.data_ptr(), each.target.shape)
        for each in target.slices
    ]
    return tuple(places) or name


def _parts(
    tensor: StoredTensor, target: WeightTarget, where: str, config_name: str
) -> Iterator[tuple[Tensor | QuantizedWeight, Tensor | WeightSlot]]:
    """(slice of the tensor, where it goes), of those that this rank keeps; `config_name` says
    where the model's shapes are from."""
    if tensor.shape != target.shape:
        raise ModelError(
            f"{where} has shape {list(tensor.shape)}; {config_name} asks for {list(target.shape)}"
        )
    for destination, index in target.slices:
        if isinstance(destination, WeightSlot) and isinstance(tensor, QuantizedTensor):
            try:
                form = tensor.read_form(index)
            except FormError as error:
                logger.warning("%s is dequantized: %s", where, error)
                form = None
            if form is not None:
                yield form, destination
                continue
        part = tensor.read(index)
        if not part.is_floating_point() or part.element_size() < 2:
            raise ModelError(
                f"{where} is {part.dtype}: config.json does not say how it is quantized, or its "
                "scales are missing"
            )
        yield part, destination


def _check_no_nan(where: str, values: Tensor) -> None:
    """Raise ModelError if a tensor that differs from another one for the same parameter holds NaN;
    where: its file and name."""
    if values.isnan().any():
        raise ModelError(
            f"{where} holds NaN, and differs from another tensor for the same parameter"
        )


def _contradiction(is_embedding: bool, earlier: str, config: ModelConfig) -> str:
    """The error for a tensor whose parameter another tensor has set to different values; earlier:
    the file and name of that one."""
    differs = f"differs from {earlier}"
    if is_embedding and config.tied_embeddings:
        return f"{differs}, but config.json says that they are the same (tie_word_embeddings)"
    if is_embedding and config.encoder is not None:
        return (
            f"{differs} (tie_word_embeddings is false); octavo serves "
            f"{config.family} whose encoder and decoder share one table"
        )
    return f"{differs}, a tensor for the same parameter"
