"""The families that octavo serves, and how a model directory is matched with its family."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octavo.config import ModelImpl, QuantizationName
from octavo.errors import ConfigError, InvalidRequest, ModelError, UnservedOption, shown
from octavo.json_fields import Fields
from octavo.models.config import ModelConfig, ModelDescription
from octavo.models.decoding_rules import read_decoding_rules
from octavo.models.fallback.config import TransformersConfig
from octavo.models.fallback.tested import read_tested
from octavo.models.family import Family
from octavo.models.own_quantizations import find_own_quantizations
from octavo.models.quantization import ON_LOAD, SMALLEST_GROUP, Quantization
from octavo.models.source import ModelSource, open_source
from octavo.models.weight_names import UNNAMED, WeightNames
from octavo.parallel import Shard
from octavo.registry import Registry
from octavo.sampling_params import SamplingParams

OWN_FAMILIES = (
    *("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3", "phi3"),
    *("smollm3", "granite", "starcoder2", "stablelm", "seed_oss", "exaone4", "ministral"),
    *("ministral3", "mistral3"),
    *(
        "gpt_neox",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3",
        "gemma4_text",
        "gemma4",
        "olmo2",
        "olmo3",
        "glm",
        "glm4",
    ),
    *("cohere", "cohere2", "gptj", "mpt", "bloom"),
    *("t5", "mt5", "bart", "marian"),
    *("qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "glm4_moe", "phimoe", "granitemoe", "gpt_oss"),
)
FAMILIES: Registry[Family] = Registry(
    "model_type", {name: f"octavo.models.families.{name}:FAMILY" for name in OWN_FAMILIES}
)
DTYPES = ("float32", "bfloat16", "float16")
# What generation_config.json may set for requests that do not.
SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Options that change the result and leave no trace in the weights, each with the value that turns
# it off. They are refused unless the family's reader honours them: no answer is better than a wrong
# one.
UNSERVED = {
    "is_causal": True,
    "use_bidirectional_attention": False,
    "dual_chunk_attention_config": None,
    "attention_chunk_size": None,
    "use_logn_attn": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "clip_qkv": None,
    "alibi": False,
    "no_rope_layers": None,
    "use_mrope": False,
    "rope_interleave": False,
    "rotary_pct": 1.0,
    "per_layer_config": None,
}

# The head in the files of families that quantizers take, and what its values are called there.
_HEAD, _HEAD_VALUES = "lm_head.", {"weight", "qweight", "weight_packed"}

# Reads what transformers makes of a directory; its module needs torch and transformers.
TRANSFORMERS_READER = "octavo.models.fallback.reader"


def read_model_config(path: str | Path, model_impl: ModelImpl = "auto") -> ModelConfig:
    """Read what a model's files say of it; weights are not read.

    Args:
        path: a directory in Hugging Face format, or a GGUF file.
        model_impl: what computes the model: a family of octavo's ("native"), transformers' module
            ("transformers"), or the latter where there is no such family ("auto").

    Raises:
        ModelError: a missing or broken file, a family that octavo does not serve, a quantization
            that it does not read, or options in config.json that change the result and that octavo
            does not implement, whether of the served families or of others that it knows of.
        ConfigError: transformers is needed, and not installed; or cannot read such files.
    """
    source = open_source(path)
    config = source.config()
    model_type = config.get("model_type", None)
    is_native = isinstance(model_type, str) and model_type in FAMILIES
    if model_impl == "transformers" or (model_impl == "auto" and not is_native):
        return _read_through_transformers(source)
    try:
        return _read_native(source)
    except UnservedOption as error:
        if model_impl == "native" or not _has_other_way(source):
            raise
        raise ModelError(
            f"{error}; transformers may compute it (model_impl='transformers')"
        ) from error


def _has_other_way(source: ModelSource) -> bool:
    """Whether models of that type, which octavo has a family of, are served through transformers,
    too."""
    is_served = source.config().get("model_type") in read_tested().served
    return source.is_for_transformers and is_served


def _read_native(source: ModelSource) -> ModelConfig:
    """A model of one of octavo's own families."""
    config, generation = source.config(), source.generation()
    quantization = source.quantization()
    family = _family_of(config)
    names = source.weight_names(family)
    text = config if family.text_config is None else _text_part(config, family.text_config)
    # Models with a text part may say there alone which tokens begin and end a text.
    given = {name: value for name, value in config.values.items() if value is not None}
    tokens = Fields(config.where, text.values | given)
    for name, harmless in UNSERVED.items():
        if name not in family.options:
            text.refuse(name, harmless)
    # Of what is outside the text part, transformers hands this one on.
    config.refuse("is_causal", UNSERVED["is_causal"])
    description = _as_stored(family.read(text), family, source, quantization is not None)
    has_encoder = description.encoder is not None
    if config.flag("is_encoder_decoder", has_encoder) != has_encoder:
        expected = "have an" if has_encoder else "have no"
        raise config.error(
            "is_encoder_decoder", f"models of {family.model_type} {expected} encoder"
        )
    own_quantizations: dict[str, Quantization | None] = {}
    if quantization is not None and _takes_forms(names):
        description = description.with_linear_method("quantized")
        own_quantizations = find_own_quantizations(description, quantization, names.possible)
    return ModelConfig(
        **_as_fields(description),
        path=source.path,
        weight_files=source.weight_files,
        weight_names=names,
        architecture=family.architecture,
        family=family.model_type,
        model_class=family.model_class,
        dtype=_dtype(config, text),
        quantization=quantization,
        own_quantizations=own_quantizations,
        bos_token_id=next(iter(tokens.token_ids("bos_token_id")), None),
        decoder_start_token_id=(
            None
            if description.encoder is None
            else _decoder_start(config, generation, family, description.vocab_size)
        ),
        eos_token_ids=_end_tokens(tokens, generation, family.eos_token_ids, description.vocab_size),
        **_of_output(
            config.with_defaults({"forced_eos_token_id": family.forced_eos_token_id}),
            generation,
            description.vocab_size,
        ),
    )


def _text_part(config: Fields, name: str) -> Fields:
    """The object of a model that takes other input than text, too. Whether its head shares the
    table of the embedding is said outside, as in transformers."""
    part = config.part(name)
    tied = config.flag("tie_word_embeddings", True)
    return Fields(part.where, part.values | {"tie_word_embeddings": tied})


def _as_stored(
    description: ModelDescription, family: Family, source: ModelSource, is_quantized: bool
) -> ModelDescription:
    """See Family.own_head and Family.optional_logits_bias; and a head that was quantized shares no
    table with the embedding, although config.json may say so of the model before."""
    may_be_quantized = description.tied_embeddings and is_quantized
    if family.own_head is None and family.optional_logits_bias is None and not may_be_quantized:
        return description
    names = set(map(source.weight_names(family).without_prefix, source.tensor_names()))
    if family.own_head in names or (may_be_quantized and _has_quantized_head(names)):
        description = replace(description, tied_embeddings=False)
    if names and family.optional_logits_bias not in (None, *names):
        description = replace(description, logits_bias=False)
    return description


def _has_quantized_head(names: set[str]) -> bool:
    """Whether there are a head's values, under any name, and something beside them."""
    parts = {name.removeprefix(_HEAD) for name in names if name.startswith(_HEAD)}
    return bool(parts & _HEAD_VALUES) and not parts <= {"weight", "bias"}


def quantized_on_load(
    config: ModelConfig, name: QuantizationName, num_ranks: int = 1
) -> ModelConfig:
    """The same model with projections that the loader quantizes. The head keeps its precision, but
    for int8 on a CPU: of a small model it is a large part of what a step reads.

    Args:
        config: of the whole model.
        name: what its weights become.
        num_ranks: how many share the model. Each of them quantizes the slices that it holds.

    Raises:
        ConfigError: the files have quantized weights already, or the loader cannot: weights that
            are stored in an order of their own, or with inputs that no group divides; or so many
            ranks cannot share the model.
    """
    where = f"{config.path}: "
    if config.quantization is not None:
        method = config.quantization.method
        raise ConfigError("quantization", f"{where}the weights are quantized already ({method})")
    if not _takes_forms(config.weight_names):
        raise ConfigError(
            "quantization", f"{where}weights of {config.family} are not quantized while they load"
        )
    quantized = config.with_linear_method("quantized")
    is_usual = config.head_method == "plain"
    head_method = "rounded" if name == "int8" and is_usual else config.head_method
    quantized = replace(quantized, head_method=head_method, quantization=ON_LOAD[name])
    shard = quantized.sharded(Shard(0, num_ranks))
    if not any(shard.quantized_parts):
        sizes = f"the hidden size {config.hidden_size}"
        if num_ranks > 1:
            divided = shard.layers[0].attention.output.in_features
            sizes += f", or {divided} of an attention's output on each of {num_ranks} ranks"
        raise ConfigError(
            "quantization",
            f"{where}none of the weights can be quantized to {name}: groups of {SMALLEST_GROUP} do "
            f"not divide their inputs, such as {sizes}",
        )
    return quantized


def _takes_forms(names: WeightNames) -> bool:
    """Whether weights of such files lie as they are computed with."""
    return not (names.transposed or names.qkv_by_head)


def _read_through_transformers(source: ModelSource) -> ModelConfig:
    directory, config = source.transformers_directory(), source.config()
    if find_spec("transformers") is None:
        raise ConfigError(
            "model_impl",
            f"{config.where}: model_type {shown(config.get('model_type', None))} is served through "
            f"transformers, which is not installed: pip install 'octavo[transformers]'; native "
            f"families are {', '.join(FAMILIES)}",
        )
    quantization = source.quantization()
    text = config.get("text_config", None)  # of a model that takes other input than text, too
    parts = (config, Fields(config.where, text)) if isinstance(text, dict) else (config,)
    dtype = _dtype(*parts)  # of others transformers' error does not name the field
    reading = import_module(TRANSFORMERS_READER).read(directory, config)
    generation = source.generation()
    # What config.json leaves out has the default of transformers' class.
    tokens = config.with_defaults(
        {"bos_token_id": reading.bos_token_id, "eos_token_id": reading.eos_token_id}
    )
    described = TransformersConfig(
        **_as_fields(reading.description),
        path=directory,
        weight_names=replace(UNNAMED, layers=reading.layers_path),
        architecture=reading.architecture,
        family=reading.model_type,
        dtype=dtype,
        bos_token_id=next(iter(tokens.token_ids("bos_token_id")), None),
        eos_token_ids=_end_tokens(tokens, generation, (), reading.description.vocab_size),
        **_of_output(config, generation, reading.description.vocab_size),
        parameters=reading.parameters,
        lookup_parameters=reading.lookup_parameters,
        table_width=reading.table_width,
        weights=reading.weights,
        whole_heads=reading.whole_heads,
        divides_head=reading.divides_head,
    )
    if quantization is None:
        return described
    described = described.with_linear_method("quantized")
    names = described.possible_names()
    own = find_own_quantizations(described, quantization, names.__getitem__)
    return replace(described, quantization=quantization, own_quantizations=own)


def _as_fields(description: ModelDescription) -> dict[str, Any]:
    return {each.name: getattr(description, each.name) for each in fields(ModelDescription)}


def _family_of(config: Fields) -> Family:
    model_type = config.get("model_type", None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise config.error(
            "model_type",
            f"octavo's own families are {', '.join(FAMILIES)}; others are served through "
            "transformers (model_impl)",
        )
    family = FAMILIES[model_type]
    given = config.names("architectures", [family.architecture])
    if not {family.architecture, *family.other_names} & set(given):
        raise config.error("architectures", f"of {model_type}, octavo serves {family.architecture}")
    return family


def _end_tokens(
    config: Fields, generation: Fields, usual: tuple[int, ...], vocab_size: int
) -> tuple[int, ...]:
    """The tokens that end a text, without ids that are not in the vocabulary (such as -1)."""
    ends = generation.token_ids("eos_token_id") or config.token_ids("eos_token_id")
    if "eos_token_id" not in config.values | generation.values:
        ends = usual
    return tuple(token_id for token_id in ends if 0 <= token_id < vocab_size)


def _decoder_start(config: Fields, generation: Fields, family: Family, vocab_size: int) -> int:
    """What the decoder starts with, where a request does not say."""
    name = "decoder_start_token_id"
    where = generation if generation.get(name, None) is not None else config
    (token_id, *more) = where.token_ids(name) or [family.decoder_start_token_id]
    if more or token_id is None or not 0 <= token_id < vocab_size:
        raise where.error(name, f"it must be one token of the vocabulary of {vocab_size}")
    return token_id


def _of_output(config: Fields, generation: Fields, vocab_size: int) -> dict[str, Any]:
    """What a model's files say of its output, from generation_config.json; older models without one
    have it in config.json."""
    where = generation if generation.where else _with_first_token(config)
    return {
        "sampling_defaults": _sampling_defaults(where),
        "decoding_rules": read_decoding_rules(where, vocab_size),
    }


def _with_first_token(config: Fields) -> Fields:
    """config.json with forced_bos_token_id where an old one says in other words that it is BOS."""
    first = config.get("bos_token_id", None)
    if first is None or not config.flag("force_bos_token_to_be_generated", False):
        return config
    return Fields(config.where, config.values | {"forced_bos_token_id": first})


def _sampling_defaults(generation: Fields) -> dict[str, Any]:
    """What the model asks for; invalid values are refused here rather than in each request."""
    samples = generation.flag("do_sample", False)
    names = SAMPLING_DEFAULTS if samples else ("repetition_penalty",)
    asked = {name: generation.get(name, None) for name in names}
    defaults = {name: value for name, value in asked.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise ModelError(f"{generation.where}: {error}") from error
    return defaults


def _dtype(*parts: Fields) -> str:
    """Of the weights; parts: of config.json, the first of which that names a dtype counts."""
    for part in parts:
        for name in ("dtype", "torch_dtype"):
            value = part.get(name, None)
            if value is None:
                continue
            if value not in DTYPES:
                raise part.error(name, f"octavo serves {', '.join(DTYPES)}")
            return str(value)
    return "float32"
