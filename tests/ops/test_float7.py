"""FP8 weights in 7 bits, and products with them."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import Emulated
from test_experts import BACKENDS, CPU, expert_weights, numbers, routed_by, router_weights
from torch import Tensor

from octavo.float7 import UNIT
from octavo.ops.cuda import experts as cuda_experts
from octavo.ops.cuda import linear, linear_hopper
from octavo.ops.cuda.expert_tiles import choose_hopper_tiles
from octavo.ops.cuda.expert_weights import ExpertMatrices
from octavo.ops.cuda.float7 import (
    FREE,
    PIECE_WORDS,
    SHIFTS,
    launch_packing,
    pack_float7,
    takes_float7,
    unpack_float7,
)
from octavo.ops.cuda.linear_table import Tiles
from octavo.ops.cuda.quantize import empty_inputs, round_inputs
from octavo.ops.epilogue import Epilogue
from octavo.ops.quantized import RoundedInputs, Rounding, ScaledFloat8
from octavo.routing import RoutingConfig


def all_numbers() -> Tensor:
    """e4m3 [128]: those that the form has, without NaN."""
    codes = torch.tensor([code | sign for sign in (0, 0x80) for code in range(64)])
    values = codes[codes & 0x3F != 0x3F].to(torch.uint8).view(torch.float8_e4m3fn)
    return (values.float() * 2.0**UNIT).to(torch.float8_e4m3fn)


def weight_of(num_rows: int, size: int, device: torch.device = CPU) -> Tensor:
    """e4m3 [num_rows, size], of all the numbers that the form has."""
    found = all_numbers()
    generator = torch.Generator().manual_seed(num_rows + size)
    places = torch.randint(len(found), (num_rows, size), generator=generator)
    return found.view(torch.uint8)[places].view(torch.float8_e4m3fn).to(device)


def as_bytes(weight: Tensor) -> Tensor:
    return weight.view(torch.uint8)


@pytest.mark.parametrize("shape", [(8, 128), (5, 128), (24, 384), (131, 640)])
def test_weights_keep_all_their_bits(device: torch.device, shape: tuple[int, int]) -> None:
    weight = weight_of(*shape)
    assert takes_float7(weight)
    packed = pack_float7(weight)
    assert packed.words.shape == (-(-shape[0] // 8), shape[1] // 128, PIECE_WORDS)
    assert torch.equal(as_bytes(unpack_float7(packed)), as_bytes(weight))
    words = torch.full_like(packed.words, -1, device=device)
    launch_packing(weight.to(device), words)
    assert torch.equal(words.cpu(), packed.words)
    if device.type == "cuda":
        on_gpu = pack_float7(weight.to(device))
        assert torch.equal(on_gpu.words.cpu(), packed.words)
        assert torch.equal(as_bytes(unpack_float7(on_gpu).cpu()), as_bytes(weight))


def test_words_are_the_registers_of_tensor_cores() -> None:
    """Thread 4 r + c has of row r the inputs 4 c to 4 c + 3 of each 16, as W / 2 ** UNIT."""
    weight = weight_of(8, 128)
    small = as_bytes((weight.float() * 2.0**-UNIT).to(torch.float8_e4m3fn))
    words = pack_float7(weight).words[0, 0].tolist()
    for thread in (0, 6, 31):
        own = [words[4 * thread + i] for i in range(4)]
        own += [words[128 + 2 * thread], words[128 + 2 * thread + 1], words[192 + thread]]
        last = 0
        for word, shift in zip(own, SHIFTS, strict=True):
            free = word & FREE
            last |= free << shift if shift > 0 else free >> -shift
        for i, register in enumerate([*(word & ~FREE for word in own), last]):
            start = 16 * i + 4 * (thread % 4)
            wanted = small[thread // 4, start : start + 4].tolist()
            assert list((register & 0xFFFFFFFF).to_bytes(4, "little")) == wanted


@pytest.mark.parametrize("value", [0.25, 3.75, 0.75, torch.nan])
def test_what_has_no_such_form(value: float) -> None:
    weight = weight_of(16, 256)
    weight[9, 200] = value
    assert not takes_float7(weight)
    assert not takes_float7(weight[:, :192])
    assert takes_float7(weight[:9])


def test_quantizing_gives_such_numbers_where_little_is_lost(device: torch.device) -> None:
    """Rows of weights of the same size have them. Those with one that is many times the others, or
    with numbers of e4m3, have all of e4m3's, and lose no more than that does."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(64, 1024, generator=generator).to(device)
    dense[3, 5] = 100.0
    plain = ScaledFloat8.quantize(dense, (1, 1024))
    dense[7] = plain.dequantize()[3]
    dense[8] = 0
    form = ScaledFloat8.quantize(dense, (1, 1024))
    rows = [row for row in range(64) if not takes_float7(form.weight[row : row + 1])]
    assert rows == [3, 7]
    torch.testing.assert_close(form.dequantize()[7], dense[7], rtol=1e-6, atol=0.0)
    scales = dense.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 448
    in_e4m3 = (dense / scales).to(torch.float8_e4m3fn).float() * scales
    lost = (form.dequantize() - dense).norm(dim=1)
    assert (lost <= 1.26 * (in_e4m3 - dense).norm(dim=1)).all()
    assert lost.norm() < 1.001 * (in_e4m3 - dense).norm()


def packed_form(dense: Tensor) -> ScaledFloat8:
    """FP8 that has the form, of numbers of all sizes."""
    form = ScaledFloat8.quantize(dense, (1, dense.shape[-1]))
    numbers_of_all = weight_of(dense[..., 0].numel(), dense.shape[-1], dense.device)
    return ScaledFloat8(numbers_of_all.view(dense.shape), form.scales, form.block)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_sms"), [(3, 4, 9), (20, 2, 10), (20, 13, 3), (21, 13, 300)]
)
def test_experts_give_what_those_of_8_bits_do(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    num_tokens: int,
    top_k: int,
    num_sms: int,
) -> None:
    """Bit by bit, of tiles of 16 and of 32 tokens; but tensor cores align the products that they
    add by exponents, and the copy's numbers below 2 ** -6 all have the same."""
    config = RoutingConfig(num_experts=13, top_k=top_k)
    size, inner = 256, 384
    dense = expert_weights(13, size, inner, device)
    up, down = (ExpertMatrices.of(packed_form(each)) for each in dense[:2])
    assert up is not None
    assert down is not None
    x = numbers(num_tokens, size, device=device).bfloat16()
    router = router_weights(config, size, device)
    routed = routed_by(BACKENDS["triton"], router, config, x.float())
    if device.type == "cpu":
        monkeypatch.setattr(cuda_experts, "grouped_kernel", Emulated(cuda_experts.grouped_kernel))
        monkeypatch.setattr(cuda_experts, "num_sms", lambda device: num_sms)
    tiles = choose_hopper_tiles(num_tokens, routed.lists.block_rows, up, down)
    assert tiles is not None
    packed = tuple(pack_float7(each.values.flatten(0, 1)) for each in (up, down))
    results = []
    for words in (None, packed):
        out = torch.full((top_k, num_tokens, size), torch.nan, device=device)
        inputs = round_inputs(x, Rounding.IN_TWO)
        cuda_experts.launch_on_hopper(
            inputs, (up, down), (None, None), out, routed, Epilogue.SILU_MUL, tiles, words
        )
        assert not cuda_experts.progress_of(device).any()
        results.append(out)
    assert results[0].isfinite().all()
    if device.type == "cuda":
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
    else:
        assert torch.equal(*results)


PRODUCTS: list[tuple[int, Rounding, int, Tiles, Epilogue]] = [
    # Tokens, what they are rounded to, inputs of a group; W's tiles.
    (5, Rounding.IN_TWO, 512, Tiles(8, 64, 256, 3), Epilogue.NONE),
    (13, Rounding.IN_TWO, 512, Tiles(16, 64, 128, 2), Epilogue.SILU_MUL),
    (7, Rounding.IN_TWO, 64, Tiles(8, 64, 256, 2, splits=2), Epilogue.NONE),
    (20, Rounding.IN_TWO, 128, Tiles(32, 64, 256, 2), Epilogue.GELU),
    (40, Rounding.TOKENS, 0, Tiles(64, 128, 128, 3, warps=8), Epilogue.NONE),
    (40, Rounding.TOKENS, 0, Tiles(64, 64, 128, 2), Epilogue.SILU_MUL),
    (40, Rounding.SPANS, 512, Tiles(64, 64, 256, 3, splits=3), Epilogue.NONE),
]


@pytest.mark.parametrize(("num_tokens", "rounding", "group", "tiles", "epilogue"), PRODUCTS)
def test_products_give_what_those_of_8_bits_do(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    num_tokens: int,
    rounding: Rounding,
    group: int,
    tiles: Tiles,
    epilogue: Epilogue,
) -> None:
    """Bit by bit, of rows that no tile divides."""
    num_rows, size = (224 if epilogue.is_gated else 176), 1152
    form = packed_form(numbers(num_rows, size, device=device))
    x = numbers(num_tokens, size, device=device).bfloat16()
    inputs = round_inputs(x, rounding)
    if group not in (0, inputs.group):
        scales = torch.linspace(0.1, 2, -(-size // group) * 128, device=device).view(-1, 128)
        inputs = RoundedInputs(inputs.values, scales, group)
    if device.type == "cpu":
        workspace = torch.empty(1 << 20), torch.zeros(1 << 10, dtype=torch.int32)
        monkeypatch.setattr(linear, "split_workspace", lambda device: workspace)
        kernel = Emulated(linear_hopper.linear_kernel)
        monkeypatch.setattr(linear_hopper, "linear_kernel", kernel)
    packed = pack_float7(form.weight)
    outputs = num_rows // 2 if epilogue.is_gated else num_rows
    bias = None if epilogue.is_gated else numbers(1, num_rows, device=device)[0].bfloat16()
    is_rounded = epilogue.is_gated and rounding is Rounding.IN_TWO
    for is_partial in {False, tiles.splits > 1}:
        results = []
        for scales, words in ((form.scales, None), (form.scales * 2.0**UNIT, packed)):
            out: Tensor | RoundedInputs
            if is_rounded:
                out = empty_inputs(num_tokens, outputs, Rounding.IN_TWO, device, group=tiles.rows)
            elif is_partial:
                out = torch.full((tiles.splits, num_tokens, outputs), torch.nan, device=device)
            else:
                out = torch.full((num_tokens, outputs), torch.nan, device=device).bfloat16()
            of_rows = scales, 1
            linear.launch_dense(
                inputs, form.weight, bias, out, epilogue, tiles, is_partial, of_rows, words
            )
            results.append(out.values.view(torch.uint8) if is_rounded else out)  # type: ignore[union-attr]
        assert is_rounded or results[0].isfinite().all()
        if device.type == "cpu" and is_partial:  # whose products add up in another order
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(*results)
