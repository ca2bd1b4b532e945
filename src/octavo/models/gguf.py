"""What the metadata of a GGUF file says of its model, as config.json would. Imports no torch.

Each architecture of llama.cpp that octavo serves is an entry in ARCHITECTURES: the family that it
is, what the family's fields are called in the metadata, and its WeightNames. How the weights are
read is in gguf_weights.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from octavo.errors import ConfigError, ModelError
from octavo.gguf import GgufFile, GgufTensor, read_gguf
from octavo.gguf.tokenizer import end_token_ids, token_id
from octavo.json_fields import MAX_COUNT, MAX_NUMBER, MIN_NUMBER, Fields
from octavo.models.families.common import LAYER_TYPES, periodic_layer_types
from octavo.models.family import Family
from octavo.models.quantization import Quantization
from octavo.models.weight_names import WeightNames

METHOD = "gguf"  # of Quantization
TABLE, HEAD = "token_embd.weight", "output.weight"
LLAMA3_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
PROJECTION = re.compile(r"blk\.\d+\.(attn|ffn)_(?!gate_inp|sinks|rot_embd|\w*norm)\w+\.weight")
EXPERTS = re.compile(r"(blk\.\d+\.ffn_\w+_exps)\.(weight|bias)")  # all in one tensor
LAYER = re.compile(r"blk\.(\d{1,9})\.")
DENSE_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Types whose blocks are integers times a scale, as GroupedInt has them, and their bits.
FORM_BITS = {"Q8_0": 8, "Q4_0": 4}
GROUP = 32  # inputs that share a scale in these
MXFP4 = "MXFP4"  # a form that experts alone have
# Names in generation_config.json and, behind "general.sampling.", in the metadata.
SAMPLING = {
    **{"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"},
    "repetition_penalty": "penalty_repeat",
}
ROPE_THETA = 10000.0  # where the metadata does not say it, as in llama.cpp
# Layers of Gemma 2 and 3 27B, whose scores are scaled by the hidden size per head.
WIDE_GEMMAS = {"gemma2": 46, "gemma3": 62}

WEIGHTS = WeightNames(
    model={"embedding": "token_embd", "norm": "output_norm", "head.linear": "output"},
    layers="blk",
    layer={
        "attention_norm": "attn_norm",
        "attention.qkv": ("attn_q", "attn_k", "attn_v"),
        "attention.query_norm": "attn_q_norm",
        "attention.key_norm": "attn_k_norm",
        "attention.output": "attn_output",
        "attention_branch_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "mlp.up": ("ffn_gate", "ffn_up"),
        "mlp.down": "ffn_down",
        "mlp.router": ("ffn_gate_inp", "exp_probs_b"),
        "mlp.experts": ("ffn_gate_exps.*", "ffn_up_exps.*", "ffn_down_exps.*"),
        "branch_norm": "post_ffw_norm",
    },
    prefixes=(),
    # What the rotary embedding is told by, and frequencies that follow from the metadata.
    ignored=(
        r"rope_(freqs|factors_long|factors_short)\.weight",
        r"blk\.\d+\.attn_rot_embd\.weight",
    ),
)


def _weights(**layer: str) -> WeightNames:
    """WEIGHTS with other names of some modules, which have __ in place of dots."""
    return replace(
        WEIGHTS, layer={**WEIGHTS.layer, **{k.replace("__", "."): v for k, v in layer.items()}}
    )


class Value(NamedTuple):
    """A field of config.json that the metadata has."""

    key: str  # behind the name of the architecture
    kind: Literal["count", "number", "flag"]
    is_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One `general.architecture`."""

    model_type: str  # the family
    values: Mapping[str, Value]  # beside COMMON; by names in config.json
    fixed: Mapping[str, Any] = field(default_factory=dict)  # config.json has, and no metadata
    weights: WeightNames = WEIGHTS
    # Whether rows of queries and keys lie so that 2 i and 2 i + 1 rotate together, although the
    # family rotates i and i + dim / 2.
    has_turned_heads: bool = False
    norm_offset: float = 0.0  # what was added to the weights of norms
    yarn: Mapping[str, Any] = field(default_factory=dict)  # rope_scaling has beside the metadata
    mixture: Architecture | None = None  # of files of the same name that have experts


COMMON = {
    "num_hidden_layers": Value("block_count", "count", True),
    "hidden_size": Value("embedding_length", "count", True),
    "intermediate_size": Value("feed_forward_length", "count", True),
    "num_attention_heads": Value("attention.head_count", "count", True),
    "num_key_value_heads": Value("attention.head_count_kv", "count"),
    "head_dim": Value("attention.key_length", "count"),
    "max_position_embeddings": Value("context_length", "count", True),
    "rope_theta": Value("rope.freq_base", "number"),
}
# What may be an array with an element for each layer, as in llama.cpp.
OF_LAYERS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
RMS_NORM = {"rms_norm_eps": Value("attention.layer_norm_rms_epsilon", "number", True)}
LAYER_NORM = {"layer_norm_eps": Value("attention.layer_norm_epsilon", "number", True)}
WINDOW = {"sliding_window": Value("attention.sliding_window", "count", True)}
MULTIPLIERS = {
    "attention_multiplier": Value("attention.scale", "number", True),
    "embedding_multiplier": Value("embedding_scale", "number", True),
    "residual_multiplier": Value("residual_scale", "number", True),
    "logits_scaling": Value("logit_scale", "number", True),
}
NUM_EXPERTS = {
    "num_experts": Value("expert_count", "count", True),
    "num_experts_per_tok": Value("expert_used_count", "count", True),
}
NORMALISED = {"norm_topk_prob": Value("expert_weights_norm", "flag")}
EXPERT_SIZE = Value("expert_feed_forward_length", "count", True)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        model_type="llama",
        values=RMS_NORM,
        has_turned_heads=True,
        mixture=Architecture(
            model_type="mixtral",
            values={
                **RMS_NORM,
                "num_local_experts": NUM_EXPERTS["num_experts"],
                "num_experts_per_tok": NUM_EXPERTS["num_experts_per_tok"],
            },
            has_turned_heads=True,
        ),
    ),
    "qwen2": Architecture(model_type="qwen2", values=RMS_NORM),
    "qwen3": Architecture(model_type="qwen3", values=RMS_NORM),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        values={**RMS_NORM, **NUM_EXPERTS, **NORMALISED, "moe_intermediate_size": EXPERT_SIZE},
        fixed={"norm_topk_prob": True},
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        values={**RMS_NORM, **NUM_EXPERTS, **NORMALISED},
        fixed={"norm_topk_prob": False},
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        values={**RMS_NORM, **WINDOW, **NUM_EXPERTS, "intermediate_size": EXPERT_SIZE},
        weights=_weights(mlp_norm="post_attention_norm", attention__sinks="attn_sinks.weight"),
        yarn={"truncate": False},
    ),
    "gemma": Architecture(model_type="gemma", values=RMS_NORM, norm_offset=1.0),
    "gemma2": Architecture(
        model_type="gemma2",
        values={
            **RMS_NORM,
            **WINDOW,
            "attn_logit_softcapping": Value("attn_logit_softcapping", "number"),
            "final_logit_softcapping": Value("final_logit_softcapping", "number"),
        },
        norm_offset=1.0,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        values={
            **RMS_NORM,
            **WINDOW,
            "rope_local_base_freq": Value("rope.freq_base_swa", "number"),
            "final_logit_softcapping": Value("final_logit_softcapping", "number"),
        },
        norm_offset=1.0,
    ),
    "phi3": Architecture(
        model_type="phi3",
        values={**RMS_NORM, "sliding_window": Value("attention.sliding_window", "count")},
        weights=_weights(attention__qkv="attn_qkv", mlp__up="ffn_up"),
    ),
    "granite": Architecture(
        model_type="granite", values={**RMS_NORM, **MULTIPLIERS}, has_turned_heads=True
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        values=RMS_NORM,
        weights=_weights(attention_norm="post_attention_norm", mlp_norm="post_ffw_norm"),
    ),
    "smollm3": Architecture(model_type="smollm3", values=RMS_NORM, has_turned_heads=True),
    "seed_oss": Architecture(
        model_type="seed_oss", values=RMS_NORM, weights=_weights(mlp_norm="post_attention_norm")
    ),
    "command-r": Architecture(
        model_type="cohere",
        values={**LAYER_NORM, "logit_scale": Value("logit_scale", "number", True)},
    ),
    "cohere2": Architecture(
        model_type="cohere2",
        values={**LAYER_NORM, **WINDOW, "logit_scale": Value("logit_scale", "number", True)},
    ),
}
# Values that change nothing, and values that must be these if they are there.
HARMLESS = {
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "feed_forward_length"),
    *("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
    *("rope.dimension_count", "rope.dimension_count_swa", "attention.sliding_window_pattern"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.attn_factor", "rope.scale_linear", "attention.causal"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
TURNED_OFF: Mapping[str, Any] = {
    **{"expert_count": 0, "expert_used_count": 0, "pooling_type": 0},
    **{
        "attention.max_alibi_bias": 0.0,
        "attention.clamp_kqv": 0.0,
        "attention.shared_kv_layers": 0,
    },
}


class GgufSource:
    """See ModelSource. Translates the metadata of one file.

    Example:
        >>> GgufSource(Path("Qwen3-0.6B-Q8_0.gguf")).config().count("hidden_size")
        1024
    """

    weight_files: ClassVar[str] = "octavo.models.gguf_weights:GgufWeights"
    is_for_transformers: ClassVar[bool] = False

    def __init__(self, path: Path) -> None:
        """Raises ModelError: see `read_gguf`; or octavo does not serve the architecture."""
        self.path = path
        self._file = read_gguf(path)
        self._name = self._file.text("general.architecture") or ""
        self._architecture = architecture_of(self._file)

    def generation(self) -> Fields:
        """See ModelSource.generation."""
        return _generation(self._file)

    def quantization(self) -> Quantization | None:
        """See ModelSource.quantization."""
        return _quantization(self._file)

    def weight_names(self, family: Family) -> WeightNames:
        """See ModelSource.weight_names."""
        return self._architecture.weights

    def tensor_names(self) -> Collection[str]:
        """See ModelSource.tensor_names."""
        return self._file.tensors.keys()

    def transformers_directory(self) -> Path:
        """See ModelSource.transformers_directory."""
        raise ConfigError(
            "model_impl", f"{self.path}: GGUF files are served by octavo's own families"
        )

    def config(self) -> Fields:
        """See ModelSource.config."""
        return Fields(f"{self._file.path}, as config.json", self._config())

    def _config(self) -> dict[str, Any]:
        architecture, file = self._architecture, self._file
        values = {**COMMON, **architecture.values}
        self._check_keys({value.key for value in values.values()})
        config = dict(architecture.fixed) | {"model_type": architecture.model_type}
        for name, value in values.items():
            found = self._value(value)
            if found is not None:
                config[name] = found
            elif value.is_required and self._key(value.key) in file.metadata:
                raise self._error(value.key, "it must be positive")
            elif value.is_required:
                raise ModelError(f"{file.path} has no {self._key(value.key)}")
        self._check_layers(config["num_hidden_layers"])
        self._check_experts()
        heads = config["num_attention_heads"]
        config.setdefault("num_key_value_heads", heads)
        config["head_dim"] = self._head_dim(config)
        config.setdefault("sliding_window", None)
        config.setdefault("rope_theta", ROPE_THETA)
        config |= self._rotary(config["head_dim"], config["max_position_embeddings"])
        config |= self._layer_types(config["num_hidden_layers"])
        if self._name in WIDE_GEMMAS:
            is_wide = config["num_hidden_layers"] == WIDE_GEMMAS[self._name]
            size = config["hidden_size"] // heads if is_wide else config["head_dim"]
            config["query_pre_attn_scalar"] = size
        return config | self._tensors() | self._special_tokens()

    def _tensors(self) -> dict[str, Any]:
        """What the presence and the types of tensors say."""
        tensors = self._file.tensors
        if TABLE not in tensors:
            raise ModelError(f"{self._file.path} has no tensor {TABLE}")
        tokens = self._file.texts("tokenizer.ggml.tokens") or ()
        table = tensors[TABLE]
        if len(table.shape) != 2 or len(tokens) > table.shape[0]:
            raise ModelError(
                f"{self._file.path}: tensor {TABLE} has shape {list(table.shape)}; it must have a "
                f"row for each of the {len(tokens)} tokens"
            )
        biased = {
            "attention_bias": "blk.0.attn_q.bias",
            "attention_out_bias": "blk.0.attn_output.bias",
            "mlp_bias": "blk.0.ffn_down.bias",
            "use_qk_norm": "blk.0.attn_q_norm.weight",
        }
        found = {name: tensor in tensors for name, tensor in biased.items()}
        if self._architecture.model_type in ("qwen2", "phi3"):
            del found["attention_bias"]  # which they always or never have
        return {
            **found,
            "vocab_size": table.shape[0],
            "tie_word_embeddings": HEAD not in tensors,
            "dtype": _dtype(tensors),
        }

    def _special_tokens(self) -> dict[str, Any]:
        ends = end_token_ids(self._file)
        tokens: dict[str, Any] = {"bos_token_id": token_id(self._file, "bos")}
        return tokens | ({"eos_token_id": list(ends)} if ends else {"eos_token_id": []})

    def _check_keys(self, own: set[str]) -> None:
        """Options that octavo does not know may change the result."""
        prefix = f"{self._name}."
        for key in self._file.metadata:
            name = key.removeprefix(prefix)
            if name == key or name in own or name in HARMLESS:
                continue
            if name not in TURNED_OFF:
                raise self._file.error(key, "octavo does not know this option")
            if self._file.metadata[key] != TURNED_OFF[name]:
                raise self._file.error(key, f"octavo does not serve it for {self._name}")
        if self._file.flag(prefix + "attention.causal") is False:
            raise self._file.error(prefix + "attention.causal", "octavo serves causal models")

    def _check_layers(self, num_layers: int) -> None:
        """Before anything is made for each of them."""
        numbers = {
            int(match[1]) for name in self._file.tensors if (match := LAYER.match(name)) is not None
        }
        if numbers != set(range(len(numbers))) or len(numbers) != num_layers:
            raise self._error("block_count", f"the file has tensors of {len(numbers)} layers")

    def _check_experts(self) -> None:
        """Before anything is made for each of them."""
        count = self._count("expert_count")
        for name, tensor in self._file.tensors.items():
            match = EXPERTS.fullmatch(name)
            if match is None:
                continue
            num_dims = 3 if match[2] == "weight" else 2
            if len(tensor.shape) != num_dims or tensor.shape[0] != count:
                raise ModelError(
                    f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}; it must have "
                    f"{num_dims} dimensions, and its first is {self._key('expert_count')} ({count})"
                )

    def _head_dim(self, config: dict[str, Any]) -> int:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim: int | None = config.get("head_dim")
        if head_dim is None:
            if hidden % heads:
                raise self._error(
                    "attention.head_count", f"it must divide the embedding length ({hidden})"
                )
            head_dim = hidden // heads
        for name in ("value_length", "key_length_swa", "value_length_swa"):
            if self._count(f"attention.{name}") not in (None, head_dim):
                raise self._error(
                    f"attention.{name}", f"octavo serves heads of one size ({head_dim})"
                )
        return head_dim

    def _rotary(self, head_dim: int, max_positions: int) -> dict[str, Any]:
        """partial_rotary_factor and rope_scaling."""
        config: dict[str, Any] = {}
        dim = self._count("rope.dimension_count") or head_dim
        if dim != head_dim:
            # Rounded so that the factor times the size of a head is not below it.
            config["partial_rotary_factor"] = math.nextafter(dim / head_dim, 2.0)
        if self._count("rope.dimension_count_swa") not in (None, dim):
            raise self._error("rope.dimension_count_swa", f"rope.dimension_count is {dim}")
        kind, factor = self._scaling()
        original = self._count("rope.scaling.original_context_length") or max_positions
        attention_factor = self._number("rope.scaling.attn_factor")
        divided = self._file.tensors.keys() & {LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS}
        if divided and kind in ("linear", "yarn"):
            raise self._error(
                "rope.scaling.type",
                f"with a factor of {factor}, octavo does not serve it beside {min(divided)}",
            )
        if LLAMA3_FACTORS in self._file.tensors:
            # Frequencies of Llama 3.1 and later are divided by these.
            factors = self._factors(LLAMA3_FACTORS, dim)
            return config | _longrope(factors, factors, original, attention_factor or 1.0)
        if LONG_FACTORS in self._file.tensors or SHORT_FACTORS in self._file.tensors:
            short, long = self._factors(SHORT_FACTORS, dim), self._factors(LONG_FACTORS, dim)
            config["original_max_position_embeddings"] = original
            return config | _longrope(short, long, original, attention_factor)
        if kind != "yarn" and attention_factor not in (None, 1.0):
            raise self._error("rope.scaling.attn_factor", f"rope.scaling.type is {kind}")
        if kind == "none":  # said, because some families scale where config.json says nothing
            return config | {"rope_scaling": {"rope_type": "default"}}
        if kind not in ("linear", "yarn"):
            raise self._error(
                "rope.scaling.type",
                f"octavo knows none, linear and yarn, and longrope by {LONG_FACTORS}",
            )
        if factor is None:
            raise ModelError(f"{self._file.path} has no {self._key('rope.scaling.factor')}")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling |= self._architecture.yarn
            scaling["original_max_position_embeddings"] = original
            for name in ("beta_fast", "beta_slow"):
                scaling[name] = self._number(f"rope.scaling.yarn_{name}")
            if attention_factor not in (None, 1.0):
                inferred = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
                scaling["attention_factor"] = attention_factor * inferred
        return config | {"rope_scaling": scaling}

    def _scaling(self) -> tuple[str, float | None]:
        """The type and the factor of the rotary embedding's scaling.

        As in llama.cpp, a factor without a type is linear, and has two names.
        """
        kind = self._file.text(self._key("rope.scaling.type"))
        factor = self._number("rope.scaling.factor") or self._number("rope.scale_linear")
        if kind is None:
            kind = "none" if factor in (None, 1.0) else "linear"
        return kind, factor

    def _factors(self, name: str, dim: int) -> list[float]:
        """The tensor of a divisor of each frequency."""
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._file.path} has no tensor {name}")
        if tensor.type != "F32" or tensor.shape != (dim // 2,):
            raise ModelError(
                f"{tensor.path}: tensor {name} is {tensor.type} {list(tensor.shape)}; it must be "
                f"F32 [{dim // 2}]"
            )
        factors = np.fromfile(tensor.path, "<f4", dim // 2, offset=tensor.offset)
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise ModelError(
                f"{tensor.path}: tensor {name} has values that are not positive numbers"
            )
        return [float(each) for each in factors]

    def _layer_types(self, num_layers: int) -> dict[str, Any]:
        """Which layers have windows, where the metadata says so."""
        key = self._key("attention.sliding_window_pattern")
        pattern = self._file.metadata.get(key)
        if pattern is None:
            return {}
        if "sliding_window" not in self._architecture.values:
            raise self._file.error(key, f"octavo does not serve it for {self._name}")
        if not isinstance(pattern, list):  # one of so many layers has no window; 0: all have one
            period = self._count("attention.sliding_window_pattern")
            if period is None:
                return {"layer_types": [LAYER_TYPES[True]] * num_layers}
            return {"layer_types": periodic_layer_types(num_layers, period)}
        if len(pattern) != num_layers:
            raise self._file.error(key, f"it must have an element for each of {num_layers} layers")
        if not all(isinstance(each, int) for each in pattern):
            raise self._file.error(key, "its elements must be true or false")
        return {"layer_types": [LAYER_TYPES[bool(each)] for each in pattern]}

    def _key(self, name: str) -> str:
        return f"{self._name}.{name}"

    def _error(self, name: str, expected: str) -> ModelError:
        return self._file.error(self._key(name), expected)

    def _value(self, value: Value) -> int | float | None:
        """A field of config.json; None: the metadata has none."""
        if value.kind == "count":
            return self._count(value.key)
        if value.kind == "number":
            return self._number(value.key)
        return self._file.flag(self._key(value.key))

    def _count(self, name: str) -> int | None:
        """A positive integer, or one for each layer that are all the same; None: none, or 0."""
        key = self._key(name)
        value = self._file.metadata.get(key)
        if isinstance(value, list) and name in OF_LAYERS:
            num_layers = self._count("block_count")
            if len(value) != num_layers:
                raise self._file.error(key, f"there must be one for each of {num_layers} layers")
            if len(set(map(str, value))) != 1:
                raise self._file.error(key, "octavo serves layers that have it in common")
            value = value[0]
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if value is None or (is_count and value == 0):
            return None
        if not is_count or not 1 <= value <= MAX_COUNT:
            raise self._file.error(key, f"it must be a positive integer, at most {MAX_COUNT:,}")
        return int(value)

    def _number(self, name: str) -> float | None:
        """A positive number; None: there is none, or 0."""
        key = self._key(name)
        value: float | None = self._file.find(key, (int, float), "a number")
        if value is not None and value != 0 and not MIN_NUMBER <= value <= MAX_NUMBER:
            raise self._file.error(key, f"it must be from {MIN_NUMBER:g} to {MAX_NUMBER:g}")
        return None if not value else float(value)


def _longrope(
    short: list[float], long: list[float], original: int, attention_factor: float | None
) -> dict[str, Any]:
    scaling = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    if attention_factor is not None:
        scaling["attention_factor"] = attention_factor
    return {"rope_scaling": scaling}


def _generation(file: GgufFile) -> Fields:
    """The model's own sampling parameters."""
    found = {
        name: file.find(f"general.sampling.{key}", (int, float), "a number")
        for name, key in SAMPLING.items()
    }
    values = {
        # As it was before it was rounded to float32.
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in found.items()
        if value is not None
    }
    return Fields(f"{file.path}: general.sampling", values | {"do_sample": bool(values)})


def _dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """The dtype that the matrices are stored in; bfloat16 if they are quantized or differ."""
    types = {each.type for name, each in tensors.items() if PROJECTION.fullmatch(name)}
    found = {DENSE_TYPES.get(each, "bfloat16") for each in types}
    return found.pop() if len(found) == 1 else "bfloat16"


def _quantization(file: GgufFile) -> Quantization | None:
    """How projections and experts are stored; None: as values."""
    experts, projections = set(), set()
    for name, tensor in file.tensors.items():
        if is_of_experts(name):
            experts.add(tensor.type)
        elif PROJECTION.fullmatch(name):
            projections.add(tensor.type)
    for kind, tensor in {each.type: each for each in file.tensors.values()}.items():
        if kind not in DENSE_TYPES and not _is_dequantized(kind):
            raise ModelError(
                f"{tensor.path}: tensor {tensor.name} is of type {kind}, which the gguf package "
                "does not dequantize"
            )
    if experts | projections <= DENSE_TYPES.keys():
        return None
    found = _stored_as(projections)
    if not experts or experts == projections:
        return found
    if experts == {MXFP4}:
        return replace(found, experts=Quantization(METHOD, form="mxfloat4"))
    return replace(found, experts=_stored_as(experts))


def _stored_as(types: set[str]) -> Quantization:
    """Weights of these types."""
    if types <= DENSE_TYPES.keys():
        return Quantization(METHOD, is_dense=True)
    bits = {FORM_BITS.get(each) for each in types}
    num_bits = bits.pop() if len(bits) == 1 else None
    if num_bits is None:  # without a form, or in several
        return Quantization(METHOD)
    return Quantization(METHOD, num_bits=num_bits, form="int", group_size=GROUP)


def architecture_of(file: GgufFile) -> Architecture:
    """What octavo knows of a file's architecture.

    Raises:
        ModelError: it knows no such architecture, or the file has no model.
    """
    kind = file.text("general.type")
    if kind not in (None, "model"):
        raise file.error("general.type", "octavo serves models")
    name = file.text("general.architecture") or ""
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise file.error("general.architecture", f"octavo serves {', '.join(ARCHITECTURES)}")
    has_experts = file.metadata.get(f"{name}.expert_count") not in (None, 0)
    return architecture.mixture or architecture if has_experts else architecture


def is_of_experts(name: str) -> bool:
    """Whether a tensor has the weights of all experts."""
    return name.endswith(".weight") and EXPERTS.fullmatch(name) is not None


def is_projection(name: str) -> bool:
    """Whether a tensor is the weight of a projection in a layer, of all experts or of the head."""
    return name == HEAD or PROJECTION.fullmatch(name) is not None


def _is_dequantized(kind: str) -> bool:
    """Whether the gguf package can."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[number][1]), np.uint8), number)
    except NotImplementedError:
        return False
    return True
