"""Which of a model's layers octavo's take the place of, and what is left to launch beside them."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import (
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fallback.shrunken import shrunken_config
from octavo.float12 import PIECE_ROWS
from octavo.layers import linear
from octavo.layers.config import CopyForm, ExpertsConfig, LinearConfig, NormConfig
from octavo.layers.linear import PlainLinear
from octavo.models.config import ModelConfig
from octavo.models.fallback import replacing
from octavo.models.fallback.build import build
from octavo.models.fallback.config import TransformersConfig, Weight
from octavo.models.fallback.experts import GroupedExperts, experts_config
from octavo.models.fallback.model import TransformersLM, _NoAttention
from octavo.models.fallback.paged import PAGED_LAYER
from octavo.models.fallback.recording import is_norm
from octavo.models.fallback.sums import RankSums
from octavo.models.loader import build_model, load_model
from octavo.models.registry import read_model_config
from octavo.ops import AttentionBackend
from octavo.ops.communicator import SingleRank
from octavo.ops.epilogue import Epilogue
from octavo.ops.linear import LinearKernel, TorchLinear
from octavo.routing import RoutingConfig

CPU = torch.device("cpu")


def load(directory: Path, model_type: str, **fields: Any) -> TransformersLM:
    shrunken_config(model_type, **fields).save_pretrained(directory)
    config = read_model_config(directory, "transformers")
    model = load_model(config, torch.float32, CPU, SingleRank(), "dummy")
    assert isinstance(model, TransformersLM)
    return model


def kinds(model: nn.Module) -> Counter[str]:
    return Counter(type(each).__name__ for each in model.modules())


def rotated_by_backend(model: TransformersLM) -> list[bool]:
    layers = [getattr(each, PAGED_LAYER, None) for each in model.modules()]
    return [layer.rotary is not None for layer in layers if layer is not None]


def test_of_a_llama_nothing_is_left_but_the_additions(tmp_path: Path) -> None:
    model = load(tmp_path, "llama", num_hidden_layers=3)
    found = kinds(model)
    assert (found["FeedForward"], found["MergedProjections"], found["RowNorm"]) == (3, 3, 7)
    assert found["Linear"] == found["LlamaRMSNorm"] == found["LlamaRotaryEmbedding"] == 0
    assert rotated_by_backend(model) == [True] * 3


def test_queries_and_keys_that_are_rotated_one_by_one(tmp_path: Path) -> None:
    """Also in layers that have other layers' keys: these come to them as to the layer that made
    them."""
    kinds_of_layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    fields = {"num_hidden_layers": 6, "layer_types": kinds_of_layers, "num_kv_shared_layers": 2}
    model = load(tmp_path, "gemma4_text", **fields)
    assert rotated_by_backend(model) == [True] * 6
    found = kinds(model)
    assert (found["FeedForward"], found["MergedProjections"], found["Gemma4RMSNorm"]) == (6, 4, 0)


def with_rotated_values(
    self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **named: Any
) -> tuple[Tensor, None]:
    """LlamaAttention.forward, with values that are rotated as well."""
    query, key, value = (
        linear(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for linear in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    value, _ = apply_rotary_pos_emb(value, value, *position_embeddings)
    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    output, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **named)
    return self.o_proj(output.flatten(2)), None


def test_attention_that_rotates_more_than_queries_and_keys_rotates_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rotation cannot be left to the backend without leaving out the other one."""
    monkeypatch.setattr(LlamaAttention, "forward", with_rotated_values)
    assert rotated_by_backend(load(tmp_path, "llama", num_hidden_layers=3)) == [False] * 3


def with_odd_calls(
    self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **named: Any
) -> tuple[Tensor, None]:
    """LlamaAttention.forward, with other arguments of the rotation: a number, or tables by name."""
    query, key, value = (
        linear(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for linear in (self.q_proj, self.k_proj, self.v_proj)
    )
    cos, sin = position_embeddings
    if self.layer_idx:
        query, key = apply_rotary_pos_emb(query, key, cos, sin, 1)
    else:
        query, key = apply_rotary_pos_emb(query, key, cos=cos, sin=sin)
    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    output, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **named)
    return self.o_proj(output.flatten(2)), None


def test_rotations_with_other_arguments_stay_the_model_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", with_odd_calls)
    assert rotated_by_backend(load(tmp_path, "llama", num_hidden_layers=3)) == [False] * 3


def test_norms_with_an_input_that_is_given_by_name_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, hidden_states: Tensor, **named: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states=hidden_states)
        hidden_states = hidden_states + self.self_attn(hidden_states=normed, **named)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    found = kinds(load(tmp_path, "llama", num_hidden_layers=3))
    assert (found["LlamaRMSNorm"], found["RowNorm"]) == (3, 4)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_layers_share_tables_of_cosines_and_sines(tmp_path: Path, model_type: str) -> None:
    """What they take is as the description says, which plans memory before there is a model."""
    model = load(tmp_path, model_type)
    layers = [getattr(each, PAGED_LAYER, None) for each in model.modules()]
    tables = {id(each.rotary): each.rotary for each in layers if each is not None}
    rotaries = [each for each in model.modules() if isinstance(each, replacing.Rotary)]
    pairs = [pair for rotary in rotaries for pair in rotary._tables.values()]
    pairs += [(each.cos, each.sin) for each in tables.values()]
    config = model._config
    taken = sum(each.nbytes for pair in pairs for each in pair)
    assert taken == 4 * config.table_width * config.max_model_len


@pytest.mark.parametrize(
    ("model_type", "blocks", "rotations"),
    [
        ("qwen3_moe", 0, [True] * 3),  # experts stay transformers'
        ("cohere2", 3, [True, False, True]),  # interleaved; one layer does not rotate
        ("phi3", 3, [True] * 3),  # gate and up in one
        ("glm4", 3, [True] * 3),  # partly rotated, interleaved
        ("starcoder2", 3, [True] * 3),  # not gated
        ("gemma3_text", 3, [True] * 3),  # norms stored minus one, one rotation for each kind
        ("nemotron", 0, [True] * 3),  # squared ReLU
        ("deepseek_v3", 3, [False] * 3),  # keys are put together behind their rotation
    ],
)
def test_layers_are_replaced_where_they_compute_the_same(
    model_type: str, blocks: int, rotations: list[bool], tmp_path: Path
) -> None:
    model = load(tmp_path, model_type)
    assert kinds(model)["FeedForward"] == blocks
    assert rotated_by_backend(model) == rotations


class Launches(TorchDispatchMode):
    """Counts operations that give a device work: no views, and no memory alone."""

    FREE = (
        "view",
        "slice",
        "transpose",
        "select",
        "split",
        "unsqueeze",
        "alias",
        "detach",
        "empty",
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = function.overloadpacket.__name__
        result = function(*args, **(kwargs or {}))
        is_view = name in ("reshape", "to") and result.data_ptr() == args[0].data_ptr()
        if not is_view and not any(free in name for free in self.FREE):
            self.counts[name] += 1
        return result


class FixedAttention:
    """In the place of a backend: one tensor for all layers."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def forward(self, *arguments: object) -> Tensor:
        return self._result


def test_a_layer_launches_two_additions_beside_octavo_s_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a decode step; kernels of projections and norms are left out of the count."""
    monkeypatch.setattr(replacing.RowNorm, "forward", lambda self, x: x)
    counts = []
    for num_layers in (2, 4):
        directory = tmp_path / str(num_layers)
        model = load(directory, "llama", num_hidden_layers=num_layers)
        for each in model.modules():
            if hasattr(each, "_kernel"):
                each._kernel = FixedKernel(each.config.out_features)
        backend: Any = FixedAttention(torch.zeros(1, 64))
        step = torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode(), Launches() as launches:
            model.forward(step, step, backend)
        counts.append(launches.counts)
    per_layer = {name: (counts[1][name] - counts[0][name]) / 2 for name in counts[1]}
    assert {name: number for name, number in per_layer.items() if number} == {"add": 2}


class FixedKernel:
    """In the place of a projection's kernel."""

    def __init__(self, size: int) -> None:
        self._size = size

    def apply(self, x: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
        size = self._size // 2 if epilogue.is_gated else self._size
        return x.new_empty((len(x), size))


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (LlamaRMSNorm(32, eps=1e-5), NormConfig("rms", 32, 1e-5)),
        (Gemma2RMSNorm(32, eps=1e-6), NormConfig("rms", 32, 1e-6, offset=1.0)),
        (nn.LayerNorm(32, eps=1e-5), NormConfig("layer", 32, 1e-5, bias=True)),
        (Gemma4RMSNorm(32, eps=1e-6), NormConfig("rms", 32, 1e-6)),
        (Gemma4RMSNorm(32, 1e-6, with_scale=False), NormConfig("rms", 32, 1e-6, affine=False)),
        (nn.LayerNorm(32, eps=1e-6, bias=False), NormConfig("layer", 32, 1e-6, bias=False)),
    ],
)
def test_norms_are_known_by_what_they_compute(norm: nn.Module, expected: NormConfig) -> None:
    assert is_norm(norm)
    assert replacing._as_norm(norm, 32) == expected


class OddNorm(LlamaRMSNorm):
    """Computes something of its own."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.01


def test_a_norm_that_computes_something_else_stays() -> None:
    assert replacing._as_norm(OddNorm(32), 32) is None


class Block(nn.Module):
    def __init__(self, activation: str, swapped: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(16, 24)
        self.out = nn.Linear(24, 16)
        self.act = ACT2FN[activation]
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if self.swapped else (self.a, self.b)
        return self.out(self.act(first(x)) * second(x))


class PlainBlock(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(16, 24), nn.Linear(24, 16)
        self.act = ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.a(x)))


class ClampedBlock(Block):
    """Whose limit inputs of about 1 do not show."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.a(x)) * self.b(x).clamp(-30, 30))


class ResidualBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (Block("silu"), (("a", "b"), Epilogue.SILU_MUL, "out")),
        (Block("silu", swapped=True), (("b", "a"), Epilogue.SILU_MUL, "out")),
        (Block("gelu_pytorch_tanh"), (("a", "b"), Epilogue.GELU_TANH_MUL, "out")),
        (Block("gelu"), None),
        (Block("relu2"), None),
        (ClampedBlock("silu"), None),
        (PlainBlock("relu"), (("a",), Epilogue.RELU, "out")),
        (PlainBlock("gelu_new"), (("a",), Epilogue.GELU_TANH, "out")),
        (PlainBlock("relu6"), None),
        (PlainBlock("gelu_10"), None),
        (ResidualBlock("silu"), None),
    ],
)
def test_blocks_are_known_by_what_they_compute(block: nn.Module, expected: object) -> None:
    linears = {name: each for name, each in block.named_children() if type(each) is nn.Linear}
    assert replacing._as_feed_forward(block, linears) == expected
    x = torch.randn(2, 16)
    assert torch.equal(block(x), copy.deepcopy(block)(x))  # probing has changed nothing


def test_memory_is_counted_as_it_is_taken(tmp_path: Path) -> None:
    for model_type in ("gpt_oss", "gemma3_text", "deepseek_v3"):
        directory = tmp_path / model_type
        shrunken_config(model_type).save_pretrained(directory)
        config: ModelConfig = read_model_config(directory, "transformers")
        model = build_model(config, torch.float32, CPU, SingleRank())  # before weights are packed
        assert isinstance(model, TransformersLM)
        own = {id(each): each.numel() for each in model.parameters()}
        assert config.num_parameters() == pytest.approx(sum(own.values()), rel=0.02)
        assert isinstance(model.rest, PreTrainedModel)


def test_nothing_keeps_the_memory_of_weights_that_kernels_have_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[weakref.ref[Any]] = []

    def packed(weight: Tensor, *options: object, **named: object) -> LinearKernel:
        given.append(weakref.ref(weight.untyped_storage()))
        kernel = TorchLinear(weight.clone())
        kernel.keeps_weight = False
        return kernel

    monkeypatch.setattr(linear, "make_linear_kernel", packed)
    model = load(tmp_path, "llama", tie_word_embeddings=False)
    assert len(given) == len([each for each in model.modules() if isinstance(each, PlainLinear)])
    assert not any(each() is not None for each in given)


def test_logits_are_those_of_transformers_head(tmp_path: Path) -> None:
    """Soft caps and multipliers are transformers' own code."""
    model = load(tmp_path, "gemma2", final_logit_softcapping=0.5)
    logits = model.logits(torch.randn(4, 64) * 100)
    assert logits.shape == (4, 320)
    assert 0.4 < float(logits.abs().max()) <= 0.5
    assert F.softmax(logits, -1).isfinite().all()


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe", "deepseek_v3", "phimoe"])
def test_experts_are_computed_by_grouped_products(tmp_path: Path, model_type: str) -> None:
    """They own the weights: transformers' modules keep none, and the description counts them."""
    model = load(tmp_path, model_type)
    named = dict(model.named_modules())
    paths = [path for path, each in named.items() if isinstance(each, GroupedExperts)]
    assert paths
    for path in paths:
        module = named[path.rpartition(".")[0]]
        assert not any(each.numel() for each in module.parameters(recurse=False))
    config = model._config
    described = [each.mlp for each in config.layers if isinstance(each.mlp, ExpertsConfig)]
    assert len(described) == len(paths) == sum(config.mixtures().values())
    assert model.num_hit_experts is not None
    assert config.num_active_parameters() < config.num_parameters()


def test_experts_of_a_single_token_are_counted_where_kernels_do_not(tmp_path: Path) -> None:
    """On a GPU nothing is listed for one token: the step counts its experts itself."""
    model = load(tmp_path, "qwen3_moe")
    backend, counter = cast(AttentionBackend, _NoAttention()), model.num_hit_experts
    assert counter is not None

    def counted(num_tokens: int, num_uncounted: int) -> int:
        model._num_uncounted = num_uncounted
        before, ids = int(counter), torch.arange(num_tokens)
        with torch.inference_mode():
            model.forward(ids, ids, backend)
        return int(counter) - before

    assert counted(1, 6) == counted(1, 0) + 6
    assert counted(2, 6) == counted(2, 0)


def test_experts_with_another_gate_are_left_alone() -> None:
    """A limit of its own, which gates within it do not show."""
    config = shrunken_config("gpt_oss")
    config._experts_implementation = "eager"
    experts = GptOssExperts(config)
    found = experts_config(experts, top_k=2)
    assert found is not None
    assert (found.alternating, found.transposed, found.bias) == (True, True, True)
    assert (found.hidden_size, found.intermediate_size) == (64, config.intermediate_size)
    assert experts_config(experts, top_k=0) is None
    experts.limit = 40.0
    assert experts_config(experts, top_k=2) is None


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_alternating", [False, True])
def test_grouped_experts_are_those_of_transformers(
    is_transposed: bool, is_alternating: bool
) -> None:
    """Whatever the strides of the ids, which kernels take dense, and the order of the weights."""
    config = shrunken_config("qwen3_moe")
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    last = experts.num_experts - 1
    hidden, weights = torch.randn(3, config.hidden_size), torch.rand(3, 2)
    ids = torch.tensor([[0, last, 1], [1, 2, last]]).t()
    described = experts_config(experts, top_k=2)
    assert described is not None
    described = replace(described, transposed=is_transposed, alternating=is_alternating)
    grouped = GroupedExperts(described, RankSums(SingleRank()))
    grouped.num_hit = torch.zeros(1, dtype=torch.int64)
    stored = {name: each.detach() for name, each in experts.named_parameters()}
    if is_alternating:
        gates, ups = stored["gate_up_proj"].chunk(2, dim=1)
        stored["gate_up_proj"] = torch.stack([gates, ups], dim=2).flatten(1, 2)
    for name, target in grouped.method.targets(("gate_up_proj", "down_proj")).items():
        tensor = stored[name].transpose(1, 2).contiguous() if is_transposed else stored[name]
        assert target.shape == tensor.shape
        for place, where in target.slices:
            assert isinstance(place, torch.Tensor)
            place.copy_(tensor[where].view(place.shape))
    grouped.method.finalize()
    with torch.no_grad():
        expected = experts(hidden, ids, weights)
        torch.testing.assert_close(grouped(hidden, ids, weights), expected, rtol=1e-3, atol=1e-2)
    assert int(grouped.num_hit) == 4


@pytest.mark.parametrize("num_parts", [None, 3])
def test_results_of_experts_have_the_dtype_of_their_inputs(num_parts: int | None) -> None:
    """Kernels may return float32, complete or in parts: the residual stream stays as it is."""
    routing = RoutingConfig(num_experts=4, top_k=2)
    config = ExpertsConfig(
        hidden_size=8, intermediate_size=8, activation="silu", routing=routing, method="quantized"
    )
    grouped = GroupedExperts(config, RankSums(SingleRank()))
    grouped.num_hit = torch.zeros(1, dtype=torch.int64)
    shape = (5, 8) if num_parts is None else (num_parts, 5, 8)
    grouped.method.forward_partial = lambda hidden, routed: torch.ones(shape)
    hidden = torch.zeros(5, 8, dtype=torch.bfloat16)
    result = grouped.forward(hidden, torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2))
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, torch.full_like(hidden, num_parts or 1))


@pytest.mark.parametrize(("size", "copy"), [(2 * PIECE_ROWS, "float12"), (PIECE_ROWS + 4, None)])
def test_gates_that_are_no_whole_pieces_have_no_copy(
    size: int, copy: CopyForm | None, tmp_path: Path
) -> None:
    shrunken_config("llama", intermediate_size=size).save_pretrained(tmp_path)
    config = read_model_config(tmp_path, "transformers")
    assert isinstance(config, TransformersConfig)
    held: dict[str, Weight] = {
        name: replace(each, copy="float12") if isinstance(each, LinearConfig) else each
        for name, each in config.held().items()
    }
    built = build(tmp_path, torch.bfloat16)
    sums = RankSums(SingleRank())
    owners = replacing.replace_modules(built, torch.bfloat16, held, config.head, sums)
    copies = {
        names[0].rpartition(".")[2]: owner.config.copy
        for owner, names in owners
        if isinstance(owner, PlainLinear)
    }
    assert (copies["gate_proj"], copies["down_proj"]) == (copy, "float12")
