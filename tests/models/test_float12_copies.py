"""Weights with copies in 12 bits for few tokens: on a CPU by a double of the kernel, and on a
GPU."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import model_zoo
from float12_doubles import CopiedExperts, Hopper
from octavo import LLM, SamplingParams, float12
from octavo.config import make_config
from octavo.float12 import MOST_TOKENS
from octavo.layers.config import ExpertsConfig, LinearConfig
from octavo.layers.experts import LoadedExperts
from octavo.layers.linear import Projection
from octavo.models.base import CausalLM
from octavo.models.loader import load_model
from octavo.models.quantization import WeightKernels
from octavo.models.registry import read_model_config
from octavo.ops.communicator import SingleRank
from octavo.ops.cuda.expert_tiles import tokens_per_tile
from octavo.ops.cuda.float12 import pack_float12, takes_float12, unpack_float12
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.parallel import Shard
from octavo.routing import RoutingConfig
from octavo.weight_forms import with_copies

PROMPTS = [model_zoo.random_token_ids(n, seed=n) for n in (3, 40, 80)]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    return Hopper(monkeypatch)


def load(directory: Path | str, **options: Any) -> LLM:
    return LLM(str(directory), **{"dtype": "bfloat16", "num_blocks": 200, **options})


def kernels(llm: LLM) -> list[object]:
    """Of all projections and experts."""
    executor: Any = llm.engine.executor
    model: nn.Module = executor._worker.runner._model
    kinds = Projection, LoadedExperts
    return [each._kernel for each in model.modules() if isinstance(each, kinds)]


def results(llm: LLM) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens, and their log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, params, use_tqdm=False)]
    scores = [position.logprob for each in outputs for position in each.logprobs or ()]
    return [list(each.token_ids) for each in outputs], scores


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("llama3", {"tie_word_embeddings": False}, {}),
        ("llama3", {"tie_word_embeddings": True}, {}),
        ("llama3", {"tie_word_embeddings": False}, {"model_impl": "transformers"}),
        ("llama3", {"tie_word_embeddings": True}, {"model_impl": "transformers"}),
        ("llama3", {"tie_word_embeddings": False}, {"quantization": "fp8"}),
        ("gemma2", {}, {}),  # soft caps
        ("phimoe", {}, {}),  # a bias
        ("bart", {"d_model": 64}, {}),  # a bias of the logits
        ("qwen3_moe", {}, {}),  # copies of attention's projections
        ("qwen3_moe", {"moe_intermediate_size": 64}, {}),  # and of experts
        ("qwen2_moe", {"moe_intermediate_size": 64}, {}),  # and of a shared expert
        ("gpt_oss", {"intermediate_size": 64}, {}),  # experts with biases have none
    ],
)
def test_tokens_are_those_of_the_rounded_weights(
    hopper: Hopper, name: str, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    sizes = sizes if name == "bart" else {"hidden_size": 64, **sizes}
    directory = model_zoo.write_model(name, tmp_path / "model", **sizes)
    with load(directory, **options) as llm:
        assert llm.engine.model_config.head_copy == "float12"
        assert llm.engine.model_config.head.copy == "float12"
        copied = [each.copy_bytes > 0 for of in llm.engine.model_config.copyable for each in of]
        assert any(copied) == ("quantization" not in options)
        expected = 1 + sum(copied)
        kinds = hopper.kernel, CopiedExperts
        assert sum(isinstance(each, kinds) for each in kernels(llm)) == expected
        found = results(llm)
    assert hopper.calls
    hopper.rounds = True
    with load(directory, **options) as llm:
        assert found == results(llm)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_as_many_layers_as_fit(
    hopper: Hopper, model_impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is counted is what the device has."""
    directory = model_zoo.write_model("llama3", tmp_path / "model", hidden_size=64)
    with load(directory, model_impl=model_impl, weight_copies=False) as llm:
        plain = llm.engine.model_config
    budget = plain.with_copies(1).copy_bytes
    monkeypatch.setattr("octavo.weight_forms._most_copies", lambda *args: budget)
    with load(directory, model_impl=model_impl) as llm:
        config = llm.engine.model_config
        assert config == plain.with_copies(1)
        copies = [each._copy for each in kernels(llm) if isinstance(each, hopper.kernel)]
    assert sum(each.nbytes for each in copies) == config.copy_bytes == budget
    flags = [any(each.copy_bytes for each in of) for of in config.copyable]
    assert flags == [True, *[False] * (len(flags) - 1)]
    assert len(flags) > 1


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_that_a_quantizer_left_alone_has_a_copy(
    hopper: Hopper, is_tied: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(Path(__file__).parent / "quantized" / "fp8_channel", directory)
    if not is_tied:
        config = json.loads((directory / "config.json").read_text())
        changed = config | {"tie_word_embeddings": False}
        (directory / "config.json").write_text(json.dumps(changed))
        tensors = load_file(directory / "model.safetensors")
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table.flip(0).contiguous()
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with load(directory) as llm:
        assert llm.engine.model_config.head.method == ("plain" if is_tied else "quantized")
        assert sum(isinstance(each, hopper.kernel) for each in kernels(llm)) == 1


@pytest.mark.parametrize("options", [{"weight_copies": False}, {"dtype": "float32"}])
def test_without_a_copy(hopper: Hopper, options: dict[str, Any], tmp_path: Path) -> None:
    directory = model_zoo.write_model("llama3", tmp_path / "model", hidden_size=64)
    with load(directory, **options) as llm:
        assert not any(isinstance(each, hopper.kernel) for each in kernels(llm))
        assert llm.engine.model_config.head_copy is None
        assert llm.engine.model_config.head.copy is None
        weights = llm.engine.executor.capacity.budget.weights
    with load(directory, **{"weight_copies": True, "dtype": "bfloat16"}) as llm:
        size = llm.engine.model_config.copy_bytes
        if "dtype" not in options:
            assert llm.engine.executor.capacity.budget.weights == weights + size > weights


def test_other_devices_ignore_the_option() -> None:
    with load("demo") as llm:
        assert llm.engine.model_config.head_copy is None


def test_weights_that_are_not_finite_have_no_copies(hopper: Hopper, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "tie_word_embeddings": False}
    directory = model_zoo.write_model("llama3", tmp_path / "model", **sizes)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][3, 5] = -torch.inf
    save_file(tensors, path, {"format": "pt"})
    with load(directory) as llm:
        copied = [each.copy_bytes > 0 for of in llm.engine.model_config.copyable for each in of]
        assert sum(isinstance(each, hopper.kernel) for each in kernels(llm)) == sum(copied) > 0


def operands(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    x, weight, bias = torch.randn(num_tokens, 192), torch.randn(40, 192), torch.randn(40)
    weight[:, ::3] *= 1e-5  # which the copy rounds
    return x.bfloat16(), weight.bfloat16(), bias.bfloat16()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, MOST_TOKENS, MOST_TOKENS + 1, 200])
def test_few_tokens_are_multiplied_by_the_copy(
    hopper: Hopper, num_tokens: int, has_bias: bool
) -> None:
    x, weight, own_bias = operands(num_tokens)
    bias = own_bias if has_bias else None
    kernel = hopper.kernel(weight)
    assert kernel.keeps_weight
    is_few = num_tokens <= MOST_TOKENS
    read = unpack_float12(pack_float12(weight)) if is_few else weight
    assert not torch.equal(read, weight) or not is_few
    assert torch.equal(kernel.apply(x, bias, Epilogue.NONE), F.linear(x, read, bias))
    assert torch.equal(kernel.apply_partial(x, bias), F.linear(x, read, bias))
    assert hopper.calls == 2 * [num_tokens] * is_few


def test_what_the_kernel_does_not_take_is_multiplied_by_the_weight(hopper: Hopper) -> None:
    _, weight, _ = operands(8)
    kernel = hopper.kernel(weight)
    wide = torch.randn(8, 196).bfloat16()
    for given in (wide[:, :192], wide.flatten()[4 : 4 + 8 * 192].view(8, 192)):
        assert torch.equal(kernel.apply(given, None, Epilogue.NONE), F.linear(given, weight))
    x = torch.randn(8, 192).bfloat16()
    gated = kernel.apply(x, None, Epilogue.SILU_MUL)  # 40 rows: ups begin within a piece
    expected = apply_epilogue(F.linear(x, weight), Epilogue.SILU_MUL)
    torch.testing.assert_close(gated, expected, rtol=0.02, atol=1e-3)
    assert not hopper.calls
    read = unpack_float12(pack_float12(weight))
    activated = kernel.apply(x, None, Epilogue.RELU)
    assert torch.equal(activated, F.linear(x, read).relu())
    gated = hopper.kernel(weight[:32]).apply(x, None, Epilogue.SILU_MUL)
    assert torch.equal(gated, apply_epilogue(F.linear(x, read[:32]), Epilogue.SILU_MUL))
    assert hopper.calls == [8, 8]


@pytest.mark.parametrize(("num_rows", "size"), [(24, 64), (131, 192)])
def test_bytes_of_a_copy(num_rows: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not LinearConfig(size, (num_rows,)).with_copy("float12").copy, "small"
    monkeypatch.setattr(float12, "_LEAST_ROWS", num_rows)
    monkeypatch.setattr(float12, "_LEAST_SIZE", num_rows * size)
    config = LinearConfig(size, (num_rows,))
    assert config.copy_bytes == 0
    copied = config.with_copy("float12")
    assert copied.copy_bytes == pack_float12(torch.ones(num_rows, size).bfloat16()).nbytes
    assert not LinearConfig(size + 32, (num_rows,)).with_copy("float12").copy
    assert not LinearConfig(size, (num_rows - 1,)).with_copy("float12").copy


CONFIGS = Path(__file__).parents[2] / "benchmarks/configs"
GB = 10**9


def test_ranks_have_copies_of_their_parts() -> None:
    plain = read_model_config(CONFIGS / "llama-3-8b")
    config = plain.with_copies()
    whole = config.head.copy_bytes
    assert whole == 128_256 * (4096 * 3 // 2 + 4)
    assert config.sharded(Shard(1, 2)).head.copy_bytes == whole // 2
    of_layer = sum(each.copy_bytes for each in config.copyable[3])
    parameters = 6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096
    assert of_layer == 3 * parameters // 2 + 4 * (6144 + 4096 + 2 * 14336 + 4096)
    assert config.copy_bytes == whole + 32 * of_layer
    assert config.least_weight_bytes(2) == plain.weight_bytes(2) + config.copy_bytes
    some = plain.with_copies(5)
    assert [any(each.copy_bytes for each in of) for of in some.copyable] == [True] * 5 + [
        False
    ] * 27
    assert some.copy_bytes == whole + 5 * of_layer
    small, large = (sum(each.copy_saves(n) for each in some.copyable[0]) for n in (64, 16))
    assert 0 < small < large
    assert some.copy_saves(64) == some.head.copy_saves(64) + 5 * small
    # One token's output projection reads its copy in a ring, and its weight by itself.
    output = some.layers[0].attention.output
    assert output.copy_saves(1) == 0 < output.copy_saves(1, is_chained=True)
    assert some.copy_saves(1) == some.copy_saves(16) == some.head.copy_saves(16) + 5 * large


@pytest.mark.parametrize(
    ("num_rows", "size", "fewest"),
    [
        (4096, 1024, (2, 1)),  # queries, keys and values of Qwen3-0.6B
        (2048, 2048, (2, 2)),  # the output projection of Qwen3-1.7B
        (2560, 2048, (2, 1)),  # of Gemma 3 4B
        (4096, 4096, (2, 1)),  # of Llama-3-8B
        (2048, 6144, (2, 1)),
        (28672, 4096, (1, 1)),
    ],
)
def test_one_token_reads_copies_of_large_weights(
    num_rows: int, size: int, fewest: tuple[int, int]
) -> None:
    assert float12.has_use(num_rows, size)
    found = tuple(float12.fewest_tokens(num_rows, size, is_chained) for is_chained in (False, True))
    assert found == fewest


def test_experts_have_copies() -> None:
    config = read_model_config(CONFIGS / "qwen3-30b-a3b").with_copies()
    experts = config.layers[0].mlp
    assert isinstance(experts, ExpertsConfig)
    weights = 128 * 3 * 2048 * 768
    scales = 128 * (2 * 768 + 2048)
    assert experts.copy_bytes == weights * 3 // 2 + 4 * scales
    assert experts in config.copyable[0]
    for num_tokens, hit in ((1, 8), (8, 51.6), (700, 128)):
        expected = (weights // 2 - 4 * scales) * hit / 128
        assert experts.copy_saves(num_tokens) == pytest.approx(expected, rel=1e-3)
    # The most tokens with which a tile of the kernel has room for those of nearly all experts.
    most = experts.copied_tokens.stop - 1
    assert tokens_per_tile(most, 128, 8) == float12.MOST_OF_EXPERT
    assert tokens_per_tile(most + 1, 128, 8) > float12.MOST_OF_EXPERT
    assert experts.copy_saves(most + 1) == 0
    half, eighth = (config.sharded(Shard(0, n)).layers[0].mlp for n in (2, 8))
    assert isinstance(half, ExpertsConfig)
    assert half.copy_bytes == weights * 3 // 4 + 4 * 128 * (768 + 2048)
    assert isinstance(eighth, ExpertsConfig)
    assert eighth.copy_bytes == 0  # parts of 96 inputs have no whole pieces
    for other in ({"intermediate_size": 736}, {"bias": True}, {"method": "quantized"}):
        assert replace(experts, **other).copy_bytes == 0  # type: ignore[arg-type]
    # Few weights, and more inputs than one token's kernels hold in registers.
    small = replace(experts, hidden_size=1024, intermediate_size=128)
    assert small.copied_tokens.start == 11  # with which half of 50 million weights are hit
    assert replace(small, routing=RoutingConfig(num_experts=8, top_k=2)).copy_bytes == 0
    for long in ({"hidden_size": 8192}, {"intermediate_size": 1088}):
        assert replace(experts, **long).copied_tokens.start == 2  # type: ignore[arg-type]


def test_attention_has_copies_beside_experts() -> None:
    config = read_model_config(CONFIGS / "gpt-oss-20b-mxfp4").with_copies()
    attention = config.layers[0].attention
    qkv = 2 * 5120 * 2880 - attention.qkv.copy_bytes
    output = 2 * 2880 * 4096 - attention.output.copy_bytes
    assert min(qkv, output) > 0
    layers, head = len(config.layers), 2 * 201_088 * 2880 - config.head.copy_bytes
    assert config.copy_saves(1) == head  # by GEMVs, of weights that are small and in no chain
    assert config.copy_saves(2) == config.copy_saves(8) == head + layers * (qkv + output)
    assert config.copy_saves(9) == config.copy_saves(16) == head + layers * qkv
    assert config.copy_saves(17) == config.copy_saves(128) == head
    assert config.copy_saves(129) == 0


@pytest.mark.parametrize(
    ("options", "dtype", "total", "kernels", "num_layers"),
    [
        ({}, "bfloat16", 126 * GB, "hopper", 32),  # 11.3 GB of 110 beside 16 GB of weights
        ({}, "bfloat16", 80 * GB, "hopper", 32),  # beside 34 GB of KV
        ({}, "bfloat16", 40 * GB, "hopper", 6),  # 0.79 GB and 6 times 0.33 of 24
        ({"max_num_seqs": 1024, "max_num_batched_tokens": 8192}, "bfloat16", 80 * GB, "hopper", 22),
        ({"max_num_seqs": 128}, "bfloat16", 40 * GB, "hopper", 10),  # beside 17 GB of KV
        ({"num_blocks": 8192}, "bfloat16", 40 * GB, "hopper", 10),  # the same
        ({"kv_cache_memory": 23 * GB}, "bfloat16", 40 * GB, "hopper", None),
        ({"weight_copies": False}, "bfloat16", 80 * GB, "hopper", None),
        ({}, "float16", 80 * GB, "hopper", None),
        ({}, "bfloat16", 80 * GB, "ada", None),
        ({}, "bfloat16", 80 * GB, "cpu", None),
        ({}, "bfloat16", 23 * GB, "hopper", 0),  # 0.79 GB of 7
        ({}, "bfloat16", 22 * GB, "hopper", None),
        ({}, "bfloat16", 10 * GB, "hopper", None),  # fewer than the weights take
        ({"tensor_parallel_size": 2}, "bfloat16", 12 * GB, "hopper", 0),
    ],
)
def test_who_has_copies(
    options: dict[str, Any],
    dtype: str,
    total: int,
    kernels: WeightKernels,
    num_layers: int | None,
) -> None:
    """num_layers: beside the head; None: no copies."""
    model = read_model_config(CONFIGS / "llama-3-8b")
    config = make_config(str(CONFIGS / "llama-3-8b"), **options)
    made = with_copies(config, model, dtype, total, kernels)
    if num_layers is None:
        assert made is model
    else:
        assert made == model.with_copies(num_layers)


@pytest.mark.parametrize(
    ("options", "total", "layers"),
    [
        ({"max_num_seqs": 1024, "max_num_batched_tokens": 8192}, 127 * GB, (48, 7)),
        ({"max_num_seqs": 256}, 127 * GB, (48, 39)),  # beside 26 GB of KV
        ({"max_num_seqs": 64}, 127 * GB, (48, 48)),
        ({"kv_cache_memory": 50 * GB}, 127 * GB, (48, 12)),
        ({}, 72 * GB, (31, 0)),  # a head of 0.47 GB, and 31 times 0.028, of 11
        ({"max_num_seqs": 64, "tensor_parallel_size": 2}, 72 * GB, (48, 48)),
        ({"max_num_seqs": 64, "tensor_parallel_size": 8}, 72 * GB, (48, 48)),  # experts have none
    ],
)
def test_projections_come_before_experts(
    options: dict[str, Any], total: int, layers: tuple[int, int]
) -> None:
    model = read_model_config(CONFIGS / "qwen3-30b-a3b")
    config = make_config(str(CONFIGS / "qwen3-30b-a3b"), **options)
    made = with_copies(config, model, "bfloat16", total, "hopper")
    found = [
        sum(part.copies is not None for part in parts)
        for parts in zip(*((each.attention, each.mlp) for each in made.layers), strict=True)
    ]
    assert found == list(layers)
    assert made == model.with_copies(*layers)


def decode_error(llm: LLM, batch: int, num_batches: int) -> float:
    """Root mean square of the differences of log-probabilities of tokens that are decoded and of
    the same tokens in prompts, which are too long for copies. `batch`: sequences at a time."""
    seeds = range(batch * num_batches)
    prompts = [model_zoo.random_token_ids(MOST_TOKENS + 9, seed=seed) for seed in seeds]
    greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
    outputs = [
        each.outputs[0]
        for start in seeds[::batch]
        for each in llm.generate(prompts[start : start + batch], greedy, use_tqdm=False)
    ]
    wholes = [[*prompt, *each.token_ids] for prompt, each in zip(prompts, outputs, strict=True)]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5, ignore_eos=True)
    squares = []
    for whole, output in zip(wholes, outputs, strict=True):
        (result,) = llm.generate([whole], scored, use_tqdm=False)
        assert result.prompt_logprobs is not None
        read = result.prompt_logprobs[-len(output.token_ids) :]
        for position, decoded in zip(read, output.logprobs or (), strict=True):
            assert position is not None
            expected = dict(position.top)
            squares += [(expected[i] - each) ** 2 for i, each in decoded.top if i in expected]
    return math.sqrt(statistics.fmean(squares))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    DEVICE = torch.device("cuda")
    SIZES = (1 << 16, 256)  # of the smallest head that has a copy

    def load(self, directory: Path, is_asked: bool, load_format: Any = "auto") -> CausalLM:
        config = read_model_config(directory)
        config = config.with_copies() if is_asked else config
        return load_model(config, torch.bfloat16, self.DEVICE, SingleRank(), load_format)

    @pytest.fixture(autouse=True)
    def hopper_gpu(self) -> None:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("a kernel for Hopper")

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        vocab_size, hidden_size = self.SIZES
        sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size}
        return model_zoo.write_model("llama3", tmp_path, tie_word_embeddings=True, **sizes)

    def test_logits_of_few_and_of_many_tokens(self, directory: Path) -> None:
        from octavo.ops.cuda.linear import CudaLinear
        from octavo.ops.cuda.linear_copied import CopiedLinear

        start = torch.cuda.memory_allocated()
        plain, middle = self.load(directory, False), torch.cuda.memory_allocated()
        copied, end = self.load(directory, True), torch.cuda.memory_allocated()
        assert type(plain.head.linear._kernel) is CudaLinear
        assert type(copied.head.linear._kernel) is CopiedLinear
        expected = copied.head.linear.config.copy_bytes
        assert end - middle - (middle - start) == pytest.approx(expected, rel=0.02)
        for num_tokens in (1, 2, 7, 16, 33, 64, 65, 128, 129, 300):
            hidden = torch.randn(num_tokens, self.SIZES[1], device=self.DEVICE).bfloat16()
            wanted = F.linear(hidden.double(), plain.token_table.double())
            for model in (plain, copied):
                error = (model.logits(hidden).double() - wanted).norm() / wanted.norm()
                assert error < 3e-3

    @pytest.mark.parametrize(
        ("name", "width"),
        [("llama3", "intermediate_size"), ("gemma3_text", "intermediate_size"), ("opt", "ffn_dim")],
    )
    def test_decodes_have_the_error_of_the_weights(
        self, name: str, width: str, tmp_path: Path
    ) -> None:
        """Rings that norm their inputs, tiles with a fold, with gates, with many tokens: different
        numbers of sequences have different kernels, and each a bound of its own. Of few there are
        several batches, as the error of few tokens varies."""
        batches = {1: 12, 3: 4, 12: 1, 40: 1}  # how many, by sequences at a time
        heads = {"num_attention_heads": 16, "num_hidden_layers": 4}
        sizes = {"hidden_size": 2048, width: 8192, "max_position_embeddings": 512, **heads}
        if name != "opt":
            sizes |= {"num_key_value_heads": 8, "head_dim": 128}
        else:
            sizes |= {"word_embed_proj_dim": 2048}
        directory = model_zoo.write_model(name, tmp_path, **sizes)
        errors = []
        for is_asked in (True, False):
            with load(directory, num_blocks=1000, weight_copies=is_asked) as llm:
                copied = llm.engine.model_config.copyable
                assert any(each.copy_bytes for of in copied for each in of) == is_asked
                errors.append({size: decode_error(llm, size, of) for size, of in batches.items()})
        with_copies, without = errors
        for size in batches:
            assert with_copies[size] < 1.5 * without[size] + 0.01, (size, with_copies, without)

    def test_weights_that_are_not_finite(self, directory: Path) -> None:
        from octavo.ops.cuda.linear import CudaLinear
        from octavo.ops.linear import make_linear_kernel

        weight = torch.zeros(self.SIZES, dtype=torch.bfloat16, device=self.DEVICE)
        weight[-1, -1] = torch.inf
        assert not takes_float12(weight)
        assert type(make_linear_kernel(weight, float12_copy=True)) is CudaLinear
