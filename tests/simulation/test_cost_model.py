from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import CacheConfig
from octavo.errors import ConfigError, ModelError
from octavo.simulation.config import SimulationConfig
from octavo.simulation.cost_model import PAPER_2023, Coefficients, CostModel, ModelSize
from octavo.simulation.gpus import GPU, GPUS, find_gpu
from octavo.simulation.models import find_model, model_names
from octavo.simulation.step_shape import StepShape

CONFIGS = Path(__file__).resolve().parents[2] / "benchmarks" / "configs"

NOTHING = StepShape(0, 0, 0, 0, 0)
# Everything at its peak, and no overhead: seconds are amounts over rates.
IDEAL = Coefficients(
    **{
        field.name: 1.0 if field.name.endswith("_efficiency") else 0.0
        for field in fields(Coefficients)
    }
)
# 100 bytes/s, 1,000 FLOPs, 50 bytes/s between devices, 10 bytes/s to the host.
TOY_GPU = GPU("toy", 1, 100.0, 1000.0, 50.0, 10.0)
TOY_MODEL = ModelSize(
    weight_bytes=400,
    token_flops=20.0,
    logit_flops=10.0,
    pair_flops=5.0,
    kv_token_bytes=8,
    block_token_bytes=8,
    hidden_bytes=4,
    num_layers=3,
)


def toy(num_gpus: int = 1, **coefficients: float) -> CostModel:
    return CostModel(TOY_MODEL, TOY_GPU, num_gpus, 2, replace(IDEAL, **coefficients))


def test_units_by_hand() -> None:
    decode = StepShape(num_seqs=2, num_tokens=2, num_sampled=2, kv_tokens=50, attention_pairs=0)
    # Weights 4 s (products only 0.06 s), KV 50 x 8 / 100.
    assert toy().seconds(decode) == pytest.approx(4 + 4)
    # Products 300 x 20 / 1,000 + 0.01, attention 100 x 5 / 1,000, KV 24.
    prefill = StepShape(1, 300, 1, 300, 100)
    assert toy().seconds(prefill) == pytest.approx(6 + 0.01 + 0.5 + 24)
    # A block of 2 tokens has 16 bytes; a copy reads and writes them.
    assert toy().seconds(replace(NOTHING, num_copied_blocks=1)) == pytest.approx(0.32)
    assert toy(swap_block_latency=0.5).swap_seconds(
        replace(NOTHING, num_swapped_blocks=2)
    ) == pytest.approx(2 * (1.6 + 0.5))
    assert toy(step_overhead=1.0, seq_overhead=0.25).seconds(decode) == pytest.approx(9.5)
    assert toy(request_overhead=0.5).seconds(
        replace(NOTHING, num_seqs=6, num_requests=2)
    ) == pytest.approx(1.0)
    # Each of 3 layers of two tokens, and with one token those with experts.
    one = StepShape(num_seqs=1, num_tokens=1, num_sampled=1, kv_tokens=50, attention_pairs=0)
    for num_expert_layers in (0, 2, 3):
        model = replace(TOY_MODEL, num_expert_layers=num_expert_layers)
        cost = CostModel(model, TOY_GPU, 1, 2, replace(IDEAL, layer_overhead=0.5))
        assert cost.seconds(decode) == pytest.approx(8 + 1.5)
        assert cost.seconds(one) == pytest.approx(8 + 0.5 * num_expert_layers)
        assert cost.seconds(NOTHING) == 0
    # Finding a block costs as much as reading 4 tokens: three times the time with blocks of 2.
    assert toy(block_lookup_tokens=4.0).seconds(decode) == pytest.approx(4 + 12)


def test_tensor_parallel_by_hand() -> None:
    """Two devices halve all but the 6 all-reduces: of 4 bytes a token, all of which pass a link."""
    decode = StepShape(2, 2, 2, 50, 0)
    reduces = 6 * (0.01 + 2 * 4 / 50)
    assert toy(2, reduce_latency=0.01).seconds(decode) == pytest.approx((4 + 4) / 2 + reduces)
    # Four: two rounds each, and three quarters of the bytes pass twice.
    reduces = 6 * (2 * 0.01 + 2 * 1.5 * 4 / 50)
    assert toy(4, reduce_latency=0.01).seconds(decode) == pytest.approx((4 + 4) / 4 + reduces)
    # Rows of 6 bytes are exchanged in blocks of 8, both at once, however many devices there are.
    model = replace(TOY_MODEL, hidden_bytes=6)
    cost = replace(IDEAL, reduce_latency=0.01, reduce_block_latency=0.001)
    for num_gpus, rounds, passed in [(2, 1, 1), (4, 2, 1.5)]:
        reduces = 6 * (rounds * 0.01 + 8 * 0.001 + 2 * passed * 6 / 50)
        seconds = CostModel(model, TOY_GPU, num_gpus, 2, cost).seconds(decode)
        assert seconds == pytest.approx((4 + 4) / num_gpus + reduces)


def test_experts_by_hand() -> None:
    """A token takes a quarter of 800 bytes; two take 7/16 of them, and many all."""
    size = replace(TOY_MODEL, expert_bytes=800, miss_share=0.75)
    model = CostModel(size, TOY_GPU, coefficients=IDEAL)
    for num_tokens, read in [(1, 200), (2, 350), (40, 800)]:
        step = StepShape(num_tokens, num_tokens, 0, 0, 0)
        expected = max((400 + read) / 100, num_tokens * 20 / 1000)
        assert model.seconds(step) == pytest.approx(expected, rel=1e-4)


def test_a_mixture_of_experts_is_priced_by_what_its_tokens_take() -> None:
    config = find_model(str(CONFIGS / "qwen3-30b-a3b"))
    size = ModelSize.of(config, "bfloat16")
    assert size.miss_share == pytest.approx(1 - 8 / 128)
    assert size.token_flops == pytest.approx(2 * 2.7e9, rel=0.02)
    assert size.expert_bytes == pytest.approx(2 * 29e9, rel=0.01)
    # 51.6 of 128 experts for 8 tokens (RoutingConfig.expected_distinct).
    read = size.read_bytes(8, 8) - size.weight_bytes
    assert read == pytest.approx(size.expert_bytes * 51.6 / 128, rel=0.01)


def test_copies_are_read_for_few_tokens() -> None:
    config = find_model(str(CONFIGS / "llama-3-8b"))
    plain = ModelSize.of(config, "bfloat16")
    copied = ModelSize.of(config.with_copies(0), "bfloat16")
    assert copied.weight_bytes == plain.weight_bytes
    quarter = 2 * 128_256 * 4096 / 4
    for num_tokens, num_logits, saved in [(1, 1, quarter), (64, 64, quarter), (500, 128, quarter)]:
        read = copied.read_bytes(num_tokens, num_logits)
        assert plain.read_bytes(num_tokens, num_logits) - read == pytest.approx(saved, rel=3e-3)
    assert copied.read_bytes(129, 129) == plain.read_bytes(129, 129)
    copied = ModelSize.of(config.with_copies(10), "bfloat16")
    gates, others = 2 * 2 * 14336 * 4096 / 4, 2 * (6144 + 14336 + 4096) * 4096 / 4
    for num_tokens, saved in [(1, gates + others), (16, gates + others), (17, gates), (65, 0)]:
        read = copied.read_bytes(num_tokens, 1)
        expected = quarter + 10 * saved
        assert plain.read_bytes(num_tokens, 1) - read == pytest.approx(expected, rel=3e-3)


def test_ranks_read_copies_of_their_parts() -> None:
    """Whether a part has one, and for how many tokens it is read, depends on the part."""
    model = find_model("qwen3-0.6b").with_copies()
    whole, halves = (ModelSize.of(model, "bfloat16", num_gpus=n) for n in (1, 2))
    assert whole.weight_bytes == halves.weight_bytes
    assert halves.head_copy_saves == whole.head_copy_saves
    assert whole.copies_save
    assert halves.copies_save == ()  # too small to have copies
    reads = [whole.read_bytes(n, n) for n in range(1, 200)]
    assert reads == sorted(reads)


AMOUNTS = [field.name for field in fields(StepShape)]


@given(
    amounts=st.fixed_dictionaries({name: st.integers(0, 3000) for name in AMOUNTS}),
    more=st.fixed_dictionaries({name: st.integers(0, 3000) for name in AMOUNTS}),
    num_gpus=st.sampled_from([1, 4]),
)
def test_more_of_anything_never_takes_less_time(
    amounts: dict[str, int], more: dict[str, int], num_gpus: int
) -> None:
    size = ModelSize.of(find_model("opt-13b"), "float16")
    model = CostModel(size, GPUS["a100-40gb"], num_gpus)
    larger = {name: amounts[name] + more[name] for name in AMOUNTS}
    assert model.seconds(StepShape(**amounts)) <= model.seconds(StepShape(**larger))


@given(st.sampled_from([field.name for field in fields(Coefficients)]))
def test_a_better_coefficient_never_takes_more_time(name: str) -> None:
    size = ModelSize.of(find_model("opt-13b"), "float16")
    shape = StepShape(30, 200, 30, 10_000, 15_000, 5, 5, 20)
    factor = 2.0 if name.endswith("_efficiency") else 0.5
    better = replace(PAPER_2023, **{name: factor * getattr(PAPER_2023, name)})
    gpu = GPUS["a100-40gb"]
    assert CostModel(size, gpu, 4, 16, better).seconds(shape) <= CostModel(
        size, gpu, 4, 16, PAPER_2023
    ).seconds(shape)


@pytest.mark.parametrize(
    ("name", "num_gpus", "copied", "batch", "measured"),
    [
        ("llama-3-8b", 1, 0, 1, 3.67),
        ("llama-3-8b", 1, 0, 64, 6.24),
        ("llama-3-8b", 1, 32, 1, 3.14),
        ("llama-3-8b", 1, 32, 64, 6.17),
        ("llama-3-8b", 1, 0, 256, 15.22),
        ("opt-13b", 1, 0, 64, 19.48),
        ("llama-3-8b", 2, 0, 1, 2.54),
        ("llama-3-8b", 2, 0, 256, 8.75),
        ("llama-3-70b", 2, 0, 64, 22.3),
        ("opt-13b", 2, 0, 64, 10.84),
        ("llama-3-70b", 4, 34, 1, 9.25),
        ("llama-3-70b", 4, 34, 16, 9.84),
        ("llama-3-70b", 4, 34, 256, 27.33),
        ("opt-66b", 4, 30, 1, 9.72),
        ("opt-66b", 4, 30, 16, 13.21),
        ("opt-66b", 4, 30, 64, 21.03),
        ("opt-175b", 4, 8, 1, 24.29),
        ("opt-175b", 4, 8, 16, 33.06),
    ],
)
def test_decode_steps_on_h200s(
    name: str, num_gpus: int, copied: int, batch: int, measured: float
) -> None:
    """In ms, at a context of 1,024 tokens (docs/performance.md), with copies in 12 bits of so many
    layers: some of those that benchmarks/fit_octavo_software.py fits."""
    model = find_model(name)
    model = model.with_copies(copied) if copied else model
    size = ModelSize.of(model, "bfloat16", num_gpus=num_gpus)
    decode = StepShape(batch, batch, batch, batch * 1040, 0, num_requests=batch)
    predicted = CostModel(size, find_gpu("h200"), num_gpus).compute_seconds(decode) * 1e3
    assert predicted == pytest.approx(measured, rel=0.1)


def test_the_paper_s_models() -> None:
    """800 KiB of KV for a token of OPT-13B; 2 FLOPs for each weight and token."""
    size = ModelSize.of(find_model("opt-13b"), "float16")
    assert size.kv_token_bytes == 819_200
    assert size.weight_bytes == pytest.approx(25.7e9, rel=0.01)
    assert size.token_flops == pytest.approx(2 * 12.6e9, rel=0.01)
    # 4 x 40 layers x 5,120: a query-key product and a weighted value.
    assert size.pair_flops == 4 * 40 * 5120
    assert ModelSize.of(find_model("opt-175b"), "float16").kv_token_bytes == 4_718_592
    assert {"opt-13b", "opt-66b", "opt-175b", "llama-13b"} <= set(model_names())


def test_an_fp8_kv_cache_is_half_as_long_read_and_moved() -> None:
    gpu = find_gpu("h200")
    plain, fp8 = (
        SimulationConfig("opt-13b", "h200", cache=CacheConfig(kv_cache_dtype=each)).prepare()
        for each in ("auto", "fp8")
    )
    sizes = [machine.cost_model.size for machine in (plain, fp8)]
    halved = {
        name: getattr(sizes[0], name) // 2 for name in ("kv_token_bytes", "block_token_bytes")
    }
    assert sizes[1] == replace(sizes[0], **halved)
    step = replace(NOTHING, kv_tokens=10_000, num_copied_blocks=3, num_swapped_blocks=5)
    seconds = [CostModel(size, gpu, coefficients=IDEAL).seconds(step) for size in sizes]
    assert seconds[0] == pytest.approx(2 * seconds[1])
    assert plain.capacity.block_bytes == 2 * fp8.capacity.block_bytes
    assert fp8.capacity.num_blocks >= 2 * plain.capacity.num_blocks


def test_tied_embeddings_are_read_once() -> None:
    size = ModelSize.of(find_model("qwen3-0.6b"), "bfloat16")
    config = find_model("qwen3-0.6b")
    assert size.weight_bytes == 2 * config.num_parameters()


def test_unknown_names_are_answered_with_the_list() -> None:
    with pytest.raises(ConfigError, match="gpu: 'b200' is not one of a100-40gb, a100-80gb, h100"):
        find_gpu("b200")
    with pytest.raises(ModelError, match=r"nor one of llama-13b, .*opt-13b"):
        find_model("opt-14b")


def test_a_device_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    values = {"name": "mine", "memory": 1 << 30, "memory_bandwidth": 1e12, "flops": 1e14}
    values |= {"link_bandwidth": 1e11, "host_bandwidth": 3e10}
    file.write_text(json.dumps(values))
    assert find_gpu(str(file)).memory_bandwidth == 1e12
    for broken, message in [
        (values | {"flops": "many"}, "flops is 'many', not a float"),
        (values | {"flops": 0}, r"gpu.flops: 0 is not between 1 and 1,000,000,000,000(,000){3}$"),
        (values | {"flops": 5e-324}, "gpu.flops: 5e-324 is not between 1 and"),
        (values | {"memory": 1 << 60}, "gpu.memory: 1152921504606846976 is not between 1 and 17,"),
        (values | {"memory": 10**400}, r"gpu.memory: about 2\*\*1328 is not between 1 and 17,"),
        (values | {"memory": float("nan")}, "gpu.memory: nan is not between 1 and 17,"),
        ({"name": "mine"}, "must be a JSON object with name, memory, memory_bandwidth"),
    ]:
        file.write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match=message):
            find_gpu(str(file))
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"gpu: .*mine\.json cannot be read: maximum recursion"):
        find_gpu(str(file))


def test_coefficients_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"coefficients.gemm_efficiency: 0 is not positive"):
        Coefficients(gemm_efficiency=0)
    with pytest.raises(ConfigError, match=r"coefficients.step_overhead: -1 is not 0 or more"):
        Coefficients(step_overhead=-1)
