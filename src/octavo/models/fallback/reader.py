"""From a model directory to the description of what transformers would compute."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from octavo.json_fields import Fields
from octavo.layers.config import AttentionConfig, ExpertsConfig, MLPConfig, NormConfig
from octavo.models.config import LayerConfig, ModelDescription
from octavo.models.fallback.build import Built, build, is_known, output_embeddings
from octavo.models.fallback.config import UNDIVIDED, Division, NamedWeight, Weight
from octavo.models.fallback.dividing import divides_head, find_divisions
from octavo.models.fallback.experts import find_experts
from octavo.models.fallback.recording import AttentionCall
from octavo.models.fallback.replacing import layer_number, linear_config, merged_linears


@dataclass(frozen=True)
class Reading:
    """What TransformersConfig has beside what is in the files of every model; token ids as
    transformers knows them, where config.json does not say them."""

    description: ModelDescription
    model_type: str
    architecture: str
    parameters: int
    lookup_parameters: int
    table_width: int
    weights: tuple[tuple[NamedWeight, ...], ...]
    whole_heads: tuple[bool, ...]
    divides_head: bool
    layers_path: str
    bos_token_id: object
    eos_token_id: object


def read(directory: Path, config: Fields) -> Reading:
    """The model that transformers makes of a directory's config.json; weights are not read.

    Args:
        directory: where it is.
        config: the file's fields.

    Raises:
        ModelError: transformers has no such model, or octavo cannot serve it; says why.
    """
    model_type = config.get("model_type", None)
    if not isinstance(model_type, str) or not is_known(model_type):
        has_code = config.get("auto_map", None) is not None
        hint = "; the code that comes with the model (auto_map) is never run" if has_code else ""
        raise config.error(
            "model_type",
            f"neither octavo nor transformers {transformers.__version__} has such a model{hint}",
        )
    built = build(directory, torch.float32)
    architecture = type(built.model).__name__
    names = config.names("architectures", [architecture])
    if architecture not in names and not any(map(_is_own_name, names)):
        raise config.error("architectures", f"of {model_type}, octavo serves {architecture}")
    layers: list[LayerConfig] = []
    weights = _weights(built)
    experts = {i: each for i, of in enumerate(weights) for each in map(_experts, of) if each}
    for call in built.recording.calls:
        number = layer_number(call.path)
        layer = _layer(call, built, None if number is None else experts.get(number))
        if layer.kv_source is not None and not layer.can_read_kv_of(layers[layer.kv_source]):
            layer = replace(layer, kv_source=None)  # it keeps the same keys and values once more
        layers.append(layer)
    hf_config, head = built.model.config, output_embeddings(built.model)
    divided = {
        name for of in weights for each in of if any(each.division.outputs) for name in each.names
    }
    own = {id(each): each for each in built.model.parameters()}
    return Reading(
        description=ModelDescription(
            vocab_size=hf_config.get_text_config().vocab_size,
            hidden_size=layers[0].attention.hidden_size,
            max_model_len=built.max_model_len,
            layers=tuple(layers),
            final_norm=None,
            tied_embeddings=built.has_tied_embeddings,
            head_bias=type(head) is nn.Linear and head.bias is not None,
        ),
        model_type=model_type,
        architecture=architecture,
        parameters=sum(each.numel() for each in own.values()),
        lookup_parameters=_lookup_parameters(built),
        table_width=3 * built.recording.table_width,
        weights=weights,
        whole_heads=tuple(
            not any(name.startswith(f"{call.path}.") for name in divided)
            for call in built.recording.calls
        ),
        divides_head=divides_head(built),
        layers_path=_layers_path(built),
        bos_token_id=_of_either(hf_config, "bos_token_id"),
        eos_token_id=_of_either(hf_config, "eos_token_id"),
    )


def _of_either(hf_config: Any, name: str) -> object:
    """A field of a configuration or, where that has none, of its part for text."""
    own = getattr(hf_config, name, None)
    return getattr(hf_config.get_text_config(), name, None) if own is None else own


def _lookup_parameters(built: Built) -> int:
    """Parameters of tables of which a step reads the rows of its tokens alone."""
    head = output_embeddings(built.model)
    tables = {
        each.weight
        for each in built.model.modules()
        if isinstance(each, nn.Embedding) and (head is None or each.weight is not head.weight)
    }
    return sum(each.numel() for each in tables)


def _weights(built: Built) -> tuple[tuple[NamedWeight, ...], ...]:
    """See TransformersConfig."""
    by_layer: dict[int, list[NamedWeight]] = {}
    experts = find_experts(built)
    # What has an output for each expert of a model, or one for all, is a router or a gate.
    few = {1, *(each.routing.num_experts for each in experts.values())} if experts else set()
    merged = [
        linears
        for linears in merged_linears(built)
        if few.isdisjoint(each.out_features for each in linears)
        and layer_number(built.paths[linears[0]]) is not None
    ]
    divisions = find_divisions(built, {each for linears in merged for each in linears})

    def add(modules: Sequence[nn.Module], config: Weight, division: Division = UNDIVIDED) -> None:
        names = tuple(built.paths[each] for each in modules)
        number = layer_number(names[0])
        if number is not None:
            by_layer.setdefault(number, []).append(NamedWeight(names, config, division))

    for linears in merged:
        parts = [divisions.get(each, Division(outputs=(0,))) for each in linears]
        division = Division(tuple(n for each in parts for n in each.outputs), parts[0].inputs)
        add(linears, linear_config(linears), division)
    for module, config in experts.items():
        add([module], config)
    return tuple(tuple(by_layer.get(i, ())) for i in range(max(by_layer, default=-1) + 1))


def _experts(weight: NamedWeight) -> ExpertsConfig | None:
    return weight.config if isinstance(weight.config, ExpertsConfig) else None


def _layers_path(built: Built) -> str:
    """The path of the list of layers."""
    parts = built.recording.calls[0].path.split(".")
    return ".".join(itertools.takewhile(lambda part: not part.isdecimal(), parts))


def _is_own_name(name: str) -> bool:
    """Whether it is what a model's own code called its causal language model, for which
    transformers has another's class, as it has Llama's for EXAONE 3."""
    return name.endswith(("ForCausalLM", "LMHeadModel")) and not hasattr(transformers, name)


def _layer(call: AttentionCall, built: Built, experts: ExpertsConfig | None) -> LayerConfig:
    hidden_size = built.recording.hidden_size
    mlp = MLPConfig(
        kind="plain",
        hidden_size=hidden_size,
        intermediate_size=max(1, built.recording.width // 3),  # of which three are counted
        activation="relu",
    )
    return LayerConfig(
        attention=attention_config(call, hidden_size),
        mlp=mlp if experts is None else replace(experts, shared=mlp),
        norm=NormConfig("rms", hidden_size, 1e-6),
        kv_source=call.kv_source,
    )


def attention_config(call: AttentionCall, hidden_size: int) -> AttentionConfig:
    """A recorded call as octavo describes attention; heads of keys and values are as long as the
    longer of them."""
    return AttentionConfig(
        hidden_size=hidden_size,
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=max(call.head_dim, call.value_dim),
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        sinks=call.sinks is not None,
    )
