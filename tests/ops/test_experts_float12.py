"""Experts with copies of their weights in 12 bits, against the reference in float32."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import Emulated
from test_experts import CPU, expert_weights, numbers, router_weights, total
from torch import Tensor

from octavo.float12 import MOST_DOWN_INPUTS, MOST_GATE_INPUTS
from octavo.ops.cuda import experts_hopper_float12, experts_one_float12
from octavo.ops.cuda.experts import mix as cuda_mix
from octavo.ops.cuda.experts import progress_of
from octavo.ops.cuda.experts_copied import CopiedExperts, take_copies
from octavo.ops.cuda.routing import CudaRouter, list_blocks
from octavo.ops.epilogue import Epilogue
from octavo.ops.expert_kernels import make_experts_kernel
from octavo.ops.experts import ExpertWeights, Routed, mix
from octavo.routing import RoutingConfig


@pytest.fixture
def hopper_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        for module, name in (
            (experts_one_float12, "_gate_up_float12_kernel"),
            (experts_one_float12, "_down_float12_kernel"),
            (experts_hopper_float12, "grouped_float12_kernel"),
        ):
            monkeypatch.setattr(module, name, Emulated(getattr(module, name)))
        monkeypatch.setattr(experts_hopper_float12, "num_sms", lambda device: 3)


def bfloat16_experts(num: int, size: int, inner: int, device: torch.device) -> ExpertWeights:
    dense = expert_weights(num, size, inner, device)
    # Rows of different sizes, and small weights among large ones.
    dense.up.mul_(torch.logspace(-2, 0, 2 * inner, device=device)[:, None])
    dense.down[..., ::3] *= 2.0**-12
    return ExpertWeights(dense.up.bfloat16(), dense.down.bfloat16())


def routed_rows(config: RoutingConfig, x: Tensor) -> Routed:
    weights = router_weights(config, x.shape[1], x.device)
    num_hit = torch.zeros(1, dtype=torch.int64, device=x.device)
    return CudaRouter(weights, config, num_hit).apply(x.float())


@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 40])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "size", "inner"), [(5, 2, 320, 64), (4, 4, 64, 192), (3, 1, 576, 320)]
)
def test_copies_give_what_weights_do(
    device: torch.device, num_experts: int, top_k: int, size: int, inner: int, num_tokens: int
) -> None:
    """Sizes that no tile divides; all experts, and one."""
    config = RoutingConfig(num_experts=num_experts, top_k=top_k)
    weights = bfloat16_experts(num_experts, size, inner, device)
    assert take_copies(weights)
    kernel = CopiedExperts(weights, Epilogue.SILU_MUL, range(1, 41))
    x = numbers(num_tokens, size, device=device).bfloat16()
    routed = routed_rows(config, x)
    got = total(kernel.apply_partial(x, routed))
    wanted = mix(x.float(), routed, weights, Epilogue.SILU_MUL)
    assert (got - wanted).norm() < 4e-3 * wanted.norm()  # gates are rounded in between
    if device.type == "cpu":
        assert not progress_of(CPU).any()


@pytest.mark.usefixtures("hopper_kernels", "poisoned")
@pytest.mark.parametrize("num_tokens", [1, 21, 60])
def test_all_rows_on_the_same_experts(device: torch.device, num_tokens: int) -> None:
    """An expert has more rows than a block holds, and lists hold anything behind their last one."""
    weights = bfloat16_experts(6, 128, 192, device)
    kernel = CopiedExperts(weights, Epilogue.GELU_TANH_MUL, range(1, 61))
    x = numbers(num_tokens, 128, device=device).bfloat16()
    ids = torch.tensor([[5, 2]], dtype=torch.int32, device=device).repeat(num_tokens, 1)
    shares = torch.linspace(0.1, 1, 2 * num_tokens, device=device).view(num_tokens, 2)
    num_hit = torch.zeros(1, dtype=torch.int64, device=device)
    lists = None if num_tokens == 1 else list_blocks(ids, 6, num_hit)
    if lists is not None:
        num_blocks = int(lists.num_blocks)
        assert num_blocks > 2 or num_tokens < 60
        for each in lists[1:4]:
            each[num_blocks:] = 2**31 - 1
    routed = Routed(ids, shares, lists)
    got = total(kernel.apply_partial(x, routed))
    wanted = mix(x.float(), routed, weights, Epilogue.GELU_TANH_MUL)
    assert (got - wanted).norm() < 4e-3 * wanted.norm()


@pytest.mark.usefixtures("hopper_kernels", "poisoned")
def test_a_bad_row_stays_alone(device: torch.device) -> None:
    weights = bfloat16_experts(4, 192, 64, device)
    kernel = CopiedExperts(weights, Epilogue.SILU_MUL, range(1, 41))
    x = numbers(20, 192, device=device).bfloat16()
    routed = routed_rows(RoutingConfig(num_experts=4, top_k=2), x)
    before = total(kernel.apply_partial(x, routed))
    x[3, 5], x[11] = torch.nan, torch.inf
    after = total(kernel.apply_partial(x, routed))
    others = [row for row in range(20) if row not in (3, 11)]
    assert after[3].isnan().all()
    assert torch.equal(after[others], before[others])


def test_what_is_left_to_the_weights(device: torch.device) -> None:
    """Numbers of tokens that gain nothing, and weights that have no such form."""
    weights = bfloat16_experts(4, 64, 64, device)
    kernel = CopiedExperts(weights, Epilogue.SILU_MUL, range(2, 3))
    x = numbers(1, 64, device=device).bfloat16()
    routed = routed_rows(RoutingConfig(num_experts=4, top_k=2), x)
    plain = cuda_mix(x, routed, weights, Epilogue.SILU_MUL)
    assert torch.equal(kernel.apply_partial(x, routed), plain)
    weights.up[1, 2, 3] = torch.nan
    assert not take_copies(weights)
    assert not take_copies(bfloat16_experts(4, 72, 64, device))
    assert not take_copies(expert_weights(4, 64, 64, device))
    biases = torch.zeros(4, 128), torch.zeros(4, 64)
    assert not take_copies(ExpertWeights(*bfloat16_experts(4, 64, 64, device)[:2], *biases))


@pytest.mark.slow  # on a CPU: the tiles of all registers are emulated
@pytest.mark.usefixtures("hopper_kernels")
def test_the_longest_inputs_of_one_token(device: torch.device) -> None:
    """All that registers hold: eight tiles of gates, and sixteen of all down projections."""
    for num_experts, size, inner in ((2, MOST_GATE_INPUTS, 64), (2, 64, MOST_DOWN_INPUTS // 2)):
        weights = bfloat16_experts(num_experts, size, inner, device)
        x = numbers(1, size, device=device).bfloat16()
        routed = routed_rows(RoutingConfig(num_experts=2, top_k=2), x)
        kernel = CopiedExperts(weights, Epilogue.SILU_MUL, range(1, 2))
        got = total(kernel.apply_partial(x, routed))
        wanted = mix(x.float(), routed, weights, Epilogue.SILU_MUL)
        assert (got - wanted).norm() < 4e-3 * wanted.norm()


@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_rows_of_large_weights(device: torch.device, num_tokens: int) -> None:
    """Powers of two of rows, and those that are left out of inputs, are beyond float32 together."""
    weights = bfloat16_experts(2, 64, 64, device)
    weights.down.copy_(torch.full_like(weights.down, 2.0**80))
    weights.down[:, ::2] *= -1
    x = numbers(num_tokens, 64, device=device).bfloat16()
    routed = routed_rows(RoutingConfig(num_experts=2, top_k=2), x)
    kernel = CopiedExperts(weights, Epilogue.SILU_MUL, range(1, 4))
    got = total(kernel.apply_partial(x, routed))
    wanted = mix(x.float(), routed, weights, Epilogue.SILU_MUL)
    assert ((got - wanted) / 2.0**80).norm() < 4e-3 * (wanted / 2.0**80).norm()


def test_rows_that_are_not_aligned_are_left_to_the_weights(device: torch.device) -> None:
    weights = bfloat16_experts(4, 64, 64, device)
    kernel = CopiedExperts(weights, Epilogue.SILU_MUL, range(1, 41))
    x = numbers(3, 72, device=device).bfloat16()[:, :64]
    routed = routed_rows(RoutingConfig(num_experts=4, top_k=2), x)
    plain = cuda_mix(x, routed, weights, Epilogue.SILU_MUL)
    assert torch.equal(kernel.apply_partial(x, routed), plain)


def test_which_experts_get_copies() -> None:
    weights = bfloat16_experts(4, 64, 64, CPU)
    assert isinstance(make_experts_kernel(weights, Epilogue.SILU_MUL, range(1, 9)), CopiedExperts)
    for given, copied_tokens in (
        (weights, range(0)),
        (bfloat16_experts(4, 72, 64, CPU), range(1, 9)),
        (ExpertWeights(weights.up, weights.down * torch.inf), range(1, 9)),
    ):
        kernel = make_experts_kernel(given, Epilogue.SILU_MUL, copied_tokens)
        assert not isinstance(kernel, CopiedExperts)
