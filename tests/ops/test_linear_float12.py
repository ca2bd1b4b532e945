"""Which kernel multiplies by a weight in 12 bits, by doubles of the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from float12_doubles import Doubles, install
from octavo.layers import linear as layers_linear
from octavo.layers.config import LinearConfig
from octavo.layers.linear import PlainLinear
from octavo.ops.cuda.float12 import PIECE_INPUTS, PIECE_ROWS, takes_float12
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.linear import LinearKernel, NormingKernel
from octavo.ops.norm import DeferredNorm

ROWS, SIZE = 272, 192
Make = Callable[[Tensor], LinearKernel]


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> tuple[Make, Doubles]:
    module, doubles = install(monkeypatch)
    return module.Float12Linear, doubles


def operands(num_tokens: int, num_rows: int = ROWS, size: int = SIZE) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((num_tokens, size), (num_rows, size), (num_rows,))
    return tuple(torch.randn(each, generator=generator).bfloat16() for each in shapes)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    wide = None if bias is None else bias.double()
    return apply_epilogue(F.linear(x.double(), weight.double(), wide), epilogue)


def error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.GELU, Epilogue.SILU_MUL])
@pytest.mark.parametrize(
    ("num_tokens", "called"),
    [(1, "one"), (2, "few"), (64, "few"), (65, "many"), (100, "many"), (101, "unpack")],
)
def test_each_number_of_tokens_has_its_kernel(
    doubles: tuple[Make, Doubles],
    num_tokens: int,
    called: str,
    epilogue: Epilogue,
    has_bias: bool,
) -> None:
    make, calls = doubles
    calls.many = 100
    x, weight, bias = operands(num_tokens)
    kernel, given = make(weight), bias if has_bias else None
    result = kernel.apply(x, given, epilogue)
    assert result.dtype == torch.bfloat16
    assert error(result, expected(x, weight, given, epilogue)) < 6e-3
    assert calls.calls == [(called, ROWS if called == "unpack" else num_tokens)]


@pytest.mark.parametrize(
    ("num_tokens", "splits", "called"),
    [(1, 3, "one"), (9, 1, "few"), (9, 3, "few"), (65, 3, "many"), (600, 3, "unpack")],
)
def test_a_norm_may_add_up_the_splits(
    doubles: tuple[Make, Doubles], num_tokens: int, splits: int, called: str
) -> None:
    make, calls = doubles
    calls.splits = splits
    x, weight, bias = operands(num_tokens)
    result = make(weight).apply_partial(x, bias)
    is_partial = called == "few" and splits > 1
    assert result.dtype == (torch.float32 if is_partial else torch.bfloat16)
    assert result.dim() == (3 if is_partial else 2)
    whole = result.sum(dim=0) if is_partial else result
    assert error(whole, expected(x, weight, bias, Epilogue.NONE)) < 6e-3
    assert [name for name, _ in calls.calls] == [called]


def test_where_there_are_no_tiles_a_few_tokens_go_the_way_of_many(
    doubles: tuple[Make, Doubles],
) -> None:
    make, calls = doubles
    calls.few, calls.many = 16, 32
    for num_tokens in (16, 17, 33):
        x, weight, _ = operands(num_tokens)
        result = make(weight).apply(x, None, Epilogue.NONE)
        assert error(result, expected(x, weight, None, Epilogue.NONE)) < 6e-3
    assert [name for name, _ in calls.calls] == ["few", "many", "unpack"]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.RELU, Epilogue.SILU_MUL])
def test_a_large_weight_is_unpacked_by_parts(
    doubles: tuple[Make, Doubles],
    monkeypatch: pytest.MonkeyPatch,
    epilogue: Epilogue,
    has_bias: bool,
) -> None:
    make, calls = doubles
    calls.many = 64
    num_rows = 270 if epilogue.is_gated else 275
    monkeypatch.setitem(make.__init__.__globals__, "_UNPACKED", 100 * SIZE)  # type: ignore[misc]
    x, weight, bias = operands(70, num_rows)
    kernel, given = make(weight), bias if has_bias else None
    result = kernel.apply(x, given, epilogue)
    assert error(result, expected(x, weight, given, epilogue)) < 6e-3
    assert [rows for _, rows in calls.calls] == [96, 96, num_rows - 192]
    partial = kernel.apply_partial(x, given)
    assert error(partial, expected(x, weight, given, Epilogue.NONE)) < 6e-3


def test_inputs_are_put_where_they_can_be_fetched(doubles: tuple[Make, Doubles]) -> None:
    make, _ = doubles
    for num_tokens in (3, 80):
        x, weight, _ = operands(num_tokens)
        storage = torch.zeros(num_tokens, SIZE + 3, dtype=torch.bfloat16)
        storage[:, 1:-2] = x
        for given in (storage[:, 1:-2], x.t().contiguous().t()):
            result = make(weight).apply(given, None, Epilogue.NONE)
            assert error(result, expected(x, weight, None, Epilogue.NONE)) < 6e-3


def test_one_token_is_normed_by_the_kernel(doubles: tuple[Make, Doubles]) -> None:
    make, calls = doubles
    x, weight, _ = operands(1)
    scale, residual = torch.randn(2, SIZE).bfloat16()
    kernel = make(weight)
    assert isinstance(kernel, NormingKernel)
    assert not kernel.keeps_weight
    assert [kernel.norms_inputs(n, norms_branch=False) for n in (1, 2, 64)] == [True, False, False]
    total = torch.empty(1, SIZE, dtype=torch.bfloat16)
    given = DeferredNorm(x, scale, 1e-5, 0.0, residual[None], total, None)
    result = kernel.apply_normed(given, None, Epilogue.NONE)
    stream = (x + residual).double()
    assert torch.equal(total.double(), stream)
    normed = F.rms_norm(stream, (SIZE,), scale.double(), 1e-5)
    assert error(result, expected(normed, weight, None, Epilogue.NONE)) < 6e-3
    assert calls.calls == [("one, normed", 1)]


@pytest.mark.parametrize(
    ("in_features", "out_sizes", "takes"),
    [
        (2880, (4096, 512, 512), True),
        (64, (50257,), True),  # the last piece is not whole
        (4096, (14336, 14336), True),
        (4096, (14340, 14340), False),  # a piece would have gates and ups
        (2888, (4096,), False),
        (4096, (255,), False),
        (32768, (8192,), True),
        (32832, (8192,), False),
        (4096, (256,), True),
    ],
)
def test_which_shapes_take_it(in_features: int, out_sizes: tuple[int, ...], takes: bool) -> None:
    config = LinearConfig(in_features, out_sizes)
    assert config.takes_float12 == takes
    if takes:
        num_bytes = -(-config.out_features // PIECE_ROWS) * PIECE_ROWS * in_features * 1.5
        assert config.float12_bytes == num_bytes + 4 * config.out_features
    weight = torch.zeros(1, in_features, dtype=torch.bfloat16)
    assert takes_float12(weight) == (in_features % PIECE_INPUTS == 0)


def test_what_stays_in_bfloat16_says_so(
    doubles: tuple[Make, Doubles], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, _ = doubles
    monkeypatch.setattr(layers_linear, "make_linear_kernel", packing(make))
    for num_rows, value, is_asked, stays in [
        (256, 0.5, True, False),
        (256, 0.5, False, False),
        (255, 0.5, True, True),
        (256, float("nan"), True, True),
        (256, float("inf"), True, True),
    ]:
        projection = PlainLinear(LinearConfig(64, (num_rows,)))
        weight = torch.full((num_rows, 64), value, dtype=torch.bfloat16)
        projection.weight = torch.nn.Parameter(weight, requires_grad=False)
        if is_asked:
            projection.dense_weights = "float12"
        projection.finalize()
        assert projection.stays_dense == stays
        assert (projection.weight is None) == (is_asked and not stays)


def packing(make: Make) -> Callable[..., LinearKernel]:
    """make_linear_kernel as on a Hopper GPU."""

    def make_kernel(
        weight: Tensor, is_chained: bool = False, dense_weights: str = "bfloat16"
    ) -> LinearKernel:
        if dense_weights == "float12" and takes_float12(weight):
            return make(weight)
        from octavo.ops.linear import TorchLinear

        return TorchLinear(weight)

    return make_kernel
