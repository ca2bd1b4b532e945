"""The scales of an FP8 KV cache that a checkpoint brings with it.

Quantizers write one number for the keys and one for the values of each layer (compressed-tensors'
kv_cache_scheme, AutoFP8, ModelOpt). They are beside the weights, whatever those are stored as.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from octavo.errors import ModelError
from octavo.json_fields import Fields, read_json
from octavo.models.base import FileTensor
from octavo.models.config import ModelConfig
from octavo.models.dequantize import StoredTensor
from octavo.models.quantization_config import KV_SCHEMES, MODELOPT, find_quantization
from octavo.ops import KVScales
from octavo.ops.base import MAX_KV_SCALE, MIN_KV_SCALE

# The number of the layer; what is scaled: k, v or both.
_NAME = re.compile(
    r"(?:.*\.)?(?P<layer>\d+)\.\w+\."
    r"(?:(?:(?:attn|[kv]_proj|qkv_proj)\.)?(?P<scaled>k|v|kv)_scale|(?P<projected>[kv])_proj\.output_scale)"
)


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of that name is such a scale, which is no weight."""
    return _NAME.fullmatch(name) is not None


def find_kv_scales(config: ModelConfig, tensors: Iterable[FileTensor]) -> list[KVScales]:
    """The scales of each attention layer: the checkpoint's, or 1 if it has none.

    Args:
        config: of the model, or of one rank's part; its path has the config.json.
        tensors: those in the weight files.

    Raises:
        ModelError: a scale is missing, is not one positive number, contradicts another one, or is
            of another kind of cache; names the tensor, or the field of config.json.
    """
    are_promised = _promises_scales(config)
    found: dict[int, dict[str, float]] = {}
    for path, name, tensor in tensors:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        layer = int(match["layer"])
        if config.encoder is not None or layer >= config.num_layers:
            raise ModelError(
                f"{path}: {name}: scales of a KV cache are read for the {config.num_layers} layers "
                "of models without an encoder"
            )
        value = _number(tensor, f"{path}: {name}")
        for each in match["scaled"] or match["projected"]:
            other = found.setdefault(layer, {}).setdefault(each, value)
            if other != value:
                raise ModelError(
                    f"{path}: {name} is {value:g}, but another {each}_scale of layer {layer} is "
                    f"{other:g}"
                )
    if not found and not are_promised:
        return [KVScales()] * len(config.attentions)
    for layer in range(config.num_layers):
        for each in "kv":
            if each not in found.get(layer, {}):
                raise ModelError(
                    f"{config.path}: the weights have no {each}_scale of layer {layer}, "
                    "although the KV cache of this model has scales"
                )
    return [KVScales(found[layer]["k"], found[layer]["v"]) for layer in range(config.num_layers)]


def _number(tensor: StoredTensor, where: str) -> float:
    if math.prod(tensor.shape) != 1:
        raise ModelError(
            f"{where} has shape {list(tensor.shape)}; octavo takes one scale for the keys of each "
            "layer, and one for its values"
        )
    stored = tensor.read(tuple(slice(0, size) for size in tensor.shape))
    if not stored.is_floating_point():
        raise ModelError(f"{where} is {stored.dtype}; scales are floating-point numbers")
    value = float(stored.float().reshape(()))
    try:
        KVScales(value, value)
    except ValueError as error:
        limits = f"between {MIN_KV_SCALE:g} and {MAX_KV_SCALE:g}"
        raise ModelError(f"{where} is {value:g}; a scale must be {limits}") from error
    return value


def _promises_scales(config: ModelConfig) -> bool:
    """Whether config.json says that there are scales; ModelError if they are not for e4m3.

    ModelOpt says that the cache is in FP8, and writes scales only where they are not all 1.
    """
    directory = config.path
    found = find_quantization(read_json(directory / "config.json"), directory)
    fields = found or Fields("", {})
    name = next((each for each in KV_SCHEMES if fields.get(each, None)), None)
    if name is None:
        return False
    given = fields.get(name)
    if given in ("static", "FP8"):  # as AutoFP8 and ModelOpt write it
        return bool(given == "static")
    expected = "an FP8 KV cache takes scales for floats of 8 bits"
    if isinstance(given, str):
        raise fields.error(name, expected)
    scheme = fields.part(name)
    for field, value in {"type": "float", "num_bits": 8}.items():
        if scheme.get(field, value) != value:
            raise scheme.error(field, expected)
    return not scheme.flag("dynamic", False) and fields.get("quant_method") != MODELOPT
