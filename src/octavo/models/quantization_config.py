"""Reads what config.json says of quantized weights (`quantization_config`). Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from octavo.errors import shown
from octavo.json_fields import Fields, read_json
from octavo.models.quantization import (
    COMPRESSED_TENSORS,
    LINEAR,
    PATTERN,
    FormKind,
    Group,
    ModuleNames,
    Quantization,
)

MODELOPT = "modelopt"
MODELOPT_FILE = "hf_quant_config.json"
KV_SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")  # the latter in ModelOpt's file
PACKED_BITS = (2, 4, 8)  # of integers that divide the word that holds them


def find_quantization(config: Fields, directory: Path) -> Fields | None:
    """What says how weights are quantized: a part of config.json or, in ModelOpt's older
    checkpoints, its file beside that; None: neither does.

    Args:
        config: config.json.
        directory: where it is.

    Raises:
        ModelError: both do, and contradict each other; names the field.
    """
    beside = directory / MODELOPT_FILE
    # The other name is that of old versions of compressed-tensors.
    for name in ("quantization_config", "compression_config"):
        if config.get(name, None) is not None:
            found = _without_nesting(config.part(name))
            if found.get("quant_method", None) == MODELOPT and beside.exists():
                _check_same(found, _modelopt_file(beside))
            return found
    return _modelopt_file(beside) if beside.exists() else None


def _modelopt_file(path: Path) -> Fields:
    fields = read_json(path)
    return _without_nesting(Fields(fields.where, fields.values | {"quant_method": MODELOPT}))


def _without_nesting(fields: Fields) -> Fields:
    """What ModelOpt says of weights, which may be in an object of its own."""
    if fields.get("quant_method", None) != MODELOPT or fields.get("quantization", None) is None:
        return fields
    inner = fields.part("quantization")
    return Fields(inner.where, inner.values | {"quant_method": MODELOPT})


def _check_same(config: Fields, beside: Fields) -> None:
    name = "quant_algo"
    if beside.get(name, None) != config.get(name, None):
        raise config.error(name, f"but {beside.where} has {shown(beside.values.get(name))}")


def read_quantization(fields: Fields | None) -> Quantization | None:
    """From what `find_quantization` found; None: the weights are not quantized.

    Raises:
        ModelError: a method, or a variant of one, that octavo does not read; names it.
    """
    if fields is None:
        return None
    method = fields.get("quant_method")
    reader = READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise fields.error("quant_method", f"octavo reads {', '.join(READERS)}")
    return replace(reader(fields), ignored=_ignored(fields))


IGNORED = (
    "ignore",
    "ignored_layers",
    "modules_to_not_convert",
    "llm_int8_skip_modules",
    "exclude_modules",
)


def _ignored(fields: Fields) -> tuple[ModuleNames, ...]:
    """Which modules are not quantized; quantizers have several names for the list."""
    return tuple(ModuleNames.read(fields, name, fields.names(name, [])) for name in IGNORED)


def _read_fp8(fields: Fields) -> Quantization:
    """FP8 weights (e4m3) with a scale per tensor or per block: transformers, DeepSeek, Qwen."""
    fields.choice("activation_scheme", {"dynamic": None, "static": None}, "dynamic")
    fields.choice("fmt", {"e4m3": None, "float8_e4m3fn": None}, "e4m3")
    if fields.get("weight_block_size", None) is None:
        return Quantization("fp8", form="float8", quantizes_inputs=True)
    block = _whole_pair(fields, "weight_block_size")
    return Quantization("fp8", block=block, form="float8", quantizes_inputs=True)


def _read_fbgemm_fp8(fields: Fields) -> Quantization:
    """FP8 weights (e4m3) with a scale per output: transformers' FbgemmFp8Config.

    `activation_scale_ub` bounds the largest value that the scale of a token's inputs is taken from.
    Inputs beyond it are clipped there; octavo rounds them with a larger scale.
    """
    fields.number("activation_scale_ub", 1200.0)
    return Quantization("fp8", form="float8", has_row_scales=True, quantizes_inputs=True)


def _whole_pair(fields: Fields, name: str) -> tuple[int, int]:
    numbers = fields.numbers(name, 2)
    rows, columns = map(int, numbers)
    if (rows, columns) != numbers:
        raise fields.error(name, "it must be two whole numbers")
    return rows, columns


# What kind of numbers each format of compressed-tensors holds; None: the dtype of its tensors says.
COMPRESSED: Mapping[str, str | None] = {
    "float-quantized": "float",
    "int-quantized": "int",
    "naive-quantized": None,
    "pack-quantized": "int",
    "nvfp4-pack-quantized": "float",
    "mxfp4-pack-quantized": "float",
}
# Inputs that share a scale, in formats of 4-bit floats.
FLOAT4_GROUPS: Mapping[str, int] = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


def _read_compressed_tensors(fields: Fields) -> Quantization:
    """FP8, int8, packed integers and 4-bit floats, as llm-compressor writes them.

    Where several patterns match a module, the first in the order of their characters counts. Of
    groups with the same target, the last one counts.
    """
    groups = fields.part("config_groups")
    by_target: dict[str, tuple[Fields, Quantization]] = {}
    for name in groups.values:
        group = groups.part(name)
        # The format of all groups stands beside them; a group may have one of its own.
        where = group if group.get("format", None) is not None else fields
        if where.get("format", "dense") != "dense":
            quantization = _read_group(where, group)
            by_target |= dict.fromkeys(group.names("targets", [LINEAR]), (group, quantization))
    for name in ("sparsity_config", "transform_config"):
        options = fields.part(name, {})
        # Weights of which many are zeros may be stored as any others; how many there are is said
        # beside that.
        if options.values and options.get("format", None) != "dense":
            raise fields.error(name, "octavo does not implement it")
    found = _by_target(
        "targets", [(of, target, each) for target, (of, each) in sorted(by_target.items())]
    )
    # Without groups, there may be scales of the KV cache.
    return _of_groups(found) if found else Quantization(COMPRESSED_TENSORS, is_dense=True)


def _read_group(where: Fields, group: Fields) -> Quantization:
    """One of `config_groups`; where: what has its format."""
    format_name = where.get("format")
    if not isinstance(format_name, str) or format_name not in COMPRESSED:
        raise where.error("format", f"octavo reads {', '.join(COMPRESSED)}")
    weights = group.part("weights")
    if format_name in FLOAT4_GROUPS:
        return _read_float4(weights, format_name)
    is_packed, kind = format_name == "pack-quantized", COMPRESSED[format_name]
    stored = weights.choice("type", {"int": "int", "float": "float"}, kind or "int")
    if kind not in (None, stored):
        raise weights.error("type", f"weights in the format {format_name} are of type {kind}")
    # What is not packed has a byte for each value, of however few bits.
    num_bits = weights.count("num_bits", 8)
    if is_packed and num_bits not in PACKED_BITS:
        raise weights.error("num_bits", f"octavo reads {', '.join(map(str, PACKED_BITS))}")
    if stored == "float" and num_bits != 8:
        raise weights.error("num_bits", "octavo reads floats of 8 bits")
    num_bits = num_bits if is_packed else 8
    has_groups = weights.get("group_size", None) not in (None, -1)
    demanded = set()
    if weights.get("actorder", None) == "group":
        demanded.add("weight_g_idx")
    has_zeros = not weights.flag("symmetric", True)
    if has_zeros:
        demanded.add("weight_zero_point")
    has_blocks = weights.get("block_structure", None) is not None
    strategy = str(weights.get("strategy", None))
    return Quantization(
        COMPRESSED_TENSORS,
        num_bits=num_bits,
        block=_whole_pair(weights, "block_structure") if has_blocks else None,
        form="float8" if stored == "float" else _kind_of_packed(num_bits),
        group_size=weights.count("group_size") if has_groups else None,
        has_row_scales={"channel": True, "tensor": False}.get(strategy),
        quantizes_inputs=group.get("input_activations", None) is not None,
        has_zeros=has_zeros,
        demanded=tuple(sorted(demanded)),
    )


def _by_target(field: str, stored: Iterable[tuple[Fields, str, Quantization]]) -> list[Group]:
    """Groups of modules that are stored in the same way.

    Names have one group for each such way, because there may be one for each of thousands of
    experts; patterns have one each, in their order.

    Args:
        field: what is wrong if a pattern is no regular expression.
        stored: where that field is, a name or a pattern, and how its modules are stored.
    """
    names: dict[Quantization, list[str]] = {}
    patterns: list[Group] = []
    for fields, target, quantization in stored:
        if target.startswith(PATTERN):
            patterns.append(Group(ModuleNames.read(fields, field, [target]), quantization))
        else:
            names.setdefault(quantization, []).append(target)
    by_name = [Group(ModuleNames(frozenset(each), ()), of) for of, each in names.items()]
    return [*by_name, *patterns]


def _rest(quantization: Quantization) -> Group:
    """All modules that are in no other group."""
    return Group(ModuleNames(frozenset({LINEAR}), ()), quantization)


def _read_float4(weights: Fields, format_name: str) -> Quantization:
    """e2m1 with scales in e4m3, which one more scale is for (NVFP4), or with powers of two
    (MXFP4)."""
    size = FLOAT4_GROUPS[format_name]
    served = {"type": "float", "num_bits": 4, "group_size": size, "symmetric": True}
    for name, value in served.items():
        if weights.get(name, value) != value:
            raise weights.error(name, f"octavo reads {value} in the format {format_name}")
    if format_name == "nvfp4-pack-quantized":
        demanded = ("weight_global_scale",)
        return Quantization(COMPRESSED_TENSORS, num_bits=4, group_size=size, demanded=demanded)
    experts = Quantization(COMPRESSED_TENSORS, form="mxfloat4")
    return Quantization(COMPRESSED_TENSORS, num_bits=4, group_size=size, experts=experts)


def _of_groups(groups: Sequence[Group]) -> Quantization:
    """How modules of these groups are stored: what all groups have in common."""
    first, *others = (each.quantization for each in groups)
    if all(other == first for other in others):
        return first
    num_bits = max(each.quantization.num_bits for each in groups)
    return replace(
        first,
        num_bits=num_bits,
        block=first.block if all(each.block == first.block for each in others) else None,
        form=first.form if all(each.form == first.form for each in others) else None,
        group_size=first.group_size
        if all(each.group_size == first.group_size for each in others)
        else None,
        quantizes_inputs=all(each.quantization.quantizes_inputs for each in groups),
        has_zeros=any(each.quantization.has_zeros for each in groups),
        demanded=(),
        experts=first.experts if all(each.experts == first.experts for each in others) else None,
        groups=tuple(groups),
    )


def _kind_of_packed(bits: int) -> FormKind | None:
    """The form of integers; those of 2 bits have none."""
    return "int" if bits in (4, 8) else None


def _group_size(fields: Fields) -> int | None:
    name = "group_size" if "group_size" in fields.values else "q_group_size"
    return None if fields.get(name, -1) == -1 else fields.count(name)


def _format_field(fields: Fields, name: str) -> str:
    """What the order of packed values is called: by its old name or, where that says nothing, by
    that which GPTQModel and transformers 5 have for all methods."""
    return name if fields.get(name, None) is not None else "format"


def _read_awq(fields: Fields) -> Quantization:
    """4-bit integers in groups of inputs, with zero points (arXiv:2306.00978)."""
    bits = fields.count("bits" if "bits" in fields.values else "w_bit", 4)
    if bits != 4:
        raise fields.error("bits", "octavo reads 4")
    name = _format_field(fields, "version")
    version = fields.get(name, "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise fields.error(name, "octavo reads gemm")
    has_zeros = fields.flag("zero_point", not fields.flag("sym", False))
    demanded = ("qzeros",) if has_zeros else ()
    return Quantization(
        "awq",
        num_bits=4,
        form="int",
        group_size=_group_size(fields),
        has_zeros=has_zeros,
        demanded=demanded,
    )


def _read_gptq(fields: Fields) -> Quantization:
    """Integers in groups of inputs, perhaps in an order of their own (arXiv:2210.17323).

    `dynamic` has other values of some fields for the modules that match a pattern. The first one
    counts; behind "-:" it is of modules that are not quantized.
    """
    usual = _read_gptq_fields(fields)
    others = fields.part("dynamic", {})
    stored = []
    for name in others.values:
        own = others.part(name, {})
        merged = Fields(own.where, fields.values | own.values)
        pattern = PATTERN + name.removeprefix("+:").removeprefix("-:")
        stored.append((fields, pattern, usual if name[:2] == "-:" else _read_gptq_fields(merged)))
    return _of_groups([*_by_target("dynamic", stored), _rest(usual)])


def _read_gptq_fields(fields: Fields, offset: int | None = None) -> Quantization:
    """offset: of zero points, where something else than the version of the format says it."""
    bits = fields.count("bits")
    if bits not in PACKED_BITS:
        raise fields.error("bits", f"octavo reads {', '.join(map(str, PACKED_BITS))}")
    if offset is None:
        versions = {"gptq": 1, "gptq_v2": 0}
        offset = fields.choice(_format_field(fields, "checkpoint_format"), versions, "gptq")
    order = ("g_idx",) if fields.flag("desc_act", False) else ()
    has_zeros = not fields.flag("sym", True)
    zeros = ("qzeros",) if has_zeros else ()
    return Quantization(
        "gptq",
        num_bits=bits,
        zero_offset=offset,
        form=_kind_of_packed(bits),
        group_size=_group_size(fields),
        has_zeros=has_zeros,
        demanded=order + zeros,
    )


# What AutoRound calls the formats of integers, whose zero points may be stored less 1.
AUTO_ROUND: Mapping[str, Callable[[Fields], Quantization]] = {
    "auto_round": functools.partial(_read_gptq_fields, offset=0),
    "auto_round:gptqmodel": functools.partial(_read_gptq_fields, offset=0),
    "auto_round:auto_gptq": functools.partial(_read_gptq_fields, offset=1),
    "auto_round:gptq": functools.partial(_read_gptq_fields, offset=1),
    "auto_round:auto_awq": _read_awq,
    "auto_round:awq": _read_awq,
}
IN_PATTERNS = frozenset("*^$|()[]?+\\")  # characters of regular expressions that no name has


def _read_auto_round(fields: Fields) -> Quantization:
    """Integers in groups of inputs (arXiv:2309.05516).

    `extra_config` has other values of some fields for modules by their full names, or by regular
    expressions; modules with 16 bits or more are not quantized.
    """
    if fields.get("data_type", "int") != "int":
        raise fields.error("data_type", "octavo reads int")
    if fields.get("rotation_config", None):
        raise fields.error("rotation_config", "octavo does not rotate the inputs of projections")
    reader = fields.choice("packing_format", AUTO_ROUND, "auto_round:auto_gptq")
    usual = reader(fields)
    others = fields.part("extra_config", {})
    stored = []
    for name in others.values:
        own = others.part(name)
        merged = Fields(own.where, fields.values | own.values)
        target = PATTERN + name if IN_PATTERNS.intersection(name) else name
        stored.append((fields, target, usual if merged.count("bits") >= 16 else reader(merged)))
    return _of_groups([*_by_target("extra_config", stored), _rest(usual)])


def _read_bitsandbytes(fields: Fields) -> Quantization:
    """NF4 and FP4 (arXiv:2305.14314), and 8 bits with a scale per row (arXiv:2208.07339)."""
    if fields.flag("load_in_8bit", False):
        return Quantization("bitsandbytes-int8", form="int")
    if not fields.flag("load_in_4bit", False):
        raise fields.error("load_in_4bit", "it or load_in_8bit must be true")
    return Quantization("bitsandbytes-4bit")


# What torchao's configurations make of weights that they write as they are computed with on a CPU:
# the form, and whether inputs are rounded to 8 bits, too. Integers of any bits have a byte each.
TORCHAO: Mapping[str, tuple[FormKind, bool]] = {
    "Float8WeightOnlyConfig": ("float8", False),
    "Float8DynamicActivationFloat8WeightConfig": ("float8", True),
    "Int8WeightOnlyConfig": ("int", False),
    "Int8DynamicActivationInt8WeightConfig": ("int", True),
    "IntxWeightOnlyConfig": ("int", False),
    "Int8DynamicActivationIntxWeightConfig": ("int", True),
}


def _read_torchao(fields: Fields) -> Quantization:
    """FP8 and integer weights of torchao."""
    kinds = fields.part("quant_type").part("default")
    name = kinds.get("_type")
    if not isinstance(name, str) or name not in TORCHAO:
        raise kinds.error("_type", f"octavo reads {', '.join(TORCHAO)}")
    form, quantizes_inputs = TORCHAO[name]
    options = kinds.part("_data", {})
    of_weights = "weight_" if name == "Int8DynamicActivationIntxWeightConfig" else ""
    scales = _torchao_scales(options, f"{of_weights}granularity")
    mapping = options.part(f"{of_weights}mapping_type", {})
    return Quantization(
        "torchao",
        form=form,
        quantizes_inputs=quantizes_inputs,
        has_row_scales=scales.of_rows,
        group_size=scales.group_size,
        has_zeros=mapping.get("_data", None) == "ASYMMETRIC",
        # Symmetric int8 may have none.
        demanded=("_weight_zero_point",) if "Intx" in name else (),
    )


class _Scales(NamedTuple):
    """See the fields of Quantization."""

    of_rows: bool | None = None
    group_size: int | None = None


# Along which axis of a weight those of torchao's granularities that have one must lie.
ALONG: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "PerTensor": ("", ()),
    "PerRow": ("dim", (-1, 1)),  # that of the inputs, which share a scale
    "PerAxis": ("axis", (0,)),  # that of the outputs, each of which has one
    "PerGroup": ("", ()),
}


def _torchao_scales(options: Fields, name: str) -> _Scales:
    """What a granularity says of the scales, or the last of a list, the first of which is that of
    the inputs."""
    value = options.get(name, None)
    if value is None:
        return _Scales()
    if isinstance(value, list) and value:
        options = Fields(options.where, {name: value[-1]})
    granularity = options.part(name)
    kind = granularity.get("_type")
    if not isinstance(kind, str) or kind not in ALONG:
        raise granularity.error("_type", f"octavo reads {', '.join(ALONG)}")
    fields = granularity.part("_data", {})
    if kind == "PerGroup":
        return _Scales(group_size=fields.count("group_size"))
    axis, served = ALONG[kind]
    if axis and fields.get(axis, served[0]) not in served:
        raise fields.error(axis, f"octavo reads {' and '.join(map(str, served))}")
    return _Scales(of_rows=kind != "PerTensor")


_NVFP4 = Quantization(MODELOPT, num_bits=4, group_size=16, demanded=("weight_scale_2",))

# What ModelOpt's algorithms make of weights.
MODELOPT_ALGORITHMS: Mapping[str, Quantization] = {
    "FP8": Quantization(MODELOPT, form="float8", quantizes_inputs=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Quantization(
        MODELOPT, form="float8", has_row_scales=True, quantizes_inputs=True
    ),
    "FP8_PB_WO": Quantization(MODELOPT, form="float8", block=(128, 128)),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}


def _read_modelopt(fields: Fields) -> Quantization:
    """What NVIDIA's ModelOpt writes; `config_groups` say less than `quant_algo`."""
    name = "quant_algo"
    if fields.get(name, None) is None and _has_kv_scheme(fields):
        return Quantization(MODELOPT, is_dense=True)
    if fields.get(name) != "MIXED_PRECISION":
        return _read_algorithm(fields, ", MIXED_PRECISION")
    layers = fields.part("quantized_layers")
    stored = [(fields, each, _read_algorithm(layers.part(each))) for each in layers.values]
    if not stored:
        raise fields.error("quantized_layers", "there must be one or more")
    return _of_groups(_by_target("quantized_layers", stored))


def _has_kv_scheme(fields: Fields) -> bool:
    return any(fields.get(name, None) is not None for name in KV_SCHEMES)


def _read_algorithm(fields: Fields, others: str = "") -> Quantization:
    """others: what octavo reads beside those in MODELOPT_ALGORITHMS, for the error."""
    algorithm = fields.get("quant_algo")
    # Those that have no name in hf_quant_config.json's own list are written in small letters.
    found = MODELOPT_ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if found is None:
        expected = f"octavo reads {', '.join(MODELOPT_ALGORITHMS)}{others}"
        raise fields.error("quant_algo", expected)
    size = found.group_size
    if size is not None and fields.get("group_size", size) != size:
        raise fields.error("group_size", f"octavo reads {size}")
    return found


def _read_mxfp4(fields: Fields) -> Quantization:
    """4-bit floats of which 32 share a power of two (gpt-oss; OCP Microscaling Formats 1.0)."""
    return Quantization("mxfp4", is_dense=True, experts=Quantization("mxfp4", form="mxfloat4"))


READERS: Mapping[str, Callable[[Fields], Quantization]] = {
    "fp8": _read_fp8,
    COMPRESSED_TENSORS: _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "bitsandbytes": _read_bitsandbytes,
    "torchao": _read_torchao,
    "mxfp4": _read_mxfp4,
    "fbgemm_fp8": _read_fbgemm_fp8,
    MODELOPT: _read_modelopt,
}
