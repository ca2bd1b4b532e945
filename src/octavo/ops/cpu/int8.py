"""Products of int8 weights with inputs that are rounded to int8 when they come.

Weights have one scale per output, inputs one per token, without zero points. Sums are exact, in
int32, and then multiplied by both scales: a token's result does not depend on the other tokens.
On CPUs with AVX-512 and dot products or matrix units for int8 that is our own kernel
(int8_packed.py), on others oneDNN's, through the private ops of torch into which its compiler turns
quantized models. Where these are missing, where the CPU would saturate sums in 16 bits, or where
oneDNN has nothing but its reference implementation, there is no kernel.

oneDNN gets inputs as uint8 with a zero point of 128, which is what VNNI multiplies; it takes the
zero point's part away in int32, so that sums stay exact. On a Zen 5 it has no kernel for inputs in
int8: 64 tokens times 6,144 x 1,024 weights took 6.8 s, and 0.94 ms with uint8.

Left out: aten::_weight_int8pack_mm, which does not round inputs, takes 2 to 5 times as long as
bf16's product for 16 tokens, and 5 to 12 times for 64; and aten::_int_mm, which packs the weight in
every call, takes 0.8 to 1.8 times as long as bf16's for 64.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from timeit import repeat
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.cpu.row_ops import apply_epilogue, quantize_rows, rescale_gate, rescale_rows
from octavo.ops.epilogue import Epilogue
from octavo.ops.quantized import GroupedInt, QuantizedWeight, chunks

if TYPE_CHECKING:
    from octavo.ops.cpu.int8_packed import PackedInt8Linear

CHUNK_TOKENS = 256  # whose sums are held at once, in float32
_PACKING_TOKENS = 64  # the number of tokens that oneDNN optimises the layout for
_ZERO_POINT = 128  # of inputs in uint8
_MAX_INPUTS = (1 << 31) // (255 * 128)  # beyond it, int32 sums could overflow
_REFERENCE = 10  # times as long as a product of float32: it takes some hundred times
_RUNS = 4


class Int8Linear:
    """Owns a copy of W [out_features, in_features] in int8, packed by oneDNN.

    Results have the inputs' dtype, or are in float32 if `is_wide`: they are not rounded again.
    """

    keeps_weight = False

    def __init__(self, form: GroupedInt, is_wide: bool = False) -> None:
        self._is_wide = is_wide
        self._out_features, in_features = form.shape
        values = (form.packed ^ 128).view(torch.int8)
        shape = [_PACKING_TOKENS, in_features]
        self._packed = torch.ops.onednn.qlinear_prepack(values, shape)
        self._scales = form.scales.flatten().float()
        self._zeros = torch.zeros(self._out_features, dtype=torch.int32)

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply. Batch-invariant."""
        if not epilogue.is_gated:
            return apply_epilogue(self.apply_partial(x, bias), epilogue)
        assert not self._is_wide, "no head has a gate"
        output = x.new_empty((len(x), self._out_features // 2))
        for first in range(0, len(x), CHUNK_TOKENS):
            part = slice(first, first + CHUNK_TOKENS)
            if bias is None:
                rounded, scales = quantize_rows(x[part])
                rescale_gate(self._multiply(rounded), scales, epilogue, output[part])
            else:
                output[part] = apply_epilogue(self.apply_partial(x[part], bias), epilogue)
        return output

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        if self._is_wide:
            return self._wide(x, bias)
        output = x.new_empty((len(x), self._out_features))
        for first in range(0, len(x), CHUNK_TOKENS):
            part = slice(first, first + CHUNK_TOKENS)
            rounded, scales = quantize_rows(x[part])
            rescale_rows(self._multiply(rounded), scales, bias, output[part])
        return output

    def _wide(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`apply_partial` in float32: sums are large, and scaled where they are."""
        rounded, scales = quantize_rows(x)
        sums = self._multiply(rounded)
        rescale_rows(sums, scales, None if bias is None else bias.float(), sums)
        return sums

    def _multiply(self, rounded: Tensor) -> Tensor:
        """Products with W of int8 [num_tokens, in_features], which are overwritten; in float32."""
        shifted = rounded.view(torch.uint8).bitwise_xor_(_ZERO_POINT)
        product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            shifted, 1.0, _ZERO_POINT, self._packed, self._scales, self._zeros, None, 1.0, 0,
            torch.float32, "none", [], "",
        )  # fmt: skip
        return product


def make_rounding_kernel(weight: Tensor) -> PackedInt8Linear | Int8Linear | None:
    """A kernel for W [out_features, in_features], rounded here, with results in float32.

    None: W is not in float32 or bfloat16, or see make_kernel.
    """
    size = weight.shape[1]
    if weight.device.type != "cpu" or not _takes(weight.dtype, size):
        return None
    values = torch.empty(weight.shape, dtype=torch.uint8)
    scales = weight.new_empty((len(weight), 1))
    for rows in chunks(len(weight), size):
        part = GroupedInt.quantize(weight[rows], 8, size)
        values[rows], scales[rows] = part.packed, part.scales
    form = GroupedInt(values, scales, None, 8, quantizes_inputs=True)
    return _kernel_class()(form, is_wide=True)


def make_kernel(
    weight: QuantizedWeight, dtype: torch.dtype
) -> PackedInt8Linear | Int8Linear | None:
    """A kernel for W [out_features, in_features] and inputs of `dtype`, on a CPU.

    None: W has another form, the model was not made for rounded inputs, or this torch or CPU has no
    exact product.
    """
    if not isinstance(weight, GroupedInt) or not weight.quantizes_inputs:
        return None
    is_plain = weight.zeros is None and weight.permutation is None
    if weight.bits != 8 or weight.scales.shape[-1] != 1 or not is_plain:
        return None
    return _kernel_class()(weight) if _takes(dtype, weight.shape[-1]) else None


def _kernel_class() -> type[PackedInt8Linear] | type[Int8Linear]:
    if not has_own_product():
        return Int8Linear
    from octavo.ops.cpu.int8_packed import PackedInt8Linear

    return PackedInt8Linear


def _takes(dtype: torch.dtype, in_features: int) -> bool:
    """Whether there is a product for such inputs."""
    is_served = dtype in (torch.float32, torch.bfloat16) and in_features <= _MAX_INPUTS
    return is_served and has_int8_product()


def has_int8_product() -> bool:
    """Whether this CPU multiplies int8 exactly, by one of our ways."""
    return has_own_product() or has_onednn_product()


@cache
def has_own_product() -> bool:
    """Whether our own kernel runs on this CPU."""
    if find_spec("numba") is None:
        return False
    from octavo.ops.cpu.int8_packed import has_dot_products, has_matrix_units

    return has_dot_products() or has_matrix_units()


@cache
def has_onednn_product() -> bool:
    """Whether the ops exist, take our arguments, compute exactly, and have a kernel for this CPU.

    CPUs without VNNI add pairs of products in 16 bits, which saturates for the largest values.
    """
    mkldnn, ops = torch.backends.mkldnn, torch.ops.onednn
    if not mkldnn.is_available() or not hasattr(ops, "qlinear_prepack"):  # type: ignore[no-untyped-call]
        return False
    packed = torch.tensor([[255], [0]], dtype=torch.uint8).expand(2, 128).repeat(16, 1)
    probe = torch.tensor([[127], [-127]], dtype=torch.int8).expand(2, 128).contiguous()
    form = GroupedInt(packed, torch.ones(32, 1), None, 8, quantizes_inputs=True)
    expected = probe.double() @ form.dequantize().double().T
    try:
        is_exact = torch.equal(Int8Linear(form)._multiply(probe).double(), expected)
    except (AttributeError, RuntimeError, TypeError):  # the schema of a private op may change
        return False
    return is_exact and not _is_reference()


def _is_reference() -> bool:
    """Whether oneDNN computes its product element by element, for want of a kernel."""
    weight = torch.ones(256, 256)
    form = GroupedInt.quantize(weight, 8, 256, quantizes_inputs=True)
    kernel, inputs = Int8Linear(form), torch.ones(16, 256, dtype=torch.int8)
    wide = inputs.float()
    ours, others = (
        min(repeat(work, number=1, repeat=_RUNS))
        for work in (lambda: kernel._multiply(inputs), lambda: F.linear(wide, weight))
    )
    return ours > _REFERENCE * others
