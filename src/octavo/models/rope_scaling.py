"""How the rotary embedding is spelled in `config.json`, in its old and new forms.

Fields are those of transformers' configuration classes. Fields that the kind of scaling does not
use are refused, because their author expects them to have an effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError, UnservedOption, shown
from octavo.json_fields import Fields
from octavo.layers.config import RotaryConfig

# Of older code for YaRN: transformers and octavo leave these factors out, as if they were 1.
_UNUSED_FACTORS = ("attn_factor", "extrapolation_factor")
_YARN_FIELDS = {
    *("factor", "attention_factor", "mscale", "mscale_all_dim"),
    *("beta_fast", "beta_slow", "truncate"),
    *_UNUSED_FACTORS,
}
# The kinds that octavo knows, each with the fields that it takes.
KINDS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": _YARN_FIELDS,
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
    "proportional": {"factor"},
}
_ALIASES = {"su": "longrope"}  # in the first checkpoints of Phi-3
# Fields of any kind. Whether the weights were tuned for the scaling ("finetuned") changes nothing.
_COMMON_FIELDS = {
    *("rope_type", "type", "rope_theta", "original_max_position_embeddings", "finetuned"),
    "partial_rotary_factor",
}


def read_rotary(
    config: Fields,
    head_dim: int,
    max_positions: int,
    partial: float | None = None,
    theta: float = 10000.0,
) -> RotaryConfig:
    """From rope_parameters (transformers 5), or rope_theta and rope_scaling (before).

    Args:
        config: config.json.
        head_dim: elements of a head.
        max_positions: max_position_embeddings.
        partial: the family's default of partial_rotary_factor; None: it rotates whole heads.
        theta: the family's default of rope_theta.
    """
    theta = config.number("rope_theta", theta)
    return _read(config, _rope_fields(config), head_dim, max_positions, partial, theta)


def read_rotaries(
    config: Fields,
    head_dim: int | Mapping[str, int],
    max_positions: int,
    thetas: Mapping[str, tuple[str, float]],
) -> tuple[RotaryConfig, ...]:
    """One rotary embedding per kind of layer, of which only full attention may be scaled.

    Args:
        config: config.json. Its rope_parameters are an object per kind of layer; before
            transformers 5, rope_scaling was that of full attention.
        head_dim: elements of a head, in each kind of layer if they differ.
        max_positions: see `read_rotary`.
        thetas: for each kind in layer_types, what older files call its rope_theta, and the family's
            default.

    Returns:
        One for each of `thetas`, in their order.
    """
    head_dims = dict.fromkeys(thetas, head_dim) if isinstance(head_dim, int) else head_dim
    by_kind = config.get("rope_parameters", None)
    # Beside parameters of kinds of layers, transformers looks for it nowhere but in them.
    config.refuse("original_max_position_embeddings", None)
    if by_kind is None:
        return tuple(
            _read(
                config,
                _of_kind(_old_scaling(config))
                if kind == "full_attention"
                else Fields(f"{config.where}: {name}", {}),
                head_dims[kind],
                max_positions,
                None,
                config.number(name, default),
            )
            for kind, (name, default) in thetas.items()
        )
    config.refuse("rope_scaling", None)
    if not isinstance(by_kind, dict) or not by_kind.keys() <= thetas.keys():
        expected = f"it must be an object with one for each kind of layer: {', '.join(thetas)}"
        raise config.error("rope_parameters", expected)
    rotaries = []
    for kind, (name, default) in thetas.items():
        values = by_kind.get(kind) or {}
        if not isinstance(values, dict):
            raise config.error("rope_parameters", f"{kind} in it must be a JSON object")
        rope = _of_kind(Fields(f"{config.where}: rope_parameters: {kind}", values))
        theta = config.number(name, default)
        rotaries.append(_read(config, rope, head_dims[kind], max_positions, None, theta))
    return tuple(rotaries)


def _old_scaling(config: Fields) -> Fields:
    """rope_scaling of full attention, in which transformers overlooks the old name of rope_type."""
    rope = _rope_fields(config)
    if rope.get("rope_type", None) is None and rope.get("type", "default") != "default":
        raise rope.error("type", "transformers 5 takes it for 'default' here; name it rope_type")
    return rope


def _of_kind(rope: Fields) -> Fields:
    """The parameters of one kind of layer, in which transformers 5.23 overlooks `truncate`."""
    rope.refuse("truncate", True)
    return Fields(rope.where, {k: v for k, v in rope.values.items() if k != "truncate"})


def _read(
    config: Fields,
    rope: Fields,
    head_dim: int,
    max_positions: int,
    partial: float | None,
    theta: float,
) -> RotaryConfig:
    """One rotary embedding; `theta` is the default if `rope` has no rope_theta."""
    kind = rope.get(rope.either("rope_type", "type"), "default")
    if partial is None:
        config.refuse("partial_rotary_factor", 1.0)
        if kind != "proportional":
            rope.refuse("partial_rotary_factor", 1.0)
    elif kind == "proportional":
        raise UnservedOption(str(rope.error("rope_type", "a part of each head is rotated here")))
    if not isinstance(kind, str) or (kind := _ALIASES.get(kind, kind)) not in KINDS:
        raise UnservedOption(
            f"{rope.where}: rope_type is {shown(kind)}; octavo knows {', '.join(sorted(KINDS))}"
        )
    for name in rope.values.keys() - KINDS[kind] - _COMMON_FIELDS:
        if rope.get(name, None) is not None:
            raise rope.error(name, f"rope_type {kind!r} has no such field")

    theta = rope.number("rope_theta", theta)
    if kind == "proportional":
        return _read_proportional(rope, head_dim, theta)
    dim = _rotary_dim(config, rope, head_dim, 1.0 if partial is None else partial)
    original = _original_positions(config, rope, max_positions)
    match kind:
        case "linear" | "dynamic":
            return RotaryConfig(dim, theta, kind, factor=rope.number("factor"))
        case "llama3":
            return _read_llama3(rope, dim, theta, original)
        case "yarn":
            return _read_yarn(rope, dim, theta, original, max_positions)
        case "longrope":
            return _read_longrope(rope, dim, theta, original, max_positions)
    return RotaryConfig(dim, theta)


def _rotary_dim(config: Fields, rope: Fields, head_dim: int, default: float) -> int:
    """How many elements of a head are rotated."""
    name = "partial_rotary_factor"
    holder = config if rope.get(name, None) is None else rope
    dim = int(head_dim * holder.number(name, default))
    if dim % 2 or not 2 <= dim <= head_dim:
        raise holder.error(
            name, f"it must rotate an even number of a head's {head_dim} elements, not {dim}"
        )
    return dim


def _rope_fields(config: Fields) -> Fields:
    """rope_parameters, rope_scaling, or both in one if they do not contradict each other.

    transformers takes rope_scaling alone where there are both.
    """
    values: dict[str, Any] = {}
    names = [
        name
        for name in ("rope_parameters", "rope_scaling")
        if config.get(name, None) not in (None, {})
    ]
    for name in names:
        part = config.get(name)
        if not isinstance(part, dict):
            raise config.error(name, "it must be a JSON object")
        if any(isinstance(value, dict) for value in part.values()):
            raise config.error(name, "octavo serves one rotary embedding for all layers")
        beside = part | {"rope_theta": config.get("rope_theta", part.get("rope_theta"))}
        if any(beside.get(key) != value for key, value in values.items()):
            raise config.error(name, f"rope_parameters ({shown(values)}) says something else")
        values |= part
    where = " and ".join(names) or "rope_parameters"
    return Fields(f"{config.where}: {where}", values)


def _original_positions(config: Fields, rope: Fields, max_positions: int) -> int:
    """The context before it was extended, which some configs give beside the scaling."""
    name = "original_max_position_embeddings"
    outside = config.count(name, max_positions)
    original = rope.count(name, outside)
    if config.get(name, None) is not None and original != outside:
        raise rope.error(name, f"outside of it, {name} is {outside}")
    return original


def _read_proportional(rope: Fields, head_dim: int, theta: float) -> RotaryConfig:
    """Whole heads with the frequencies of whole heads, of which only the first ones turn."""
    share = rope.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise rope.error("partial_rotary_factor", "it must be a part of each head, at most 1")
    turning = int(share * head_dim // 2)
    factor = rope.number("factor", 1.0)
    return RotaryConfig(head_dim, theta, "proportional", factor=factor, num_turning=turning)


def _read_llama3(rope: Fields, dim: int, theta: float, original: int) -> RotaryConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("low_freq_factor", f"it must be less than high_freq_factor ({high})")
    return RotaryConfig(
        dim,
        theta,
        "llama3",
        factor=rope.number("factor"),
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(
    rope: Fields, dim: int, theta: float, original: int, max_positions: int
) -> RotaryConfig:
    """YaRN (arXiv:2309.00071): equation 22 gives the attention factor if none is set."""
    for name in _UNUSED_FACTORS:
        rope.refuse(name, 1)
    if theta == 1:  # all frequencies are the same: there is no dimension where the ramp begins
        raise ModelError(f"{rope.where}: rope_theta is 1; yarn needs another base")
    factor = rope.number("factor", max_positions / original)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    inferred = magnitude(1.0)
    if rope.get("mscale", 0) and rope.get("mscale_all_dim", 0):
        inferred = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    return RotaryConfig(
        dim,
        theta,
        "yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        # The only field whose null does not mean the default in transformers: it means false.
        truncate="truncate" not in rope.values or rope.flag("truncate", False),
        attention_factor=rope.number("attention_factor", inferred),
    )


def _read_longrope(
    rope: Fields, dim: int, theta: float, original: int, max_positions: int
) -> RotaryConfig:
    """LongRoPE (arXiv:2402.13753), with Phi-3's attention factor if none is set."""
    factor = rope.number("factor", max_positions / original)
    inferred = 1.0
    if factor > 1:
        if original == 1:
            raise ModelError(f"{rope.where}: longrope needs an original context of 2 or more")
        inferred = math.sqrt(1 + math.log(factor) / math.log(original))
    return RotaryConfig(
        dim,
        theta,
        "longrope",
        factor=factor,
        original_max_positions=original,
        attention_factor=rope.number("attention_factor", inferred),
        short_factors=rope.numbers("short_factor", dim // 2),
        long_factors=rope.numbers("long_factor", dim // 2),
    )
