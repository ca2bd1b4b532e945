"""Kernels of mixtures of experts against the reference in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from _pytest.mark import ParameterSet
from gluon_emulator import Emulated
from torch import Tensor

from daily_cases import checkered
from octavo.layers import experts as layers_experts
from octavo.layers.base import WeightOwner
from octavo.layers.config import ExpertsConfig, MLPConfig, NormConfig
from octavo.layers.experts import MixtureOfExperts
from octavo.layers.mlp import DenseMLP
from octavo.layers.norm import Joining, RMSNorm
from octavo.ops.cpu.experts import PackedExperts
from octavo.ops.cuda import experts as cuda_experts
from octavo.ops.cuda import (
    experts_mx_hopper,
    experts_one_float8,
    experts_one_mx,
    routing,
    routing_normed,
)
from octavo.ops.cuda.expert_tables import ExpertTables
from octavo.ops.cuda.expert_tiles import (
    choose_hopper_tiles,
    choose_tiles,
    max_blocks,
    tokens_per_tile,
)
from octavo.ops.cuda.expert_weights import ExpertMatrices
from octavo.ops.cuda.routing import CudaRouter, empty_lists, list_blocks
from octavo.ops.cuda.routing_in_kernel import routes_in_kernel
from octavo.ops.cuda.routing_normed import CudaNormRouter
from octavo.ops.epilogue import Epilogue
from octavo.ops.expert_kernels import SeparateExperts, TorchRouter
from octavo.ops.experts import (
    ExpertsKernel,
    ExpertWeights,
    QuantizedExpertWeights,
    Routed,
    RouterKernel,
    RouterWeights,
    Unrouted,
    mix,
    route,
)
from octavo.ops.linear import has_numba_kernel
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import (
    GroupedInt,
    MxFloat4,
    QuantizedWeight,
    Rounding,
    ScaledFloat8,
    round_inputs,
)
from octavo.routing import RoutingConfig, Scoring

SHARED_MEMORY = 227 << 10  # bytes of a multiprocessor
CPU = torch.device("cpu")
RULES = {
    "softmax": RoutingConfig(num_experts=6, top_k=2, renormalised=False),
    "chosen-softmax": RoutingConfig(num_experts=13, top_k=4, bias=True),
    "all": RoutingConfig(num_experts=5, top_k=5),
    "one": RoutingConfig(num_experts=4, top_k=1, renormalised=False),
    "groups": RoutingConfig(
        num_experts=24, top_k=5, num_groups=6, top_groups=2, renormalised=False, scale=0.5
    ),
    "sigmoid": RoutingConfig(num_experts=8, top_k=3, scoring=Scoring.SIGMOID, correction=True),
    "grouped-sigmoid": RoutingConfig(
        num_experts=12,
        top_k=4,
        scoring=Scoring.SIGMOID,
        correction=True,
        num_groups=4,
        top_groups=2,
        scale=2.5,
    ),
    "scaled": RoutingConfig(num_experts=9, top_k=3, expert_scales=True),
    "sparsemixer": RoutingConfig(
        num_experts=7, top_k=2, scoring=Scoring.SPARSEMIXER, renormalised=False, jitter=0.3
    ),
}


Backend = tuple[
    Callable[[RouterWeights, RoutingConfig, Tensor], RouterKernel],
    Callable[[ExpertWeights, Epilogue], ExpertsKernel],
]


def numbers(*shape: int, seed: int = 0, device: torch.device = CPU) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device=device)


def router_weights(config: RoutingConfig, size: int, device: torch.device) -> RouterWeights:
    num = config.num_experts
    return RouterWeights(
        numbers(num, size, device=device) * 2 * size**-0.5,
        numbers(num, device=device) if config.bias else None,
        numbers(num, device=device) * 0.3 if config.correction else None,
        numbers(num, seed=1, device=device) if config.expert_scales else None,
    )


def expert_weights(
    num: int, size: int, inner: int, device: torch.device, has_bias: bool = False
) -> ExpertWeights:
    return ExpertWeights(
        numbers(num, 2 * inner, size, device=device) * size**-0.5,
        numbers(num, size, inner, device=device) * inner**-0.5,
        numbers(num, 2 * inner, device=device) if has_bias else None,
        numbers(num, size, device=device) if has_bias else None,
    )


def total(result: Tensor) -> Tensor:
    """What a norm makes of the kernel's result."""
    return result.float().sum(0) if result.dim() == 3 else result.float()


def routed_by(backend: Backend, weights: RouterWeights, config: RoutingConfig, x: Tensor) -> Routed:
    num_hit = torch.zeros(1, dtype=torch.int64, device=x.device)
    return backend[0](weights, config, num_hit).apply(x)


def assert_routed(got: Routed, want: Routed) -> None:
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-5, atol=1e-6)


def cuda_kernel(
    weights: ExpertWeights | QuantizedExpertWeights, epilogue: Epilogue
) -> ExpertsKernel:
    kernel = cuda_experts.CudaExperts.of(weights, epilogue)
    assert kernel is not None
    return kernel


def gpu_kernel(
    weights: QuantizedExpertWeights, epilogue: Epilogue, dtype: torch.dtype
) -> ExpertsKernel:
    """The one that a GPU gets."""
    kernel = experts_mx_hopper.MxExperts.of(weights, epilogue, dtype)
    return kernel or cuda_kernel(weights, epilogue)


BACKENDS: dict[str, Backend] = {
    "triton": (CudaRouter, cuda_kernel),
    "packed": (TorchRouter, PackedExperts),
    "separate": (TorchRouter, SeparateExperts),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    is_triton = request.param == "triton"
    if not is_triton and device.type == "cuda":
        pytest.skip("computes on the CPU")
    if request.param == "packed" and not has_numba_kernel(torch.zeros(16, 16)):
        pytest.skip("this CPU lacks AVX-512")
    if is_triton:
        request.getfixturevalue("poisoned")
    return BACKENDS[request.param]


@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("rule", RULES)
def test_routing(backend: Backend, device: torch.device, rule: str, num_tokens: int) -> None:
    config = RULES[rule]
    weights = router_weights(config, 50, device)
    num_hit = torch.zeros(1, dtype=torch.int64, device=device)
    kernel = backend[0](weights, config, num_hit)
    hit = 0
    for seed in range(2):
        x = numbers(num_tokens, 50, seed=seed, device=device)
        want = route(x, weights, config)
        assert_routed(kernel.apply(x), want)
        hit += len(want.ids.unique())
    assert int(num_hit) == hit


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("rule", RULES)
def test_an_expert_s_router_that_is_nan_is_found(
    backend: Backend, device: torch.device, rule: str
) -> None:
    """By the weights of every token, also where all other scores are finite."""
    config = RULES[rule]
    weights = router_weights(config, 50, device)
    weights.weight[2, 7] = torch.nan
    x = numbers(20, 50, device=device)
    got, want = routed_by(backend, weights, config, x), route(x, weights, config)
    assert torch.equal(got.ids, want.ids)
    assert got.weights.isnan().any(1).all()
    assert all(len(row.unique()) == config.top_k for row in got.ids)


@pytest.mark.parametrize(("size", "num_tokens"), [(1_100, 3), (8_300, 3), (1_100, 40)])
def test_routing_of_long_inputs(device: torch.device, size: int, num_tokens: int) -> None:
    config = RULES["softmax"]
    weights = RouterWeights(
        numbers(config.num_experts, size, device=device) / size**0.5,
        numbers(config.num_experts, seed=1, device=device),
    )
    x = numbers(num_tokens, size, device=device)
    assert_routed(routed_by(BACKENDS["triton"], weights, config, x), route(x, weights, config))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("size", "num_tokens"),
    [(300, 3), (1_100, 40), pytest.param(1_100, 600, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("rounding", [Rounding.IN_TWO, Rounding.TOKENS_IN_TWO])
def test_routers_make_two_numbers_of_inputs(
    device: torch.device, rounding: Rounding, size: int, num_tokens: int
) -> None:
    """To the last bit as a kernel of its own does, in rows that are not finite, too; and they
    choose the same experts."""
    config = RULES["softmax"]
    weights = RouterWeights(numbers(config.num_experts, size, device=device).bfloat16())
    x = numbers(num_tokens, size, device=device).bfloat16()
    x[1, 100], x[2, 5] = torch.nan, torch.inf
    num_hit = torch.zeros(1, dtype=torch.int64, device=device)
    router = CudaRouter(weights, config, num_hit)
    plain, routed = router.apply(x), router.apply(x, rounding)
    assert torch.equal(routed.ids, plain.ids)
    assert plain.inputs is None
    assert routed.inputs is not None
    wanted = cuda_experts.round_inputs(x, rounding)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    pair = routed.inputs.values.float(), wanted.values.float()
    if device.type == "cpu":  # the interpreter stores NaN as a number of either sign
        pair = pair[0].abs(), pair[1].abs()
    torch.testing.assert_close(*pair, **same)
    used = (..., slice(0, num_tokens if rounding.group else 1))
    torch.testing.assert_close(routed.inputs.scales[used], wanted.scales[used], **same)


def deferred(
    num_parts: int, num_tokens: int, size: int, device: torch.device, dtype: torch.dtype
) -> DeferredNorm:
    """Of partial sums, if there are several, or of a complete one."""
    x = numbers(num_parts, num_tokens, size, device=device)
    residual = numbers(num_tokens, size, seed=1, device=device).to(dtype)
    return DeferredNorm(
        x if num_parts > 1 else x[0].to(dtype),
        numbers(size, seed=2, device=device).to(dtype),
        1e-5,
        1.0,
        residual,
        torch.full_like(residual, torch.nan),
    )


def normed_by_reference(norm: DeferredNorm) -> tuple[Tensor, Tensor]:
    """The norm and what is normed, in float32."""
    assert norm.residual is not None
    x = norm.x.float()
    total = (x.sum(0) if x.dim() == 3 else x) + norm.residual.float()
    total = total.to(norm.residual.dtype).float()
    scale = norm.weight.float() + norm.offset
    return F.rms_norm(total, scale.shape, scale, norm.eps), total


def assert_listed(routed: Routed, num_experts: int) -> None:
    """By experts, and in the order of tokens."""
    num_hit = torch.zeros(1, dtype=torch.int64, device=routed.ids.device)
    wanted = list_blocks(routed.ids, num_experts, num_hit)
    assert torch.equal(routed.lists.num_blocks, wanted.num_blocks)
    assert torch.equal(routed.lists.rows, wanted.rows)
    count = int(wanted.num_blocks)
    for name in ("experts", "begins", "ends"):
        assert torch.equal(getattr(routed.lists, name)[:count], getattr(wanted, name)[:count]), name


def test_lists_begin_where_kernels_expect_it(device: torch.device) -> None:
    """Kernels are compiled again for arrays that do not begin at multiples of 16 bytes."""
    for num_tokens in range(2, 40):
        lists = empty_lists(num_tokens, 3, 13, device)
        assert not any(each.data_ptr() % 16 for each in lists[:5])


@pytest.mark.parametrize(
    ("num_parts", "num_tokens", "size"), [(3, 4, 50), (1, 7, 150), (2, 8, 530)]
)
@pytest.mark.parametrize("rule", RULES)
def test_a_router_norms_its_inputs(
    device: torch.device, rule: str, num_parts: int, num_tokens: int, size: int
) -> None:
    config = RULES[rule]
    weights = router_weights(config, size, device)
    num_hit = torch.zeros(1, dtype=torch.int64, device=device)
    router = CudaNormRouter(weights, config, num_hit)
    assert router.norms_inputs(num_tokens)
    norm = deferred(num_parts, num_tokens, size, device, torch.float32)
    wanted, total = normed_by_reference(norm)
    rounding = Rounding.TOKENS_IN_TWO if num_tokens == 7 else Rounding.IN_TWO
    routed = router.apply(norm, rounding)
    assert_routed(routed, route(wanted, weights, config))
    assert_listed(routed, config.num_experts)
    assert int(num_hit) == len(routed.ids.unique())
    assert norm.total is not None
    assert routed.normed is not None
    assert routed.inputs is not None
    torch.testing.assert_close(norm.total, total)
    torch.testing.assert_close(routed.normed, wanted)
    in_two = cuda_experts.round_inputs(routed.normed, rounding)
    assert torch.equal(routed.inputs.values.float(), in_two.values.float())
    used = (..., slice(0, num_tokens if rounding.group else 1))
    assert torch.equal(routed.inputs.scales[used], in_two.scales[used])
    assert (routing_normed._board(device) == routing_normed.EMPTY.value).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_a_bad_row_stays_alone_where_a_router_norms(device: torch.device, bad: float) -> None:
    """Logits of zero announce themselves, too."""
    config = RULES["grouped-sigmoid"]
    weights = router_weights(config, 300, device)
    router = CudaNormRouter(weights, config, torch.zeros(1, dtype=torch.int64, device=device))
    norm = deferred(1, 5, 300, device, torch.float32)
    assert norm.residual is not None
    wanted = router.apply(norm)
    norm.x[2], norm.residual[2] = bad, -0.0
    routed = router.apply(norm)
    others = [0, 1, 3, 4]
    assert torch.equal(routed.ids[others], wanted.ids[others])
    assert torch.equal(routed.weights[others], wanted.weights[others])
    assert routed.weights[2].isfinite().all() == (bad == 0)
    assert len(routed.ids[2].unique()) == config.top_k
    assert_listed(routed, config.num_experts)
    assert (routing_normed._board(device) == routing_normed.EMPTY.value).all()


def test_routers_norm_the_inputs_of_few_tokens(device: torch.device) -> None:
    config = RoutingConfig(num_experts=128, top_k=8)

    def norms(num_tokens: int, size: int = 4096, dtype: torch.dtype = torch.bfloat16) -> bool:
        weights = RouterWeights(torch.empty((128, size), dtype=dtype, device=device))
        num_hit = torch.zeros(1, dtype=torch.int64, device=device)
        return CudaNormRouter(weights, config, num_hit).norms_inputs(num_tokens)

    assert [norms(num_tokens) for num_tokens in (3, 4, 8, 9)] == [False, True, True, False]
    assert not norms(4, 4160)
    assert not norms(4, dtype=torch.float16), "scaled inputs may be too large"


@pytest.mark.parametrize("has_shared", [False, True])
def test_a_norm_is_left_to_a_router(monkeypatch: pytest.MonkeyPatch, has_shared: bool) -> None:
    """Of few tokens, and also if there are partial sums; the experts read what it has normed."""
    monkeypatch.setattr(layers_experts, "make_router_kernel", CudaNormRouter)
    monkeypatch.setattr(
        layers_experts,
        "make_experts_kernel",
        lambda weights, epilogue, copied_tokens: cuda_kernel(weights, epilogue),
    )
    routing_config = RoutingConfig(num_experts=6, top_k=2)
    config = ExpertsConfig(
        hidden_size=96, intermediate_size=32, activation="silu", routing=routing_config
    )
    if has_shared:
        shared = MLPConfig(kind="gated", hidden_size=96, intermediate_size=32, activation="silu")
        config = replace(config, shared=shared, shared_gate=True)
    block, norm = MixtureOfExperts(config), RMSNorm(NormConfig("rms", 96, 1e-5, offset=1.0))
    block.router.num_hit = torch.zeros(1, dtype=torch.int64)
    for module in (*block.modules(), norm):
        if isinstance(module, WeightOwner):
            for parameter in module.parameters():
                parameter.data = numbers(*parameter.shape) * 0.2
            module.finalize()
    parts, residual = numbers(2, 20, 96), numbers(20, 96, seed=1)

    def run(hidden: Tensor, before: Tensor) -> tuple[bool, Tensor, Tensor]:
        given, stream = norm.forward_for(block, hidden, before.clone())
        result = block.forward(given)
        results = result if isinstance(result, tuple) else (result,)
        summed = sum(each.sum(0) if each.dim() == 3 else each for each in results)
        assert isinstance(summed, Tensor)
        return isinstance(given, DeferredNorm), summed, stream

    is_deferred, wanted, total = run(parts.sum(0), residual)
    assert not is_deferred
    for hidden in (parts.sum(0)[:7], parts[:, :7]):
        is_deferred, got, stream = run(hidden.contiguous(), residual[:7])
        assert is_deferred
        torch.testing.assert_close(got, wanted[:7], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stream, total[:7])
    norm.follow(Joining(norm))
    assert isinstance(norm.forward_for(block, parts[0, :7], residual[:7].clone())[0], Tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("config", "size", "num_parts"),
    [
        (RoutingConfig(num_experts=128, top_k=8), 2048, 4),
        (RoutingConfig(num_experts=32, top_k=4, bias=True), 2880, 2),
        (RoutingConfig(num_experts=40, top_k=3, scoring=Scoring.SIGMOID), 4096, 1),
    ],
)
def test_a_router_that_norms_again_and_again(
    config: RoutingConfig, size: int, num_parts: int
) -> None:
    """In one launch after the other, also of a graph: the same bits, and what two kernels make,
    within what rounding inputs before their norm or after it changes."""
    device = torch.device("cuda")
    exact = router_weights(config, size, device)
    bias = None if exact.bias is None else exact.bias.bfloat16()
    weights = RouterWeights(exact.weight.bfloat16(), bias)
    num_hit = torch.zeros(1, dtype=torch.int64, device=device)
    router = CudaNormRouter(weights, config, num_hit)
    norms = [deferred(num_parts, n, size, device, torch.bfloat16) for n in (2, 5, 8)]
    firsts = [router.apply(norm, Rounding.IN_TWO) for norm in norms]
    for norm, routed in zip(norms, firsts, strict=True):
        wanted, total = normed_by_reference(norm)
        assert routed.normed is not None
        assert norm.total is not None
        assert (routed.normed - wanted).norm() < 3e-3 * wanted.norm()
        assert (norm.total - total).norm() < 1e-3 * total.norm()
        assert_listed(routed, config.num_experts)
        reference = route(wanted, weights, config)
        is_same = (routed.ids == reference.ids).all(dim=1)
        assert (routed.ids == reference.ids).float().mean() > 0.9
        torch.testing.assert_close(
            routed.weights[is_same], reference.weights[is_same], rtol=0.05, atol=0.01
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [[router.apply(norm, Rounding.IN_TWO) for norm in norms] for _ in range(3)]
    for _ in range(200):
        graph.replay()
        for each in again:
            for got, first in zip(each, firsts, strict=True):
                assert torch.equal(got.ids, first.ids)
                assert torch.equal(got.weights, first.weights)
                assert torch.equal(got.lists.rows, first.lists.rows)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # exp of large gates
@pytest.mark.parametrize("num_tokens", [1, 3, 20])
@pytest.mark.parametrize(
    ("epilogue", "has_bias", "size", "inner"),
    [
        (Epilogue.SILU_MUL, False, 44, 36),
        (Epilogue.GELU_TANH_MUL, True, 45, 30),  # TMA cannot fetch rows of these lengths
        (Epilogue.CLAMPED_SWIGLU, True, 72, 20),
    ],
)
def test_experts(
    backend: Backend,
    device: torch.device,
    num_tokens: int,
    epilogue: Epilogue,
    has_bias: bool,
    size: int,
    inner: int,
) -> None:
    """Sizes that no tile divides."""
    config = RULES["chosen-softmax"]
    router = router_weights(config, size, device)
    weights = expert_weights(config.num_experts, size, inner, device, has_bias)
    x = numbers(num_tokens, size, device=device) * 3  # so that activations are clamped
    routed = routed_by(backend, router, config, x)
    got = total(backend[1](weights, epilogue).apply_partial(x, routed))
    torch.testing.assert_close(got, mix(x, routed, weights, epilogue), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", ["all", "one", "sparsemixer"])
def test_numbers_of_experts(backend: Backend, device: torch.device, rule: str) -> None:
    """All of them, and one."""
    config, x = RULES[rule], numbers(19, 24, device=device)
    weights = expert_weights(config.num_experts, 24, 20, device)
    routed = routed_by(backend, router_weights(config, 24, device), config, x)
    got = total(backend[1](weights, Epilogue.SILU_MUL).apply_partial(x, routed))
    wanted = mix(x, routed, weights, Epilogue.SILU_MUL)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_all_rows_on_the_same_experts(
    backend: Backend, device: torch.device, num_tokens: int
) -> None:
    """Several blocks of one expert, and none of the others."""
    config = RULES["softmax"]
    router = RouterWeights(torch.zeros(6, 24, device=device))
    weights = expert_weights(6, 24, 20, device)
    x = numbers(num_tokens, 24, device=device)
    routed = routed_by(backend, router, config, x)
    assert routed.ids.tolist() == [[0, 1]] * num_tokens  # of equal scores, the first
    got = total(backend[1](weights, Epilogue.SILU_MUL).apply_partial(x, routed))
    wanted = mix(x, routed, weights, Epilogue.SILU_MUL)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize(("bad", "num_tokens"), [(float("nan"), 20), (float("inf"), 3)])
@pytest.mark.parametrize("rule", ["chosen-softmax", "grouped-sigmoid", "sparsemixer"])
def test_a_bad_row_stays_alone(
    backend: Backend, device: torch.device, rule: str, bad: float, num_tokens: int
) -> None:
    config = RULES[rule]
    router = router_weights(config, 24, device)
    weights = expert_weights(config.num_experts, 24, 20, device)
    experts = backend[1](weights, Epilogue.SILU_MUL)
    x = numbers(num_tokens, 24, device=device)
    before = experts.apply_partial(x, routed_by(backend, router, config, x))
    x[1, 5] = bad
    routed = routed_by(backend, router, config, x)
    assert ((routed.ids >= 0) & (routed.ids < config.num_experts)).all()
    assert all(len(set(row)) == config.top_k for row in routed.ids.tolist())
    after = experts.apply_partial(x, routed)
    others = [i for i in range(num_tokens) if i != 1]
    assert torch.equal(total(after)[others], total(before)[others])
    assert not total(after)[1].isfinite().any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("num_tokens", [3, 40])
@pytest.mark.parametrize("rule", RULES)
def test_bad_rows_leave_lists_whole(device: torch.device, rule: str, num_tokens: int) -> None:
    """The first, the middle and the last token, of one tile or of several: others keep their
    experts and weights to the bit, and each row of each token is listed once."""
    config = RULES[rule]
    weights = router_weights(config, 24, device)
    x = numbers(num_tokens, 24, device=device)
    wanted = routed_by(BACKENDS["triton"], weights, config, x)
    bad = [0, num_tokens // 2, num_tokens - 1]
    others = [i for i in range(num_tokens) if i not in bad]
    x[bad[0]], x[bad[1], 7], x[bad[2]] = torch.nan, torch.inf, -torch.inf
    routed = routed_by(BACKENDS["triton"], weights, config, x)
    assert torch.equal(routed.ids[others], wanted.ids[others])
    assert torch.equal(routed.weights[others], wanted.weights[others])
    assert routed.weights[0].isnan().all()
    assert all(len(set(row)) == config.top_k for row in routed.ids.tolist())
    assert_listed(routed, config.num_experts)
    rows = torch.arange(num_tokens * config.top_k, device=device)
    assert torch.equal(routed.lists.rows.sort().values, rows)


@pytest.mark.parametrize("num_tokens", [3, 20])
def test_a_token_may_take_hundreds_of_experts(device: torch.device, num_tokens: int) -> None:
    """All of them, of one tile of tokens or of several."""
    config = RoutingConfig(num_experts=300, top_k=300)
    weights = router_weights(config, 24, device)
    x = numbers(num_tokens, 24, device=device)
    routed = routed_by(BACKENDS["triton"], weights, config, x)
    assert_routed(routed, route(x, weights, config))
    by_expert = routed.lists.rows.view(300, num_tokens).long()
    assert (by_expert // 300 == torch.arange(num_tokens, device=device)).all()
    assert (routed.ids.flatten()[by_expert] == torch.arange(300, device=device)[:, None]).all()


def test_blocks_hold_the_rows_of_their_expert(device: torch.device) -> None:
    ids = torch.tensor([[0, 2]] * 300 + [[2, 5]] * 20 + [[7, 11]], device=device).int()
    for part in (ids, ids[290:]):
        lists = routing.list_blocks(part, 12, torch.zeros(1, dtype=torch.int64, device=device))
        num_blocks = int(lists.num_blocks)
        experts, begins, ends = (each[:num_blocks].tolist() for each in lists[1:4])
        hit = sorted(set(part.flatten().tolist()))
        found: dict[int, list[int]] = {each: [] for each in hit}
        for expert, begin, end in zip(experts, begins, ends, strict=True):
            assert 0 < end - begin <= lists.block_rows
            found[expert] += lists.rows[begin:end].tolist()
        for expert, rows in found.items():
            assert rows == (part.flatten() == expert).nonzero().flatten().tolist()


def test_ten_thousand_rows(device: torch.device) -> None:
    """Lists of many chunks of ids, and blocks of 128 rows."""
    config = RoutingConfig(num_experts=8, top_k=2)
    router, x = router_weights(config, 16, device), numbers(5_000, 16, device=device)
    weights = expert_weights(8, 16, 16, device)
    routed = routed_by(BACKENDS["triton"], router, config, x)
    assert_routed(routed, route(x, router, config))
    assert len(routed.lists.rows) == 10_000
    got = total(cuda_experts.mix(x, routed, weights, Epilogue.SILU_MUL))
    some = torch.arange(0, len(x), 97, device=device)
    part = Routed(routed.ids[some], routed.weights[some])
    wanted = mix(x[some], part, weights, Epilogue.SILU_MUL)
    # Of so many tokens, results are rounded to x's dtype before they are added up.
    torch.testing.assert_close(got[some], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "inner", "num_tokens"),
    [pytest.param(2880, 64, 1, marks=pytest.mark.slow), (2880, 64, 5), (64, 2880, 5)],
)
def test_sizes_of_gpt_oss(device: torch.device, size: int, inner: int, num_tokens: int) -> None:
    """2,880 is a multiple of 64 and not of 128; the interpreter multiplies no bfloat16."""
    config = RoutingConfig(num_experts=3, top_k=2, bias=True)
    router = router_weights(config, size, device)
    weights = expert_weights(3, size, inner, device, has_bias=True)
    rounded = [[None if t is None else t.half() for t in each] for each in (router, weights)]
    router, weights = RouterWeights(*rounded[0]), ExpertWeights(*rounded[1])
    x = numbers(num_tokens, size, device=device).half()
    routed = routed_by(BACKENDS["triton"], router, config, x)
    assert_routed(routed, route(x, router, config))
    got = total(cuda_experts.mix(x, routed, weights, Epilogue.CLAMPED_SWIGLU))
    wanted = mix(x.float(), routed, weights, Epilogue.CLAMPED_SWIGLU)
    assert (got - wanted).norm() < 2e-3 * wanted.norm()


def test_a_token_does_not_depend_on_the_others(backend: Backend, device: torch.device) -> None:
    config = RULES["chosen-softmax"]
    router = router_weights(config, 48, device)
    experts = backend[1](expert_weights(13, 48, 32, device), Epilogue.SILU_MUL)
    x = numbers(20, 48, device=device)
    before = total(experts.apply_partial(x, routed_by(backend, router, config, x)))[7]
    x[:7], x[8:] = numbers(7, 48, seed=1, device=device), numbers(12, 48, seed=2, device=device)
    assert torch.equal(
        total(experts.apply_partial(x, routed_by(backend, router, config, x)))[7], before
    )


def quantized(form: str, weight: Tensor) -> QuantizedWeight:
    """The weight [num_experts, out_features, in_features] in a form."""
    *_, num_rows, size = weight.shape
    generator = torch.Generator(weight.device).manual_seed(size)
    if form.startswith("mx_float4"):
        shape = (*weight.shape[:-1], size // 32)
        least = 116 if form.endswith("near") else 110  # experts_mx_hopper.py takes near scales
        exponents = torch.randint(
            least, 128, shape, generator=generator, device=weight.device, dtype=torch.uint8
        )
        shape = (*weight.shape[:-1], size // 2)
        packed = torch.randint(
            0, 256, shape, generator=generator, device=weight.device, dtype=torch.uint8
        )
        return MxFloat4(packed, exponents)
    if form.startswith("int4"):
        group = size if form.endswith("rows") else int(form.split("-")[1])
        found = GroupedInt.quantize(weight, 4, group)
        if form.endswith("zeros"):
            zeros = torch.randint(
                0, 17, found.scales.shape, generator=generator, device=weight.device
            )
            found = replace(found, zeros=zeros.to(torch.int16))
        return found
    blocks = {"tensor": (num_rows // 2, size), "rows": (1, size), "blocks": (128, 128)}
    blocks |= {"wide": (128, 256), "wider": (64, 384)}
    return ScaledFloat8.quantize(weight, blocks[form.removeprefix("float8-")])


FORMS = {
    "float8-tensor": (45, 34),
    "float8-rows": (48, 48),
    "float8-blocks": (140, 72),
    "float8-wide": (384, 72),  # fewer inputs at once than share a scale
    "float8-wider": (72, 640),
    "mx_float4": (160, 64),
    "mx_float4-near": (160, 96),
    "int4-32": (192, 32),
    "int4-32-zeros": (64, 96),
    "int4-64": (192, 64),
    "int4-rows": (96, 64),
    "int4-few-in-rows": (40, 24),  # rows that are no half or quarter of a block
}


# Those that take the interpreter longest, and are most like others. It computes near scales of
# mx_float4 by the same kernel as others: experts_mx_hopper.py is for GPUs.
LONG_CASES = {("mx_float4-near", 1), ("mx_float4-near", 20)}
LONG_CASES |= {("float8-wide", 1), ("float8-wider", 1)}
LONG_CASES |= {("int4-32-zeros", 1), ("int4-64", 1), ("int4-rows", 1)}


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("form", "num_tokens"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in LONG_CASES else ())
        for case in itertools.product(FORMS, (1, 20))
    ],
)
def test_quantized_experts(device: torch.device, form: str, num_tokens: int) -> None:
    """Of sizes that no tile divides, but for what a form demands."""
    config, (size, inner) = RULES["chosen-softmax"], FORMS[form]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    router = router_weights(config, size, device)
    dense = expert_weights(config.num_experts, size, inner, device, has_bias=True)
    up, down = quantized(form, dense.up), quantized(form, dense.down)
    weights = QuantizedExpertWeights(up, down, *dense[2:])
    x = numbers(num_tokens, size, device=device).to(dtype)
    routed = routed_by(BACKENDS["triton"], RouterWeights(*_as(dtype, router)), config, x)
    experts = gpu_kernel(
        QuantizedExpertWeights(up, down, *_as(dtype, dense[2:])), Epilogue.CLAMPED_SWIGLU, dtype
    )
    got = total(experts.apply_partial(x, routed))
    wanted = mix(x.float(), routed, weights, Epilogue.CLAMPED_SWIGLU)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (got - wanted).norm() < tolerance * wanted.norm()
    # A row that is not finite stays alone.
    if num_tokens > 1:
        x[1] = torch.nan
        routed = routed_by(BACKENDS["triton"], RouterWeights(*_as(dtype, router)), config, x)
        after = total(experts.apply_partial(x, routed))
        assert after[1].isnan().all()
        assert torch.equal(after[[0, *range(2, num_tokens)]], got[[0, *range(2, num_tokens)]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("rule", "num_tokens"),
    [("all", 65), ("softmax", 70), pytest.param("softmax", 1, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "form",
    [
        *("float8-blocks", "mx_float4", "int4-32"),
        # The interpreter computes it as the one before.
        pytest.param("mx_float4-near", marks=() if torch.cuda.is_available() else pytest.mark.slow),
    ],
)
def test_quantized_experts_that_all_tokens_take(
    device: torch.device, form: str, rule: str, num_tokens: int
) -> None:
    """All experts that there are, or two of them and none of the others; one row is not finite."""
    config, size, inner = RULES[rule], 128, 96
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dense = expert_weights(config.num_experts, size, inner, device)
    forms = quantized(form, dense.up), quantized(form, dense.down)
    weights = QuantizedExpertWeights(*forms)
    router = RouterWeights(torch.zeros(config.num_experts, size, device=device, dtype=dtype))
    x = numbers(num_tokens, size, device=device).to(dtype)
    if num_tokens > 1:
        x[3] = torch.inf
    routed = routed_by(BACKENDS["triton"], router, config, x)
    assert (routed.ids[0] == torch.arange(config.top_k, device=device)).all()
    got = total(gpu_kernel(weights, Epilogue.SILU_MUL, dtype).apply_partial(x, routed))
    wanted = mix(x.float(), routed, weights, Epilogue.SILU_MUL)
    if num_tokens > 1:
        assert not got[3].isfinite().any()
        got[3] = wanted[3] = 0
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (got - wanted).norm() < tolerance * wanted.norm()


HOPPER_FORMS = ("float8-tensor", "float8-rows", "float8-blocks")


@pytest.mark.parametrize(
    ("form", "num_tokens", "top_k", "num_sms"),
    checkered(HOPPER_FORMS, [(3, 4, 9), (20, 2, 10), (20, 13, 3), (20, 2, 300)]),
)
def test_products_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    num_tokens: int,
    top_k: int,
    num_sms: int,
) -> None:
    """experts_hopper.py's kernel, carried out by the emulator: sizes that no tile divides, several
    tiles for a program, or none for some; lists hold anything behind their last block."""
    config = RoutingConfig(num_experts=13, top_k=top_k)
    size, inner = 320, 160
    dense = expert_weights(13, size, inner, CPU, has_bias=True)
    dense = ExpertWeights(*(None if each is None else each.bfloat16() for each in dense))
    forms = [quantized(form, each) for each in dense[:2]]
    x = (numbers(num_tokens, size) * 300).bfloat16()
    x[:, 5] *= 1e4  # beyond what e4m3 can hold
    routed = routed_by(BACKENDS["triton"], router_weights(config, size, CPU), config, x.float())
    monkeypatch.setattr(cuda_experts, "grouped_kernel", Emulated(cuda_experts.grouped_kernel))
    monkeypatch.setattr(cuda_experts, "num_sms", lambda device: num_sms)
    up, down = map(ExpertMatrices.of, forms)
    assert up is not None
    assert down is not None
    tiles = choose_hopper_tiles(num_tokens, routed.lists.block_rows, up, down)
    assert tiles is not None
    num_blocks = int(routed.lists.num_blocks)
    for each in routed.lists[1:4]:
        assert num_sms < 300 or len(each) > num_blocks
        each[num_blocks:] = 2**31 - 1

    def computed() -> Tensor:
        out = torch.full((top_k, num_tokens, size), torch.nan)
        cuda_experts.launch_on_hopper(
            round_inputs(x, Rounding.IN_TWO),
            (up, down),
            dense[2:],
            out,
            routed,
            Epilogue.SILU_MUL,
            tiles,
        )
        assert not cuda_experts.progress_of(CPU).any()
        return total(out)

    got = computed()
    weights = QuantizedExpertWeights(*forms, *dense[2:])
    wanted = mix(x.float(), routed, weights, Epilogue.SILU_MUL)
    assert (got - wanted).norm() < 3e-3 * wanted.norm()  # gates are rounded in between
    x[1, 7], x[2, 7] = torch.nan, torch.inf
    after = computed()
    others = [0, *range(3, num_tokens)]
    assert after[1:3].isnan().all()
    assert torch.equal(after[others], got[others])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_tokens", [40, 160])
@pytest.mark.parametrize("form", ["float8-rows", "float8-blocks"])
def test_down_projections_follow_the_gates(form: str, num_tokens: int) -> None:
    """Tiles of 128 rows, several for each program, whose gates others compute: in one launch after
    the other, down projections find them all."""
    device = torch.device("cuda")
    config = RoutingConfig(num_experts=32, top_k=4)
    dense = expert_weights(32, 1024, 512, device)
    weights = QuantizedExpertWeights(quantized(form, dense.up), quantized(form, dense.down))
    router = RouterWeights(numbers(32, 1024, device=device).bfloat16())
    x = numbers(num_tokens, 1024, device=device).bfloat16()
    routed = routed_by(BACKENDS["triton"], router, config, x)
    kernel = gpu_kernel(weights, Epilogue.SILU_MUL, torch.bfloat16)
    got = kernel.apply_partial(x, routed)
    wanted = mix(x.float(), routed, weights, Epilogue.SILU_MUL)
    assert (total(got) - wanted).norm() < 1e-2 * wanted.norm()
    assert kernel.rounding(num_tokens, 4) is Rounding.IN_TWO
    num_hit = torch.zeros(1, dtype=torch.int64, device=device)
    routed = CudaRouter(router, config, num_hit).apply(x, Rounding.IN_TWO)
    for _ in range(200):
        assert torch.equal(kernel.apply_partial(x, routed), got)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("epilogue", "top_k", "size", "inner"),
    [
        (Epilogue.CLAMPED_SWIGLU, 4, 2880, 2880),
        (Epilogue.CLAMPED_SWIGLU, 1, 3200, 288),  # two stages for a unit of gates
        (Epilogue.SILU_MUL, 8, 2048, 768),
        (Epilogue.SILU_MUL, 3, 320, 160),
    ],
)
def test_mxfp4_down_projections_of_one_token_find_all_gates(
    epilogue: Epilogue, top_k: int, size: int, inner: int
) -> None:
    """In one launch after the other, also of a graph, and after gates that are not numbers."""
    device = torch.device("cuda")
    config = RoutingConfig(num_experts=8, top_k=top_k)
    dense = expert_weights(8, size, inner, device, has_bias=True)
    forms = [quantized("mx_float4-near", each) for each in dense[:2]]
    weights = QuantizedExpertWeights(*forms, *_as(torch.bfloat16, dense[2:]))
    x = numbers(1, size, device=device).bfloat16()
    routed = routed_by(BACKENDS["triton"], router_weights(config, size, device), config, x.float())
    kernel = gpu_kernel(weights, epilogue, torch.bfloat16)
    got = kernel.apply_partial(x, routed)
    wanted = mix(x.float(), routed, weights, epilogue)
    assert (total(got) - wanted).norm() < 5e-3 * wanted.norm()
    bad = x.clone()
    bad[0, 7] = torch.nan
    for _ in range(200):
        assert torch.equal(kernel.apply_partial(x, routed), got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [kernel.apply_partial(each, routed) for each in (x, x, bad, x, x)]
    for _ in range(200):
        graph.replay()
        assert results[2].isnan().all()
        assert all(torch.equal(results[i], got) for i in (0, 1, 3, 4))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "block_rows", "epilogue", "size"),
    [
        (1, 5, 16, Epilogue.CLAMPED_SWIGLU, 320),
        pytest.param(  # two blocks of each warp
            *(1, 5, 16, Epilogue.SILU_MUL, 1184), marks=pytest.mark.slow
        ),
        pytest.param(  # two stages for a unit of gates
            *(1, 5, 16, Epilogue.CLAMPED_SWIGLU, 3200), marks=pytest.mark.slow
        ),
        (3, 5, 16, Epilogue.SILU_MUL, 320),
        (6, 18, 16, Epilogue.CLAMPED_SWIGLU, 320),
        (6, 3, 16, Epilogue.CLAMPED_SWIGLU, 320),
        (26, 5, 32, Epilogue.CLAMPED_SWIGLU, 320),
        (40, 5, 64, Epilogue.CLAMPED_SWIGLU, 320),
    ],
)
def test_mxfp4_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    num_experts: int,
    block_rows: int,
    epilogue: Epilogue,
    size: int,
) -> None:
    """The kernels of experts_mx_hopper.py and experts_one_mx.py, carried out by the emulator: sizes
    that no tile divides, tiles that programs claim, blocks of several tiles of tokens, and tiles of
    which more or less is computed, or whose inputs are fetched four tokens at a time: of six, which
    all take the same experts. Inputs of tiles of 16 tokens are copied by token, and weights
    fetched ahead."""
    for module, name in (
        (experts_mx_hopper, "grouped_mx_kernel"),
        (experts_mx_hopper, "split_kernel"),
        (experts_one_mx, "experts_one_kernel"),
    ):
        monkeypatch.setattr(module, name, Emulated(getattr(module, name)))
    for name in ("is_on_hopper", "NUM_SMS"):
        monkeypatch.setattr(experts_mx_hopper, name, {"NUM_SMS": 2}.get(name, lambda device: True))
    monkeypatch.setattr(experts_mx_hopper, "MAX_TOKENS", 32)
    monkeypatch.setattr(experts_mx_hopper, "AHEAD", 1)
    monkeypatch.setattr(experts_one_mx, "num_sms", lambda device: 2)
    monkeypatch.setattr(routing, "tokens_per_tile", lambda *_: block_rows)
    config = RoutingConfig(num_experts=num_experts, top_k=3)
    inner = 160
    dense = expert_weights(config.num_experts, size, inner, CPU, has_bias=True)
    forms = [quantized("mx_float4-near", each) for each in dense[:2]]
    weights = QuantizedExpertWeights(*forms, *_as(torch.bfloat16, dense[2:]))
    x = (numbers(num_tokens, size)).bfloat16()
    if num_tokens == 6:
        x = x[:1] + x * 2**-6
    routed = routed_by(BACKENDS["triton"], router_weights(config, size, CPU), config, x.float())
    assert num_tokens != 6 or len(routed.ids.unique()) == 3
    x *= 300
    x[:, 5] *= 1e3
    experts = experts_mx_hopper.MxExperts.of(weights, epilogue, x.dtype)
    assert experts is not None
    got = total(experts.apply_partial(x, routed))
    wanted = mix(x.float(), routed, weights, epilogue)
    assert (got - wanted).norm() < 3e-3 * wanted.norm()  # gates are rounded in between
    if num_tokens == 1:  # two buffers take turns, and each is left as it was, also by NaN
        bad = x.clone()
        bad[0, 7] = torch.nan
        assert total(experts.apply_partial(bad, routed)).isnan().all()
        for _ in range(2):
            assert torch.equal(total(experts.apply_partial(x, routed)), got)
    else:
        x[1, 7], x[2, 7] = torch.nan, torch.inf
        after = total(experts.apply_partial(x, routed))
        others = [0, *range(3, num_tokens)]
        assert after[1].isnan().all()
        assert not after[2].isfinite().any()
        assert torch.equal(after[others], got[others])


def unrouted(x: Tensor, config: RoutingConfig, offset: float, adds: bool) -> Unrouted:
    """With the residual stream, the norm and the router of a layer."""
    size, device = x.shape[1], x.device
    router = router_weights(config, size, device)
    residual = numbers(1, size, seed=1, device=device).bfloat16() if adds else None
    norm = DeferredNorm(
        x,
        numbers(size, seed=2, device=device).bfloat16(),
        1e-5,
        offset,
        residual,
        None if residual is None else torch.full_like(residual, torch.nan),
    )
    weights = RouterWeights(router.weight.bfloat16(), router.bias)
    return Unrouted(norm, weights, config, torch.zeros(1, dtype=torch.int64, device=device))


def mixed_by_reference(
    x: Unrouted, weights: ExpertWeights | QuantizedExpertWeights, epilogue: Epilogue
) -> tuple[Tensor, Tensor]:
    """What experts make of the norm of x, in float32, and the residual stream."""
    norm = x.norm
    stream = norm.x if norm.residual is None else norm.x + norm.residual
    scale = norm.weight.float() + norm.offset
    normed = F.rms_norm(stream.float(), scale.shape, scale, norm.eps)
    return mix(normed, route(normed, x.router, x.config), weights, epilogue), stream


ROUTED_IN_KERNEL = {
    "chosen-softmax": RoutingConfig(num_experts=5, top_k=3, bias=True),
    "softmax": RoutingConfig(num_experts=6, top_k=2, renormalised=False, scale=1.5),
    "one": RoutingConfig(num_experts=4, top_k=1),
}


def routed_cases(*by_day: tuple[str, bool]) -> list[ParameterSet]:
    """Rules, with a residual stream to be added or without one. Both kernels choose experts by the
    same functions, so that a rule by day is enough in one of them; the other pairs every night."""
    return [
        pytest.param(*case, marks=() if case in by_day else pytest.mark.slow)
        for case in itertools.product(ROUTED_IN_KERNEL, (False, True))
    ]


@pytest.mark.parametrize(("rule", "adds"), routed_cases(("chosen-softmax", True)))
def test_mxfp4_experts_that_norm_and_route(
    monkeypatch: pytest.MonkeyPatch, rule: str, adds: bool
) -> None:
    """By the emulator."""
    config = ROUTED_IN_KERNEL[rule]
    kernel = Emulated(experts_one_mx.experts_one_kernel)
    monkeypatch.setattr(experts_one_mx, "experts_one_kernel", kernel)
    monkeypatch.setattr(experts_mx_hopper, "is_on_hopper", lambda device: True)
    for module in (experts_one_mx, experts_mx_hopper):
        monkeypatch.setattr(module, "num_sms", lambda device: 6)
    size, inner = 320, 160
    dense = expert_weights(config.num_experts, size, inner, CPU, has_bias=True)
    forms = [quantized("mx_float4-near", each) for each in dense[:2]]
    weights = QuantizedExpertWeights(*forms, *_as(torch.bfloat16, dense[2:]))
    given = unrouted(numbers(1, size).bfloat16(), config, 0.25, adds)
    experts = experts_mx_hopper.MxExperts.of(weights, Epilogue.CLAMPED_SWIGLU, torch.bfloat16)
    assert experts is not None
    assert experts.routes_inputs(1, given.router, config)
    check_unrouted(given, weights, Epilogue.CLAMPED_SWIGLU, experts)


def check_unrouted(
    given: Unrouted, weights: QuantizedExpertWeights, epilogue: Epilogue, experts: ExpertsKernel
) -> None:
    """Two buffers take turns: each is used again, one of them after inputs that are not numbers."""
    wanted, stream = mixed_by_reference(given, weights, epilogue)
    first = total(experts.apply_unrouted(given))
    assert (first - wanted).norm() < 3e-3 * wanted.norm()
    bad = given.norm.x.clone()
    bad[0, 7] = torch.nan
    bad_norm = given.norm._replace(x=bad)
    bad_given = given._replace(norm=bad_norm, num_hit=torch.zeros_like(given.num_hit))
    assert total(experts.apply_unrouted(bad_given)).isnan().all()
    for i in range(2):
        assert torch.equal(total(experts.apply_unrouted(given)), first)
        assert given.num_hit == (i + 2) * given.config.top_k
        assert given.norm.total is None or torch.equal(given.norm.total, stream)


class RoutingExperts:
    """Experts that route one token, by the reference."""

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights = weights

    def rounding(self, num_tokens: int, top_k: int) -> Rounding:
        return Rounding.NONE

    def apply_partial(self, x: Tensor, routed: Routed) -> Tensor:
        return mix(x, routed, self._weights, Epilogue.SILU_MUL)

    def routes_inputs(self, num_tokens: int, router: RouterWeights, config: RoutingConfig) -> bool:
        return num_tokens == 1

    def apply_unrouted(self, x: Unrouted) -> Tensor:
        result, stream = mixed_by_reference(x, self._weights, Epilogue.SILU_MUL)
        if x.norm.total is not None:
            x.norm.total.copy_(stream)
        x.num_hit.add_(x.config.top_k)
        return result


def test_a_norm_is_left_to_experts_that_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one token, in a block without a shared expert."""
    monkeypatch.setattr(
        layers_experts,
        "make_experts_kernel",
        lambda weights, epilogue, copied_tokens: RoutingExperts(weights),
    )
    routing = RoutingConfig(num_experts=6, top_k=2)
    config = ExpertsConfig(hidden_size=96, intermediate_size=32, activation="silu", routing=routing)
    block, norm = MixtureOfExperts(config), RMSNorm(NormConfig("rms", 96, 1e-5, offset=1.0))
    block.router.num_hit = torch.zeros(1, dtype=torch.int64)
    for module in (block.router, block.experts, norm):
        for parameter in module.parameters():
            parameter.data = numbers(*parameter.shape)
        module.finalize()
    x, residual = numbers(2, 96), numbers(2, 96, seed=1)
    normed, total_of_two = norm.forward_for(block, x, residual.clone())
    assert isinstance(normed, Tensor)
    wanted = block.forward(normed)
    block.router.num_hit.zero_()
    for before in (residual, None):
        given, stream = norm.forward_for(block, x[:1], None if before is None else before[:1])
        assert isinstance(given, DeferredNorm)
        result = block.forward(given)
        if before is None:
            assert torch.equal(stream, x[:1])
        else:
            torch.testing.assert_close(result, wanted[:1])
            torch.testing.assert_close(stream, total_of_two[:1])
    assert block.router.num_hit == 4
    assert torch.equal(residual, numbers(2, 96, seed=1))
    shared = MLPConfig(kind="gated", hidden_size=96, intermediate_size=32, activation="silu")
    block.shared = DenseMLP(shared)
    assert isinstance(norm.forward_for(block, x[:1], residual[:1].clone())[0], Tensor)
    block.shared = None
    norm.follow(Joining(norm))
    assert isinstance(norm.forward_for(block, x[:1], residual[:1].clone())[0], Tensor)


def test_experts_choose_in_the_kernel_by_logits_alone() -> None:
    plain = RoutingConfig(num_experts=6, top_k=2)
    weights = RouterWeights(torch.empty(6, 8))
    assert routes_in_kernel(weights, plain, 6)
    assert not routes_in_kernel(weights, plain, 5), "each program has one logit at most"
    corrected = weights._replace(correction=torch.empty(6))
    assert not routes_in_kernel(corrected, replace(plain, correction=True), 6)
    for other in (
        replace(plain, scoring=Scoring.SIGMOID),
        replace(plain, num_groups=3, top_groups=2),
    ):
        assert not routes_in_kernel(weights, other, 6)


def few_float8_experts(
    form: str, epilogue: Epilogue, top_k: int, size: int, inner: int, device: torch.device
) -> tuple[QuantizedExpertWeights, Tensor, Routed]:
    """Weights without biases, one token, and its experts."""
    config = RoutingConfig(num_experts=top_k + 3, top_k=top_k)
    dense = expert_weights(config.num_experts, size, inner, device)
    weights = QuantizedExpertWeights(*(quantized(form, each) for each in dense[:2]))
    x = (numbers(1, size, device=device) * 3).bfloat16()
    x[:, 5] *= 1e3
    routed = routed_by(BACKENDS["triton"], router_weights(config, size, device), config, x.float())
    return weights, x, routed


@pytest.mark.parametrize(
    ("epilogue", "top_k", "size", "inner", "num_sms"),
    [
        (Epilogue.SILU_MUL, 3, 256, 128, 3),  # units are claimed
        pytest.param(  # two blocks of x, two batches of gates
            *(Epilogue.CLAMPED_SWIGLU, 5, 1280, 256, 2), marks=pytest.mark.slow
        ),
        (Epilogue.SILU_MUL, 2, 256, 1152, 5),  # two blocks of an expert's gates
        (Epilogue.SILU_MUL, 1, 384, 128, 26),  # programs that have nothing to do
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=() if form == "float8-blocks" else pytest.mark.slow)
        for form in HOPPER_FORMS
    ],
)
def test_float8_of_one_token_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    epilogue: Epilogue,
    top_k: int,
    size: int,
    inner: int,
    num_sms: int,
) -> None:
    """experts_one_float8.py's kernel, carried out by the emulator; two buffers take turns, and each
    is left as it was, also by NaN."""
    kernel = Emulated(experts_one_float8.experts_one_float8_kernel)
    monkeypatch.setattr(experts_one_float8, "experts_one_float8_kernel", kernel)
    monkeypatch.setattr(experts_one_float8, "num_sms", lambda device: num_sms)
    monkeypatch.setattr(cuda_experts, "is_on_hopper", lambda device: True)
    weights, x, routed = few_float8_experts(form, epilogue, top_k, size, inner, CPU)
    experts = cuda_experts.CudaExperts.of(weights, epilogue)
    assert experts is not None
    got = experts.apply_partial(x, routed)
    wanted = mix(x.float(), routed, weights, epilogue)
    assert (got - wanted).norm() < 3e-3 * wanted.norm()  # gates are rounded in between
    bad = x.clone()
    bad[0, 7] = torch.nan
    assert experts.apply_partial(bad, routed).isnan().all()
    for _ in range(2):
        assert torch.equal(experts.apply_partial(x, routed), got)


@pytest.mark.parametrize(("rule", "adds"), routed_cases(("one", True), ("softmax", False)))
def test_float8_experts_that_norm_and_route(
    monkeypatch: pytest.MonkeyPatch, rule: str, adds: bool
) -> None:
    """By the emulator; more than one part of the input, of which the second one is not whole."""
    config = ROUTED_IN_KERNEL[rule]
    kernel = Emulated(experts_one_float8.experts_one_float8_kernel)
    monkeypatch.setattr(experts_one_float8, "experts_one_float8_kernel", kernel)
    monkeypatch.setattr(cuda_experts, "is_on_hopper", lambda device: True)
    for module in (experts_one_float8, cuda_experts):
        monkeypatch.setattr(module, "num_sms", lambda device: 6)
    size, inner = 2304, 128
    dense = expert_weights(config.num_experts, size, inner, CPU)
    weights = QuantizedExpertWeights(*(quantized("float8-rows", each) for each in dense[:2]))
    given = unrouted(numbers(1, size).bfloat16(), config, 0.25, adds)
    experts = cuda_experts.CudaExperts.of(weights, Epilogue.SILU_MUL)
    assert experts is not None
    assert experts.routes_inputs(1, given.router, config)
    assert not experts.routes_inputs(2, given.router, config)
    assert not experts.routes_inputs(1, RouterWeights(given.router.weight.half()), config)
    check_unrouted(given, weights, Epilogue.SILU_MUL, experts)


@pytest.mark.parametrize("change", ["bias", "rows", "blocks", "dtype", "memory"])
def test_float8_of_one_token_that_the_kernel_does_not_take(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Other kernels compute it."""
    monkeypatch.setattr(cuda_experts, "is_on_hopper", lambda device: True)
    form = "float8-blocks"
    weights, _x, _routed = few_float8_experts(form, Epilogue.SILU_MUL, 2, 256, 128, CPU)
    if change == "bias":
        weights = weights._replace(down_bias=torch.zeros(5, 256))
    if change in ("rows", "blocks"):
        block = (24, 128) if change == "rows" else (128, 256)
        up = ScaledFloat8.quantize(weights.up.dequantize(), block)
        weights = weights._replace(up=up)
    experts = cuda_experts.CudaExperts.of(weights, Epilogue.SILU_MUL)
    assert experts is not None
    if change in ("bias", "rows", "blocks"):
        assert (experts._one_float8 is None) == (change != "blocks")
        return
    one = experts._one_float8
    assert one is not None
    assert experts_one_float8.takes_one(torch.bfloat16, *one, 2)
    if change == "dtype":
        assert not experts_one_float8.takes_one(torch.float16, *one, 2)
    else:
        monkeypatch.setattr(experts_one_float8, "_SHARED_MEMORY", 50_000)
        assert not experts_one_float8.takes_one(torch.bfloat16, *one, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("form", "epilogue", "top_k", "size", "inner"),
    [
        ("float8-rows", Epilogue.SILU_MUL, 8, 2048, 768),
        ("float8-blocks", Epilogue.SILU_MUL, 8, 2048, 768),
        ("float8-tensor", Epilogue.CLAMPED_SWIGLU, 2, 4096, 1536),
        ("float8-rows", Epilogue.SILU_MUL, 2, 4096, 14336),
        ("float8-blocks", Epilogue.SILU_MUL, 1, 640, 384),
    ],
)
def test_float8_outputs_of_one_token_find_all_gates(
    form: str, epilogue: Epilogue, top_k: int, size: int, inner: int
) -> None:
    """In one launch after the other, and in graphs, in which a launch begins while the one before
    ends; NaN is not left behind for the next ones."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper")
    device = torch.device("cuda")
    weights, x, routed = few_float8_experts(form, epilogue, top_k, size, inner, device)
    kernel = cuda_experts.CudaExperts.of(weights, epilogue)
    assert kernel is not None
    assert kernel._one_float8 is not None
    got = kernel.apply_partial(x, routed)
    wanted = mix(x.float(), routed, weights, epilogue)
    assert (got - wanted).norm() < 3e-3 * wanted.norm()
    bad = x.clone()
    bad[0, 7] = torch.nan
    for _ in range(200):
        assert torch.equal(kernel.apply_partial(x, routed), got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [kernel.apply_partial(each, routed) for each in (x, x, bad, x, x)]
    for _ in range(200):
        graph.replay()
        assert results[2].isnan().all()
        assert all(torch.equal(results[i], got) for i in (0, 1, 3, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("config", "size", "inner"),
    [
        (RoutingConfig(num_experts=32, top_k=4, bias=True), 2880, 320),
        (RoutingConfig(num_experts=128, top_k=8, renormalised=False), 704, 160),
        (RoutingConfig(num_experts=40, top_k=1, scale=1.5), 3200, 160),
    ],
)
def test_mxfp4_experts_that_norm_and_route_on_hopper(
    config: RoutingConfig, size: int, inner: int
) -> None:
    """In one launch after the other, also of a graph, and with inputs that are not numbers."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper")
    device = torch.device("cuda")
    dense = expert_weights(config.num_experts, size, inner, device, has_bias=True)
    forms = [quantized("mx_float4-near", each) for each in dense[:2]]
    weights = QuantizedExpertWeights(*forms, *_as(torch.bfloat16, dense[2:]))
    given = unrouted(numbers(1, size, device=device).bfloat16(), config, 0.0, adds=True)
    experts = experts_mx_hopper.MxExperts.of(weights, Epilogue.CLAMPED_SWIGLU, torch.bfloat16)
    assert experts is not None
    assert experts.routes_inputs(1, given.router, config)
    wanted, stream = mixed_by_reference(given, weights, Epilogue.CLAMPED_SWIGLU)
    got = experts.apply_unrouted(given)
    # If normed inputs were rounded to bfloat16, it would be 5e-3 to 1e-2.
    assert (total(got) - wanted).norm() < 4e-3 * wanted.norm()
    assert given.norm.total is not None
    assert torch.equal(given.norm.total, stream)
    bad = given.norm.x.clone()
    bad[0, 7] = torch.nan
    given_bad = given._replace(norm=given.norm._replace(x=bad))
    for _ in range(200):
        assert torch.equal(experts.apply_unrouted(given), got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [experts.apply_unrouted(each) for each in (given, given, given_bad, given, given)]
    for _ in range(200):
        graph.replay()
        assert results[2].isnan().all()
        assert all(torch.equal(results[i], got) for i in (0, 1, 3, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("are_alike", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 8, 9])
def test_mxfp4_of_few_tokens_on_hopper(num_tokens: int, are_alike: bool) -> None:
    """With and without about one token for each expert; each launch gives the same bits."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper")
    device = torch.device("cuda")
    config = RoutingConfig(num_experts=32, top_k=4)
    size, inner = 704, 320
    dense = expert_weights(config.num_experts, size, inner, device, has_bias=True)
    forms = [quantized("mx_float4-near", each) for each in dense[:2]]
    weights = QuantizedExpertWeights(*forms, *_as(torch.bfloat16, dense[2:]))
    x = numbers(num_tokens, size, device=device).bfloat16()
    if are_alike:
        x = x[:1] + x * 2**-6
    router = RouterWeights(*_as(torch.bfloat16, router_weights(config, size, device)))
    routed = routed_by(BACKENDS["triton"], router, config, x)
    experts = experts_mx_hopper.MxExperts.of(weights, Epilogue.CLAMPED_SWIGLU, x.dtype)
    assert experts is not None
    got = experts.apply_partial(x, routed)
    wanted = mix(x.float(), routed, weights, Epilogue.CLAMPED_SWIGLU)
    assert (total(got) - wanted).norm() < 3e-3 * wanted.norm()
    for _ in range(50):
        assert torch.equal(experts.apply_partial(x, routed), got)


def test_mxfp4_that_tables_cannot_hold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experts_mx_hopper, "is_on_hopper", lambda device: True)
    experts_mx_hopper._warn_of_scales.cache_clear()
    near, wide = (
        quantized(form, torch.empty(2, 64, 64)) for form in ("mx_float4-near", "mx_float4")
    )
    for forms in ((near, wide), (wide, near)):
        weights = QuantizedExpertWeights(*forms)
        assert experts_mx_hopper.MxExperts.of(weights, Epilogue.SILU_MUL, torch.bfloat16) is None
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "scales differ by more than a factor of 2^11" in caplog.text
    weights = QuantizedExpertWeights(near, near)
    for dtype in (torch.float16, torch.float32):
        assert experts_mx_hopper.MxExperts.of(weights, Epilogue.SILU_MUL, dtype) is None


@pytest.mark.parametrize("num_first", [None, 100])
def test_tables_hold_weights_in_mxfp4(num_first: int | None) -> None:
    """They are exact, also with groups of zeros, whatever their scale; and refused, where scales
    of a row are too far from each other."""
    form = quantized("mx_float4-near", torch.empty(2, 200, 320))
    assert isinstance(form, MxFloat4)
    form.packed[0, 3] = 0
    form.packed[1, 5, :16], form.exponents[1, 5, 0] = 0x80, 3
    tables = ExpertTables.of(form, num_first)
    assert tables is not None
    shape = (2, tables.num_tiles, tables.num_blocks)
    words = tables.words.view(*shape, 64, 2, 4, 4)  # by row, matrix, t, c
    shifts = tables.shifts.view(torch.uint8).view(*shape, 4, 8, 2, 2, 4)
    shifts = shifts.permute(0, 1, 2, 3, 6, 4, 5, 7).reshape(*shape, 64, 2, 1, 4).int()
    codes = torch.tensor([0, 8, 16, 20, 24, 28, 32, 36], dtype=torch.int32)
    found = torch.empty(*shape, 64, 2, 4, 2, 4, 4)  # by c, h, t, j
    for h, j in itertools.product(range(2), range(4)):
        magnitudes = (words >> (4 * (4 * h + j))) & 7
        signs = (words >> (8 * j + (7, 3)[h])) & 1
        octets = torch.where(magnitudes > 0, codes[magnitudes] + shifts, 0) | (signs << 7)
        values = octets.to(torch.uint8).view(torch.float8_e4m3fn).float()
        found[..., h, :, j] = values.transpose(-1, -2)
    rows = found.flatten(-4).permute(0, 4, 1, 3, 2, 5).flatten(4).flatten(2, 3)
    first = tables.num_first
    stored = torch.cat((rows[:, 0, :first], rows[:, 1, : 200 - first]), dim=1)[..., :320]
    assert torch.equal(stored * tables.factors[..., None], form.dequantize())
    form.exponents[1, 5, 1] = 140
    assert ExpertTables.of(form, num_first) is None


def _as(dtype: torch.dtype, tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else each.to(dtype) for each in tensors]


def test_words_hold_the_weights_of_sixteen_neighbours() -> None:
    size, num = 160, 64
    packed = torch.arange(num * size // 2).to(torch.uint8).view(1, num, -1)
    form = GroupedInt(packed, torch.ones(1, num, size // 32), None, bits=4)
    matrices = ExpertMatrices.of(form)
    assert matrices is not None
    words = matrices.values.view(num, -1, 16)
    values = torch.stack((packed[0] & 15, packed[0] >> 4), dim=-1).flatten(1)
    values = torch.nn.functional.pad(values, (0, 96)).view(num, -1, 8, 16)
    for i in range(8):
        assert torch.equal((words >> (4 * i)) & 15, values[:, :, i].int())


def test_exponents_beyond_a_bfloat16() -> None:
    """An expert with large weights, beside one with usual ones."""
    exponents = torch.full((2, 1, 4), 120, dtype=torch.uint8)
    exponents[0, 0, 1] = 200
    form = MxFloat4(torch.full((2, 1, 64), 0x22, dtype=torch.uint8), exponents)
    matrices = ExpertMatrices.of(form)
    assert matrices is not None
    assert matrices.scales is not None
    assert matrices.factors is not None
    assert matrices.factors.tolist() == [2.0**72, 1.0]
    fields = matrices.scales.view(torch.uint8).view(2, 4).double()
    values = torch.exp2(fields - 127 - 126) * matrices.factors.double()[:, None]
    assert torch.equal(values, torch.exp2(exponents[:, 0].double() - 127))


def test_tiles_fit_and_blocks_suffice() -> None:
    for num_experts, top_k, sizes in (
        (128, 8, (2048, 768)),
        (32, 4, (2880, 2880)),
        (8, 2, (4096, 14336)),
        (5, 5, (45, 30)),
    ):
        for num_tokens in (2, 8, 64, 256, 8192):
            tokens = tokens_per_tile(num_tokens, num_experts, top_k)
            for size in sizes:
                for element_size, is_gated in itertools.product((2, 4), (False, True)):
                    dtype = {2: torch.float16, 4: torch.float32}[element_size]
                    matrices = ExpertMatrices.of(torch.empty(1, 1, size, dtype=dtype))
                    assert matrices is not None
                    tiles = choose_tiles(tokens, matrices, element_size, is_gated, has_tma=True)
                    rows = tiles.rows * (2 if is_gated else 1)
                    stage = element_size * tiles.columns * (rows + tokens)
                    assert tiles.stages * stage <= SHARED_MEMORY
            # The most blocks that there can be: one row for each expert, and the rest for one.
            num_rows = num_tokens * top_k
            hit = min(num_rows, num_experts)
            worst = hit - 1 + -(-(num_rows - hit + 1) // tokens)
            assert max_blocks(num_tokens, num_experts, top_k, tokens) >= worst


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, "9 of 8 experts cannot be chosen"),
        ({"num_groups": 3}, "8 experts do not form 3 groups"),
        ({"num_groups": 4, "top_groups": 5}, "5 of 4 groups cannot be chosen"),
        ({"num_groups": 8}, "groups of 1 expert have no two best ones"),
        ({"num_groups": 4, "top_k": 3}, "1 groups of 2 have no 3 experts to choose"),
    ],
)
def test_rules_that_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RoutingConfig(num_experts=8, top_k=2), **change)
