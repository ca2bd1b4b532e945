"""Linear layers whose weight is packed in the order in which our kernel reads it.

Blocks of 64 outputs are adjacent: [blocks, in_features / pair, 64, pair], with `pair` neighbours in
a 32-bit word (1 in float32, 2 in bfloat16). So one load serves sixteen outputs, a block is read
from one end to the other, and an output is one chain of multiply-adds: results are batch-invariant,
bit for bit.
"""

from __future__ import annotations

import math
from ctypes import addressof, c_int64
from functools import cache

import torch
from torch import Tensor

from octavo.host_memory import HUGE_PAGE, use_huge_pages
from octavo.ops.cpu.attention_tiles import TILE_ROWS
from octavo.ops.cpu.jit import host_has
from octavo.ops.cpu.linear_kernel import BLOCK, JOB, compile_linear
from octavo.ops.cpu.row_ops import apply_epilogue, apply_gate
from octavo.ops.cpu.threads import Runner, make_runner
from octavo.ops.epilogue import Epilogue

# Fewer multiply-adds than this are not worth waking a thread for. (Reading a weight takes as long
# as multiplying it with 8 tokens.)
WORTH_SHARING = 4_000_000
_Job = c_int64 * len(JOB.names or ())  # ctypes takes a tenth of the time of assignments in NumPy
UNITS_PER_THREAD = 8  # so that a thread which loses its core hardly delays the others
GATED_TOKENS = 256  # whose gates are held at once


def can_pack(weight: Tensor) -> bool:
    """Whether our kernel is the fastest one for this weight on this CPU.

    It needs the 32 registers of AVX-512; with matrix units (AMX), oneDNN is faster.
    """
    if weight.device.type != "cpu" or not host_has("avx512f"):
        return False
    if weight.dtype == torch.bfloat16:
        even = weight.shape[1] % 2 == 0
        return even and host_has("avx512bf16") and not host_has("amx-bf16")
    return weight.dtype == torch.float32


def empty_weights(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for weights, in huge pages as far as they fill them."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    memory = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % HUGE_PAGE
    use_huge_pages(memory.data_ptr() + begin, num_bytes)
    return memory[begin : begin + num_bytes].view(dtype).view(shape)


def pack(weight: Tensor) -> Tensor:
    """W [out_features, in_features] as blocks of 64 outputs, the last one filled up with zeros:
    [blocks, in_features / pair, 64, pair]."""
    return pack_all(weight[None])[0]


def pack_all(weights: Tensor) -> Tensor:
    """Several of equal shapes: [number, blocks, in_features / pair, 64, pair]."""
    number, out_features, in_features = weights.shape
    pair = 4 // weights.element_size()
    depth = in_features // pair
    whole, rest = divmod(out_features, BLOCK)
    shape = number, whole + (rest > 0), depth, BLOCK, pair
    packed = empty_weights(shape, weights.dtype)
    for blocks, weight in zip(packed, weights, strict=True):
        in_blocks = weight[: whole * BLOCK].reshape(whole, BLOCK, depth, pair)
        blocks[:whole] = in_blocks.transpose(1, 2)
        if rest:
            blocks[whole] = 0
            blocks[whole, :, :rest] = weight[-rest:].reshape(rest, depth, pair).transpose(0, 1)
    return packed


class PackedLinear:
    """Owns a packed copy of W [out_features, in_features]."""

    keeps_weight = False

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._pair = 4 // weight.element_size()
        self._blocks = pack(weight)
        self._depth = self.in_features // self._pair
        self._num_blocks = -(-self.out_features // BLOCK)
        self._run = _runner(weight.dtype)

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply."""
        if epilogue.is_gated and len(x) > GATED_TOKENS:
            return self._apply_gated(x, bias, epilogue)
        y = self.apply_partial(x, bias)
        return apply_epilogue(y, epilogue) if epilogue else y

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        if x.stride(1) != 1 or x.stride(0) % self._pair or x.data_ptr() % 4:
            x = x.contiguous()
        num_tokens = x.shape[0]
        output = torch.empty((num_tokens, self.out_features), dtype=x.dtype)
        threads, rows_per_unit = torch.get_num_threads(), num_tokens
        if max(num_tokens, 8) * self.out_features * self.in_features < WORTH_SHARING:
            threads = 1
        if threads > 1:
            cuts = -(-UNITS_PER_THREAD * threads // self._num_blocks)
            rows_per_unit = max(TILE_ROWS, -(-num_tokens // cuts))
        job = _Job(  # in the order of JOB: next_unit first
            0, x.data_ptr(), x.stride(0) * x.element_size(), self._blocks.data_ptr(),
            0 if bias is None else bias.data_ptr(), output.data_ptr(),
            num_tokens, self.out_features, self._depth,
            rows_per_unit, max(1, self._num_blocks // (UNITS_PER_THREAD * threads)),
        )  # fmt: skip
        self._run(addressof(job), threads)
        return output

    def _apply_gated(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """`apply` with a gated epilogue, to a part of the tokens at a time.

        y is the largest activation of a step. For all tokens at once it would leave the caches
        before it is read, and take nearly half of the memory of a step with many tokens.
        """
        output = torch.empty((len(x), self.out_features // 2), dtype=x.dtype)
        for first in range(0, len(x), GATED_TOKENS):
            part = slice(first, first + GATED_TOKENS)
            apply_gate(self.apply_partial(x[part], bias), epilogue, output[part])
        return output


@cache
def _runner(dtype: torch.dtype) -> Runner:
    return make_runner(compile_linear(bf16=dtype == torch.bfloat16))
