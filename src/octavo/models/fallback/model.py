"""A transformers model as octavo's worker sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.errors import ModelError
from octavo.layers.base import WeightOwner, WeightTarget, WeightTargets
from octavo.layers.config import ExpertsConfig, LinearConfig
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.fallback.build import Built, build, output_embeddings, sole_use
from octavo.models.fallback.checkpoint import TransformersCheckpoint
from octavo.models.fallback.config import TransformersConfig
from octavo.models.fallback.decoded import Decoded
from octavo.models.fallback.experts import GroupedExperts, replace_experts
from octavo.models.fallback.paged import GROUPED_EXPERTS, PAGED_LAYER, OwnHeads, PagedLayer, Step
from octavo.models.fallback.recording import AttentionCall, with_rotation
from octavo.models.fallback.replacing import (
    Owners,
    Rotary,
    form_of,
    linear_config,
    replace_modules,
)
from octavo.models.fallback.sums import RankSums
from octavo.models.safetensors_paths import tensor_names
from octavo.ops import AttentionBackend, LayerSpec, ScoreFunction, Sinks
from octavo.ops.communicator import Communicator

# How far the hidden states of a token may be apart in two steps, as a part of the largest: what
# rounding does in many layers.
SAME_STATES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


class TransformersLM(CausalLM):
    """Owns transformers' modules, with octavo's layers in them."""

    def __init__(
        self, config: ModelConfig, device: torch.device, communicator: Communicator
    ) -> None:
        """`config`: a TransformersConfig."""
        super().__init__()
        assert isinstance(config, TransformersConfig)
        assert config.shard == communicator.shard
        self._config = config
        self._sums = RankSums(communicator)
        self._step = Step()
        self._num_uncounted = 0  # experts that a step of one token takes and kernels do not count
        [(_, self._tokens)] = config.head.out_ranges()  # whose logits are this rank's
        own = self._tokens  # of the logits that transformers' code makes, those columns
        self._own_columns = slice(own.stop - own.start) if config.divides_head else own

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """See CausalLM.allocate: transformers makes its modules for a dtype.

        Raises:
            ModelError: octavo cannot serve the model; says why.
        """
        config, self._dtype = self._config, dtype
        built = build(config.path, dtype, config.max_model_len)
        recording = built.recording
        if device.type == "cuda" and recording.data_dependent is not None:
            raise ModelError(
                f"{config.path}: a step of {config.architecture} cannot be captured in CUDA "
                f"graphs: the size of what it computes depends on its tensors "
                f"({recording.data_dependent})"
            )
        parameters = built.model.state_dict(keep_vars=True)
        held = config.held()
        experts = [name for name, weight in held.items() if isinstance(weight, ExpertsConfig)]
        checkpoint = TransformersCheckpoint(
            built.model, built.left_out, experts, tensor_names(config.path)
        )
        with torch.device("cpu"):
            try:
                _fill_buffers(built.model)
            except Exception as error:  # whatever modules raise for fields that do not fit
                raise ModelError(
                    f"{config.path}: {config.architecture} cannot be made from these fields "
                    f"({type(error).__name__}: {error})"
                ) from error
            rotaries = {
                module: Rotary(module, kinds, config.max_model_len)
                for module, kinds in recording.rotaries.items()
            }
            for rotary in rotaries.values():
                rotary.to_device(device)
            self.attention_layers = [
                self._attention_layer(number, call, rotaries)
                for number, call in enumerate(recording.calls)
            ]
        for module, rotary in rotaries.items():
            built.model.set_submodule(built.paths[module], rotary)
        owners = replace_modules(built, dtype, held, self._head(built), self._sums)
        of_experts = replace_experts(built, dtype, held, checkpoint.expert_names, self._sums)
        self._count_experts(built.model, device)
        tied = _tie(built.model, parameters, owners)
        owners += of_experts
        made = _with_memory(built.model, owners, dtype, device)
        divided = tied if config.divides_head and config.shard.size > 1 else None
        checkpoint.targets = _targets(built.model, parameters, owners, made, divided)
        checkpoint.names = dict(owners)
        self.checkpoint = checkpoint
        self._first_position = built.first_position
        self._take(built)
        if divided is not None:
            divided.weight = nn.Parameter(self.tied_table, requires_grad=False)

    def _head(self, built: Built) -> LinearConfig:
        """The projection to logits, as it is held."""
        config, head = self._config, self._config.head
        found = output_embeddings(built.model)
        if config.divides_head or type(found) is not nn.Linear:
            return head
        copy = head.copy if config.shard.size == 1 else None
        return replace(linear_config([found]), method=head.method, copy=copy)

    def _own_heads(self, number: int) -> OwnHeads | None:
        """See PagedLayer.own_heads."""
        config = self._config
        if config.shard.size == 1 or not config.whole_heads[number]:
            return None
        attention = config.layers[number].attention
        query, kv = (
            slice(shard.rank * count, (shard.rank + 1) * count)
            for shard, count in (
                (attention.shard, attention.num_heads),
                (attention.kv_shard, attention.num_kv_heads),
            )
        )
        return OwnHeads(query, kv, self._sums.communicator)

    def _attention_layer(
        self, number: int, call: AttentionCall, rotaries: dict[nn.Module, Rotary]
    ) -> LayerSpec:
        described = self._config.layers[number].attention
        size, module = described.head_dim, call.module
        layer = PagedLayer(number, self._step, size, call.value_dim, self._dtype)
        setattr(module, PAGED_LAYER, layer)
        layer.own_heads = self._own_heads(number)
        if call.rotated is not None and call.head_dim == size:
            kind, rotary = call.rotated.rotary.kind, rotaries[call.rotated.rotary.module]
            form = form_of(call.rotated, rotary, size)
            if form is not None:
                layer.rotary = rotary.halves(kind, form)
                leave = _not_rotated if call.rotated.is_of_both else _not_rotated_alone
                module.forward = with_rotation(module, leave)
        sinks: Sinks | None = None
        if call.sinks is not None:
            first = described.shard.rank * described.num_heads
            heads = slice(first, first + described.num_heads)
            sinks = ModuleSinks(module, call.sinks, heads)
        return LayerSpec(
            layer_id=number,
            num_heads=described.num_heads,
            num_kv_heads=described.num_kv_heads,
            head_dim=size,
            scores=ScoreFunction(described.scale, described.softcap, None, sinks),
            window=described.window,
        )

    def _count_experts(self, model: nn.Module, device: torch.device) -> None:
        """Let all experts count those that are hit in one place."""
        grouped = [each for each in model.modules() if isinstance(each, GroupedExperts)]
        if grouped:
            self.num_hit_experts = torch.zeros(1, dtype=torch.int64, device=device)
        for each in grouped:
            assert self.num_hit_experts is not None
            each.num_hit = self.num_hit_experts
        if device.type == "cuda":  # where experts of a single token are not listed (list_experts)
            self._num_uncounted = sum(each.top_k for each in grouped)

    def _take(self, built: Built) -> None:
        """Divide the model into its decoder and what makes logits of hidden states."""
        self.decoder = built.base
        # In a tuple, so that it is not one more parameter.
        self._table = (built.model.get_input_embeddings().get_parameter("weight"),)
        self._decoded = Decoded(built.base)
        built.model.set_submodule(built.paths[built.base], self._decoded)
        self.rest = built.model

    @property
    def token_table(self) -> Tensor:
        """See CausalLM.token_table."""
        return self._table[0]

    @property
    def tied_table(self) -> Tensor:
        """See CausalLM.tied_table."""
        return self.token_table[self._tokens] if self._config.divides_head else self.token_table

    def tie(self) -> None:
        """See CausalLM.tie: `allocate` has tied what transformers ties."""

    def check(self) -> None:
        """See CausalLM.check: without attention, a token's hidden state must depend on the token
        and its position alone, wherever it stands in a step and whatever stands beside it."""
        device = self.token_table.device
        vocab_size = self._config.vocab_size
        first, second, *others = (id % vocab_size for id in (5, 11, 17, 23))
        ids = torch.tensor([[first, others[0], second], [others[1], second, first]], device=device)
        positions = torch.tensor([[0, 1, 1], [0, 1, 0]], device=device)
        backend = cast(AttentionBackend, _NoAttention())
        try:
            with torch.inference_mode():
                one, two = (
                    self.forward(*each, backend).float()
                    for each in zip(ids, positions, strict=True)
                )
                self.logits(one.to(self._dtype))
        except Exception as error:  # whatever modules raise
            raise ModelError(
                f"{self._config.path}: octavo cannot serve {self._config.architecture} through "
                f"transformers {transformers.__version__}: a step fails "
                f"({type(error).__name__}: {error})"
            ) from error
        same = torch.stack([one[0] - two[2], one[2] - two[1]])
        limit = SAME_STATES[self._dtype] * float(one.abs().max())
        if not float(same.abs().max()) <= limit and bool(one.isfinite().all()):
            raise ModelError(
                f"{self._config.path}: octavo cannot serve {self._config.architecture} "
                "through transformers: tokens of a step change each other's hidden states beside "
                "the attention, or positions are not those that it is given"
            )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        logits_indices: Tensor | None = None,
    ) -> Tensor:
        """See CausalLM.forward; the last layer computes all tokens."""
        self._step.backend = attention
        self._sums.begin()
        if self._num_uncounted and len(input_ids) == 1:
            assert self.num_hit_experts is not None
            self.num_hit_experts.add_(self._num_uncounted)
        if self._first_position:
            positions = positions + self._first_position
        hidden: Tensor = self.decoder(
            input_ids=input_ids.unsqueeze(0),
            attention_mask=None,
            position_ids=positions.unsqueeze(0),
            use_cache=False,
        ).last_hidden_state[0]
        return hidden if logits_indices is None else hidden[logits_indices]

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM.logits: by transformers' own code behind its decoder."""
        rows = hidden.unsqueeze(0)
        self._decoded.hidden = rows
        logits: Tensor = self.rest(inputs_embeds=rows, use_cache=False).logits[0]
        logits = logits if logits.device.type == "cuda" else logits.float()
        return logits[:, self._own_columns]


class _NoAttention:
    """Stands in for an attention backend: every token sees itself alone."""

    def forward(self, layer_id: int, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        """See AttentionBackend.forward."""
        group = query.shape[1] // key.shape[1]
        return value.repeat_interleave(group, dim=1).flatten(1)


class ModuleSinks:
    """Attention sinks that are a parameter of transformers' module, of the heads of all ranks."""

    def __init__(self, module: nn.Module, name: str, heads: slice) -> None:
        """heads: this rank's."""
        self._module, self._name, self._heads = module, name, heads

    @property
    def weight(self) -> Tensor:
        """[num_heads]."""
        return self._module.get_parameter(self._name)[self._heads]


def _not_rotated(query: Tensor, key: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Stands in for the function that rotates heads, which the attention backend does."""
    return query, key


def _not_rotated_alone(x: Tensor, *others: Any, **named: Any) -> Tensor:
    """The same for a function that rotates queries or keys."""
    return x


def _fill_buffers(model: PreTrainedModel) -> None:
    """Buffers with their values, on the CPU: transformers computes them where it sets weights."""
    for module in model.modules():
        vars(module)["_is_hf_initialized"] = False
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    with sole_use():
        model.initialize_weights()  # type: ignore[no-untyped-call]


def _tie(model: nn.Module, state: dict[str, Tensor], owners: Owners) -> WeightOwner | None:
    """Let layers of octavo's share the parameters that transformers has tied to its modules'.
    Returns the one that shares a weight, if there is one: the projection to logits."""
    left = {id(each) for each in model.parameters()}
    found: WeightOwner | None = None
    for owner, names in owners:
        for own in ("weight", "bias"):
            shared = state.get(f"{names[0]}.{own}")
            if id(shared) in left:
                assert len(names) == 1, "nothing is tied to a part of a merged projection"
                setattr(owner, own, shared)
                if own == "weight":
                    assert found is None, "nothing else shares a weight"
                    found = owner
    return found


def _with_memory(
    model: nn.Module, owners: Owners, dtype: torch.dtype, device: torch.device
) -> dict[int, nn.Parameter]:
    """Give all parameters memory, and move buffers to the device; by the ids of those without."""
    own = {id(each) for owner, _ in owners for each in owner.parameters(recurse=False)}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            found = made.get(id(parameter))
            if found is None:
                kind = dtype if id(parameter) in own else parameter.dtype
                weight = torch.empty(parameter.shape, dtype=kind, device=device)
                found = made[id(parameter)] = nn.Parameter(weight, requires_grad=False)
                made[id(found)] = found
            module._parameters[name] = found
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return made


def _targets(
    model: nn.Module,
    state: dict[str, Tensor],
    owners: Owners,
    made: dict[int, nn.Parameter],
    tied: WeightOwner | None,
) -> WeightTargets:
    """Where tensors go, by transformers' names; `state` has the parameters without memory. `tied`
    owns nothing but a table of embeddings, all of which is loaded: it will compute with a part."""
    found: WeightTargets = {}
    for owner, names in owners:
        if owner is tied:
            found[f"{names[0]}.weight"] = WeightTarget.whole(owner.get_parameter("weight"))
        else:
            found |= owner.targets(names)
    for name, each in state.items():
        path, _, last = name.rpartition(".")
        if name not in found and not _holds_experts(model, path):
            tensor: Tensor | None = made.get(id(each))
            if tensor is None:
                tensor = model.get_submodule(path).get_buffer(last)
            found[name] = WeightTarget.whole(tensor)
    return found


def _holds_experts(model: nn.Module, path: str) -> bool:
    """Whether a method of octavo's has taken the place of the parameters of a module there."""
    try:
        return hasattr(model.get_submodule(path), GROUPED_EXPERTS)
    except AttributeError:  # the module's own place is taken
        return False
