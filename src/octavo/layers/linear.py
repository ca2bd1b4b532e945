"""Projections. How one is stored and computed is a `LinearMethod`.

A method owns its tensors, says where a checkpoint's tensors go, rearranges them once they are
loaded, and computes. `make_linear` chooses it by the LinearConfig; models and MLPs know only the
interface.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from octavo.layers.base import WeightOwner, WeightSlice, WeightSlot, WeightTarget, WeightTargets
from octavo.layers.config import LinearConfig
from octavo.ops.epilogue import Epilogue
from octavo.ops.linear import (
    LinearInput,
    LinearKernel,
    MaybeRounded,
    NormingKernel,
    RoundingKernel,
    make_linear_kernel,
    make_quantized_kernel,
    make_rounding_kernel,
)
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import (
    FormError,
    QuantizedWeight,
    RoundedInputs,
    Rounding,
)
from octavo.registry import LINEAR_METHODS

logger = logging.getLogger(__name__)


class LinearMethod(WeightOwner):
    """y = x W^T + b with W [out_features, in_features], however W is stored.

    `targets` takes one name, or one for each of the merged projections; where more are named (of
    gate and up, in a block without a gate), the first are meant.
    """

    is_chained = False
    """See make_linear_kernel; set before `finalize`."""

    follows_experts = False
    """See make_quantized_kernel; set before `finalize`."""

    def finalize(self) -> None:
        """Rearrange the weights for the device that they are on; called once, after loading."""
        raise NotImplementedError

    def forward(self, x: Tensor, epilogue: Epilogue = Epilogue.NONE) -> Tensor:
        """epilogue(y) of x [num_tokens, in_features]: [num_tokens, out_features], half if gated.

        Called after `finalize`.
        """
        raise NotImplementedError

    def rounding(self, num_tokens: int) -> Rounding:
        """How inputs of so many tokens are rounded before they are multiplied.

        What computes them may round them so, and pass `forward_rounded` the result.
        """
        return Rounding.NONE

    def part_rounding(self, num_tokens: int) -> Rounding:
        """The same for what computes parts of tokens, before the others are known; NONE: it is not
        to round them."""
        return Rounding.NONE

    def forward_rounded(self, x: RoundedInputs, epilogue: Epilogue) -> Tensor:
        """As `forward`, of inputs that are rounded as `rounding` or `part_rounding` says."""
        raise NotImplementedError

    def norms_inputs(self, num_tokens: int, norms_branch: bool, is_partial: bool = False) -> bool:
        """Whether `forward_normed` is to compute with so many tokens.

        Args:
            norms_branch: whether there is a `branch_weight`.
            is_partial: whether there are partial sums to be added up.
        """
        return False

    def forward_normed(self, x: DeferredNorm, epilogue: Epilogue) -> Tensor:
        """As `forward`, of the norm of x; writes x.total, if there is one."""
        raise NotImplementedError

    def project(self, x: LinearInput, epilogue: Epilogue = Epilogue.NONE) -> Tensor:
        """`forward`, `forward_rounded` or `forward_normed`, by what is to be done with x."""
        if isinstance(x, RoundedInputs):
            return self.forward_rounded(x, epilogue)
        if isinstance(x, DeferredNorm):
            return self.forward_normed(x, epilogue)
        return self.forward(x, epilogue)

    def project_for(
        self, reader: LinearMethod, x: LinearInput, epilogue: Epilogue = Epilogue.NONE
    ) -> MaybeRounded:
        """`project`, with the result in the form that `reader` takes."""
        return self.project(x, epilogue)

    def forward_partial(self, x: Tensor) -> Tensor:
        """y, or float32 partial sums [num_splits, num_tokens, out_features], on GPUs.

        For a norm that follows and adds them up (Norm.forward).
        """
        raise NotImplementedError

    def forward_rounded_partial(self, x: RoundedInputs) -> Tensor:
        """As `forward_partial`, of inputs as in `forward_rounded`."""
        raise NotImplementedError

    def project_partial(self, x: MaybeRounded) -> Tensor:
        """`forward_partial` or `forward_rounded_partial`."""
        if isinstance(x, RoundedInputs):
            return self.forward_rounded_partial(x)
        return self.forward_partial(x)


class Projection(LinearMethod):
    """Owns the bias, and a kernel for the weight; subclasses own the weight until it is loaded."""

    def __init__(self, config: LinearConfig) -> None:
        super().__init__()
        self.config = config
        self._has_float12_copy = config.copy == "float12"
        self.bias: nn.Parameter | None = None
        if config.has_bias:
            self.bias = nn.Parameter(torch.empty(config.out_features), requires_grad=False)
        self._kernel: LinearKernel
        self._norming_kernel: NormingKernel | None = None

    def places(self) -> Sequence[Tensor | WeightSlot]:
        """Where the weight of each merged projection goes: [out_size, in_features]."""
        raise NotImplementedError

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """See WeightOwner.targets."""
        config, outputs = self.config, self.config.out_ranges()
        names = names[: len(outputs)]
        num_inputs, inputs = config.in_range()
        per_name = [outputs] if len(names) == 1 else [[each] for each in outputs]
        found: WeightTargets = {}
        parts = iter(self.places())
        for name, ranges in zip(names, per_name, strict=True):
            found[f"{name}.weight"] = _target(ranges, parts, (num_inputs,), (inputs,))
        if config.bias:
            biases = () if self.bias is None else torch.split(self.bias, list(config.out_sizes))
            parts = iter(biases)
            for name, ranges in zip(names, per_name, strict=True):
                found[f"{name}.bias"] = _target(ranges, parts)
        return found

    def forward(self, x: Tensor, epilogue: Epilogue = Epilogue.NONE) -> Tensor:
        """See LinearMethod.forward."""
        return self._kernel.apply(x, self.bias, epilogue)

    def forward_partial(self, x: Tensor) -> Tensor:
        """See LinearMethod.forward_partial."""
        return self._kernel.apply_partial(x, self.bias)

    def norms_inputs(self, num_tokens: int, norms_branch: bool, is_partial: bool = False) -> bool:
        """See LinearMethod.norms_inputs."""
        kernel = self._norming_kernel
        if kernel is None or is_partial:
            return False
        return kernel.norms_inputs(num_tokens, norms_branch)

    def forward_normed(self, x: DeferredNorm, epilogue: Epilogue) -> Tensor:
        """See LinearMethod.forward_normed."""
        assert self._norming_kernel is not None
        return self._norming_kernel.apply_normed(x, self.bias, epilogue)

    def kernels(self) -> Sequence[object]:
        """See WeightOwner.kernels."""
        return (self._kernel,)

    def _compute_with(self, kernel: LinearKernel) -> None:
        """Called by `finalize`."""
        self._kernel = kernel
        # Known from here on, because such a check is slow.
        self._norming_kernel = kernel if isinstance(kernel, NormingKernel) else None


class PlainLinear(Projection):
    """Owns W and b in the model's dtype, as loaded or packed for the CPU."""

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        shape = (config.out_features, config.in_features)
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(shape), requires_grad=False)

    def places(self) -> Sequence[Tensor | WeightSlot]:
        """See Projection.places."""
        assert self.weight is not None, "called before finalize"
        return torch.split(self.weight, list(self.config.out_sizes))

    def finalize(self) -> None:
        """Pack the weight where that pays, and then let go of it.

        An embedding table that shares the weight keeps it: then there are two copies.
        """
        assert self.weight is not None, "finalize is called once"
        weight = self.weight.detach()
        self._compute_with(make_linear_kernel(weight, self.is_chained, self._has_float12_copy))
        if not self._kernel.keeps_weight:
            self.weight = None


class RoundedLinear(PlainLinear):
    """Owns W as loaded, which an embedding table may share, and computes with int8 on a CPU, then
    with results in float32: for the head."""

    def finalize(self) -> None:
        """See PlainLinear.finalize."""
        assert self.weight is not None, "finalize is called once"
        self._compute_with(make_rounding_kernel(self.weight.detach(), self._has_float12_copy))
        if not self._kernel.keeps_weight:
            self.weight = None


class QuantizedLinear(Projection):
    """Owns W as the checkpoint has it: quantized where a kernel computes with that form.

    What has no such kernel is dequantized when it is loaded, and computed as PlainLinear does:
    projections that the checkpoint has not quantized, merged ones of different forms, and all of
    them on a CPU.
    """

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        self._slots = [WeightSlot(size, config.in_features) for size in config.out_sizes]
        self._rounding_kernel: RoundingKernel | None = None

    def places(self) -> Sequence[Tensor | WeightSlot]:
        """See Projection.places."""
        return self._slots

    def finalize(self) -> None:
        """See LinearMethod.finalize."""
        form, dtype = joined_form(self._slots), self._slots[0].dtype
        kernel = None
        if form is not None:
            kernel = make_quantized_kernel(
                form,
                dtype,
                self.is_chained,
                dequantized_copy=self.config.copy == "dequantized",
                float7_copy=self.config.copy == "float7",
                follows_experts=self.follows_experts,
            )
        if kernel is None:
            dense = [slot.dense() for slot in self._slots]
            weight = dense[0] if len(dense) == 1 else torch.cat(dense)
            kernel = make_linear_kernel(weight, float12_copy=self._has_float12_copy)
        self._compute_with(kernel)
        self._rounding_kernel = kernel if isinstance(kernel, RoundingKernel) else None
        for slot in self._slots:
            slot.clear()

    def rounding(self, num_tokens: int) -> Rounding:
        """See LinearMethod.rounding."""
        kernel = self._rounding_kernel
        return Rounding.NONE if kernel is None else kernel.rounding(num_tokens)

    def part_rounding(self, num_tokens: int) -> Rounding:
        """See LinearMethod.part_rounding."""
        kernel = self._rounding_kernel
        return Rounding.NONE if kernel is None else kernel.part_rounding(num_tokens)

    def forward_rounded(self, x: RoundedInputs, epilogue: Epilogue) -> Tensor:
        """See LinearMethod.forward_rounded."""
        assert self._rounding_kernel is not None
        return self._rounding_kernel.apply_rounded(x, self.bias, epilogue)

    def project_for(
        self, reader: LinearMethod, x: LinearInput, epilogue: Epilogue = Epilogue.NONE
    ) -> MaybeRounded:
        """See LinearMethod.project_for."""
        kernel = self._rounding_kernel
        if kernel is not None and not isinstance(x, DeferredNorm):
            num_tokens = len(x.values if isinstance(x, RoundedInputs) else x)
            rounding = reader.part_rounding(num_tokens)
            if kernel.rounds_results(num_tokens, epilogue, rounding):
                return kernel.apply_and_round(x, self.bias, epilogue, rounding)
        return self.project(x, epilogue)

    def forward_rounded_partial(self, x: RoundedInputs) -> Tensor:
        """See LinearMethod.forward_rounded_partial."""
        assert self._rounding_kernel is not None
        return self._rounding_kernel.apply_rounded_partial(x, self.bias)


def joined_form(slots: Sequence[WeightSlot]) -> QuantizedWeight | None:
    """The weights of merged projections as one; None, with a warning, if their forms differ, and
    without one if none of them is quantized."""
    contents = [slot.content for slot in slots]
    forms = [each for each in contents if isinstance(each, QuantizedWeight)]
    if not forms:
        return None
    kinds = {type(each) for each in contents}
    try:
        if len(kinds) > 1:
            raise FormError("some of them are not quantized, or otherwise")
        return forms[0] if len(forms) == 1 else type(forms[0]).join(forms)
    except FormError as error:
        warn_once(f"merged projections are dequantized: {error}")
        return None


@cache
def warn_once(message: str) -> None:
    """Log a warning that would be the same for every layer."""
    logger.warning(message)


def _target(
    ranges: Sequence[tuple[int, slice]],
    parts: Iterator[Tensor | WeightSlot],
    inner_shape: tuple[int, ...] = (),
    inner_index: tuple[slice, ...] = (),
) -> WeightTarget:
    """The target of a tensor in which a checkpoint has merged projections.

    Args:
        ranges: of each projection: its outputs in the checkpoint, and which of them this rank has.
        parts: where these go; none if this rank keeps nothing.
        inner_shape, inner_index: the tensor's other dimensions, and what this rank has of them.
    """
    begin, slices = 0, []
    for (size, outputs), part in zip(ranges, parts, strict=False):
        index = slice(begin + outputs.start, begin + outputs.stop)
        slices.append(WeightSlice(part, (index, *inner_index)))
        begin += size
    return WeightTarget((sum(size for size, _ in ranges), *inner_shape), tuple(slices))


def make_linear(config: LinearConfig) -> LinearMethod:
    """The method that the projection names, with uninitialised weights.

    Raises ConfigError if there is none.
    """
    method: LinearMethod = LINEAR_METHODS.find(config.method)(config)
    return method
