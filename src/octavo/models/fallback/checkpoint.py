"""What checkpoints call the parameters of a transformers model.

Names are changed by transformers' own conversion mapping, with which some checkpoints differ from
the module: other names, or one tensor per expert where the module has one for all.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from octavo.errors import ModelError
from octavo.layers.base import WeightOwner, WeightTargets
from octavo.models.base import FileTensor

# Frequencies that old checkpoints have among their weights.
IGNORED = (r"rotary_emb\.inv_freq", r"\.masked_bias$", r"\.attn\.bias$", r"position_ids$")
# The weight of one expert's projection, and that of a first expert's.
_EXPERT = re.compile(r".*\.(?P<number>\d+)\.(?P<projection>[^.\d][^.]*)\.weight")
_FIRST = re.compile(r"\.0\.[^.\d][^.]*\.weight$")
UP, DOWN = "gate_up_proj", "down_proj"  # transformers' parameters, of all experts
# Which of them the weight of an expert's gate, up and down projection is a part of, and its place
# there.
_PLACES = ((UP, 0), (UP, 1), (DOWN, 0))

# By paths of modules: what the weights of their experts are called (ExpertsMethod).
ExpertNames = Mapping[str, tuple[str, ...]]


class TransformersCheckpoint:
    """See octavo.models.base.Checkpoint."""

    targets: WeightTargets
    names: dict[WeightOwner, Sequence[str]]

    def __init__(
        self,
        model: PreTrainedModel,
        left_out: Sequence[str],
        experts: Collection[str],
        tensor_names: Iterable[str],
    ) -> None:
        """`targets` and `names`, of all owners of weights, are set later.

        Args:
            model: as transformers has made it, on the meta device.
            left_out: paths of modules that it lacks, whose tensors are ignored.
            experts: paths of modules whose experts may be loaded one by one.
            tensor_names: those in the files.
        """
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
        self._single_patterns = {
            pattern: number
            for each in self._converters
            if _stacks(each)
            for number, pattern in enumerate(each.source_patterns)
        }
        self.expert_names = self._find_expert_names(frozenset(experts), tensor_names)

    def translate(self, tensors: Iterable[FileTensor]) -> Iterator[tuple[str, FileTensor]]:
        """The tensors by the module's names, several of them put together where it has one; those
        of experts that are loaded one by one by `expert_names`."""
        open_conversions: dict[str, _Conversion] = {}
        for each in tensors:
            name, pattern = self._renamed(each[1])
            if pattern is None or name not in self._state:
                yield name, each
                continue
            path = name.rpartition(".")[0]
            single = _Single.find(path, each[1]) if path in self.expert_names else None
            if single is not None:
                yield single.name, each
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

    def names_of(self, path: str, owner: WeightOwner) -> Sequence[str]:
        """See Checkpoint.names_of."""
        return self.names[owner]

    def _find_expert_names(
        self, experts: frozenset[str], tensor_names: Iterable[str]
    ) -> ExpertNames:
        """From the tensors of each first expert."""
        found: dict[str, dict[tuple[str, int], str]] = {}
        for tensor_name in {f"{name.rpartition('.')[0]}.weight" for name in tensor_names}:
            if not _FIRST.search(tensor_name):
                continue
            name, pattern = self._renamed(tensor_name)
            path, _, parameter = name.rpartition(".")
            single = _Single.find(path, tensor_name)
            if path in experts and pattern in self._single_patterns and single is not None:
                place = parameter, self._single_patterns[pattern]
                found.setdefault(path, {})[place] = single.module
        return {
            path: tuple(names[place] for place in _PLACES)
            for path, names in found.items()
            if names.keys() == set(_PLACES)
        }

    def _renamed(self, name: str) -> tuple[str, str | None]:
        prefix, state = self._model.base_model_prefix, self._state
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, state)
        if renamed not in state and name in state:
            return rename_source_key(name, [], [], prefix, state)
        return renamed, pattern


def _stacks(converter: WeightConverter) -> bool:
    """Whether it makes one tensor of those of all experts, gates before ups, and nothing else."""
    kinds = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    merged, joined = (MergeModulelist, 0), (Concatenate, 1)
    return kinds == ([merged] if len(converter.source_patterns) == 1 else [merged, joined])


class _Single(NamedTuple):
    """The name of one expert's projection, behind the path of the experts' module."""

    path: str
    number: str
    projection: str

    @classmethod
    def find(cls, path: str, name: str) -> _Single | None:
        """By the name of its weight in a file; None if that is none of an expert."""
        match = _EXPERT.fullmatch(name)
        return None if match is None else cls(path, match["number"], match["projection"])

    @property
    def name(self) -> str:
        """Of its weight."""
        return f"{self.path}.{self.number}.{self.projection}.weight"

    @property
    def module(self) -> str:
        """Of all such projections; see ExpertsMethod."""
        return f"{self.path}.*.{self.projection}"


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
