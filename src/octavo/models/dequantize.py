"""Weights of quantized checkpoints, read as one tensor each.

A format stores a weight W [out_features, in_features] in several tensors. The loader sees one
tensor in their place, with the name, the shape and the values of W. Where W has a form that it can
keep in memory (ops/quantized.py), the loader can have that; otherwise it gets values in float32,
which it rounds to the model's dtype.

Scales and orders of inputs of quantized activations are left out: they follow from the inputs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.models.quantization import Quantization
from octavo.ops.quantized import (
    E2M1,
    FLOAT8_MAX,
    MX_BLOCK,
    GroupedInt,
    MxFloat4,
    QuantizedWeight,
    ScaledFloat8,
    scaled_e2m1,
)

Parts = Mapping[str, Tensor]
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# The largest exponent of MXFP4 with which float32 and bfloat16 hold all numbers: the largest one is
# then 6 times 2^(252 - 127). 255 stands for NaN.
MX_LARGEST = 252
_LARGEST = torch.finfo(torch.bfloat16).max  # which float32 holds, too


class StoredTensor(Protocol):
    """A tensor of a checkpoint, of which slices are read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """A slice of it."""


class FormatError(Exception):
    """What is wrong with one of the tensors that hold a weight."""

    def __init__(self, part: str, problem: str) -> None:
        super().__init__(problem)
        self.part = part
        self.problem = problem


class Format(NamedTuple):
    """In which tensors a weight is stored. Their names end in the names here."""

    markers: tuple[str, ...]  # by one of which a stored weight is recognized
    needed: tuple[str, ...]  # the others; "a|b": one of them
    optional: tuple[str, ...]
    read: Callable[[Parts, Quantization], Tensor | QuantizedWeight]  # values are float32
    joint: str = "."  # between a weight's module and these names
    dense: str = ".weight"  # what the weight is called behind the module
    is_transposed: bool = False  # dense checkpoints have it as [..., in_features, out_features]
    ignored: str = (
        r".*\.((input|output|((gate_up|down)_proj_)?activation)_scale"
        r"|input_(zero_point|global_scale)|(q|k|v|kv)_scale|[kv]_zero_point)"
    )


@dataclass(slots=True)
class QuantizedTensor:
    """A weight that several tensors hold, read when it is first asked for."""

    where: str  # the file and the weight's module, for errors
    format: Format
    quantization: Quantization
    parts: Mapping[str, StoredTensor]
    device: torch.device  # where it is read to
    _value: Tensor | QuantizedWeight | None = field(default=None, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, num_rows, num_columns = self._read().shape
        sizes = (num_columns, num_rows) if self.format.is_transposed else (num_rows, num_columns)
        return (*leading, *sizes)

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """A slice of the weight, float32."""
        value = self._read()
        if isinstance(value, QuantizedWeight):
            dense = value.dequantize()
            self._value = value = dense.transpose(-1, -2) if self.format.is_transposed else dense
        return value[index]

    def read_form(self, index: tuple[slice, ...]) -> QuantizedWeight | None:
        """A slice of the weight as it can stay in memory; None: there is no such form.

        The index is that of `read`; the form is [..., out_features, in_features] in any case.

        Raises FormError if the slice falls inside a group of inputs that share a scale.
        """
        value = self._read()
        if not isinstance(value, QuantizedWeight):
            return None
        *leading, rows, columns = index
        if self.format.is_transposed:
            rows, columns = columns, rows
        for part in leading:
            value = value[part]
        return value.cut(rows, columns)

    def _read(self) -> Tensor | QuantizedWeight:
        if self._value is None:
            whole = {name: _whole(part).to(self.device) for name, part in self.parts.items()}
            try:
                self._value = self.format.read(whole, self.quantization)
            except FormatError as error:
                name = f"{self.where}{self.format.joint}{error.part}"
                raise ModelError(f"{name} {error.problem}") from error
        return self._value


def joined(
    tensors: Iterable[tuple[Path, str, StoredTensor]],
    quantization: Quantization,
    device: torch.device,
) -> Iterator[tuple[Path, str, StoredTensor]]:
    """The tensors of a checkpoint, with one for each weight that several of them hold.

    Args:
        tensors: file, name and tensor; all stay readable while this iterates.
        quantization: of the checkpoint.
        device: where such weights are read to.

    Raises:
        ModelError: a weight lacks one of its tensors, or is there twice; names it.
    """
    formats = (FORMATS[quantization.method], *EXPERT_FORMATS.get(quantization.method, ()))
    stored: dict[str, tuple[Path, StoredTensor]] = {}
    for path, name, tensor in tensors:
        if name in stored:
            raise ModelError(f"{path}: {name} is also in {stored[name][0].name}")
        stored[name] = path, tensor
    if len(formats) > 1:
        _divide_scales(stored)
    for format_ in formats:
        yield from _joined(format_, stored, quantization, device)
    for format_ in formats:
        _check_complete(format_, stored)
    for name, (path, tensor) in stored.items():
        if not any(re.fullmatch(format_.ignored, name) for format_ in formats):
            yield path, name, tensor


def _joined(
    format_: Format,
    stored: dict[str, tuple[Path, StoredTensor]],
    quantization: Quantization,
    device: torch.device,
) -> Iterator[tuple[Path, str, StoredTensor]]:
    """The weights that are stored in a format, whose tensors `stored` loses."""
    endings = _endings(format_)
    for marker in [name for name in stored if name.endswith(endings)]:
        [ending] = [each for each in endings if marker.endswith(each)]
        module, (path, tensor) = marker.removesuffix(ending), stored.pop(marker)
        parts = {ending.removeprefix(format_.joint): tensor}
        own = quantization.of_module(module)
        if own is None:
            raise ModelError(
                f"{path}: {marker} is there, but no group of modules in config.json has {module}"
            )
        for line in (*format_.needed, *format_.optional):
            names = {name: module + format_.joint + name for name in line.split("|")}
            found = {short: stored.pop(name)[1] for short, name in names.items() if name in stored}
            if not found and (line not in format_.optional or line in own.demanded):
                lacking = " or ".join(names.values())
                raise ModelError(f"{path}: {marker} is there, but not {lacking}")
            parts |= found
        where = f"{path}: {module}"
        if module + format_.dense in stored:
            raise ModelError(f"{path}: {marker} is there, and so is {module}{format_.dense}")
        if quantization.is_ignored(module):
            raise ModelError(
                f"{path}: {marker} is there, but config.json says that {module} is not quantized"
            )
        weight = QuantizedTensor(where, format_, own, parts, device)
        yield path, module + format_.dense, weight


def _check_complete(format_: Format, stored: Mapping[str, tuple[Path, StoredTensor]]) -> None:
    """Raise ModelError if there is a part of a weight that means nothing without the others."""
    lines = (*format_.needed, *format_.optional)
    names = {name for line in lines for name in line.split("|")}
    names.discard(format_.dense.removeprefix(format_.joint))  # a weight that is not quantized
    parts_alone = tuple(format_.joint + name for name in names)
    for name, (path, _) in stored.items():
        if name.endswith(parts_alone):
            module = name.removesuffix(next(each for each in parts_alone if name.endswith(each)))
            lacking = " or ".join(module + each for each in _endings(format_))
            raise ModelError(f"{path}: {name} is there, but not {lacking}")


def _endings(format_: Format) -> tuple[str, ...]:
    return tuple(format_.joint + marker for marker in format_.markers)


@dataclass(frozen=True, slots=True)
class _OfExpert:
    """Some rows of one of the matrices in a tensor. See StoredTensor."""

    whole: StoredTensor
    expert: int
    rows: slice

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows.stop - self.rows.start, self.whole.shape[2])

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """See StoredTensor.read."""
        rows = slice(self.rows.start + index[0].start, self.rows.start + index[0].stop)
        return self.whole.read((slice(self.expert, self.expert + 1), rows, index[1]))[0]


_SCALES_OF_EXPERTS = re.compile(
    r"(?P<block>.+)\.experts\.(?P<name>gate_up_proj|down_proj)_scale_inv"
)
# What files call the projections of one expert that transformers holds as one.
_OF_ONE_EXPERT: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_OF_ALL_EXPERTS = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}  # Granite


def _divide_scales(stored: dict[str, tuple[Path, StoredTensor]]) -> None:
    """Give experts the scales that transformers 5 writes beside them as it holds them, of all
    experts of a layer in one tensor, while it gives the experts themselves the names of the
    original files.

    Raises ModelError if the gates and ups of an expert share scales of one of several blocks.
    """
    for match in [match for match in map(_SCALES_OF_EXPERTS.fullmatch, stored) if match]:
        name, block, kind = match[0], match["block"], match["name"]
        if f"{block}.experts.{kind}" in stored:  # which transformers wrote as it holds it, too
            continue
        path, scale = stored[name]
        of_all = f"{block}.{_OF_ALL_EXPERTS[kind]}.weight"
        if of_all in stored:
            stored[f"{of_all}_scale_inv"] = stored.pop(name)
            continue
        first = f"{block}.experts.0."
        named = (each for each in _OF_ONE_EXPERT[kind] if f"{first}{each[0]}.weight" in stored)
        projections = next(named, None)
        if projections is None:
            continue
        rows = scale.shape[1] if len(scale.shape) == 3 else 0
        if rows != 1 and (rows == 0 or rows % len(projections)):
            raise ModelError(
                f"{path}: {name} has shape {list(scale.shape)}; scales of {', '.join(projections)} "
                "are [experts, blocks of outputs, blocks of inputs], as many for each of them"
            )
        del stored[name]
        height = max(1, rows // len(projections))
        for expert in range(scale.shape[0]):
            for number, projection in enumerate(projections):
                begin = height * number if rows > 1 else 0
                own = _OfExpert(scale, expert, slice(begin, begin + height))
                key = f"{block}.experts.{expert}.{projection}.weight_scale_inv"
                if key in stored:
                    raise ModelError(f"{path}: {key} is there, and so is {name}")
                stored[key] = path, own


# ---------------------------------------------------------------- formats


def _fp8(parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """e4m3 times a scale per tensor, per row or per block."""
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    return _float8(parts, "weight", name, quantization)


def _fp8_experts(parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """The same for all experts of a layer: [experts, out_features, in_features].

    Gates and ups may have scales of their own where no block of the height that config.json says
    ends between them.
    """
    (name,) = (each for each in parts if not each.endswith("_scale_inv"))
    names = name, f"{name}_scale_inv"
    weight, scale = (parts[each] for each in names)
    if name == "gate_up_proj" and weight.dim() == scale.dim() == 3 and weight.shape[1] % 2 == 0:
        half = weight.shape[1] // 2
        rows = half if quantization.block is None else quantization.block[0]
        is_between = quantization.block is not None and half % rows == 0
        if not is_between and scale.shape[1] == 2 * -(-half // rows):
            pairs = zip(weight.chunk(2, dim=1), scale.chunk(2, dim=1), strict=True)
            halves = (dict(zip(names, each, strict=True)) for each in pairs)
            return ScaledFloat8.join([_float8(each, *names, quantization) for each in halves])
    return _float8(parts, *names, quantization)


def _modelopt(parts: Parts, quantization: Quantization) -> Tensor | QuantizedWeight:
    """e4m3 times a scale per tensor, per row or per block; or NVFP4."""
    if "weight_scale_2" in parts:
        return _nvfp4(parts, ("weight", "weight_scale_2"), quantization)
    scale = parts["weight_scale"]
    if scale.dim() == 4 and scale.shape[1] == scale.shape[3] == 1:  # [blocks, 1, blocks, 1]
        parts = {**parts, "weight_scale": scale[:, 0, :, 0]}
    return _float8(parts, "weight", "weight_scale", quantization)


def _torchao(parts: Parts, quantization: Quantization) -> Tensor | QuantizedWeight:
    """e4m3 or int8, times a scale per row, tensor or, of int8, group of inputs."""
    names = "_weight_qdata", "_weight_scale", "_weight_zero_point"
    if quantization.form == "float8":
        return _float8(parts, *names[:2], quantization)
    return _whole_bytes(parts, names, quantization)


def _float8(
    parts: Parts, weight_name: str, scale_name: str, quantization: Quantization
) -> ScaledFloat8:
    weight, scale = parts[weight_name], parts[scale_name]
    dims = weight.dim()
    if weight.dtype != torch.float8_e4m3fn or dims not in (2, 3) or not weight.numel():
        raise FormatError(
            weight_name,
            f"is {weight.dtype} {list(weight.shape)}; FP8 weights are torch.float8_e4m3fn in 2-D, "
            "those of all experts of a layer in 3-D",
        )
    _check_no_nan(weight, weight_name)
    if scale.dtype == torch.float8_e8m0fnu:  # powers of two
        scale = scale.float()
    _check_scales(scale, scale_name, "positive", FLOAT8_MAX)
    *leading, num_rows, num_columns = weight.shape
    scale, block = scale.float(), quantization.block
    if block is not None:
        rows, columns = block
        expected = [*leading, -(-num_rows // rows), -(-num_columns // columns)]
        if scale.numel() == math.prod(expected) == math.prod(leading):
            scale = scale.view(expected)
        if list(scale.shape) != expected:
            raise FormatError(
                scale_name,
                f"has shape {list(scale.shape)}, not {expected}: blocks are {rows} x {columns}",
            )
    elif leading:
        if list(scale.shape) != [*leading, 1, 1]:
            raise FormatError(
                scale_name, f"has shape {list(scale.shape)}, not {[*leading, 1, 1]}: one per expert"
            )
        block = (num_rows, num_columns)
    else:
        scale = _per_row(scale, num_rows, scale_name, quantization.has_row_scales)
        block = (1 if len(scale) == num_rows else num_rows, num_columns)
    return ScaledFloat8(weight, scale, block, quantization.quantizes_inputs)


def _compressed(parts: Parts, quantization: Quantization) -> Tensor | QuantizedWeight:
    """FP8, int8 with a scale per row, or packed integers with a scale per group of inputs; NVFP4,
    MXFP4."""
    scale = parts["weight_scale"]
    if "weight_global_scale" in parts:
        return _nvfp4(parts, ("weight_packed", "weight_global_scale"), quantization, divides=True)
    if quantization.of_experts.form == "mxfloat4":
        _check_float4(parts, "weight_packed", MX_BLOCK, torch.uint8)
        check_exponents(scale, "weight_scale")
        return MxFloat4(parts["weight_packed"], scale)
    if "weight" in parts:
        kinds = {torch.float8_e4m3fn: "float8", torch.int8: "int"}
        kind = quantization.form or kinds.get(parts["weight"].dtype)
        if kind == "float8":
            _check_no_zeros(parts, "weight_zero_point")
            return _float8(parts, "weight", "weight_scale", quantization)
        return _whole_bytes(parts, ("weight", "weight_scale", "weight_zero_point"), quantization)
    packed, bits = _int32(parts, "weight_packed"), quantization.num_bits
    if "weight_shape" not in parts:
        raise FormatError("weight_shape", "is not there, and packed weights need it")
    rows, columns = _two_sizes(parts["weight_shape"])
    if tuple(packed.shape) != (rows, -(-columns * bits // 32)):
        raise FormatError(
            "weight_packed",
            f"has shape {list(packed.shape)}; {bits}-bit weights [{rows}, {columns}] take "
            f"[{rows}, {-(-columns * bits // 32)}]",
        )
    values = _unpacked(packed, bits)[:, :columns]
    zeros = None
    if "weight_zero_point" in parts:
        packed_zeros = _int32(parts, "weight_zero_point")
        if len(packed_zeros) != -(-rows * bits // 32):
            shape = list(packed_zeros.shape)
            raise FormatError("weight_zero_point", f"has shape {shape} for {rows} outputs")
        zeros = _unpacked(packed_zeros.t(), bits).t()[:rows].to(torch.int16)
    names = "weight_scale", "weight_zero_point", "weight_g_idx"
    return _grouped(values, scale, zeros, quantization, parts.get("weight_g_idx"), names)


def _awq(parts: Parts, quantization: Quantization) -> Tensor | QuantizedWeight:
    """Packed along the outputs, of which each eight are in an order of their own."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def unpacked(name: str) -> Tensor:
        values = _unpacked(_int32(parts, name), quantization.num_bits)
        return values.view(len(values), -1, 8)[:, :, order.to(values.device)].flatten(1)

    values, scale = unpacked("qweight"), _matrix(parts["scales"], "scales")
    expected = (len(scale), values.shape[1])
    if tuple(scale.shape) != expected:
        raise FormatError("scales", f"has shape {list(scale.shape)}, not {list(expected)}")
    zeros = unpacked("qzeros").t().to(torch.int16) if "qzeros" in parts else None
    names = "scales", "qzeros", ""
    return _grouped(values.t(), scale.t(), zeros, quantization, None, names)


def _gptq(parts: Parts, quantization: Quantization) -> Tensor | QuantizedWeight:
    """Packed along the inputs, which may belong to groups in any order (desc_act)."""
    bits = quantization.num_bits
    values = _unpacked(_int32(parts, "qweight").t().contiguous(), bits)
    scale = _matrix(parts["scales"], "scales")
    # Version 1 took 1 off each zero point by subtracting from whole words, with a borrow where one
    # was 0.
    ones = quantization.zero_offset * ((1 << 32) - 1) // ((1 << bits) - 1)
    words = (_int32(parts, "qzeros").long() + ones).to(torch.int32)
    zeros = _unpacked(words, bits).to(torch.int16)
    if tuple(zeros.shape) != tuple(scale.shape):
        raise FormatError(
            "qzeros", f"holds {list(zeros.shape)} values, and scales {list(scale.shape)}"
        )
    if scale.shape[1] != len(values):
        raise FormatError("scales", f"has {scale.shape[1]} columns for {len(values)} outputs")
    names = "scales", "qzeros", "g_idx"
    return _grouped(values, scale.t(), zeros.t(), quantization, parts.get("g_idx"), names)


def _grouped(
    values: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    quantization: Quantization,
    groups: Tensor | None,
    names: tuple[str, str, str],
) -> Tensor | QuantizedWeight:
    """Integers with a scale, and perhaps a zero point, for each group of inputs.

    values: uint8 [out_features, in_features]. scale, zeros: [out_features, num_groups]. groups: the
    group of each input; None: they follow each other. names: of scale, zeros and groups.
    """
    num_outputs, num_inputs = values.shape
    bits = quantization.num_bits
    _check_scales(scale, names[0], "not zero", _largest_integer(bits, zeros))
    for name, each in zip(names, (scale, zeros), strict=False):
        if each is not None:
            _check_groups(each, num_outputs, num_inputs, groups is not None, name, quantization)
    if groups is not None:
        _check_index(groups, num_inputs, scale.shape[1], names[2])
    permutation = None
    if groups is not None:
        order = groups.long().argsort(stable=True)
        if not torch.equal(order, torch.arange(num_inputs, device=order.device)):
            permutation = order
        counts = groups.long().bincount(minlength=scale.shape[1])
        if quantization.group_size is not None and int(counts.max()) > quantization.group_size:
            raise FormatError(
                names[2],
                f"has {int(counts.max())} inputs in group {int(counts.argmax())}, and config.json "
                f"says group_size {quantization.group_size}",
            )
        if bool((counts != counts[0]).any()):
            return _spread_groups(values, scale, zeros, bits, groups.long())
    if bits not in (4, 8) or num_inputs % scale.shape[1] or num_inputs * bits % 8:
        if groups is None:
            groups = torch.arange(num_inputs, device=values.device)
            groups //= num_inputs // scale.shape[1]
        return _spread_groups(values, scale, zeros, bits, groups.long())
    return GroupedInt.from_values(values, scale, zeros, bits, permutation)


def _spread_groups(
    values: Tensor, scale: Tensor, zeros: Tensor | None, bits: int, groups: Tensor
) -> Tensor:
    """The weight, where it has no form: of 2 bits, or with groups of different sizes."""
    shift = zeros[:, groups].float() if zeros is not None else 1 << (bits - 1)
    return (values.float() - shift).mul_(scale.float()[:, groups])


def _int8(
    values: Tensor,
    scale: Tensor,
    name: str,
    zeros: Tensor | None,
    quantizes_inputs: bool = False,
) -> QuantizedWeight:
    """int8 with a scale per row; zeros: of the values plus 128."""
    if values.dtype != torch.int8 or values.dim() != 2 or not values.numel():
        shape = list(values.shape)
        raise FormatError("weight", f"is {values.dtype} {shape}; it must be torch.int8 in 2-D")
    scale = _per_row(scale, len(values), name).expand(len(values), 1)
    unsigned = values.view(torch.uint8) ^ 128
    return GroupedInt.from_values(unsigned, scale, zeros, 8, quantizes_inputs=quantizes_inputs)


def _whole_bytes(
    parts: Parts, names: tuple[str, str, str], quantization: Quantization
) -> Tensor | QuantizedWeight:
    """int8, of however few bits, with a scale for each row or group of inputs.

    names: of the weight, its scales and, perhaps, its zero points.
    """
    weight, scale, zeros = parts[names[0]], parts[names[1]], parts.get(names[2])
    if weight.dtype != torch.int8 or weight.dim() != 2 or not weight.numel():
        raise FormatError(
            names[0],
            f"is {weight.dtype} {list(weight.shape)}; integers are torch.int8 in 2-D",
        )
    has_groups = scale.dim() == 2 and scale.shape[1] > 1
    if has_groups or quantization.group_size is not None:
        if zeros is not None:
            zeros = _int8_zeros(zeros, names[2])
        unsigned = weight.view(torch.uint8) ^ 128
        index = "weight_g_idx"  # which torchao does not have
        return _grouped(
            unsigned, scale, zeros, quantization, parts.get(index), (names[1], names[2], index)
        )
    scale = _per_row(scale, len(weight), names[1], quantization.has_row_scales)
    if zeros is not None:
        zeros = _per_row(zeros, len(weight), names[2], len(scale) > 1).expand(len(weight), 1)
        zeros = _int8_zeros(zeros, names[2])
    _check_scales(parts[names[1]], names[1], "not zero", _largest_integer(8, zeros))
    return _int8(weight, scale, names[1], zeros, quantization.quantizes_inputs)


def _int8_zeros(zeros: Tensor, name: str) -> Tensor:
    """Zero points of int8 as those of the values plus 128."""
    if zeros.dtype not in _INTEGERS:
        raise FormatError(name, f"is {zeros.dtype}; zero points are integers")
    wrong = (zeros < -128) | (zeros > 127)
    if wrong.any():
        index = _first(wrong)
        raise FormatError(
            name, f"has {int(zeros[tuple(index)])} at {index}; zero points are from -128 to 127"
        )
    return zeros.to(torch.int16) + 128


def _bitsandbytes_4bit(parts: Parts, quantization: Quantization) -> Tensor:
    """Indices into a table of 16 values, with a scale per block, which may be quantized, too."""
    states = [name for name in parts if name.startswith("weight.quant_state.")]
    try:
        state = json.loads(bytes(parts[states[0]].tolist()))
        shape = [int(size) for size in state["shape"]]
        block_size, nested = int(state["blocksize"]), int(state.get("nested_blocksize", 0))
        offset = float(state.get("nested_offset", 0.0))
        if min(shape) < 1 or len(shape) != 2 or block_size < 1 or nested < 0:
            raise ValueError(f"sizes {shape}, blocks of {block_size}, of which {nested} share one")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(states[0], f"cannot be read: {error}") from error
    scale, table = parts["weight.absmax"], parts["weight.quant_map"]
    _check_table(table, "weight.quant_map", 16)
    if "weight.nested_absmax" in parts:
        outer = parts["weight.nested_absmax"]
        if "weight.nested_quant_map" not in parts:
            raise FormatError("weight.nested_quant_map", "is not there, and nested scales need it")
        inner = parts["weight.nested_quant_map"]
        _check_table(inner, "weight.nested_quant_map", 256)
        largest = float(inner.abs().max())
        _check_scales(outer, "weight.nested_absmax", "not negative", largest)
        _check_bytes(scale, "weight.absmax")
        scale = scale.flatten()
        if nested < 1 or outer.numel() != -(-len(scale) // nested):
            raise FormatError(
                "weight.nested_absmax",
                f"has {outer.numel()} values for {len(scale)} scales, of which {nested} share one",
            )
        outer = outer.flatten().repeat_interleave(min(nested, len(scale)))[: len(scale)]
        scale = inner[scale.long()] * outer + offset
    # A block of zeros has 0.
    _check_scales(scale, "weight.absmax", "not negative", float(table.abs().max()))
    scale = scale.flatten().float()
    # Floating-point numbers (bnb_4bit_quant_storage) have the same bytes.
    if not parts["weight"].is_floating_point():
        _check_bytes(parts["weight"], "weight")
    packed = parts["weight"].contiguous().flatten().view(torch.uint8)
    size = math.prod(shape)
    if packed.numel() != -(-size // 2):
        raise FormatError("weight", f"has {packed.numel()} bytes for a weight of shape {shape}")
    indices = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[:size]
    if len(scale) != -(-size // block_size):
        raise FormatError(
            "weight.absmax",
            f"has {len(scale)} scales of {block_size} values for a weight of shape {shape}",
        )
    scales = scale.repeat_interleave(min(block_size, size))[:size]
    return (table[indices.long()].float() * scales).view(shape)


def _bitsandbytes_int8(parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """int8, of which 127 stands for the largest value of each row.

    Inputs stay as they are: LLM.int8() rounds all of them but outliers. Old versions of
    bitsandbytes could save a weight in the order in which a GPU's kernels read it (weight_format).
    """
    if "weight_format" in parts and bool(parts["weight_format"].any()):
        number = parts["weight_format"].flatten().tolist()
        raise FormatError("weight_format", f"is {number}; octavo reads rows in their order (0)")
    scale = parts["SCB"]
    _check_scales(scale, "SCB", "not negative", 128 / 127)  # a row of zeros has 0
    num_outputs = parts["weight"].shape[:1].numel()
    if scale.numel() != num_outputs:
        raise FormatError("SCB", f"has shape {list(scale.shape)} for {num_outputs} outputs")
    return _int8(parts["weight"], scale.float() / 127, "SCB", None)


def _mxfp4(parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """e2m1 in blocks of 32 inputs times powers of two: [..., out_features, in_features / 32, 16].

    Experts that are not quantized are stored transposed.
    """
    packed, exponents = parts["blocks"], parts["scales"]
    _check_bytes(packed, "blocks")
    _check_bytes(exponents, "scales")
    if packed.dim() != 4 or packed.shape[-1] * 2 != MX_BLOCK:
        raise FormatError(
            "blocks",
            f"has shape {list(packed.shape)}, not [experts, outputs, blocks, {MX_BLOCK // 2}]",
        )
    if tuple(packed.shape[:-1]) != tuple(exponents.shape):
        raise FormatError("scales", f"has shape {list(exponents.shape)}, not one per block")
    check_exponents(exponents, "scales")
    return MxFloat4(packed.flatten(-2), exponents)


def _nvfp4(
    parts: Parts, names: tuple[str, str], quantization: Quantization, divides: bool = False
) -> Tensor:
    """e2m1 times a scale in e4m3 for each 16 inputs, and one for all of them.

    names: of the values, and of the latter scale. divides: it does, instead of multiplying.
    """
    if names[1] not in quantization.demanded:
        raise FormatError(names[1], "is there, but config.json says nothing of NVFP4")
    _check_float4(parts, names[0], 16, torch.float8_e4m3fn)
    scales, whole = parts["weight_scale"].float(), parts[names[1]]
    if whole.numel() != 1:
        raise FormatError(names[1], f"has shape {list(whole.shape)}; it must be one number")
    largest = E2M1[-1]
    _check_scales(whole, names[1], "positive", 0 if divides else largest * FLOAT8_MAX)
    factor = 1 / float(whole) if divides else float(whole)
    _check_scales(scales, "weight_scale", "not negative", largest * factor)
    whole = whole.float().reshape(())
    return scaled_e2m1(parts[names[0]], scales / whole if divides else scales * whole)


FORMATS: Mapping[str, Format] = {
    "fp8": Format(("weight_scale_inv", "weight_scale"), ("weight",), (), _fp8),
    "compressed-tensors": Format(
        ("weight_scale",),
        ("weight|weight_packed",),
        ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
        _compressed,
    ),
    "awq": Format(("qweight",), ("scales",), ("qzeros",), _awq),
    "gptq": Format(("qweight",), ("qzeros", "scales"), ("g_idx",), _gptq),
    "bitsandbytes-4bit": Format(
        ("weight.absmax",),
        (
            "weight",
            "weight.quant_map",
            "weight.quant_state.bitsandbytes__nf4|weight.quant_state.bitsandbytes__fp4",
        ),
        ("weight.nested_absmax", "weight.nested_quant_map"),
        _bitsandbytes_4bit,
    ),
    "bitsandbytes-int8": Format(("SCB",), ("weight",), ("weight_format",), _bitsandbytes_int8),
    "torchao": Format(("_weight_qdata",), ("_weight_scale",), ("_weight_zero_point",), _torchao),
    "modelopt": Format(("weight_scale",), ("weight",), ("weight_scale_2",), _modelopt),
    "mxfp4": Format(("blocks",), ("scales",), (), _mxfp4, "_", "", is_transposed=True),
}
# In which the experts of a layer are stored as transformers 5 holds them.
EXPERT_FORMATS: Mapping[str, tuple[Format, ...]] = {
    "fp8": tuple(
        Format((f"{name}_scale_inv",), (name,), (), _fp8_experts, dense=f".{name}")
        for name in ("gate_up_proj", "down_proj")
    )
}


# ---------------------------------------------------------------- inside


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits]: the values in each word, lowest bits first."""
    # Flat, because of one column torch does not care what its stride is.
    octets = packed.contiguous().flatten().view(torch.uint8).view(len(packed), -1)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((octets.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def is_unused_bias(name: str, tensor: StoredTensor) -> bool:
    """Whether it is a bias of zeros, which some quantizers write for projections without one."""
    if not name.endswith(".bias"):
        return False
    return not _whole(tensor).any()


def _whole(tensor: StoredTensor) -> Tensor:
    return tensor.read(tuple(slice(0, size) for size in tensor.shape))


def _int32(parts: Parts, name: str) -> Tensor:
    tensor = parts[name]
    if tensor.dtype != torch.int32 or tensor.dim() != 2 or not tensor.numel():
        raise FormatError(name, f"is {tensor.dtype} {list(tensor.shape)}; it must be int32 in 2-D")
    return tensor


def _check_float4(parts: Parts, name: str, size: int, dtype: torch.dtype) -> None:
    """Raise FormatError unless two values of 4 bits share a byte, and `size` inputs in their order
    a scale of that dtype, without zero points; name: of the values."""
    if name not in parts:
        raise FormatError(name, "is not there, and 4-bit floats need it")
    packed, scale = parts[name], parts["weight_scale"]
    _check_no_zeros(parts, "weight_zero_point")
    if "weight_g_idx" in parts:
        raise FormatError("weight_g_idx", "is there, and inputs of 4-bit floats are in their order")
    if packed.dtype != torch.uint8 or packed.dim() != 2 or not packed.numel():
        kind = f"{packed.dtype} {list(packed.shape)}"
        raise FormatError(name, f"is {kind}; 4-bit floats are torch.uint8 in 2-D")
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if columns % size:
        raise FormatError(name, f"has {columns} inputs, which blocks of {size} do not divide")
    if scale.dtype != dtype or tuple(scale.shape) != (rows, columns // size):
        raise FormatError(
            "weight_scale",
            f"is {scale.dtype} {list(scale.shape)}; blocks of {size} inputs of [{rows}, {columns}] "
            f"have {dtype} [{rows}, {columns // size}]",
        )


def _two_sizes(shape: Tensor) -> tuple[int, int]:
    if shape.numel() != 2 or shape.dtype not in _INTEGERS:
        raise FormatError(
            "weight_shape", f"is {shape.dtype} {list(shape.shape)}; it must be 2 integers"
        )
    rows, columns = shape.flatten().tolist()
    return int(rows), int(columns)


def _check_groups(
    values: Tensor,
    num_outputs: int,
    num_inputs: int,
    has_index: bool,
    name: str,
    quantization: Quantization,
) -> None:
    """Raise FormatError unless [out_features, num_groups] fits the weight and config.json."""
    if values.dim() != 2 or values.shape[0] != num_outputs:
        raise FormatError(name, f"has shape {list(values.shape)} for {num_outputs} outputs")
    num_groups, size = values.shape[1], quantization.group_size
    if num_groups == 0 or (num_inputs % num_groups and not has_index):
        raise FormatError(name, f"has {num_groups} groups, which do not divide {num_inputs} inputs")
    if size is not None and num_groups != -(-num_inputs // size):
        raise FormatError(
            name,
            f"has {num_groups} groups for {num_inputs} inputs, but config.json says group_size "
            f"{size}",
        )
    if size is not None and num_groups > 1 and num_inputs % size and not has_index:
        raise FormatError(
            name,
            f"has {num_groups} groups for {num_inputs} inputs, which config.json's group_size "
            f"{size} does not divide",
        )


def _check_index(groups: Tensor, num_inputs: int, num_groups: int, name: str) -> None:
    """Raise FormatError unless each input belongs to one of the groups."""
    if groups.dtype not in _INTEGERS or groups.shape != (num_inputs,):
        raise FormatError(
            name, f"is {groups.dtype} {list(groups.shape)}; it must be integers [{num_inputs}]"
        )
    low, high = (int(each) for each in groups.aminmax())
    if low < 0 or high >= num_groups:
        wrong = low if low < 0 else high
        raise FormatError(
            name, f"has group {wrong} at {_first(groups == wrong)}, and there are {num_groups}"
        )


def _per_row(scale: Tensor, num_rows: int, name: str, has_rows: bool | None = None) -> Tensor:
    """A scale per tensor or per row, [1, 1] or [out_features, 1]; has_rows: which of them."""
    numbers = {None: (1, num_rows), False: (1,), True: (num_rows,)}
    is_list = sum(size > 1 for size in scale.shape) <= 1
    if scale.numel() not in numbers[has_rows] or not is_list:
        kinds = {None: "one per output, or one", False: "one", True: "one per output"}
        raise FormatError(
            name, f"has shape {list(scale.shape)} for {num_rows} outputs: {kinds[has_rows]}"
        )
    return scale.reshape(-1, 1)


def _largest_integer(bits: int, zeros: Tensor | None) -> int:
    """The largest absolute value of an integer less its zero point; None: half of all integers."""
    return 1 << (bits - 1 if zeros is None else bits)


def _check_scales(
    scale: Tensor,
    name: str,
    sign: Literal["positive", "not negative", "not zero"],
    most: float,
) -> None:
    """Raise FormatError unless all scales are of that sign, and finite, as are their products with
    values of up to `most`; some quantizers of integers write negative scales."""
    if not scale.is_floating_point() or scale.element_size() < 2 or not scale.numel():
        kind = f"{scale.dtype} {list(scale.shape)}"
        raise FormatError(
            name, f"is {kind}; scales are floating-point numbers of 16 bits or more, one or more"
        )
    wide = scale.float()
    if sign == "not zero":
        wide = wide.abs()
    least, largest = wide.aminmax()  # NaN if there is one
    is_right = least >= 0 if sign == "not negative" else least > 0
    if not bool(is_right & largest.isfinite()):
        wrong = ~wide.isfinite() | (wide < 0 if sign == "not negative" else wide <= 0)
        index = _first(wrong)
        raise FormatError(
            name, f"has {float(scale[tuple(index)]):g} at {index}; scales are finite and {sign}"
        )
    if float(largest) * most > _LARGEST:
        index = _first(wide == largest)
        raise FormatError(
            name,
            f"has {float(scale[tuple(index)]):g} at {index}; weights, which are scales times up to "
            f"{most:g}, are at most {_LARGEST:.3g}",
        )


def check_exponents(exponents: Tensor, name: str) -> None:
    """Raise FormatError if there are exponents of MXFP4 with which weights would not be finite."""
    if exponents.numel() and int(exponents.max()) > MX_LARGEST:
        index = _first(exponents > MX_LARGEST)
        raise FormatError(
            name,
            f"has the exponent {int(exponents[tuple(index)])} at {index}; weights are finite with "
            f"those from 0 to {MX_LARGEST}",
        )


def _check_no_zeros(parts: Parts, name: str) -> None:
    """Raise FormatError if there are zero points other than 0."""
    if name in parts and bool((wrong := parts[name].to(torch.float32) != 0).any()):
        raise FormatError(name, f"is not 0 at {_first(wrong)}, and floats have no zero points")


def _check_no_nan(weight: Tensor, name: str) -> None:
    """Raise FormatError if a weight in e4m3 has NaN: the bytes 0x7F and 0xFF, which are the largest
    signed and the largest unsigned ones.

    Both maxima of a GB take 65 ms on two cores, and `isnan` 3.4 s.
    """
    for dtype in (torch.int8, torch.uint8):
        if int(weight.view(dtype).amax()) == torch.iinfo(dtype).max:
            wrong = (weight.view(torch.uint8) & 0x7F) == 0x7F
            raise FormatError(name, f"has NaN at {_first(wrong)}")


def _check_table(table: Tensor, name: str, size: int) -> None:
    """Raise FormatError unless it has that many finite numbers."""
    is_number = table.is_floating_point() and table.element_size() >= 2
    if not is_number or table.shape != (size,):
        kind = f"{table.dtype} {list(table.shape)}"
        raise FormatError(name, f"is {kind}; it must be floating-point numbers [{size}]")
    if not table.isfinite().all():
        index = _first(~table.isfinite())
        raise FormatError(name, f"has {float(table[tuple(index)]):g} at {index}")


def _check_bytes(tensor: Tensor, name: str) -> None:
    if tensor.dtype != torch.uint8:
        raise FormatError(name, f"is {tensor.dtype}; it must be torch.uint8")


def _matrix(tensor: Tensor, name: str) -> Tensor:
    if tensor.dim() != 2:
        raise FormatError(name, f"has shape {list(tensor.shape)}; it must be in 2-D")
    return tensor


def _first(wrong: Tensor) -> list[int]:
    """Where the first of those elements is."""
    return [int(each) for each in wrong.nonzero()[0]]
