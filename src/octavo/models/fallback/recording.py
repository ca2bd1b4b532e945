"""What a transformers model does in a step, found out by a pass over tensors without data.

The model is on the meta device. One pass shows which modules call the attention, in which order and
with which arguments, which tokens they see, which projections read the same tensor, and which norms
and rotary embeddings are called with what.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from octavo.models.fallback.paged import ATTENTION

RECORDING = "octavo_recording"  # the name of the attention that records
NUM_TOKENS = 3
ROTATE = "apply_rotary_pos_emb"  # what transformers' attention modules call it
# Arguments of the attention that are read, or that change nothing when tokens are only computed.
KNOWN_ARGUMENTS = {"scaling", "softcap", "s_aux", "sliding_window", "is_causal"}
HARMLESS_ARGUMENTS = {
    *("dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states"),
    *("return_dict", "position_embeddings", "layer_idx", "cache_position", "input_shape"),
    *("past_key_values", "output_router_logits", "deterministic", "logits_to_keep", "target_dtype"),
}
DEPRECATION = "transformers.utils.deprecation"  # whose decorators rename arguments
NO_INTERFACE = "its attention does not go through transformers' attention interface"
DATA_DEPENDENT = "which operations it carries out depends on what its tensors hold"
CHECKED_POSITIONS = 8  # at which a mask is compared with a window, beside its ends


class Unserved(Exception):
    """Why octavo cannot serve a model through transformers."""


class ForwardFailed(Unserved):
    """An error that the model's own code raised."""


class Window(NamedTuple):
    """A causal mask: the query at p sees the keys p - size + 1 .. p; None: all up to p."""

    size: int | None


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention."""

    module: nn.Module
    path: str
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: str | None  # the module's parameter
    rotated: RotationCall | None
    """What queries and keys are the results of, if that is all that the module rotates."""
    kv_source: int | None  # the call before it that had the same keys and values


class RotaryCall(NamedTuple):
    """A call of a rotary embedding: the module, and its arguments beside positions."""

    module: nn.Module
    kind: tuple[Any, ...]


class RotationCall(NamedTuple):
    """A call of the function that rotates queries and keys, or one call for either."""

    function: Callable[..., Any]
    rotary: RotaryCall
    arguments: dict[str, Any]
    is_of_both: bool  # whether it takes both, and not one of them


@dataclass
class Recording:
    """What one pass has shown; modules by their place in the order of calls."""

    calls: list[AttentionCall] = field(default_factory=list)
    linears: dict[nn.Linear, list[Tensor]] = field(default_factory=dict)  # with their inputs
    norms: dict[nn.Module, tuple[torch.dtype, int] | None] = field(default_factory=dict)
    """With their inputs' dtype and size; None: these differ, or an input is given by name or is not
    alone."""
    rotaries: dict[nn.Module, set[tuple[Any, ...]]] = field(default_factory=dict)
    data_dependent: str | None = None
    """An operation whose result has a size, or decides something, by what tensors hold."""
    experts: dict[nn.Module, int] = field(default_factory=dict)
    """Those that transformers' interface computes, with how many of them a token takes."""
    given: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    """The arguments of each module's last call, by place and by name."""
    width: int = 0
    """Elements that a token has in the results of all projections between two attention calls, at
    most."""
    hidden_size: int = 0  # of what the decoder returns
    table_width: int = 0  # elements of all cosines together, for each position

    @property
    def called(self) -> set[nn.Module]:
        """All modules that the step has called."""
        return set(self.given)


def record(
    model: PreTrainedModel, base: nn.Module, paths: dict[nn.Module, str], longest: int
) -> Recording:
    """Compute a step of a few tokens.

    Args:
        model: on the meta device, with `ATTENTION` as its attention.
        base: its decoder, without the projection to logits.
        paths: of all modules.
        longest: tokens of the longest sequence that is to be served.

    Raises:
        Unserved: the model calls its attention in a way that octavo has no place for, or it does
            not call it at all.
    """
    recorder = _Recorder(paths, longest)
    device = torch.device("meta")
    ids = torch.zeros((1, NUM_TOKENS), dtype=torch.int64, device=device)
    with recorder.watching(model):
        try:
            result = base(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=torch.zeros_like(ids),
                use_cache=False,
            )
            hidden = result.last_hidden_state
        except Unserved:
            raise
        except NotImplementedError as error:  # of tensors that have no data to copy
            raise Unserved(DATA_DEPENDENT) from error
        except Exception as error:  # whatever a model's own code raises
            raise ForwardFailed(
                f"its forward pass fails on tensors without data ({type(error).__name__}: {error})"
            ) from error
    recorder.check(model)
    recorder.leave_rotations()
    if hidden.dim() != 3 or hidden.shape[:2] != (1, NUM_TOKENS):
        raise Unserved(f"its decoder returns hidden states of shape {list(hidden.shape)}")
    recorder.found.hidden_size = hidden.shape[2]
    return recorder.found


class _Recorder:
    def __init__(self, paths: dict[nn.Module, str], longest: int) -> None:
        self.found = Recording()
        self._paths = paths
        self._longest = longest
        self._masks: dict[int, Window] = {}
        self._tables: dict[int, RotaryCall] = {}  # by the cosine that it returned
        self._rotated: dict[int, RotationCall] = {}  # by what a call has returned
        self._sources: dict[tuple[int, int], int] = {}  # by key and value: the first call
        self._num_rotations: Counter[nn.Module] = Counter()
        self._kept: list[Tensor] = []  # so that no other tensor gets the same id
        self._width = 0

    # ---------------------------------------------------------------- hooks

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """Replace what is recorded, for a while."""
        configs: dict[int, Any] = {}
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", "") == ATTENTION:
                configs[id(config)] = config
        AttentionInterface.register(RECORDING, self._attend)
        AttentionMaskInterface.register(RECORDING, self._make_mask)
        changed: list[nn.Module] = []
        dynamic: list[tuple[Any, object]] = []
        hooks = []
        try:
            for config in configs.values():
                config._attn_implementation = RECORDING
            for module in model.modules():
                hooks.append(module.register_forward_pre_hook(self._note, with_kwargs=True))
                if type(module) is nn.Linear:
                    module.forward = partial(self._project, module)  # type: ignore[method-assign]
                    changed.append(module)
                elif hasattr(module, "is_transposed"):  # which the interface's decorator sets
                    hook = module.register_forward_pre_hook(self._mix, with_kwargs=True)
                    hooks.append(hook)
                elif is_norm(module):
                    hook = module.register_forward_pre_hook(self._normalise, with_kwargs=True)
                    hooks.append(hook)
                elif is_rotary(module):
                    hooks.append(module.register_forward_hook(self._make_table, with_kwargs=True))
                    kind = getattr(module, "rope_type", None)
                    dynamic.append((module, kind))
                    module.rope_type = _without_dynamic(kind)
                elif (rotate := rotation_of(module)) is not None:
                    rotate = partial(self._rotate, module, rotate)
                    module.forward = with_rotation(module, rotate)
                    changed.append(module)
            with torch.no_grad(), _WithoutData(self.found):
                yield
        finally:
            for module in changed:
                del module.forward
            for rotary, kind in dynamic:
                rotary.rope_type = kind
            for hook in hooks:
                hook.remove()
            for config in configs.values():
                config._attn_implementation = ATTENTION
            del AttentionInterface._global_mapping[RECORDING]
            del AttentionMaskInterface._global_mapping[RECORDING]

    def _note(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.found.given[module] = inputs, named

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor

    def _project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        if x.shape[-1] != linear.in_features:
            raise Unserved(
                f"{self._paths[linear]} takes {linear.in_features} features and is given "
                f"{x.shape[-1]}: sizes in config.json do not fit together"
            )
        self.found.linears.setdefault(linear, []).append(self._keep(x))
        self._width += linear.out_features
        # As a merged projection returns it: a part of longer rows.
        return x.new_empty((*x.shape[:-1], linear.out_features + 8))[..., :-8]

    def _normalise(self, norm: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        norms = self.found.norms
        kind = (inputs[0].dtype, inputs[0].shape[-1]) if len(inputs) == 1 and not named else None
        norms[norm] = kind if norms.get(norm, kind) == kind else None

    def _mix(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["top_k_index"] if "top_k_index" in named else inputs[1]
        self.found.experts[module] = ids.shape[-1]

    def _make_table(
        self,
        rotary: nn.Module,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        result: Any,
    ) -> None:
        is_pair = isinstance(result, tuple) and len(result) == 2
        kind = tuple(value for value in (*inputs, *named.values()) if not isinstance(value, Tensor))
        if is_pair and all(isinstance(each, Tensor) and each.dim() == 3 for each in result):
            kinds = self.found.rotaries.setdefault(rotary, set())
            if kind not in kinds:
                kinds.add(kind)
                self.found.table_width += result[0].shape[2]
            self._tables[id(self._keep(result[0]))] = RotaryCall(rotary, kind)
            self._tables[id(self._keep(result[1]))] = RotaryCall(rotary, kind)

    def _rotate(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        *inputs: Any,
        **named: Any,
    ) -> Any:
        self._num_rotations[module] += 1
        results = function(*inputs, **named)
        rotated = (results,) if isinstance(results, Tensor) else results
        tables = [self._tables.get(id(_whole(each))) for each in inputs[len(rotated) :]]
        if len(tables) == 2 and tables[0] is not None and tables[0] == tables[1]:
            if rotated[0].shape != inputs[0].shape:
                raise Unserved(
                    f"rotation makes {rotated[0].shape[-1]} elements of the "
                    f"{inputs[0].shape[-1]} that a head has: it needs an even head_dim"
                )
            call = RotationCall(function, tables[0], named, is_of_both=len(rotated) == 2)
            self._rotated |= {id(self._keep(each)): call for each in rotated}
        return results

    def _make_mask(self, *, mask_function: Callable[..., Tensor], **arguments: Any) -> Tensor:
        mask = self._keep(torch.empty((1, 1, NUM_TOKENS, NUM_TOKENS), device="meta"))
        self._masks[id(mask)] = window_of(mask_function, self._longest)
        return mask

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        path = self._paths[module]
        if any(call.module is module for call in self.found.calls):
            raise Unserved(f"{path} calls the attention more than once in a step")
        _check_arguments(path, arguments)
        _, num_heads, num_tokens, head_dim = query.shape
        num_kv_heads, num_keys = key.shape[1], key.shape[2]
        if (num_tokens, num_keys, value.shape[2]) != (NUM_TOKENS,) * 3:
            raise Unserved(
                f"{path} attends from {num_tokens} tokens to {num_keys} in a step of {NUM_TOKENS}"
            )
        if num_heads % num_kv_heads:
            raise Unserved(f"{path} has {num_heads} query heads for {num_kv_heads} KV heads")
        rotation = self._rotation_of(query, key)
        scale = arguments.get("scaling")
        number = len(self.found.calls)
        source = self._sources.setdefault((id(self._keep(key)), id(self._keep(value))), number)
        self.found.calls.append(
            AttentionCall(
                module=module,
                path=path,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_dim=value.shape[3],
                scale=head_dim**-0.5 if scale is None else _scale(path, scale),
                window=self._window(module, path, attention_mask, arguments),
                softcap=_softcap(path, arguments.get("softcap")),
                sinks=_sinks(module, path, arguments.get("s_aux")),
                rotated=rotation,
                kv_source=None if source == number else source,
            )
        )
        self.found.width = max(self.found.width, self._width)
        self._width = 0
        return query.new_empty((1, NUM_TOKENS, num_heads, value.shape[3])), None

    def _window(
        self, module: nn.Module, path: str, mask: Tensor | None, arguments: dict[str, Any]
    ) -> int | None:
        window = arguments.get("sliding_window")
        if window is not None and int(window) < 1:
            raise Unserved(f"{path} attends with a window of {window} tokens")
        if mask is None:
            is_causal = arguments.get("is_causal")
            if is_causal is None:
                is_causal = getattr(module, "is_causal", True)
            if not is_causal:
                raise Unserved(f"the attention of {path} is not causal: it sees later tokens")
            return None if window is None else int(window)
        seen = self._masks.get(id(_whole(mask)))
        if seen is None:
            raise Unserved(f"{path} attends with a mask of its own")
        if seen.size == 0:
            raise Unserved(f"{path} attends with a mask that hides all keys: a window of 0 tokens")
        if window is not None and int(window) < self._longest and seen.size != int(window):
            raise Unserved(
                f"{path} attends with a window of {window}, but its mask is one of {seen.size}"
            )
        return seen.size

    def _rotation_of(self, query: Tensor, key: Tensor) -> RotationCall | None:
        """What queries and keys are the results of; perhaps of equal calls, one for each."""
        of_query, of_key = (self._rotated.get(id(_untransposed(each))) for each in (query, key))
        return of_query if of_query == of_key else None

    def leave_rotations(self) -> None:
        """Forget the rotations of modules that rotate anything else: the function by which they do
        cannot be replaced for queries and keys alone; and of those that share keys, unless all of
        them rotate in the same way."""
        calls = self.found.calls
        for number, call in enumerate(calls):
            has_both = call.rotated is not None and call.rotated.is_of_both
            expected = 1 if has_both or call.kv_source is not None else 2
            if self._num_rotations[call.module] != expected:
                calls[number] = replace(call, rotated=None)
        for source in {call.kv_source for call in calls if call.kv_source is not None}:
            sharing = [i for i, call in enumerate(calls) if source in (i, call.kv_source)]
            if any(calls[i].rotated != calls[source].rotated for i in sharing):
                for i in sharing:
                    calls[i] = replace(calls[i], rotated=None)

    # ---------------------------------------------------------------- checks

    def check(self, model: PreTrainedModel) -> None:
        """Raise Unserved unless every layer calls the attention exactly once, and nothing else
        looks at other tokens."""
        calls = self.found.calls
        if not calls:
            raise Unserved(NO_INTERFACE)
        for module in self.found.called:
            if isinstance(module, nn.Conv1d):
                raise Unserved(f"{self._paths[module]} is a convolution over tokens")
        checked: list[str] = []  # outer lists alone: a layer may hold lists of its own
        for path, layers in model.named_modules():
            if not isinstance(layers, nn.ModuleList) or path.startswith(tuple(checked)):
                continue
            counts = [
                sum(call.path.startswith(f"{path}.{number}.") for call in calls)
                for number in range(len(layers))
            ]
            if not any(counts):
                continue
            checked.append(f"{path}.")
            for number, count in enumerate(counts):
                if count != 1:
                    how = "does not call the attention" if count == 0 else f"calls it {count} times"
                    raise Unserved(
                        f"{path}.{number} ({_mixer(layers[number])}) {how}; octavo serves layers "
                        "that call it once, without linear attention, state space or convolution"
                    )
        self.found.width = max(self.found.width, self._width)


def _whole(tensor: Any) -> Any:
    """The tensor that another one is a view of, if the view leaves nothing out; anything else as it
    is."""
    base = getattr(tensor, "_base", None)
    if base is None or (base.shape, base.stride()) != (tensor.shape, tensor.stride()):
        return tensor
    return base


def _untransposed(heads: Tensor) -> Tensor:
    """What heads are that a module has transposed after it rotated them; else themselves."""
    base = heads._base
    if base is None or base.dim() != 4:
        return heads
    seen = base.transpose(1, 2)
    return base if (seen.shape, seen.stride()) == (heads.shape, heads.stride()) else heads


def _mixer(layer: nn.Module) -> str:
    """The class of a layer's first block, for messages."""
    return type(next(iter(layer.children()), layer)).__name__


def _without_dynamic(kind: Any) -> Any:
    """A rotary embedding's kind, or that of each kind of layer, for a step without data.

    Dynamic scaling compares positions with the context, which octavo never exceeds.
    """
    if isinstance(kind, dict):
        return {name: _without_dynamic(each) for name, each in kind.items()}
    return "default" if kind == "dynamic" else kind


class _WithoutData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a model on the meta device pass where it asks for what tensors hold."""

    def __init__(self, found: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = function.name()
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.device.type == "meta":
            if name == "aten::nonzero":
                self._found.data_dependent = "nonzero"
                return torch.empty((0, first.dim()), dtype=torch.int64, device="meta")
            if name == "aten::_local_scalar_dense":
                raise Unserved(DATA_DEPENDENT)
        return function(*args, **(kwargs or {}))


def is_norm(module: nn.Module) -> bool:
    """Whether a module may be a norm: it owns a scale, perhaps a shift, and nothing else; or it
    owns nothing, and is called a norm."""
    names = {name for name, value in module._parameters.items() if value is not None}
    is_bare = not names and type(module).__name__.endswith("Norm")
    return (
        (is_bare or names in ({"weight"}, {"weight", "bias"}))
        and not module._modules
        and not module._buffers
        and all(each is None or each.dim() == 1 for each in module._parameters.values())
    )


def is_rotary(module: nn.Module) -> bool:
    """Whether a module may be a rotary embedding: it has frequencies, and no weights."""
    return any("inv_freq" in name for name in module._buffers) and not list(module.parameters())


def _own_forward(module: nn.Module) -> FunctionType | None:
    """A module's `forward` without the decorator for deprecated names of arguments, which
    transformers' own layers do not use; None if another decorator is around it."""
    forward: object = type(module).forward
    while isinstance(forward, FunctionType) and forward.__globals__["__name__"] == DEPRECATION:
        forward = getattr(forward, "__wrapped__", None)
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    return forward


def rotation_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that rotates the queries and keys of an attention module, if its own `forward`
    calls one by the usual name."""
    forward = _own_forward(module)
    if forward is None:
        return None
    code: CodeType = forward.__code__
    found = forward.__globals__.get(ROTATE)
    return found if ROTATE in code.co_names and callable(found) else None


def with_rotation(module: nn.Module, rotate: Callable[..., Any]) -> MethodType:
    """The module's `forward`, in which another function rotates; the class stays as it is."""
    forward = _own_forward(module)
    assert forward is not None, "rotation_of has checked it"
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTATE: rotate},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(own, module)


def window_of(mask_function: Callable[..., Tensor], longest: int) -> Window:
    """The window that a mask is, for sequences up to `longest` tokens.

    mask_function: transformers' (batch, head, query position, key position) -> visible.

    Raises:
        Unserved: it is no causal mask of a window.
    """
    drawn = random.Random(0)
    keys = torch.arange(longest)

    def visible(query: int) -> Tensor:
        zero = torch.zeros((), dtype=torch.int64)
        return mask_function(zero, zero, torch.tensor(query), keys).expand(longest)

    size = int(visible(longest - 1).sum())
    ends = {0, 1, 2, size - 2, size - 1, size, size + 1, longest // 2, longest - 1}
    queries = {query for query in ends if 0 <= query < longest}
    queries |= {drawn.randrange(longest) for _ in range(CHECKED_POSITIONS)}
    for query in queries:
        expected = (keys <= query) & (keys > query - size)
        if not torch.equal(visible(query), expected):
            raise Unserved(
                f"its attention mask is no causal window: what the query at {query} sees is not "
                f"the last {size} keys up to it"
            )
    return Window(None if size == longest else size)


def _check_arguments(path: str, arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        is_off = value is None or value is False
        if name not in KNOWN_ARGUMENTS and name not in HARMLESS_ARGUMENTS and not is_off:
            raise Unserved(
                f"{path} gives its attention the argument {name}, which octavo has no place for"
            )


def _number(path: str, name: str, value: Any) -> float:
    if isinstance(value, Tensor) or not isinstance(value, int | float):
        raise Unserved(f"{path} gives its attention {name} as a {type(value).__name__}")
    return float(value)


def _positive(path: str, name: str, value: Any, effect: str, fields: str) -> float:
    """effect: what the attention does with it; fields: of config.json, which it comes from."""
    number = _number(path, name, value)
    if not 0 < number < math.inf:
        raise Unserved(f"{path} {effect} {number} ({fields}); it must be positive and finite")
    return number


def _scale(path: str, value: Any) -> float:
    fields = "attention_multiplier or query_pre_attn_scalar"
    return _positive(path, "scaling", value, "multiplies scores by", fields)


def _softcap(path: str, value: Any) -> float | None:
    if value is None:
        return None
    return _positive(path, "softcap", value, "limits scores to", "attn_logit_softcapping")


def _sinks(module: nn.Module, path: str, sinks: Any) -> str | None:
    if sinks is None:
        return None
    names = [name for name, value in module.named_parameters(recurse=False) if value is sinks]
    if not names:
        raise Unserved(f"{path} gives its attention sinks that are no parameter of its own")
    return names[0]
