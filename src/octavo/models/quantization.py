"""How the weights of a checkpoint are stored, and which devices keep them so. Imports no torch.

What config.json says of it is read in quantization_config.py; which tensors a projection is stored
in, and how those are read, is in dequantize.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.config import QuantizationName
from octavo.json_fields import Fields

COMPRESSED_TENSORS = "compressed-tensors"
# Where modules that are not quantized are known by their full names alone. transformers compares
# torchao's with names that end in ".weight", so that ends of modules' names say nothing.
OF_FULL_NAMES = (COMPRESSED_TENSORS, "torchao")
ON_LOAD_METHOD = "on-load"  # of weights that the files do not hold quantized
SMALLEST_GROUP = 32  # of inputs that share a scale, of weights that are quantized on load
EXPERTS_GROUP = 128  # the most inputs that share a scale where kernels hold experts in 4 bits


FormKind = Literal["float8", "int", "mxfloat4"]

# Which kernels for quantized weights a device has: those of a GPU of that generation ("ada" stands
# for later ones than Hopper, too), that of ops/cpu/int8.py, or none.
WeightKernels = Literal["hopper", "ada", "ampere", "cpu", "none"]


class KeptParts(NamedTuple):
    """Which weights a device keeps in their quantized form; it dequantizes the others."""

    projections: bool
    experts: bool


LINEAR = "Linear"  # what compressed-tensors calls all projections
PATTERN = "re:"  # what stands before a regular expression


class ModuleNames(NamedTuple):
    """What config.json says of which modules are meant. There may be one name for each of
    thousands of experts, so patterns are compiled once."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]  # which a full name begins with

    @classmethod
    def read(cls, fields: Fields, field: str, given: Sequence[str]) -> ModuleNames:
        """given: names, names with an asterisk for any characters (ModelOpt), and PATTERN with a
        regular expression behind it.

        Raises:
            ModelError: what should be a pattern is none; names `field`.
        """
        patterns = []
        for each in given:
            if each.startswith(PATTERN):
                try:
                    patterns.append(re.compile(each.removeprefix(PATTERN)))
                except re.error as error:
                    reason = f"{each!r} is no regular expression: {error}"
                    raise fields.error(field, reason) from error
            elif "*" in each:
                patterns.append(re.compile(fnmatch.translate(each)))
        names = frozenset(each for each in given if not each.startswith(PATTERN))
        return cls(names, tuple(patterns))

    def match(self, module: str) -> bool:
        """Whether a pattern matches a module's full name."""
        return any(pattern.match(module) for pattern in self.patterns)

    def have_start_of(self, module: str) -> bool:
        """Whether a name is a module's full name, or that of one that it is in."""
        parts = module.split(".")
        return any(".".join(parts[:i]) in self.names for i in range(len(parts), 0, -1))

    def have_end_of(self, module: str) -> bool:
        """Whether a name is a module's full name, or the end of it."""
        parts = module.split(".")
        return any(".".join(parts[i:]) in self.names for i in range(len(parts)))


class Group(NamedTuple):
    """Modules that are stored in a way of their own."""

    targets: ModuleNames  # full names, or LINEAR
    quantization: Quantization


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the projections of a checkpoint are stored.

    Which of them are quantized is seen from the names of their tensors: a projection that the
    quantizer left alone has a plain `weight`.
    """

    method: str  # a name in dequantize.FORMATS, or ON_LOAD_METHOD
    num_bits: int = 8  # of packed integers
    zero_offset: int = 0  # what is added to stored zero points
    block: tuple[int, int] | None = None  # rows and columns of the blocks that share a scale
    # As which of ops/quantized.py's forms the weights stay in memory; None: as none of them.
    form: FormKind | None = None
    group_size: int | None = None  # inputs that share a scale of integers; None: all of an output
    # Whether weights without blocks and groups have a scale for each output; None: or just one.
    has_row_scales: bool | None = None
    quantizes_inputs: bool = False  # whether the model was made for inputs of 8 bits, too
    has_zeros: bool = False  # whether each group of inputs has a zero point
    demanded: tuple[str, ...] = ()  # of the parts of a weight that may lack, those that may not
    # Modules that config.json says are not quantized: by their full names or the ends of those, in
    # compressed-tensors and torchao by their full names or LINEAR.
    ignored: tuple[ModuleNames, ...] = ()
    is_dense: bool = False  # all projections are plain, and only experts are quantized, if any
    experts: Quantization | None = None  # how experts are stored; None: as projections are
    # Where not all modules are stored in the same way; else there are none.
    groups: tuple[Group, ...] = ()

    @property
    def of_experts(self) -> Quantization:
        """How experts are stored."""
        return self.experts or self

    def of_module(self, *names: str) -> Quantization | None:
        """How a module is stored, by its full name or those that it may have; None: it is in none
        of the groups.

        A name, such as that of all experts of a layer, comes before patterns, and these before
        LINEAR.
        """
        if not self.groups:
            return self
        tests: tuple[Callable[[ModuleNames], bool], ...] = (
            lambda targets: any(map(targets.have_start_of, names)),
            lambda targets: any(map(targets.match, names)),
            lambda targets: LINEAR in targets.names,
        )
        for is_of in tests:
            for group in self.groups:
                if is_of(group.targets):
                    return group.quantization
        return None

    def is_ignored(self, module: str) -> bool:
        """Whether config.json says that a module, by its full name, is not quantized."""
        if self.method in OF_FULL_NAMES:
            is_named = any(not each.names.isdisjoint((module, LINEAR)) for each in self.ignored)
        else:
            is_named = any(each.have_end_of(module) for each in self.ignored)
        return is_named or any(each.match(module) for each in self.ignored)

    def weight_bytes(self, divisor: int = 1, is_of_experts: bool = False) -> float | None:
        """Bytes of a weight in its form, with its share of the scales and zero points of groups, as
        kernels hold them; None: it has no form.

        Args:
            divisor: see `divisors`.
            is_of_experts: of those that a router chooses from. Their scales are float32.
        """
        if self.form != "int":
            return None if self.form is None else 1.0 if self.form == "float8" else 0.5 + 1 / 32
        group = self.group_size if divisor == 1 else divisor
        size = 2
        if is_of_experts:
            group, size = min(group or EXPERTS_GROUP, EXPERTS_GROUP), 4
        if self.has_zeros:
            size *= 2
        return self.num_bits / 8 + (size / group if group else 0)

    @property
    def divisors(self) -> tuple[int, ...]:
        """By how many inputs those of a weight must be divisible to be quantized on load: by one of
        these, the first of which is how many share a scale."""
        if self.method != ON_LOAD_METHOD or self.group_size is None:
            return (1,)
        return halved(self.group_size)

    @property
    def is_unpacked(self) -> bool:
        """Whether products convert such weights to 16 bits each time. Where arithmetic bounds a
        product, weights of 16 bits take less time."""
        return self.form == "int" or (self.form == "float8" and not self.quantizes_inputs)

    @property
    def fits_float7(self) -> bool:
        """Whether weights are numbers of which copies in 7 bits lose nothing: those that are
        quantized on load, with a scale for each output."""
        return self.form == "float8" and self.method == ON_LOAD_METHOD and not self.block

    def kept_by(self, kernels: WeightKernels) -> KeptParts:
        """What a device with such kernels keeps as it is stored, as a rule."""
        return KeptParts(self._keeps_projections(kernels), self.of_experts._keeps_experts(kernels))

    def _keeps_projections(self, kernels: WeightKernels) -> bool:
        """Those of GPUs take Hopper's instructions; those of a CPU are int8 without zero points,
        with rounded inputs."""
        if self.is_dense:
            return True
        if kernels == "cpu":
            is_int8 = (self.form, self.num_bits, self.group_size) == ("int", 8, None)
            return is_int8 and self.quantizes_inputs and not self.has_zeros
        return kernels == "hopper" and self.form is not None

    def _keeps_experts(self, kernels: WeightKernels) -> bool:
        """They are computed with packed values of 4 bits, and with e4m3 where the GPU converts
        it."""
        if self.is_dense or kernels in ("cpu", "none"):
            return self.is_dense
        if self.form == "float8":
            return kernels != "ampere"
        return self.form == "mxfloat4" or (self.form == "int" and self.num_bits == 4)


def halved(group: int) -> tuple[int, ...]:
    """A number of inputs that share a scale, and smaller ones that may, where it does not divide
    all inputs."""
    sizes = [group]
    while sizes[-1] > SMALLEST_GROUP:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


# What the option `quantization` makes of weights that are not quantized, while they are loaded.
ON_LOAD: Mapping[QuantizationName, Quantization] = {
    "fp8": Quantization(ON_LOAD_METHOD, form="float8", quantizes_inputs=True),
    "int8": Quantization(ON_LOAD_METHOD, form="int", num_bits=8, quantizes_inputs=True),
    "int4": Quantization(ON_LOAD_METHOD, form="int", num_bits=4, group_size=128),
}
