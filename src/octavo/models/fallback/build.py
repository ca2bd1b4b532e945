"""transformers' module for a model directory, without memory for its weights."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from octavo.errors import ModelError, shown
from octavo.models.fallback.paged import ATTENTION, EXPERTS, register
from octavo.models.fallback.recording import (
    NO_INTERFACE,
    ForwardFailed,
    Recording,
    Unserved,
    record,
)

OTHER_INPUTS = ("vision_config", "audio_config", "speech_config", "vq_config")
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k")
LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")
STATE = "its layers carry a state from token to token"
STATEFUL = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})
_SOLE_USE = threading.Lock()


@dataclass(frozen=True)
class Built:
    """A model on the meta device, and what a step of it does."""

    model: PreTrainedModel
    base: nn.Module  # the decoder, which returns hidden states
    paths: dict[nn.Module, str]
    max_model_len: int
    first_position: int  # of a sequence, by the model's own count
    recording: Recording
    left_out: tuple[str, ...]  # paths of modules that text alone does not need, such as towers

    @property
    def has_tied_embeddings(self) -> bool:
        """Whether logits are computed with the table of the token embeddings."""
        head, embeddings = output_embeddings(self.model), self.model.get_input_embeddings()
        return head is not None and head.weight is embeddings.weight


def output_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """The projection to logits, if it is one."""
    found: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found


def read_config(directory: Path) -> Any:
    """transformers' configuration of a directory; code that comes with models is never run.

    Raises:
        ModelError: transformers does not know the type, or refuses the fields.
    """
    try:
        with sole_use():
            return AutoConfig.from_pretrained(
                str(directory), trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # whatever its validation raises
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{directory / 'config.json'}: transformers {transformers.__version__} refuses it "
            f"({type(error).__name__}: {reason[:400]})"
        ) from error


def is_known(model_type: str) -> bool:
    """Whether transformers has a configuration of that type."""
    return model_type in CONFIG_MAPPING


def build(directory: Path, dtype: torch.dtype, max_model_len: int | None = None) -> Built:
    """The model of a directory on the meta device, recorded.

    Args:
        directory: of its config.json; weights are not read.
        dtype: that it is computed in.
        max_model_len: tokens of the longest sequence, if it is less than the model's own limit.

    Raises:
        ModelError: octavo cannot serve it; says why.
    """
    config = read_config(directory)
    where = directory / "config.json"
    try:
        with sole_use():
            return _build(config, dtype, max_model_len)
    except Unserved as error:
        raise ModelError(
            f"{where}: octavo cannot serve model_type {shown(config.model_type)} through "
            f"transformers {transformers.__version__}: {error}"
        ) from error


def _build(config: Any, dtype: torch.dtype, max_model_len: int | None) -> Built:
    try:
        text = config.get_text_config()
    except ValueError as error:  # several parts take text
        raise Unserved(" ".join(str(error).split())) from error
    _check_kind(config, text)
    _check_groups(text)
    register()
    try:
        with torch.device("meta"), _missing_libraries():
            model: PreTrainedModel = _auto_class(config).from_config(
                config,
                dtype=dtype,
                trust_remote_code=False,
                attn_implementation=ATTENTION,
                experts_implementation=EXPERTS,
            )
    except KeyError as error:
        if error.args == (ATTENTION,):  # a table of its own classes, by the attention's name
            raise Unserved(NO_INTERFACE) from error
        raise Unserved(f"it cannot be made from these fields (KeyError: {error})") from error
    except Exception as error:  # whatever its constructor raises for fields that do not fit
        raise Unserved(
            f"it cannot be made from these fields ({type(error).__name__}: {error})"
            f"{_wrong_numbers(text)}"
        ) from error
    model.train(False)
    _check_sizes(model)
    decoders = (each for each in model.children() if isinstance(each, PreTrainedModel))
    base = getattr(model, model.base_model_prefix or "-", next(decoders, None))
    if not isinstance(base, nn.Module) or base is model:
        raise Unserved(f"{type(model).__name__} has no decoder beside its projection to logits")
    if model.config.is_encoder_decoder:
        raise Unserved("it has an encoder")
    if getattr(model, "_is_stateful", False):
        raise Unserved(STATE)
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise Unserved(f"{type(base).__name__} takes no position_ids")
    first_position = _first_position(base)
    own_limit = _own_limit(text) - first_position
    if own_limit < 1:
        raise Unserved(f"it has no positions from {first_position} (pad_token_id + 1) on")
    paths = {module: path for path, module in model.named_modules()}
    served = max_model_len or own_limit
    try:
        recording = record(model, base, paths, served)
    except ForwardFailed as error:
        raise Unserved(f"{error}{_wrong_numbers(text)}") from error
    _check_window(text, served, recording)
    left_out = () if text is config else _leave_out(base, paths, recording.called)
    return Built(model, base, paths, own_limit, first_position, recording, left_out)


class _Absent(nn.Module):
    """Stands for a part of a model that takes a library which is not installed."""


@contextmanager
def _missing_libraries() -> Iterator[None]:
    """Make the rest of a model where a tower, such as one of timm's, takes a library that is not
    installed: text may not need it."""
    changed: Any = AutoModel
    own, make = vars(AutoModel)["from_config"], changed.from_config

    def make_or_leave(config: Any, **options: Any) -> nn.Module:
        try:
            made: nn.Module = make(config, **options)
        except ImportError:
            return _Absent()
        return made

    changed.from_config = make_or_leave
    try:
        yield
    finally:
        changed.from_config = own


def _leave_out(
    base: nn.Module, paths: dict[nn.Module, str], called: set[nn.Module]
) -> tuple[str, ...]:
    """Take out of a decoder what a step of text alone has not called, such as towers for images and
    the projections of their results. Returns the paths."""
    found = []
    for module in [each for each in base.modules() if each in called]:
        for name, child in module.named_children():
            is_unused = called.isdisjoint(child.modules())
            if is_unused and (isinstance(child, _Absent) or any(child.state_dict())):
                setattr(module, name, nn.Module())
                found.append(paths[child])
    return tuple(found)


def _first_position(base: nn.Module) -> int:
    """What a decoder numbers the first token with where it is given no positions: RoBERTa and its
    like count from pad_token_id + 1, as they are trained. Transformers' `generate` gives them
    positions from 0 on, which their own forward pass does not."""
    for module in base.modules():
        numbered: Any = getattr(module, "create_position_ids_from_inputs_embeds", None)
        if numbered is not None:
            padding: Any = getattr(module, "padding_idx", None)
            if padding is None:
                raise Unserved(
                    "it numbers positions from pad_token_id + 1, and pad_token_id is null"
                )
            try:
                return int(numbered(torch.zeros(1, 1, 1), padding)[0, 0])
            except TypeError as error:  # other arguments than those of RoBERTa
                raise Unserved(f"{type(module).__name__} numbers positions itself") from error
    return 0


def _auto_class(config: Any) -> Any:
    """The class of transformers' that makes the model of a configuration: of models that take other
    input than text, too, the whole one, of which text needs a part."""
    if config.get_text_config() is config:
        return AutoModelForCausalLM
    has_class = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if has_class else AutoModelForCausalLM


def _check_kind(config: Any, text: Any) -> None:
    if type(config) not in _auto_class(config)._model_mapping:
        raise Unserved("it is no causal language model (AutoModelForCausalLM has no class for it)")
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise Unserved("it has an encoder (is_encoder_decoder)")
    for name in OTHER_INPUTS:
        if text is config and getattr(config, name, None) is not None:
            raise Unserved(f"it takes other input than text ({name})")
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds & STATEFUL:
        raise Unserved(f"{STATE} (layer_types: {', '.join(sorted(kinds & STATEFUL))})")
    if "chunked_attention" in kinds:
        raise Unserved("its attention stays within chunks (layer_types: chunked_attention)")


def _check_sizes(model: nn.Module) -> None:
    """Refuse parameters without elements, which neither octavo's layers nor its kernels take."""
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise Unserved(
                f"{name} has shape {list(parameter.shape)}: a size in config.json is 0, or becomes "
                "0 where it is divided"
            )


def _numbers_of_experts(config: Any) -> tuple[str | None, dict[str, int]]:
    """The field that has the number of experts, if there is one, and all that are integers."""
    values = config.to_dict()
    fields = {name: value for name, value in values.items() if isinstance(value, int)}
    return next((name for name in NUM_EXPERTS if name in fields), None), fields


def _check_groups(config: Any) -> None:
    """Refuse groups that do not divide the experts: some of transformers' modules would take those
    that are left over for experts of the next token."""
    experts, fields = _numbers_of_experts(config)
    groups = fields.get("n_group", 1)
    if experts is not None and groups > 0 and fields[experts] % groups:
        raise Unserved(f"n_group is {groups}; it must divide {fields[experts]} ({experts})")


def _wrong_numbers(config: Any) -> str:
    """What to add to an error of transformers' modules, whose own does not name a field: numbers
    that are missing, and those that do not fit together, each with its limit."""
    experts, fields = _numbers_of_experts(config)
    found = _missing_numbers(config)
    found += [] if experts is None else _wrong_experts(experts, fields)
    size, rotated = fields.get("head_dim"), fields.get("qk_rope_head_dim")
    if size is not None and rotated is not None and size != rotated:
        found.append(f"head_dim is {size}; it must be {rotated} (qk_rope_head_dim)")
    return "".join(f"; {each}" for each in found)


def _missing_numbers(config: Any) -> list[str]:
    """Fields that are null, and numbers by default, such as sizes; ids of tokens may be null."""
    defaults = type(config)().to_dict()
    return [
        f"{name} is null; its default is {defaults[name]}"
        for name, value in config.to_dict().items()
        if value is None
        and isinstance(defaults.get(name), int | float)
        and not name.endswith("_token_id")
    ]


def _wrong_experts(experts: str, fields: dict[str, int]) -> list[str]:
    number, found = fields[experts], []
    if number < 1:
        found.append(f"{experts} is {number}; it must be positive")
    for name in NUM_CHOSEN:
        if name in fields and not 0 <= fields[name] <= number:
            found.append(f"{name} is {fields[name]}; it must be from 0 to {number} ({experts})")
    groups = fields.get("n_group")
    if groups is not None and not 1 <= groups <= number // 2:
        found.append(
            f"n_group is {groups}; it must divide {number} ({experts}) into groups of 2 or more"
        )
    chosen = fields.get("topk_group")
    if groups is not None and chosen is not None and groups > 0 and not 0 <= chosen <= groups:
        found.append(f"topk_group is {chosen}; it must be from 0 to {groups} (n_group)")
    return found


def _check_window(config: Any, limit: int, recording: Recording) -> None:
    """Refuse a window, shorter than sequences of up to `limit` tokens, that transformers knows by
    its cache alone, and not by its masks."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    is_windowed = isinstance(window, int) and window < limit and types is None
    if is_windowed and all(call.window is None for call in recording.calls):
        raise Unserved(f"its attention masks do not follow sliding_window ({window})")


def _own_limit(config: Any) -> int:
    for name in LENGTHS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 1:
            return value
    raise Unserved(f"its config.json does not say how long sequences may be ({', '.join(LENGTHS)})")


@contextmanager
def sole_use() -> Iterator[None]:
    """Let one thread at a time use what transformers has once in a process: its table of
    attentions, the dtype and the initialisers while it makes a model, the threshold of its log. Its
    remarks about fields and kernels are left out: they are not for a server's log."""
    logger = logging.getLogger("transformers")
    with _SOLE_USE:
        threshold = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(threshold)
