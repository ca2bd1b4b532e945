"""Attention of encoders: one launch for all inputs, against torch's attention of each."""

from __future__ import annotations

import pytest
import torch
from attention_cases import seeded
from test_scores import TOLERANCE
from torch.profiler import profile

from octavo.layers.attention import RelativePositionBias
from octavo.layers.config import RelativeBiasConfig
from octavo.ops import LayerSpec, ScoreFunction
from octavo.ops.bidirectional import BidirectionalAttention, TorchBidirectional
from octavo.ops.cuda.attention_encoder import TritonBidirectional, encoder_config, encoder_items

CPU = torch.device("cpu")


def layers(
    num_heads: int, num_kv_heads: int, head_dim: int, has_bias: bool, device: torch.device
) -> list[LayerSpec]:
    """Two layers, which share their relative biases."""
    bias = None
    if has_bias:
        bias = RelativePositionBias(RelativeBiasConfig(num_heads, 16, 30, bidirectional=True))
        bias.weight.data = torch.randn(bias.weight.shape, generator=seeded(4)).mul(3).to(device)
    scores = ScoreFunction(0.2, relative_bias=bias)
    return [LayerSpec(i, num_heads, num_kv_heads, head_dim, scores) for i in range(2)]


def attended(
    attention: BidirectionalAttention,
    lens: tuple[int, ...],
    heads: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    attention.plan(lens, heads[0].dtype)
    return attention.forward(1, *heads).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "16-bit"])
@pytest.mark.parametrize(
    ("shape", "has_bias", "lens"),
    [
        ((2, 2, 64), True, (1, 77, 64, 130)),
        ((3, 1, 80), True, (33,)),
        ((2, 2, 128), False, (65, 2, 1)),
        ((1, 1, 16), True, (300,)),
        pytest.param((32, 32, 128), True, (512, 700, 1, 64), marks=pytest.mark.gpu),
    ],
)
def test_inputs_of_any_length_are_one_launch(
    shape: tuple[int, int, int],
    has_bias: bool,
    lens: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Queries, keys and values are parts of one tensor, behind which there is nothing to read."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter does not compute in bf16
    if device.type == "cpu" and shape[0] == 32:
        pytest.skip("too much for the interpreter")
    num_heads, num_kv_heads, head_dim = shape
    fused = torch.randn(sum(lens), num_heads + 2 * num_kv_heads, head_dim, generator=seeded(3))
    fused = fused.to(dtype)
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    torch_layers = layers(*shape, has_bias, CPU)
    want = attended(
        TorchBidirectional(torch_layers, CPU), lens, torch.split(fused.float(), sizes, dim=1)
    )
    triton = TritonBidirectional(layers(*shape, has_bias, device), device)
    got = attended(triton, lens, torch.split(fused.to(device), sizes, dim=1))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)

    # An input's result has the same bits whatever is computed beside it.
    alone = attended(triton, lens[:1], torch.split(fused[: lens[0]].to(device), sizes, dim=1))
    assert torch.equal(alone, got[: lens[0]])


def test_biases_of_long_inputs_take_the_memory_of_a_row() -> None:
    """No copy of them is made, of all queries or of some: with 3,000 keys each, 256 of them would
    take 24 MB."""
    attention = TorchBidirectional(layers(8, 8, 16, True, CPU), CPU)
    heads = torch.split(torch.randn(3_010, 24, 16, generator=seeded(6)), [8, 8, 8], dim=1)
    with torch.inference_mode(), profile(profile_memory=True) as profiled:
        attended(attention, (3_000, 10), heads)
    largest = max(event.cpu_memory_usage for event in profiled.events())
    assert largest < 8 * heads[0].nbytes


def test_work_items_cover_each_token_once() -> None:
    lens = torch.randint(1, 400, (50,), generator=seeded(5)).numpy().astype("int32")
    items = encoder_items(lens, 64)
    tokens = [t for begin, end, first, _ in items for t in range(first, min(end, first + 64))]
    assert sorted(tokens) == list(range(lens.sum()))
    ends = lens.cumsum()
    for begin, end, first, _ in items:
        assert begin <= first < end
        assert end in ends
        assert end - begin == lens[list(ends).index(end)]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="says nothing that the launches on a GPU do not"
)
@pytest.mark.parametrize("shared_memory", [99 << 10, 227 << 10])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_fit_into_shared_memory(head_dim: int, shared_memory: int) -> None:
    """Queries once; keys, values and biases of each tile in flight."""
    for has_bias in (False, True):
        config = encoder_config(torch.bfloat16, head_dim, has_bias, shared_memory)
        rows = config.queries + 2 * config.tile * config.num_stages
        biases = config.queries * config.tile * config.num_stages if has_bias else 0
        assert 2 * (head_dim * rows + biases) <= shared_memory
