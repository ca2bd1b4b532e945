"""The tensors of a GGUF file, as the loader reads those of any checkpoint.

The gguf package dequantizes. Blocks of integers times one scale (Q8_0, Q4_0), and experts in MXFP4,
are forms in which a weight can stay in memory (GroupedInt, MxFloat4), value for value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.gguf import GgufTensor, forget_gguf, read_gguf
from octavo.models.base import FileTensor
from octavo.models.config import ModelConfig
from octavo.models.dequantize import (
    Format,
    FormatError,
    Parts,
    QuantizedTensor,
    StoredTensor,
    check_exponents,
)
from octavo.models.gguf import (
    DENSE_TYPES,
    EXPERTS,
    FORM_BITS,
    GROUP,
    METHOD,
    MXFP4,
    architecture_of,
    is_of_experts,
    is_projection,
)
from octavo.models.quantization import Quantization
from octavo.ops import KVScales
from octavo.ops.quantized import GroupedInt, MxFloat4, QuantizedWeight

CHUNK_BYTES = 1 << 20  # that are dequantized at once
TURNED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
CPU = torch.device("cpu")


class GgufWeights:
    """See WeightFiles. Experts come one by one. Scales that are not finite are a ModelError when
    they are read."""

    config_name = "the metadata"

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    @contextmanager
    def tensors(self, dtype: torch.dtype, device: torch.device) -> Iterator[Iterable[FileTensor]]:
        """See WeightFiles.tensors."""
        yield _read_tensors(self._config, dtype, device)
        forget_gguf()

    def kv_scales(self) -> list[KVScales]:
        """See WeightFiles.kv_scales."""
        return [KVScales()] * len(self._config.attentions)


def _read_tensors(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Iterator[FileTensor]:
    file = read_gguf(config.path)
    architecture = architecture_of(file)
    form = Format((), (), (), _read_form, joint=" as ")
    dense = Format((), (), (), partial(_read_dense, dtype=dtype), joint=" as ")
    for stored in file.tensors.values():
        has_form = is_projection(stored.name) and stored.type in FORM_BITS
        has_form |= is_of_experts(stored.name) and stored.type == MXFP4
        format_, place = (form, device) if has_form else (dense, CPU)
        for tensor in _matrices(stored):
            is_turned = architecture.has_turned_heads and TURNED.fullmatch(tensor.name) is not None
            head_dim = config.layers[0].attention.head_dim if is_turned else None
            offset = architecture.norm_offset if tensor.name.endswith("norm.weight") else 0.0
            rows = _rows(tensor, head_dim)
            if tensor.type in DENSE_TYPES:
                stored_dtype = getattr(torch, DENSE_TYPES[tensor.type])
                values: StoredTensor = GgufValues(tensor.shape, stored_dtype, rows, offset)
            else:
                where, parts = f"{tensor.path}: tensor {tensor.name}", {tensor.type: rows}
                values = QuantizedTensor(where, format_, Quantization(METHOD), parts, place)
            yield tensor.path, tensor.name, values


def _rows(tensor: GgufTensor, head_dim: int | None) -> GgufRows:
    is_dense = tensor.type in DENSE_TYPES
    num_rows = tensor.shape[0] if len(tensor.shape) == 1 and is_dense else prod(tensor.shape[:-1])
    shape = (num_rows, tensor.num_bytes // num_rows)
    return GgufRows(tensor.path, tensor.offset, shape, head_dim)


@dataclass(frozen=True, slots=True)
class GgufRows:
    """The stored bytes of a matrix, or of a vector, whose values are rows: uint8 [rows, bytes of a
    row]."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    head_dim: int | None  # of turned heads (Architecture.has_turned_heads)

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """A slice of them, in the order in which the family has the rows.

        Raises ModelError if the file has been removed, or cut, since its header was read.
        """
        try:
            stored = np.memmap(self.path, np.uint8, "r", self.offset, self.shape)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path} can no longer be read: {error}") from error
        if self.head_dim is None or len(stored) % self.head_dim:
            return torch.from_numpy(np.array(stored[index]))
        # In the file, rows 2 i and 2 i + 1 of a head rotate together; in the family, i and
        # i + head_dim / 2.
        pairs = np.arange(len(stored)).reshape(-1, self.head_dim // 2, 2)
        order = pairs.swapaxes(1, 2).reshape(-1)
        return torch.from_numpy(stored[order[index[0]]])[:, index[1]]


@dataclass(frozen=True, slots=True)
class GgufValues:
    """A tensor that is stored as values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: GgufRows
    offset: float  # is taken off

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """A slice of it."""
        everything = slice(0, self.rows.shape[1])
        values = self.rows.read((index[0], everything)).view(self.dtype)
        values = values.view(-1, *self.shape[1:])[(slice(None), *index[1:])]
        return values - self.offset if self.offset else values


def _matrices(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The tensor, or one for each expert."""
    match = EXPERTS.fullmatch(tensor.name)
    if match is None:
        yield tensor
        return
    size = tensor.num_bytes // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        yield replace(
            tensor,
            name=f"{match[1]}.{expert}.{match[2]}",
            shape=tensor.shape[1:],
            offset=tensor.offset + expert * size,
            num_bytes=size,
        )


def _read_form(parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """Blocks of a scale and GROUP values: of Q8_0 a byte each, of Q4_0 and MXFP4 half a byte, first
    the low halves of 16 bytes, and then their high halves."""
    [(kind, data)] = parts.items()
    scale_bytes = 1 if kind == MXFP4 else 2
    block_bytes = scale_bytes + GROUP * FORM_BITS.get(kind, 4) // 8
    blocks = data.view(len(data), -1, block_bytes)
    scales, values = blocks[..., :scale_bytes], blocks[..., scale_bytes:]
    values = values ^ 128 if kind == "Q8_0" else torch.cat((values & 15, values >> 4), dim=-1)
    values, scales = values.flatten(1), scales.flatten(1)
    if kind == MXFP4:
        check_exponents(scales, kind)
        return MxFloat4.from_values(values, scales.contiguous())
    scales = scales.contiguous().view(torch.float16)
    _check_finite(kind, scales.isfinite())
    return GroupedInt.from_values(values, scales, None, FORM_BITS[kind])


def _check_finite(kind: str, are_finite: Tensor) -> None:
    if not are_finite.all():
        row = int((~are_finite).any(dim=1).nonzero()[0])
        raise FormatError(kind, f"has scales that are not finite, in row {row}")


def _read_dense(parts: Parts, quantization: Quantization, dtype: torch.dtype) -> Tensor:
    """Dequantize a matrix by the gguf package, some rows at a time."""
    import gguf

    [(kind, data)] = parts.items()
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    num_rows, row_bytes = data.shape
    dense = torch.empty(num_rows, row_bytes // block_bytes * block, dtype=dtype)
    step = max(1, CHUNK_BYTES // row_bytes)
    for begin in range(0, num_rows, step):
        with np.errstate(all="ignore"):  # scales that are not finite
            values = gguf.dequantize(data[begin : begin + step].numpy(), number)
        if not np.isfinite(values).all():
            row = begin + int(np.argmin(np.isfinite(values).all(axis=1)))
            raise FormatError(kind, f"has scales that are not finite, in row {row}")
        dense[begin : begin + step] = torch.from_numpy(values)
    return dense
