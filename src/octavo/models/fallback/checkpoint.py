"""What checkpoints call the parameters of a transformers model.

Names are changed by transformers' own conversion mapping, with which some checkpoints differ from
the module: other names, or one tensor per expert where the module has one for all.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from octavo.errors import ModelError
from octavo.layers.base import WeightTargets
from octavo.models.base import FileTensor

# Frequencies that old checkpoints have among their weights.
IGNORED = (r"rotary_emb\.inv_freq", r"\.masked_bias$", r"\.attn\.bias$", r"position_ids$")


class TransformersCheckpoint:
    """See octavo.models.base.Checkpoint."""

    targets: WeightTargets

    def __init__(self, model: PreTrainedModel, left_out: Sequence[str]) -> None:
        """`model`: as transformers has made it, on the meta device, but for modules at the paths
        `left_out`, whose tensors are ignored; `targets` are set later."""
        self._model = model
        self._state = model.state_dict()
        self._as_made = _AsMade(self._state)
        mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._by_pattern = {
            pattern: each for each in self._converters for pattern in each.source_patterns
        }
        ignored = model._keys_to_ignore_on_load_unexpected or []
        self._ignored = [re.compile(pattern) for pattern in (*IGNORED, *ignored)]
        self._left_out = tuple(f"{path}." for path in left_out)

    def translate(self, tensors: Iterable[FileTensor]) -> Iterator[tuple[str, FileTensor]]:
        """The tensors by the module's names, several of them put together where it has one."""
        open_conversions: dict[str, _Conversion] = {}
        for each in tensors:
            name, pattern = self._renamed(each[1])
            if pattern is None or name not in self._state:
                yield name, each
                continue
            if name not in open_conversions:
                converter = copy.deepcopy(self._by_pattern[pattern])
                open_conversions[name] = _Conversion(name, converter)
            open_conversions[name].add(each, pattern)
        for conversion in open_conversions.values():
            yield from conversion.results(self._as_made, self._model.config)

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is no weight, or one that text does not need."""
        is_unused = name.startswith(self._left_out)
        return is_unused or any(pattern.search(name) for pattern in self._ignored)

    def _renamed(self, name: str) -> tuple[str, str | None]:
        prefix, state = self._model.base_model_prefix, self._state
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, state)
        if renamed not in state and name in state:
            return rename_source_key(name, [], [], prefix, state)
        return renamed, pattern


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """See StoredTensor: one that was made of several."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """See StoredTensor.read."""
        return self.tensor[index]


@dataclass(frozen=True, slots=True)
class _AsMade:
    """What transformers' operations ask a model for: its parameters as transformers has made them,
    before octavo's layers took the place of its own."""

    state: Mapping[str, Tensor]

    def get_parameter(self, name: str) -> Tensor:
        """A parameter of that name, on the meta device."""
        return self.state[name]


class _Conversion:
    """Several tensors of a checkpoint that become one or more parameters."""

    def __init__(self, name: str, converter: WeightConverter) -> None:
        self._name = name
        self._converter = converter
        self._tensors: list[tuple[list[Any], FileTensor, str]] = []

    def add(self, tensor: FileTensor, pattern: str) -> None:
        """One more; it is read when the parameters are made."""
        self._tensors.append((_natural(tensor[1]), tensor, pattern))

    def results(self, model: _AsMade, config: PreTrainedConfig) -> Iterator[tuple[str, FileTensor]]:
        """The parameters, made now."""
        self._tensors.sort(key=lambda each: each[0])
        for _, (_, name, stored), pattern in self._tensors:
            whole = stored.read(tuple(slice(0, size) for size in stored.shape))
            # Declared as a future; transformers takes tensors, too, as where it saves them.
            self._converter.add_tensor(self._name, name, pattern, cast(Any, whole))
        path, first, _ = self._tensors[0][1]
        try:
            found = self._converter.convert(self._name, model=model, config=config)
        except (RuntimeError, ValueError, LookupError, AttributeError) as error:
            counts = Counter(pattern for _, _, pattern in self._tensors)
            found_of = ", ".join(f"{count} of {pattern}" for pattern, count in counts.items())
            raise ModelError(
                f"{path}: {first} and {len(self._tensors) - 1} others do not make "
                f"{self._name} (there are {found_of}): {error}"
            ) from error
        for name, value in found.items():
            tensor: Tensor = value[0] if isinstance(value, list) else value
            yield name, (path, first, MadeTensor(tensor))


def _natural(name: str) -> list[Any]:
    """A key by which expert 10 comes after expert 9."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if part.isdecimal() else part for part in parts]
