"""Weights of quantized checkpoints, dequantized as they are read.

A format stores a weight W [out_features, in_features] in several tensors. The loader sees one
tensor in their place, with the name, the shape and the values of W. Values are computed in float32;
the loader rounds them to the model's dtype.

Scales and orders of inputs of quantized activations are left out: activations stay in the model's
dtype, which is at least as exact.
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
    dequantize: Callable[[Parts, Quantization], Tensor]
    joint: str = "."  # between a weight's module and these names
    dense: str = ".weight"  # what the dequantized weight is called behind the module
    ignored: str = r".*\.(input_scale|input_zero_point|output_scale|[qkv]_scale|[kv]_zero_point)"


@dataclass(slots=True)
class DequantizedTensor:
    """A weight that several tensors hold, dequantized when it is first read."""

    where: str  # the file and the weight's module, for errors
    format: Format
    quantization: Quantization
    parts: Mapping[str, StoredTensor]
    _dense: Tensor | None = field(default=None, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._dequantized().shape)

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """A slice of the weight, float32."""
        return self._dequantized()[index]

    def _dequantized(self) -> Tensor:
        if self._dense is None:
            whole = {name: _whole(part) for name, part in self.parts.items()}
            try:
                self._dense = self.format.dequantize(whole, self.quantization)
            except FormatError as error:
                name = f"{self.where}{self.format.joint}{error.part}"
                raise ModelError(f"{name} {error.problem}") from error
        return self._dense


def dequantized(
    tensors: Iterable[tuple[Path, str, StoredTensor]], quantization: Quantization
) -> Iterator[tuple[Path, str, StoredTensor]]:
    """The tensors of a checkpoint, with one for each weight that several of them hold.

    Args:
        tensors: file, name and tensor; all stay readable while this iterates.
        quantization: of the checkpoint.

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
        yield path, module + format_.dense, DequantizedTensor(where, format_, quantization, parts)
    for name, (path, tensor) in stored.items():
        if not re.fullmatch(format_.ignored, name):
            yield path, name, tensor


# ---------------------------------------------------------------- formats


def _fp8(parts: Parts, quantization: Quantization) -> Tensor:
    """e4m3 times a scale per tensor, per row or per block."""
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    weight = parts["weight"]
    if weight.dtype != torch.float8_e4m3fn:
        raise FormatError("weight", f"is {weight.dtype}; FP8 weights are torch.float8_e4m3fn")
    return _scaled(weight.float(), parts[name], name, quantization.block)


def _compressed(parts: Parts, quantization: Quantization) -> Tensor:
    """FP8, int8 with a scale per row, or packed integers with a scale per group of inputs."""
    scale = parts["weight_scale"]
    if "weight" in parts:
        weight = parts["weight"]
        if weight.dtype not in (torch.float8_e4m3fn, torch.int8):
            raise FormatError(
                "weight", f"is {weight.dtype}; octavo reads torch.float8_e4m3fn and torch.int8"
            )
        values = weight.float()
        if "weight_zero_point" in parts:
            values -= _spread(parts["weight_zero_point"].float(), values, "weight_zero_point")
        return _scaled(values, scale, "weight_scale", quantization.block)
    packed, bits = parts["weight_packed"], quantization.num_bits
    if packed.dtype != torch.int32:
        raise FormatError("weight_packed", f"is {packed.dtype}; it must be torch.int32")
    rows, columns = _two_sizes(parts["weight_shape"])
    values = _unpacked(packed, bits)[:, :columns].float()
    if tuple(values.shape) != (rows, columns):
        raise FormatError(
            "weight_packed",
            f"has shape {list(packed.shape)}; {bits}-bit weights [{rows}, {columns}] take "
            f"[{rows}, {-(-columns * bits // 32)}]",
        )
    groups = parts.get("weight_g_idx")
    if "weight_zero_point" in parts:
        zeros = _unpacked(parts["weight_zero_point"].t(), bits).t()[:rows].float()
        values -= _by_group(zeros, columns, groups, "weight_zero_point")
    else:
        values -= 1 << (bits - 1)
    _check_scales(scale, "weight_scale")
    return values.mul_(_by_group(scale.float(), columns, groups, "weight_scale"))


def _awq(parts: Parts, quantization: Quantization) -> Tensor:
    """Packed along the outputs, of which each eight are in an order of their own."""
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def unpacked(name: str) -> Tensor:
        values = _unpacked(_int32(parts, name), quantization.num_bits)
        return values.view(len(values), -1, 8)[:, :, order].flatten(1)

    values, scale = unpacked("qweight").float(), parts["scales"]
    num_inputs, num_outputs = values.shape
    _check_scales(scale, "scales")
    expected = (len(scale), num_outputs)
    if tuple(scale.shape) != expected:
        raise FormatError("scales", f"has shape {list(scale.shape)}, not {list(expected)}")
    zeros: Tensor | int = 8
    if "qzeros" in parts:
        zeros = _by_group(unpacked("qzeros").float().t(), num_inputs, None, "qzeros").t()
    values -= zeros
    values *= _by_group(scale.float().t(), num_inputs, None, "scales").t()
    return values.t()


def _gptq(parts: Parts, quantization: Quantization) -> Tensor:
    """Packed along the inputs, which may belong to groups in any order (desc_act)."""
    bits = quantization.num_bits
    values = _unpacked(_int32(parts, "qweight").t().contiguous(), bits).float()
    num_outputs, num_inputs = values.shape
    scale, groups = parts["scales"], parts.get("g_idx")
    _check_scales(scale, "scales")
    zeros = _unpacked(_int32(parts, "qzeros"), bits).float() + quantization.zero_offset
    if tuple(zeros.shape) != tuple(scale.shape):
        raise FormatError("qzeros", f"holds {list(zeros.shape)} values, and scales {scale.shape}")
    if scale.shape[1] != num_outputs:
        raise FormatError("scales", f"has {scale.shape[1]} columns for {num_outputs} outputs")
    values -= _by_group(zeros.t(), num_inputs, groups, "qzeros")
    values *= _by_group(scale.float().t(), num_inputs, groups, "scales")
    return values


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


def _bitsandbytes_int8(parts: Parts, quantization: Quantization) -> Tensor:
    """int8, of which 127 stands for the largest value of each row."""
    return _scaled(parts["weight"].float(), parts["SCB"].unsqueeze(1) / 127, "SCB", None)


def _torchao(parts: Parts, quantization: Quantization) -> Tensor:
    """e4m3 times a scale per row or tensor."""
    return _scaled(parts["_weight_qdata"].float(), parts["_weight_scale"], "_weight_scale", None)


def _mxfp4(parts: Parts, quantization: Quantization) -> Tensor:
    """e2m1 in blocks of 32 inputs times powers of two: [..., out, in / 32, 16] -> [..., in, out].

    Transposed, as the experts that are not quantized are stored.
    """
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed, exponents = parts["blocks"], parts["scales"]
    if tuple(packed.shape[:-1]) != tuple(exponents.shape):
        raise FormatError("scales", f"has shape {list(exponents.shape)}, not one per block")
    scale = torch.exp2(exponents.float() - 127).unsqueeze(-1)
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return (values[pairs.long()] * scale).flatten(-2).transpose(-1, -2)


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
    "mxfp4": Format(("blocks",), ("scales",), (), _mxfp4, joint="_", dense=""),
}


# ---------------------------------------------------------------- inside


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits]: the values in each word, lowest bits first."""
    octets = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
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


def _by_group(values: Tensor, num_inputs: int, groups: Tensor | None, name: str) -> Tensor:
    """[out_features, num_groups] -> [out_features, num_inputs]: that of each input's group."""
    num_groups = values.shape[1]
    if groups is not None:
        if groups.shape != (num_inputs,) or groups.min() < 0 or groups.max() >= num_groups:
            raise FormatError(
                name, f"has {num_groups} groups, which is not what the index of groups says"
            )
        return values[:, groups.long()]
    if num_groups == 0 or num_inputs % num_groups:
        raise FormatError(name, f"has {num_groups} groups, which do not divide {num_inputs} inputs")
    return values.repeat_interleave(num_inputs // num_groups, dim=1)


def _scaled(values: Tensor, scale: Tensor, name: str, block: tuple[int, int] | None) -> Tensor:
    """values [out_features, in_features] times their scales, in place."""
    _check_scales(scale, name)
    scale = scale.float()
    if block is not None and scale.dim() == 2:
        rows, columns = block
        expected = [-(-values.shape[0] // rows), -(-values.shape[1] // columns)]
        if list(scale.shape) != expected:
            raise FormatError(name, f"has shape {list(scale.shape)}, not {expected}")
        scale = scale.repeat_interleave(rows, dim=0)[: len(values)]
        return values.mul_(scale.repeat_interleave(columns, dim=1)[:, : values.shape[1]])
    return values.mul_(_spread(scale, values, name))


def _spread(scale: Tensor, values: Tensor, name: str) -> Tensor:
    """A scale per tensor or per row, [1, 1] or [out_features, 1]."""
    if scale.numel() not in (1, len(values)):
        raise FormatError(
            name, f"has shape {list(scale.shape)} for {len(values)} outputs: one per output, or one"
        )
    return scale.reshape(-1, 1)


def _check_scales(scale: Tensor, name: str) -> None:
    if not torch.isfinite(scale.float()).all():
        raise FormatError(name, "has values that are not finite")
