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
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.models.quantization import Quantization
from octavo.ops.quantized import GroupedInt, MxFloat4, QuantizedWeight, ScaledFloat8

Parts = Mapping[str, Tensor]


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
        r".*\.(input_scale|input_zero_point|output_scale|(q|k|v|kv)_scale|[kv]_zero_point)"
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
        ModelError: a weight lacks one of its tensors; names it.
    """
    format_ = FORMATS[quantization.method]
    stored = {name: (path, tensor) for path, name, tensor in tensors}
    endings = tuple(format_.joint + marker for marker in format_.markers)
    for marker in [name for name in stored if name.endswith(endings)]:
        [ending] = [each for each in endings if marker.endswith(each)]
        module, (path, tensor) = marker.removesuffix(ending), stored.pop(marker)
        parts = {ending.removeprefix(format_.joint): tensor}
        for line in (*format_.needed, *format_.optional):
            names = {name: module + format_.joint + name for name in line.split("|")}
            found = {short: stored.pop(name)[1] for short, name in names.items() if name in stored}
            if not found and line not in format_.optional:
                lacking = " or ".join(names.values())
                raise ModelError(f"{path}: {marker} is there, but not {lacking}")
            parts |= found
        where = f"{path}: {module}"
        weight = QuantizedTensor(where, format_, quantization, parts, device)
        yield path, module + format_.dense, weight
    for name, (path, tensor) in stored.items():
        if not re.fullmatch(format_.ignored, name):
            yield path, name, tensor


# ---------------------------------------------------------------- formats


def _fp8(parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """e4m3 times a scale per tensor, per row or per block."""
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    return _float8(parts, "weight", name, quantization)


def _torchao(parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """e4m3 times a scale per row or tensor."""
    return _float8(parts, "_weight_qdata", "_weight_scale", quantization)


def _float8(
    parts: Parts, weight_name: str, scale_name: str, quantization: Quantization
) -> ScaledFloat8:
    weight, scale = parts[weight_name], parts[scale_name]
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise FormatError(
            weight_name,
            f"is {weight.dtype} {list(weight.shape)}; FP8 weights are torch.float8_e4m3fn in 2-D",
        )
    _check_scales(scale, scale_name)
    sizes, scale = (weight.shape[0], weight.shape[1]), scale.float()
    block = quantization.block
    if block is not None and scale.dim() == 2:
        rows, columns = block
        expected = [-(-sizes[0] // rows), -(-sizes[1] // columns)]
        if list(scale.shape) != expected:
            raise FormatError(scale_name, f"has shape {list(scale.shape)}, not {expected}")
    else:
        scale = _per_row(scale, sizes[0], scale_name)
        block = (1 if len(scale) == sizes[0] else sizes[0], sizes[1])
    return ScaledFloat8(weight, scale, block, quantization.quantizes_inputs)


def _compressed(parts: Parts, quantization: Quantization) -> Tensor | QuantizedWeight:
    """FP8, int8 with a scale per row, or packed integers with a scale per group of inputs."""
    scale = parts["weight_scale"]
    if "weight" in parts:
        weight = parts["weight"]
        if weight.dtype == torch.float8_e4m3fn:
            return _float8(parts, "weight", "weight_scale", quantization)
        if weight.dtype != torch.int8:
            raise FormatError(
                "weight", f"is {weight.dtype}; octavo reads torch.float8_e4m3fn and torch.int8"
            )
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            zeros = _per_row(zeros, len(weight), "weight_zero_point").expand(len(weight), 1) + 128
        return _int8(weight, scale, "weight_scale", zeros, quantization.quantizes_inputs)
    packed, bits = parts["weight_packed"], quantization.num_bits
    if packed.dtype != torch.int32:
        raise FormatError("weight_packed", f"is {packed.dtype}; it must be torch.int32")
    rows, columns = _two_sizes(parts["weight_shape"])
    values = _unpacked(packed, bits)[:, :columns]
    if tuple(values.shape) != (rows, columns):
        raise FormatError(
            "weight_packed",
            f"has shape {list(packed.shape)}; {bits}-bit weights [{rows}, {columns}] take "
            f"[{rows}, {-(-columns * bits // 32)}]",
        )
    zeros = None
    if "weight_zero_point" in parts:
        zeros = _unpacked(parts["weight_zero_point"].t(), bits).t()[:rows].to(torch.int16)
    names = "weight_scale", "weight_zero_point"
    return _grouped(values, scale, zeros, bits, parts.get("weight_g_idx"), names)


def _awq(parts: Parts, quantization: Quantization) -> Tensor | QuantizedWeight:
    """Packed along the outputs, of which each eight are in an order of their own."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def unpacked(name: str) -> Tensor:
        values = _unpacked(_int32(parts, name), quantization.num_bits)
        return values.view(len(values), -1, 8)[:, :, order.to(values.device)].flatten(1)

    values, scale = unpacked("qweight"), parts["scales"]
    expected = (len(scale), values.shape[1])
    if tuple(scale.shape) != expected:
        raise FormatError("scales", f"has shape {list(scale.shape)}, not {list(expected)}")
    zeros = unpacked("qzeros").t().to(torch.int16) if "qzeros" in parts else None
    names = "scales", "qzeros"
    return _grouped(values.t(), scale.t(), zeros, quantization.num_bits, None, names)


def _gptq(parts: Parts, quantization: Quantization) -> Tensor | QuantizedWeight:
    """Packed along the inputs, which may belong to groups in any order (desc_act)."""
    bits = quantization.num_bits
    values = _unpacked(_int32(parts, "qweight").t().contiguous(), bits)
    scale = parts["scales"]
    zeros = _unpacked(_int32(parts, "qzeros"), bits).to(torch.int16) + quantization.zero_offset
    if tuple(zeros.shape) != tuple(scale.shape):
        raise FormatError("qzeros", f"holds {list(zeros.shape)} values, and scales {scale.shape}")
    if scale.shape[1] != len(values):
        raise FormatError("scales", f"has {scale.shape[1]} columns for {len(values)} outputs")
    names = "scales", "qzeros"
    return _grouped(values, scale.t(), zeros.t(), bits, parts.get("g_idx"), names)


def _grouped(
    values: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    bits: int,
    groups: Tensor | None,
    names: tuple[str, str],
) -> Tensor | QuantizedWeight:
    """Integers with a scale, and perhaps a zero point, for each group of inputs.

    values: uint8 [out_features, in_features]. scale, zeros: [out_features, num_groups]. groups: the
    group of each input; None: they follow each other. names: of scale and zeros.
    """
    num_outputs, num_inputs = values.shape
    _check_scales(scale, names[0])
    for name, each in zip(names, (scale, zeros), strict=True):
        if each is not None:
            _check_groups(each.shape, num_outputs, num_inputs, groups, name)
    permutation = None
    if groups is not None:
        order = groups.long().argsort(stable=True)
        if not torch.equal(order, torch.arange(num_inputs, device=order.device)):
            permutation = order
        counts = groups.long().bincount(minlength=scale.shape[1])
        if bool((counts != counts[0]).any()):
            return _spread_groups(values, scale, zeros, bits, groups.long())
    if bits not in (4, 8) or num_inputs % scale.shape[1] or num_inputs * bits % 8:
        group = num_inputs // scale.shape[1]
        index = torch.arange(num_inputs, device=values.device) // group
        return _spread_groups(values, scale, zeros, bits, index)
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
    _check_scales(scale, name)
    scale = _per_row(scale, len(values), name).expand(len(values), 1)
    unsigned = values.view(torch.uint8) ^ 128
    return GroupedInt.from_values(unsigned, scale, zeros, 8, quantizes_inputs=quantizes_inputs)


def _bitsandbytes_4bit(parts: Parts, quantization: Quantization) -> Tensor:
    """Indices into a table of 16 values, with a scale per block, which may be quantized, too."""
    states = [name for name in parts if name.startswith("weight.quant_state.")]
    try:
        state = json.loads(bytes(parts[states[0]].tolist()))
        shape = [int(size) for size in state["shape"]]
        block_size, nested = int(state["blocksize"]), int(state.get("nested_blocksize", 0))
        offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(states[0], f"cannot be read: {error}") from error
    scale, table = parts["weight.absmax"], parts["weight.quant_map"]
    if "weight.nested_absmax" in parts:
        values = parts["weight.nested_quant_map"][scale.long()]
        outer = parts["weight.nested_absmax"].repeat_interleave(nested)[: len(values)]
        scale = values * outer + offset
    _check_scales(scale, "weight.absmax")
    packed = parts["weight"].flatten()
    indices = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[: math.prod(shape)]
    if len(indices) != math.prod(shape) or len(scale) * block_size < len(indices):
        raise FormatError("weight", f"has {packed.numel()} bytes for a weight of shape {shape}")
    scales = scale.repeat_interleave(block_size)[: len(indices)]
    return (table[indices.long()].float() * scales).view(shape)


def _bitsandbytes_int8(parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """int8, of which 127 stands for the largest value of each row.

    Inputs stay as they are: LLM.int8() rounds all of them but outliers.
    """
    return _int8(parts["weight"], parts["SCB"].unsqueeze(1) / 127, "SCB", None)


def _mxfp4(parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """e2m1 in blocks of 32 inputs times powers of two: [..., out_features, in_features / 32, 16].

    Experts that are not quantized are stored transposed.
    """
    packed, exponents = parts["blocks"], parts["scales"]
    if tuple(packed.shape[:-1]) != tuple(exponents.shape):
        raise FormatError("scales", f"has shape {list(exponents.shape)}, not one per block")
    return MxFloat4(packed.flatten(-2), exponents)


FORMATS: Mapping[str, Format] = {
    "fp8": Format(("weight_scale_inv", "weight_scale"), ("weight",), (), _fp8),
    "compressed-tensors": Format(
        ("weight_scale",),
        ("weight|weight_packed",),
        ("weight_shape", "weight_zero_point", "weight_g_idx"),
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
    "torchao": Format(("_weight_qdata",), ("_weight_scale",), (), _torchao),
    "mxfp4": Format(("blocks",), ("scales",), (), _mxfp4, "_", "", is_transposed=True),
}


# ---------------------------------------------------------------- inside


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits]: the values in each word, lowest bits first."""
    octets = packed.contiguous().view(torch.uint8)
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
    if tensor.dtype != torch.int32 or tensor.dim() != 2:
        raise FormatError(name, f"is {tensor.dtype} {list(tensor.shape)}; it must be int32 in 2-D")
    return tensor


def _two_sizes(shape: Tensor) -> tuple[int, int]:
    if shape.numel() != 2:
        raise FormatError("weight_shape", f"has {shape.numel()} values, not 2")
    rows, columns = shape.flatten().tolist()
    return int(rows), int(columns)


def _check_groups(
    shape: torch.Size, num_outputs: int, num_inputs: int, groups: Tensor | None, name: str
) -> None:
    """Raise FormatError unless [out_features, num_groups] fits the weight and the index of
    groups."""
    num_groups = shape[1]
    if shape[0] != num_outputs:
        raise FormatError(name, f"has shape {list(shape)} for {num_outputs} outputs")
    if groups is not None:
        if groups.shape != (num_inputs,) or groups.min() < 0 or groups.max() >= num_groups:
            raise FormatError(
                name, f"has {num_groups} groups, which is not what the index of groups says"
            )
    elif num_groups == 0 or num_inputs % num_groups:
        raise FormatError(name, f"has {num_groups} groups, which do not divide {num_inputs} inputs")


def _per_row(scale: Tensor, num_rows: int, name: str) -> Tensor:
    """A scale per tensor or per row, [1, 1] or [out_features, 1]."""
    if scale.numel() not in (1, num_rows):
        raise FormatError(
            name, f"has shape {list(scale.shape)} for {num_rows} outputs: one per output, or one"
        )
    return scale.reshape(-1, 1)


def _check_scales(scale: Tensor, name: str) -> None:
    if not torch.isfinite(scale.float()).all():
        raise FormatError(name, "has values that are not finite")
