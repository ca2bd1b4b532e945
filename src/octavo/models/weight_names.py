"""What checkpoints call the modules of decoder.py. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

_LAYER_MODULE = re.compile(r"(encoder\.)?layers\.(\d+)\.(.+)")
_RELATIVE_BIAS = re.compile(r"((?:encoder\.)?relative_biases)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """What a family's checkpoints call its modules.

    `model` and `layer` map a module's path, in the model or in a layer, to the checkpoint's name of
    it. Where a module merges several projections, they are named in the order of its out_sizes, or
    by one name if the checkpoint has merged them, too; where it has copies of one table, they are
    all named. Entries for modules that a variant of the family does not have are not used. Names of
    relative biases have {} in place of their number.
    """

    model: Mapping[str, str | tuple[str, ...]]
    layers: str  # the list of layers
    layer: Mapping[str, str | tuple[str, ...]]
    encoder_layers: str = ""  # the same two for the layers of an encoder
    encoder_layer: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    prefixes: tuple[str, ...]  # of all names; some checkpoints leave them out
    ignored: tuple[str, ...] = ()  # patterns of tensors that are no weights, without prefixes
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of parts of names
    # Entries of `layer` in files that transformers 5 wrote as it holds them (save_original_format):
    # there, the experts of a layer are two tensors.
    merged: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    transposed: bool = False  # layers keep projections as [in_features, out_features]
    # The merged QKV projection has, for each KV head, its queries, its key and its value.
    qkv_by_head: bool = False

    def without_prefix(self, name: str) -> str:
        """A tensor's name without prefix, and with aliases replaced."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        if not self.aliases:
            return name
        return ".".join(self.aliases.get(part, part) for part in name.split("."))

    def in_files(self, tensor_names: Collection[str]) -> WeightNames:
        """Those in files that have tensors of these names: see `merged`."""
        experts = self.merged.get("mlp.experts", ())
        if not any(name.endswith(experts) for name in tensor_names):
            return self
        return replace(self, layer={**self.layer, **self.merged})

    def of(self, path: str) -> tuple[str, ...]:
        """The checkpoint's names, without prefix, of the module at `path` in the model."""
        if match := _RELATIVE_BIAS.fullmatch(path):
            return tuple(name.format(match[2]) for name in _as_tuple(self.model[match[1]]))
        match = _LAYER_MODULE.fullmatch(path)
        if match is None:
            return _as_tuple(self.model[path])
        layers, layer = self.layers, self.layer
        if match[1]:
            layers, layer = self.encoder_layers, self.encoder_layer
        return tuple(f"{layers}.{match[2]}.{name}" for name in _as_tuple(layer[match[3]]))

    def possible(self, path: str) -> list[list[str]]:
        """What a checkpoint may call each of the modules that are merged at `path` in the model,
        with prefix or without."""
        return [[f"{prefix}{name}" for prefix in ("", *self.prefixes)] for name in self.of(path)]


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


UNNAMED = WeightNames(model={}, layers="", layer={}, prefixes=())  # a Checkpoint knows the names
