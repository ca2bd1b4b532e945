"""Which modules of a checkpoint are not stored as its others are, by what config.json says of them.
Imports no torch.

The loader sees that from the tensors; memory is counted before there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.layers.config import LinearConfig
from octavo.models.config import ModelDescription
from octavo.models.quantization import Quantization

# What a checkpoint may call each of the modules that are merged at a path.
PossibleNames = Callable[[str], Sequence[Sequence[str]]]


def find_own_quantizations(
    description: ModelDescription, quantization: Quantization, possible_names: PossibleNames
) -> dict[str, Quantization | None]:
    """See ModelConfig.own_quantizations. The first expert of a layer stands for all.

    Args:
        description: the whole model.
        quantization: of its weights.
        possible_names: what its checkpoint calls them; which of several names, only the files know.
    """
    if not (quantization.groups or quantization.ignored):
        return {}
    found = {}
    for path, weight in description.quantizable_weights():
        merged = possible_names(path)
        if isinstance(weight, LinearConfig):
            merged = merged[: len(weight.out_sizes)]
        ways = {_stored_as(quantization, names) for names in merged}
        own = ways.pop() if len(ways) == 1 else None
        if own != quantization:
            found[path] = own
    return found


def _stored_as(quantization: Quantization, names: Sequence[str]) -> Quantization | None:
    """How a module is stored, by the names that it may have; None: it is not quantized."""
    modules = [each.replace("*", "0") for each in names]
    if any(map(quantization.is_ignored, modules)):
        return None
    return quantization.of_module(*modules)
