"""The attention layer: what it hands to a backend, and what it owns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention

from octavo.errors import ConfigError
from octavo.layers.attention import Attention, Step
from octavo.layers.config import AttentionConfig, NormConfig
from octavo.ops import LayerSpec, ScoreFunction
from octavo.ops.communicator import SingleRank
from octavo.ops.quantized import RoundedInputs, Rounding, round_inputs
from octavo.parallel import Shard

CONFIG = AttentionConfig(hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
NORM = NormConfig("rms", 8, 1e-6)


class Recorder:
    """A backend that returns the query and keeps what it was given."""

    def forward(self, layer_id: int, query: Tensor, *arguments: Any) -> Tensor:
        self.given = (query, *arguments)
        return query.flatten(1)


class Rounder(Recorder):
    """One that rounds results for projections that take them so."""

    def rounds(self, layer_id: int, rounding: Rounding) -> bool:
        return layer_id == 3 and rounding is Rounding.IN_TWO

    def forward_rounded(self, layer_id: int, query: Tensor, *arguments: Any) -> RoundedInputs:
        return round_inputs(query.flatten(1), arguments[-1])


def made(config: AttentionConfig) -> Attention:
    """With random weights."""
    layer = Attention(config, layer_id=3, rotary=None, communicator=SingleRank())
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


def given_by(layer: Attention, hidden: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """(the projection [num_tokens, all heads, head_dim], what the backend was given)."""
    projected = F.linear(hidden, layer.qkv.weight).view(len(hidden), -1, layer.spec.head_dim)
    layer.qkv.finalize()
    recorder = Recorder()
    layer.forward(hidden, Step(recorder))
    return projected, recorder.given


@pytest.mark.parametrize("may_round", [True, False])
@pytest.mark.parametrize("rounding", [Rounding.IN_TWO, Rounding.SPANS, Rounding.NONE])
def test_a_backend_rounds_what_the_output_projection_takes_so(
    monkeypatch: pytest.MonkeyPatch, rounding: Rounding, may_round: bool
) -> None:
    layer, hidden = made(CONFIG), torch.randn(5, 24)
    layer.qkv.finalize()
    plain = layer.forward(hidden, Step(Recorder()))
    assert isinstance(plain, Tensor)
    monkeypatch.setattr(layer.output, "part_rounding", lambda num_tokens: rounding)
    for backend, rounds in ((Recorder(), False), (Rounder(), True)):
        attended = layer.forward(hidden, Step(backend), may_round=may_round)
        if rounds and may_round and rounding is Rounding.IN_TWO:
            assert isinstance(attended, RoundedInputs)
            assert torch.equal(attended.scales, round_inputs(plain, rounding).scales)
        else:
            assert isinstance(attended, Tensor)
            assert torch.equal(attended, plain)


def test_a_norm_over_the_whole_width_is_that_of_olmo_2() -> None:
    config = replace(CONFIG, width_norm=NORM)
    layer = made(config)
    theirs = Olmo2Attention(
        Olmo2Config(
            hidden_size=24,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            rms_norm_eps=1e-6,
        ),
        layer_idx=0,
    )
    hidden = torch.randn(5, 24)
    projected, (query, key, value, _, head_norms) = given_by(layer, hidden)
    assert head_norms is None, "there is nothing left to normalise"
    for norm, own in ((theirs.q_norm, layer.query_norm), (theirs.k_norm, layer.key_norm)):
        norm.weight.data.copy_(own.weight)
    theirs_of = theirs.q_norm, theirs.k_norm, torch.nn.Identity()
    rows = [heads.flatten(1) for heads in projected.split([4, 2, 2], dim=1)]
    expected = [norm(each) for norm, each in zip(theirs_of, rows, strict=True)]
    for got, want in zip((query, key, value), expected, strict=True):
        torch.testing.assert_close(got.flatten(1), want.detach())


def test_a_layer_norm_of_heads_is_applied_before_the_backend() -> None:
    layer = made(replace(CONFIG, head_norm=replace(NORM, kind="layer")))
    hidden = torch.randn(5, 24)
    projected, (query, key, _, _, head_norms) = given_by(layer, hidden)
    assert head_norms is None
    for got, norm, heads in (
        (query, layer.query_norm, projected[:, :4]),
        (key, layer.key_norm, projected[:, 4:6]),
    ):
        torch.testing.assert_close(got, F.layer_norm(heads, (8,), norm.weight, norm.bias, 1e-6))


def test_rms_norms_of_heads_are_left_to_the_backend() -> None:
    layer = made(replace(CONFIG, head_norm=NORM))
    *_, head_norms = given_by(layer, torch.randn(5, 24))[1]
    assert head_norms == (layer.query_norm, layer.key_norm, None)


def test_a_norm_of_values_is_left_to_the_backend() -> None:
    layer = made(replace(CONFIG, head_norm=NORM, value_norm=replace(NORM, affine=False)))
    *_, head_norms = given_by(layer, torch.randn(5, 24))[1]
    assert head_norms == (layer.query_norm, layer.key_norm, layer.value_norm)


@pytest.mark.parametrize(
    "norms", [{}, {"head_norm": NORM}, {"width_norm": NORM}, {"sinks": True}], ids=str
)
def test_declared_parameters_are_those_of_the_modules(norms: dict[str, Any]) -> None:
    config = replace(CONFIG, **norms)
    assert config.num_parameters == sum(p.numel() for p in made(config).parameters())


def test_the_score_function_is_the_configuration_s() -> None:
    slopes = (0.5, 0.25, 0.125, 0.0625)
    layer = made(replace(CONFIG, softcap=30.0, alibi_slopes=slopes, sinks=True, window=9))
    assert layer.spec == LayerSpec(3, 4, 2, 8, ScoreFunction(0.5, 30.0, slopes, layer.sinks), 9)
    assert made(CONFIG).spec.scores == ScoreFunction(0.5)


@pytest.mark.parametrize("features", [{}, {"softcap": 2.0}, {"sinks": True}], ids=str)
def test_features_are_named_as_in_the_score_function(features: dict[str, Any]) -> None:
    config = replace(CONFIG, **features)
    assert config.score_features == made(config).spec.scores.features == set(features)


def test_sinks_are_the_checkpoint_s_whatever_is_loaded_later() -> None:
    """The loader replaces a module's parameters after the layer was made."""
    layer = made(replace(CONFIG, sinks=True))
    assert layer.sinks is not None
    layer.sinks.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    targets = layer.sinks.targets(["layers.3.self_attn.sinks"])
    assert list(targets) == ["layers.3.self_attn.sinks"]
    (part,) = targets["layers.3.self_attn.sinks"].slices
    part.target.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert layer.spec.scores.sinks is not None
    assert layer.spec.scores.sinks.weight.tolist() == [1, 2, 3, 4]


def test_each_rank_has_the_slopes_and_sinks_of_its_heads() -> None:
    whole = replace(CONFIG, alibi_slopes=(0.4, 0.3, 0.2, 0.1), sinks=True)
    stored = torch.arange(4.0)
    for rank in range(2):
        layer = made(whole.sharded(Shard(rank, 2)))
        assert layer.spec.scores.alibi_slopes == ((0.4, 0.3), (0.2, 0.1))[rank]
        assert layer.sinks is not None
        target = layer.sinks.targets(["sinks"])["sinks"]
        assert target.shape == (4,)
        (part,) = target.slices
        assert part.target.shape == (2,)
        assert stored[part.where].tolist() == [2 * rank, 2 * rank + 1]


def test_ranks_cannot_share_a_layer_norm_of_all_heads() -> None:
    config = replace(CONFIG, width_norm=replace(NORM, kind="layer"))
    assert config.sharded(Shard()) == config
    with pytest.raises(ConfigError, match="2 ranks cannot share a layer norm of all heads"):
        config.sharded(Shard(1, 2))


def test_a_softcap_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"softcap must be positive and finite, not -1\.0"):
        Attention(replace(CONFIG, softcap=-1.0), layer_id=0, rotary=None, communicator=SingleRank())
