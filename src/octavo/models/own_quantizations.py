"""Which modules of a checkpoint are not stored as its others are, by what config.json says of them.
Imports no torch.

The loader sees that from the tensors; memory is counted before there are any.
"""

from __future__ import annotations

from octavo.layers.config import LinearConfig
from octavo.models.config import ModelDescription
from octavo.models.quantization import Quantization
from octavo.models.weight_names import WeightNames


def find_own_quantizations(
    description: ModelDescription, quantization: Quantization, names: WeightNames
) -> dict[str, Quantization | None]:
    """See ModelConfig.own_quantizations. The first expert of a layer stands for all.

    Args:
        description: the whole model.
        quantization: of its weights.
        names: what its checkpoint calls them.
    """
    if not (quantization.groups or quantization.ignored):
        return {}
    found = {}
    for path, weight in description.quantizable_weights():
        merged = names.of(path)
        if isinstance(weight, LinearConfig):
            merged = merged[: len(weight.out_sizes)]
        ways = {_stored_as(quantization, names, name) for name in merged}
        own = ways.pop() if len(ways) == 1 else None
        if own != quantization:
            found[path] = own
    return found


def _stored_as(quantization: Quantization, names: WeightNames, name: str) -> Quantization | None:
    """How a module is stored, by its name without prefix; None: it is not quantized."""
    module = name.replace("*", "0")
    # Which of the prefixes there is, only the files know.
    modules = [f"{prefix}{module}" for prefix in ("", *names.prefixes)]
    if any(map(quantization.is_ignored, modules)):
        return None
    return quantization.of_module(*modules)
