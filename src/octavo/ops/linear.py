"""Kernels of projections: one interface, and which kernel a weight gets.

torch keeps a weight as the checkpoint has it, and on a CPU rearranges it in every call. There are
two ways to pack it once, of which the first that the machine has is taken: our own kernel
(cpu/linear.py: Numba, AVX-512), and the private ops by which torch's compiler packs for oneDNN when
it freezes a model (cpu/onednn.py). Without either, a projection is F.linear. Measured on one Zen 5
core (benchmarks/cpu_kernels.py), in multiples of our kernel's time for 1, 16, 64 and 512 tokens,
1,024 by 6,144 weights from memory:
  oneDNN, packed   fp32 1.2, 1.1, 1.1, 1.0   bf16 1.3, 1.2, 1.1, 1.0
  F.linear         fp32 2.4, 3.1, 2.7, 2.4   bf16 3.1, 2.0, 1.4, 1.1
Ours fetches the next weights while it computes with these, and its sums are batch-invariant.

On a GPU a weight stays as it is: cuda/linear.py chooses between our kernels and cuBLAS. On
Hopper many have copies beside them: in 12 bits (cuda/linear_copied.py), or, if they are quantized,
in 7 bits or dequantized (cuda/linear_quantized.py).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.cpu import int8, onednn
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import QuantizedWeight, RoundedInputs, Rounding

LinearInput = Tensor | RoundedInputs | DeferredNorm
# What attention computes for its output projection, or one projection for another.
MaybeRounded = Tensor | RoundedInputs


class LinearKernel(Protocol):
    """Computes y = x W^T + b, where it holds W [out_features, in_features] in some order."""

    keeps_weight: bool
    """Whether it reads the given weight; otherwise it holds a packed copy."""

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """epilogue(y) of x [num_tokens, in_features] and bias [out_features]."""

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """y, or float32 partial sums [num_splits, num_tokens, out_features] of a split-K kernel.

        For a norm that follows and adds them up.
        """


@runtime_checkable
class RoundingKernel(LinearKernel, Protocol):
    """Rounds inputs to 8 bits, or takes those that what computes them has rounded."""

    def rounding(self, num_tokens: int) -> Rounding:
        """How inputs of so many tokens are rounded."""

    def part_rounding(self, num_tokens: int) -> Rounding:
        """How what computes parts of so many tokens may round them, before the others are known;
        NONE: it may not."""

    def apply_rounded(self, x: RoundedInputs, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """As `apply`, of inputs that are rounded as `rounding` or `part_rounding` says."""

    def apply_rounded_partial(self, x: RoundedInputs, bias: Tensor | None) -> Tensor:
        """As `apply_partial`, of inputs as in `apply_rounded`."""

    def rounds_results(self, num_tokens: int, epilogue: Epilogue, rounding: Rounding) -> bool:
        """Whether `apply_and_round` is to compute what another product takes rounded so."""

    def apply_and_round(
        self, x: MaybeRounded, bias: Tensor | None, epilogue: Epilogue, rounding: Rounding
    ) -> RoundedInputs:
        """As `apply` or `apply_rounded`, with the results rounded."""


@runtime_checkable
class NormingKernel(LinearKernel, Protocol):
    """Applies the RMS norm of its inputs itself where that takes less time than a norm's kernel."""

    def norms_inputs(self, num_tokens: int, norms_branch: bool) -> bool:
        """Whether it does so for so many tokens; norms_branch: if there is a `branch_weight`."""

    def apply_normed(self, x: DeferredNorm, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """As `apply`, of the norm of x; writes x.total, if there is one."""


class TorchLinear:
    """Reads the weight by F.linear: for any device and dtype."""

    keeps_weight = True

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        """See LinearKernel.apply."""
        return apply_epilogue(F.linear(x, self._weight, bias), epilogue)

    def apply_partial(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See LinearKernel.apply_partial."""
        return F.linear(x, self._weight, bias)


def make_linear_kernel(
    weight: Tensor, is_chained: bool = False, float12_copy: bool = False
) -> LinearKernel:
    """The fastest kernel for W [out_features, in_features] on its device.

    Args:
        weight: W, in the model's dtype.
        is_chained: of one token, nothing but attention or experts comes between this product and
            other such ones.
        float12_copy: few tokens are multiplied by a copy of W in 12 bits, if W has that form; only
            asked for on Hopper GPUs, and without a meaning on a CPU.
    """
    if weight.device.type == "cuda":
        if float12_copy:
            from octavo.ops.cuda.float12 import takes_float12

            if takes_float12(weight):
                from octavo.ops.cuda.linear_copied import CopiedLinear

                return CopiedLinear(weight, is_chained)
        from octavo.ops.cuda.linear import CudaLinear

        return CudaLinear(weight, is_chained)
    if has_numba_kernel(weight):
        from octavo.ops.cpu.linear import PackedLinear

        return PackedLinear(weight)
    return onednn.OneDnnLinear(weight) if onednn.can_pack(weight) else TorchLinear(weight)


def make_rounding_kernel(weight: Tensor, float12_copy: bool = False) -> LinearKernel:
    """The fastest kernel for W [out_features, in_features] that may be rounded to int8, and inputs
    that may be, too: that is done on a CPU that has such products. Results may be in float32.

    float12_copy: see make_linear_kernel.
    """
    kernel = int8.make_rounding_kernel(weight)
    return kernel or make_linear_kernel(weight, float12_copy=float12_copy)


def make_quantized_kernel(
    weight: QuantizedWeight,
    dtype: torch.dtype,
    is_chained: bool = False,
    dequantized_copy: bool = False,
    float7_copy: bool = False,
    follows_experts: bool = False,
) -> LinearKernel | None:
    """The fastest kernel for a quantized W [out_features, in_features] and inputs of `dtype`.

    None: there is none on this device, or for such a form.

    Args:
        weight: W.
        dtype: of inputs and results.
        is_chained: see make_linear_kernel.
        dequantized_copy: many tokens are multiplied by a copy of W in `dtype`; only asked for on
            Hopper GPUs, and without a meaning on a CPU.
        float7_copy: few tokens are multiplied by a copy of W in 7 bits, if W has that form; as for
            dequantized ones.
        follows_experts: of one token, this product alone comes directly after quantized experts.
    """
    if weight.device.type != "cuda":
        return int8.make_kernel(weight, dtype)
    from octavo.ops.cuda.linear_quantized import make_kernel

    return make_kernel(
        weight,
        dtype,
        is_chained=is_chained,
        dequantized_copy=dequantized_copy,
        float7_copy=float7_copy,
        follows_experts=follows_experts,
    )


def has_numba_kernel(weight: Tensor) -> bool:
    """Whether cpu/linear.py serves such a weight on this machine."""
    if weight.device.type != "cpu" or find_spec("numba") is None:
        return False
    from octavo.ops.cpu.linear import can_pack

    return can_pack(weight)
