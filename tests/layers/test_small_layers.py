"""Norms, activations, embeddings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from octavo.layers.config import LinearConfig, NormConfig, NormKind
from octavo.layers.embedding import Embedding, LMHead, PositionEmbedding
from octavo.layers.linear import PlainLinear
from octavo.layers.mlp import GATED_EPILOGUES, PLAIN_EPILOGUES
from octavo.layers.norm import (
    Joining,
    LayerNorm,
    Norm,
    RMSNorm,
    StreamScale,
    add_partial,
    make_norm,
)
from octavo.models.families.common import GATED_ACTIVATIONS as GATED_NAMES
from octavo.models.families.common import PLAIN_ACTIVATIONS as PLAIN_NAMES
from octavo.ops.cpu import row_ops
from octavo.ops.epilogue import Epilogue, apply_epilogue

DTYPES = [torch.float32, torch.bfloat16]
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    tolerance = 1e-6 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_rms_norm(dtype: torch.dtype, num_tokens: int) -> None:
    norm = RMSNorm(NormConfig("rms", 48, 1e-5)).to(dtype)
    reference = LlamaRMSNorm(48, 1e-5).to(dtype)
    assert norm.weight is not None
    norm.weight.copy_(torch.randn(48))
    reference.weight.data.copy_(norm.weight)
    hidden, residual = torch.randn(2, num_tokens, 48).to(dtype)
    want_sum = hidden + residual
    got, got_sum = norm.forward(hidden, residual.clone())
    close(got, reference(want_sum).detach())
    assert torch.equal(got_sum, want_sum)
    alone, same = norm.forward(hidden)
    close(alone, reference(hidden).detach())
    assert same is hidden


def test_rms_norm_of_strided_heads() -> None:
    """Qwen3's norms on queries and keys see views of the fused projection."""
    norm = RMSNorm(NormConfig("rms", 8, 1e-6))
    assert norm.weight is not None
    norm.weight.copy_(torch.randn(8))
    heads = torch.randn(3, 4 * 8).view(3, 4, 8)[:, 1:3]
    close(norm.forward(heads)[0], norm.forward(heads.contiguous())[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(dtype: torch.dtype, affine: bool) -> None:
    norm = LayerNorm(NormConfig("layer", 48, 1e-5, affine)).to(dtype)
    for parameter in norm.parameters():
        parameter.copy_(torch.randn(48))
    hidden, residual = torch.randn(2, 5, 48).to(dtype)
    want_sum = hidden + residual
    got, got_sum = norm.forward(hidden, residual.clone())
    close(got, F.layer_norm(want_sum, (48,), norm.weight, norm.bias, 1e-5))
    assert torch.equal(got_sum, want_sum)


def test_a_layer_norm_without_a_shift() -> None:
    config = NormConfig("layer", 48, 1e-5, bias=False)
    norm = LayerNorm(config)
    assert [parameter.numel() for parameter in norm.parameters()] == [config.num_parameters]
    assert norm.weight is not None
    norm.weight.copy_(torch.randn(48))
    x = torch.randn(3, 48)
    close(norm.forward(x)[0], F.layer_norm(x, (48,), norm.weight, None, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_offset_and_multiplier(kind: NormKind, dtype: torch.dtype) -> None:
    """In float32: a scale near 1 whose distance from 1 is much smaller than bfloat16's steps."""
    plain = make_norm(NormConfig(kind, 48, 1e-5))
    norm = make_norm(NormConfig(kind, 48, 1e-5, offset=1.0, multiplier=0.25)).to(dtype)
    stored = 2**-12 * torch.arange(1, 49)
    assert norm.weight is not None
    assert plain.weight is not None
    norm.weight.copy_(stored)
    plain.weight.copy_(0.25 * (1 + norm.weight.float()))
    if norm.bias is not None and plain.bias is not None:
        norm.bias.normal_()
        plain.bias.copy_(0.25 * norm.bias.float())
    norm.finalize()
    assert list(norm.parameters()) == []
    assert torch.equal(norm.weight, plain.weight)
    x = torch.randn(5, 48).to(dtype)
    close(norm.forward(x)[0], plain.forward(x.float())[0].to(dtype))
    other = make_norm(NormConfig(kind, 48, 1e-5)).to(dtype)
    before = list(other.parameters())
    other.finalize()
    assert [id(each) for each in other.parameters()] == [id(each) for each in before]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_branches_and_of_parallel_blocks(kind: NormKind, dtype: torch.dtype) -> None:
    first, second, third = (make_norm(NormConfig(kind, 48, 1e-5)).to(dtype) for _ in range(3))
    for norm in (first, second, third):
        for parameter in norm.parameters():
            parameter.normal_()
    if third.bias is not None:
        third.bias.zero_()  # norms of branches are not shifted
    x, y, residual = torch.randn(3, 5, 48).to(dtype)

    total = (x.float() + y.float() + residual.float()).to(dtype)
    (normed, twin), summed = first.forward_each((x, y), residual.clone(), second)
    close(summed, total)
    close(normed, first.forward(total)[0])
    close(twin, second.forward(total)[0])
    normed, summed = first.forward((x, y), residual.clone())
    close(summed, total)
    close(normed, first.forward(total)[0])

    branch = third.forward(x.float())[0] if dtype == torch.float32 else third.forward(x)[0]
    total = (branch.float() + residual.float()).to(dtype)
    close(third.add_normed(x, residual.clone()), total)
    first.follow(Joining(third))
    assert len(list(first.modules())) == 1
    normed, summed = first.forward(x, residual.clone())
    close(summed, total)
    close(normed, first.forward(total)[0])  # what comes first of all has no residual and no norm
    close(add_partial(residual.clone(), (x, y)), residual + x + y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_results_are_normed_apart_and_join_a_stream_that_is_scaled(dtype: torch.dtype) -> None:
    norm, *others = (make_norm(NormConfig("rms", 48, 1e-5)).to(dtype) for _ in range(4))
    for each in (norm, *others):
        for parameter in each.parameters():
            parameter.normal_()
    scale = StreamScale()
    scale.weight.fill_(-0.5)
    scale.finalize()
    assert not list(scale.parameters()), "it is none of transformers', either"
    x, y, residual = torch.randn(3, 5, 48).to(dtype)
    of_sum, *of_each = others

    def normed(norm: Norm, x: Tensor) -> Tensor:
        return norm.float().forward(x.float())[0]

    joining = Joining(of_sum, (of_each[0], of_each[1]), scale)
    norm.follow(joining)
    results = norm.forward((x, y), residual.clone()), joining.add((x, y), residual.clone())
    both = normed(of_each[0], x) + normed(of_each[1], y)
    total = ((residual.float() + normed(of_sum, both)) * -0.5).to(dtype)
    close(results[0][1], total)
    close(results[1], total)
    close(results[0][0], normed(norm, total).to(dtype))


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_activations_equal_transformers(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    close(apply_epilogue(x, PLAIN_EPILOGUES[PLAIN_NAMES[name]]), ACT2FN[name](x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATED_NAMES)
@pytest.mark.parametrize("apply", [apply_epilogue, row_ops.apply_epilogue], ids=["torch", "cpu"])
def test_gated_activations(
    name: str, dtype: torch.dtype, apply: Callable[[Tensor, Epilogue], Tensor]
) -> None:
    gate, up = torch.randn(2, 3, 7).to(dtype)
    gate_up = torch.cat((gate, up), dim=-1)
    before = gate_up.clone()
    close(apply(gate_up, GATED_EPILOGUES[GATED_NAMES[name]]), ACT2FN[name](gate) * up)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("epilogue", [Epilogue.RELU, Epilogue.GELU])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_a_projection_with_its_epilogue_and_in_partial_sums(
    epilogue: Epilogue, device: str
) -> None:
    linear = PlainLinear(LinearConfig(1024, (192,), bias=True)).to(device, torch.bfloat16)
    assert linear.weight is not None
    assert linear.bias is not None
    linear.weight.normal_(std=1024**-0.5)
    linear.bias.normal_()
    weight = linear.weight.float()
    linear.finalize()
    for num_tokens in (1, 5, 200):
        x = torch.randn(num_tokens, 1024).to(device, torch.bfloat16)
        plain = F.linear(x.float(), weight, linear.bias.float())
        close(linear.forward(x, epilogue), apply_epilogue(plain, epilogue).to(torch.bfloat16))
        residual = torch.randn(num_tokens, 192).to(device, torch.bfloat16)
        wanted = (plain + residual.float()).to(torch.bfloat16)
        total = add_partial(residual, linear.forward_partial(x))
        assert total is residual
        close(total, wanted)


def test_position_embedding_offset() -> None:
    embedding = PositionEmbedding(6, 4, offset=2)
    embedding.weight.copy_(torch.randn(6, 4))
    assert torch.equal(embedding.forward(torch.tensor([0, 3])), embedding.weight[[2, 5]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_float32_and_tied_heads_share_memory(dtype: torch.dtype) -> None:
    embedding, head = (
        Embedding(40, 16).to(dtype),
        LMHead(LinearConfig(16, (40,))).to(dtype),
    )
    head.tie(embedding)
    embedding.weight.copy_(torch.randn(40, 16))
    assert head.linear.weight is embedding.weight
    head.linear.finalize()
    hidden = torch.randn(3, 16).to(dtype)
    logits = head.forward(hidden)
    assert logits.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(
        logits, hidden.float() @ embedding.weight.float().T, atol=tolerance, rtol=tolerance
    )
