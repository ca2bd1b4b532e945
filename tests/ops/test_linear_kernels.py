"""GEMV and skinny GEMM kernels against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
from gluon_emulator import Emulated
from linear_cases import expected, relative_error
from torch import Tensor

from octavo.layers import linear as layers_linear
from octavo.layers import norm as layers_norm
from octavo.layers.config import MLPConfig, NormConfig
from octavo.layers.mlp import DenseMLP
from octavo.layers.norm import Joining, LayerNorm, RMSNorm
from octavo.ops.cuda import linear as cuda_linear
from octavo.ops.cuda import linear_ring as cuda_ring
from octavo.ops.cuda import norm as cuda_norm
from octavo.ops.cuda.linear import CudaLinear, linear, linear_partial
from octavo.ops.cuda.linear_gemv import Programs, choose_programs, pays_to_norm
from octavo.ops.cuda.linear_ring import Ring, choose_ring, linear_ring, takes_ring
from octavo.ops.cuda.linear_table import MEASURED, SIZES, Tiles, choose_tiles
from octavo.ops.epilogue import Epilogue
from octavo.ops.norm import DeferredNorm

pytestmark = pytest.mark.usefixtures("poisoned")

# ||out - expected|| / ||expected||: half a unit in the last place, and the rounding of inputs
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SHARED_MEMORY = 227 << 10  # bytes of a multiprocessor
# Of Gemma 3 4B and of a rank of Llama 3 70B, for which nothing was measured by itself.
UNMEASURED = [
    (4096, 2560, Epilogue.NONE),
    (2560, 2048, Epilogue.NONE),
    (10240, 2560, Epilogue.GELU_TANH_MUL),
    (2560, 10240, Epilogue.NONE),
    (64128, 8192, Epilogue.NONE),
]


def operands(
    num_tokens: int, num_rows: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(num_tokens * 31 + num_rows + size)
    shapes = ((num_tokens, size), (num_rows, size), (num_rows,))
    x, weight, bias = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes
    )
    return x, weight * size**-0.5, bias


def assert_close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    error = relative_error(actual, wanted)
    assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "size"), [(6, 48), (34, 1100), (6, 3300)])
def test_one_token(
    device: torch.device, epilogue: Epilogue, has_bias: bool, num_rows: int, size: int
) -> None:
    x, weight, bias = operands(1, num_rows, size, torch.float32, device)
    given = bias if has_bias else None
    actual = linear(x, weight, given, epilogue)
    assert_close(actual, expected(x, weight, given, epilogue), torch.float32)
    if epilogue == Epilogue.NONE:
        assert torch.equal(linear_partial(x, weight, given), actual)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy
@pytest.mark.parametrize("epilogue", Epilogue)
def test_activations_keep_nan(device: torch.device, epilogue: Epilogue) -> None:
    x, weight, bias = operands(1, 6, 48, torch.float32, device)
    x[0, 5] = torch.nan
    assert linear(x, weight, bias, epilogue).isnan().all()


@pytest.fixture
def ring_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        kernel = Emulated(cuda_ring._linear_ring_kernel)
        monkeypatch.setattr(cuda_ring, "_linear_ring_kernel", kernel)


@pytest.mark.usefixtures("ring_kernel")
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.RELU, Epilogue.GELU_TANH_MUL])
@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.float16, True), (torch.bfloat16, False)])
@pytest.mark.parametrize(("num_rows", "size"), [(6, 64), (70, 1152)])
@pytest.mark.parametrize("ring", [Ring(8, 8, 3, 150), Ring(4, 16, 2, 150)])
def test_one_token_by_a_ring(
    device: torch.device,
    ring: Ring,
    num_rows: int,
    size: int,
    dtype: torch.dtype,
    has_bias: bool,
    epilogue: Epilogue,
) -> None:
    """More blocks than the ring has, and programs that have no rows."""
    x, weight, bias = operands(1, num_rows, size, dtype, device)
    given = bias if has_bias else None
    actual = linear_ring(x, weight, given, epilogue, ring, num_programs=3)
    assert_close(actual, expected(x, weight, given, epilogue), dtype)


def by_a_ring(weight: Tensor, given: DeferredNorm, bias: Tensor, epilogue: Epilogue) -> Tensor:
    return linear_ring(given, weight, bias, epilogue, Ring(4, 16, 3, 150), num_programs=3)


@pytest.mark.usefixtures("ring_kernel")
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SILU_MUL])
@pytest.mark.parametrize(
    ("multiply", "num_rows", "size"),
    [
        (lambda weight, *args: CudaLinear(weight).apply_normed(*args), 34, 1100),
        (lambda weight, *args: CudaLinear(weight).apply_normed(*args), 34, 1536),
        (lambda weight, *args: CudaLinear(weight).apply_normed(*args), 6, 3300),
        (by_a_ring, 34, 1152),
    ],
)
@pytest.mark.parametrize("adds", ["nothing", "x", "float32 x", "norm of x"])
def test_norm_of_one_token(
    device: torch.device,
    adds: str,
    multiply: Callable[..., Tensor],
    num_rows: int,
    size: int,
    epilogue: Epilogue,
) -> None:
    """It leaves the residual stream as it was: programs read it while one writes the total."""
    dtype = torch.float16  # the interpreter truncates to bfloat16
    x, weight, bias = operands(1, num_rows, size, dtype, device)
    residual, scale, branch_scale = operands(3, 1, size, dtype, device)[0].unsqueeze(1)
    branch = branch_scale[0] if adds == "norm of x" else None
    given, stream = DeferredNorm(x, scale[0], 1e-5, 1.0), x
    if adds == "float32 x":  # whose bits are more than float16 has
        x = x.float() * (1 + 2**-13)
    if adds != "nothing":
        stream = _normed(x, branch) if branch is not None else x.double()
        stream = (stream + residual.double()).to(dtype)
        total = torch.empty_like(residual)
        given = DeferredNorm(x, scale[0], 1e-5, 1.0, residual.clone(), total, branch)
    actual = multiply(weight, given, bias, epilogue)
    assert actual.dtype == dtype
    assert_close(actual, expected(_normed(stream, scale[0]), weight, bias, epilogue), dtype)
    if given.total is not None:
        torch.testing.assert_close(given.total, stream, rtol=2**-10, atol=0)
        assert given.residual is not None
        assert torch.equal(given.residual, residual)


def test_where_programs_are_many_a_kernel_norms() -> None:
    assert pays_to_norm(4096, 2560, norms_branch=True)  # Gemma 3 4B's queries, keys and values
    assert not pays_to_norm(20480, 2560, norms_branch=True)  # its gates and ups
    assert pays_to_norm(28672, 4096, norms_branch=False)  # Llama 3 8B's
    assert not pays_to_norm(28672, 4096, norms_branch=False, is_float8=True)


@pytest.mark.parametrize("follows", [False, True])
def test_the_projection_that_reads_one_token_norms_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    monkeypatch.setattr(layers_linear, "make_linear_kernel", lambda weight, *_: CudaLinear(weight))
    monkeypatch.setattr(layers_norm, "_norm_on", lambda x: cuda_norm.norm)
    mlp = DenseMLP(MLPConfig(kind="gated", hidden_size=96, intermediate_size=60, activation="silu"))
    norm, branch_norm = (RMSNorm(NormConfig("rms", 96, 1e-5, offset=1.0)) for _ in range(2))
    for i, module in enumerate((mlp.up, mlp.down, norm, branch_norm)):
        for parameter in module.parameters():
            parameter.data = operands(i + 2, 1, parameter.numel(), torch.float32, device)[1].view(
                parameter.shape
            )
        module.finalize()
    if follows:
        norm.follow(Joining(branch_norm))
    x, residual, _ = operands(1, 1, 96, torch.float32, device)
    for before in (None, residual):
        normed, total = norm.forward(x, None if before is None else before.clone())
        wanted = mlp.forward(normed)
        given, own_total = norm.forward_for(mlp, x, before)
        assert isinstance(given, DeferredNorm)
        torch.testing.assert_close(mlp.forward(given), wanted)
        torch.testing.assert_close(own_total, total)
    assert torch.equal(residual, operands(1, 1, 96, torch.float32, device)[1])
    two = x.expand(2, -1).contiguous()
    assert isinstance(norm.forward_for(mlp, two, None)[0], Tensor)
    assert isinstance(norm.forward_for(mlp, x.view(1, 1, 96), residual)[0], Tensor)
    layer_norm = LayerNorm(NormConfig("layer", 96, 1e-5))
    for parameter in layer_norm.parameters():
        parameter.data = x[0].clone()
    layer_norm.finalize()
    assert isinstance(layer_norm.forward_for(mlp, x, None)[0], Tensor)


def _normed(x: Tensor, scale: Tensor) -> Tensor:
    return F.rms_norm(x.double(), x.shape[1:], scale.double() + 1, 1e-5)


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SILU_MUL])
def test_one_output_of_one_token(device: torch.device, epilogue: Epilogue) -> None:
    """Of a size of 1 Triton makes a constant."""
    x, weight, _ = operands(1, 2 if epilogue.is_gated else 1, 70, torch.float32, device)
    actual = linear(x, weight, None, epilogue)
    assert_close(actual, expected(x, weight, None, epilogue), torch.float32)


def test_programs_leave_neither_sms_nor_columns_idle() -> None:
    def idle_in_last_wave(programs: Programs, num_rows: int) -> float:
        waves = num_rows / programs.rows / (132 * programs.per_sm)
        return 1 - waves / math.ceil(waves)

    # 1,280 programs of the usual kind would be one wave of 1,188 and one of 92.
    assert idle_in_last_wave(choose_programs(4096, 4096, False), 2560) > 0.4
    assert idle_in_last_wave(choose_programs(2560, 10240, False), 2560) < 0.1
    assert choose_programs(4096, 2560, False).columns == 512  # five blocks without padding
    assert choose_programs(10240, 2560, True).columns == 512


@pytest.mark.parametrize("is_float8", [False, True])
def test_rings_leave_neither_sms_nor_memory_idle(is_float8: bool) -> None:
    def memory(rows: int, size: int, is_gated: bool = False) -> int:
        ring = choose_ring(rows, size, is_gated, 132, is_float8)
        units = rows / (1 + is_gated) / ring.rows / 132
        assert units / math.ceil(units) > 0.96
        blocks = ring.rows * ring.fold * 128 * ring.stages * (1 + is_gated)
        own_blocks = math.ceil(units) * math.ceil(size / (ring.fold * (128 if is_float8 else 64)))
        assert blocks > 60 << 10 or ring.stages == own_blocks
        part = 2048 if is_float8 else 1024
        return blocks + triton.cdiv(size, part) * part * 2 + 2048  # with barriers and CUDA's share

    attention = 36 << 10
    # Of Gemma 3 4B and of Llama 3 8B; two that follow each other share an SM.
    for hidden, heads, width, inner in ((2560, 2048, 4096, 10240), (4096, 4096, 6144, 14336)):
        qkv, output = memory(width, hidden), memory(hidden, heads)
        up, down = memory(2 * inner, hidden, is_gated=True), memory(hidden, inner)
        assert max(qkv + output, output + up) + attention < SHARED_MEMORY
        assert max(up + down, down + qkv) < SHARED_MEMORY
    assert not takes_ring(4096, 1100, is_float8)  # rows are not aligned as TMA needs them
    assert not takes_ring(128, 4096, is_float8)
    assert takes_ring(4096, 1088, is_float8) is not is_float8  # half a piece


@pytest.mark.parametrize(("rows", "size"), [(5120, 2048), (6144, 4096), (4096, 2560)])
def test_a_ring_beside_experts_takes_little_from_them(rows: int, size: int) -> None:
    ring = choose_ring(rows, size, False, 132, is_float8=True, follows_experts=True)
    assert 16 << 10 <= ring.rows * ring.fold * 128 * ring.stages <= 40 << 10


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize("follows_experts", [False, True])
def test_a_ring_of_several_blocks_has_room_for_two(
    is_gated: bool, is_float8: bool, follows_experts: bool
) -> None:
    """Of any size that there are rings of; with one, the kernel would wait for good."""
    for rows in (1024, 5120, 10_240, 28_672):  # 10,240 x 8,192: Llama 3 70B's queries
        for size in range(128, 20_481, 128):
            ring = choose_ring(rows, size, is_gated, 132, is_float8, follows_experts)
            units = triton.cdiv(triton.cdiv(rows // (1 + is_gated), ring.rows), 132)
            blocks = units * triton.cdiv(size, ring.fold * (128 if is_float8 else 64))
            assert ring.stages >= min(2, blocks)
            memory = ring.rows * ring.fold * 128 * ring.stages * (1 + is_gated)
            assert memory + 2 * triton.cdiv(size, 2048) * 2048 < SHARED_MEMORY


def test_more_tokens_on_a_cpu_are_torch() -> None:
    x, weight, bias = operands(3, 8, 16, torch.float32, torch.device("cpu"))
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(linear_partial(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(linear(x, weight, bias, Epilogue.RELU), F.linear(x, weight, bias).relu())


def test_relu_without_the_private_op_of_torch(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cuda_linear._addmm_activation is not None, "this torch tests only the fallback"
    # On a GPU, more tokens than our kernels take.
    x, weight, bias = operands(200, 64, 96, torch.float32, device)
    with_op = linear(x, weight, bias, Epilogue.RELU)
    monkeypatch.setattr(cuda_linear, "_addmm_activation", None)
    without = linear(x, weight, bias, Epilogue.RELU)
    assert (without == 0).any()
    torch.testing.assert_close(without, with_op)
    assert_close(without, expected(x, weight, bias, Epilogue.RELU), torch.float32)


def test_tiles_fit() -> None:
    shapes = [
        *MEASURED,
        *UNMEASURED,
        (64, 64, Epilogue.NONE),
        (96, 192, Epilogue.SILU_MUL),
        (1024, 8192, Epilogue.NONE),
        (32000, 4096, Epilogue.NONE),
        (8192, 64, Epilogue.SILU_MUL),
    ]
    for num_rows, size, epilogue in shapes:
        for num_tokens in (2, 16, 17, 33, 100, 128, 129):
            tiles = choose_tiles(num_tokens, num_rows, size, epilogue)
            if tiles is None:
                continue
            assert num_tokens <= tiles.tokens
            assert (tiles.tokens == 64) if tiles.swap else (tiles.tokens in SIZES)
            halves = 2 if epilogue.is_gated else 1
            stage = 2 * tiles.columns * (tiles.tokens + tiles.rows * halves)
            assert (tiles.stages * stage + 1024) * tiles.per_sm <= SHARED_MEMORY
            assert tiles.stages > 1
            assert tiles.splits <= -(-size // tiles.columns)
    assert choose_tiles(129, 4096, 4096, Epilogue.NONE) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    DEVICE = torch.device("cuda")

    @pytest.mark.parametrize("shape", [*MEASURED, *UNMEASURED])
    @pytest.mark.parametrize("num_tokens", [1, 2, 16, 24, 33, 64, 100, 128, 200, 256])
    def test_shapes_of_models(self, shape: tuple[int, int, Epilogue], num_tokens: int) -> None:
        num_rows, size, epilogue = shape
        rows = num_rows * 2 if epilogue.is_gated else num_rows
        x, weight, bias = operands(num_tokens, rows, size, torch.bfloat16, self.DEVICE)
        wanted = expected(x, weight, bias, epilogue)
        assert_close(linear(x, weight, bias, epilogue), wanted, torch.bfloat16)
        if epilogue == Epilogue.NONE:
            parts = linear_partial(x, weight, bias)
            assert_close(parts.sum(0) if parts.dim() == 3 else parts, wanted, torch.bfloat16)

    @pytest.mark.parametrize("shape", [*MEASURED, *UNMEASURED])
    def test_rings_of_models(self, shape: tuple[int, int, Epilogue]) -> None:
        num_rows, size, epilogue = shape
        rows = num_rows * 2 if epilogue.is_gated else num_rows
        x, weight, bias = operands(1, rows, size, torch.bfloat16, self.DEVICE)
        actual = CudaLinear(weight, is_chained=True).apply(x, bias, epilogue)
        assert_close(actual, expected(x, weight, bias, epilogue), torch.bfloat16)

    @pytest.mark.parametrize("shape", [(4096, 14336), (1024, 2048), (28672, 4096)])
    def test_two_products_for_one(self, shape: tuple[int, int]) -> None:
        x, weight, _ = operands(256, *shape, torch.bfloat16, self.DEVICE)
        if shape[0] > shape[1]:
            actual = linear(x, weight, None, Epilogue.SILU_MUL)
            assert_close(actual, expected(x, weight, None, Epilogue.SILU_MUL), torch.bfloat16)
            return
        parts = linear_partial(x, weight)
        assert parts.shape[0] == 2
        assert_close(parts.sum(0), expected(x, weight, None, Epilogue.NONE), torch.bfloat16)

    @pytest.mark.parametrize("num_tokens", [16, 128, 256])
    def test_parts_that_cancel(self, num_tokens: int) -> None:
        """Two columns of W, one in each half, are large and nearly opposite: so are the parts."""
        x, weight, _ = operands(num_tokens, 1024, 3072, torch.bfloat16, self.DEVICE)
        x[:, 2000] = x[:, 1000]
        weight[:, 1000] *= 5000
        weight[:, 2000] = -weight[:, 1000]
        parts = linear_partial(x, weight)
        assert parts.dim() == 3
        assert parts.abs().max() > 100 * parts.sum(0).abs().max()
        assert_close(
            parts.sum(0).bfloat16(), expected(x, weight, None, Epilogue.NONE), torch.bfloat16
        )

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("num_tokens", [1, 5, 31, 128])
    @pytest.mark.parametrize("epilogue", Epilogue)
    @pytest.mark.parametrize(("num_rows", "size"), [(64, 64), (198, 320), (1026, 1536), (40, 100)])
    def test_other_shapes(
        self,
        dtype: torch.dtype,
        num_tokens: int,
        epilogue: Epilogue,
        num_rows: int,
        size: int,
    ) -> None:
        x, weight, bias = operands(num_tokens, num_rows, size, dtype, self.DEVICE)
        wanted = expected(x, weight, bias, epilogue)
        assert_close(linear(x, weight, bias, epilogue), wanted, dtype)

    @pytest.mark.parametrize("early", [False, True])
    @pytest.mark.parametrize("swap", [False, True])
    @pytest.mark.parametrize("splits", [1, 2, 3, 5])
    @pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SILU_MUL])
    def test_tiles(
        self,
        early: bool,
        swap: bool,
        splits: int,
        epilogue: Epilogue,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        tiles = Tiles(64, 32 if swap else 64, 64, 3, 4, splits, 2, swap, early)
        monkeypatch.setattr("octavo.ops.cuda.linear.choose_tiles", lambda *shape: tiles)
        x, weight, bias = operands(50, 680, 704, torch.bfloat16, self.DEVICE)
        wanted = expected(x, weight, bias, epilogue)
        for _ in range(3):  # the workspace is left as it was found
            actual = linear(x, weight, bias, epilogue)
            assert_close(actual, wanted, torch.bfloat16)
        assert torch.equal(linear(x, weight, bias, epilogue), actual)
        if epilogue == Epilogue.NONE:
            parts = linear_partial(x, weight, bias)
            assert_close(parts.sum(0) if parts.dim() == 3 else parts, wanted, torch.bfloat16)

    @pytest.mark.parametrize("num_tokens", [1, 8, 16, 60, 128])
    def test_a_token_does_not_depend_on_the_others(self, num_tokens: int) -> None:
        x, weight, _ = operands(num_tokens, 4096, 4096, torch.bfloat16, self.DEVICE)
        before = linear(x, weight)[0]
        x[1:] = torch.randn_like(x[1:])
        assert torch.equal(linear(x, weight)[0], before)

    def test_rows_and_offsets_beyond_int32(self) -> None:
        num_rows, size = 600_000, 4096  # 2.5e9 weights
        weight = torch.randn(num_rows, size, device=self.DEVICE, dtype=torch.bfloat16)
        for num_tokens in (1, 8):
            x = torch.randn(num_tokens, size, device=self.DEVICE, dtype=torch.bfloat16) * 0.02
            actual = linear(x, weight)
            for rows in (slice(0, 200), slice(524_200, 524_400), slice(num_rows - 200, num_rows)):
                wanted = expected(x, weight[rows], None, Epilogue.NONE)
                assert_close(actual[:, rows], wanted, torch.bfloat16)

    @pytest.mark.parametrize(
        ("num_tokens", "in_ring"), [(1, False), (1, True), (8, False), (64, False)]
    )
    def test_a_captured_chain_gives_what_plain_steps_give(
        self, num_tokens: int, in_ring: bool
    ) -> None:
        """Kernels overlap in a graph: each must wait for what it reads and overwrites."""
        from octavo.ops.cuda.norm import norm
        from octavo.ops.norm import Affine

        size, inner, layers = 1024, 3072, 12
        make = torch.Generator(self.DEVICE).manual_seed(0)
        weights = [
            [
                torch.randn(shape, generator=make, device=self.DEVICE, dtype=torch.bfloat16)
                * shape[1] ** -0.5
                for shape in ((2048, size), (size, 2048), (2 * inner, size), (size, inner))
            ]
            for _ in range(layers)
        ]
        scale = torch.ones(size, device=self.DEVICE, dtype=torch.bfloat16)
        x = torch.empty(num_tokens, size, device=self.DEVICE, dtype=torch.bfloat16)

        def normed(hidden: Tensor, residual: Tensor) -> Tensor:
            return norm(hidden, Affine(scale), 1e-5, residual, is_rms=True)[0]

        kernels = [[CudaLinear(each, in_ring) for each in layer] for layer in weights]

        def step() -> Tensor:
            hidden, residual = x, torch.zeros_like(x)
            for first, second, gate_up, down in kernels:
                heads = first.apply(normed(hidden, residual), None, Epilogue.NONE)
                hidden = second.apply_partial(heads, None)
                inside = gate_up.apply(normed(hidden, residual), None, Epilogue.SILU_MUL)
                hidden = down.apply_partial(inside, None)
            return normed(hidden, residual)

        x.normal_(generator=make)
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(20):
            x.normal_(generator=make)
            graph.replay()
            assert torch.equal(captured, step())
