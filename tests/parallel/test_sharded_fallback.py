"""Models that transformers computes, on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from sharded import executor_on
from test_sharded_models import OneOf, put_together
from torch import Tensor

from fallback.sweep import (
    GREEDY,
    NUM_TOKENS,
    prompts,
    reference_beams,
    reference_tokens,
    served_tokens,
    write_reference,
)
from fallback.test_tokens import VARIANTS
from model_zoo import write_model
from octavo import LLM, BeamSearchParams
from octavo.models.fallback import sums
from octavo.models.fallback.config import TransformersConfig
from octavo.models.fallback.model import TransformersLM
from octavo.models.loader import build_model, fill_with_noise, load_weights
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.communicator import Reduction, ReductionSite
from octavo.parallel import Shard

SLOW = pytest.mark.slow
RanksOf = Callable[[int], Ranks]
SAMPLES = Path(__file__).parent.parent / "models" / "quantized"
# A vocabulary that three ranks share with padding, in one table.
SIX_HEADS = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def on_ranks(directory: Path, ranks: Ranks, **options: Any) -> list[list[int]]:
    with executor_on(ranks) as executor:
        return served_tokens(directory, executor=executor, num_threads=1, **options)


@pytest.mark.parametrize(
    ("name", "size", "fields"),
    [
        ("llama", 3, SIX_HEADS),
        pytest.param("qwen3_moe", 2, {}, marks=SLOW),
        # Biases, sinks, and experts whose weights are transposed.
        ("gpt_oss", 2, {}),
        # Keys and values come from a projection that all ranks have.
        ("deepseek_v3", 2, {}),
        # Shared experts; two KV heads for four ranks.
        ("ernie4_5_moe", 4, {}),
        pytest.param("glm4_moe", 2, {}, marks=SLOW),
        # All ranks project all heads: they are in one tensor, and layers hand keys to each other.
        ("phi3", 2, {}),
        ("gemma4_shared", 2, {}),
        # An activation that kernels do not have; a bias of the logits.
        pytest.param("nemotron", 2, {}, marks=SLOW),
        ("ctrl", 2, {}),
    ],
)
def test_tokens_equal_transformers(
    name: str, size: int, fields: dict[str, Any], ranks: RanksOf, tmp_path: Path
) -> None:
    model_type, own = VARIANTS.get(name, (name, {}))
    model = write_reference(model_type, tmp_path, **own, **fields).model
    expected = [reference_tokens(model, each) for each in prompts()]
    assert on_ranks(tmp_path, ranks(size)) == expected


def test_beams_equal_transformers(ranks: RanksOf, tmp_path: Path) -> None:
    model, prompt = write_reference("gpt_oss", tmp_path).model, prompts()[1]
    params = BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    with (
        executor_on(ranks(2)) as executor,
        LLM(tmp_path, model_impl="transformers", executor=executor, num_blocks=120) as llm,
    ):
        [output] = llm.beam_search(prompt, params, use_tqdm=False)
    assert [each.token_ids for each in output.outputs] == reference_beams(model, prompt, 3)


@pytest.mark.parametrize(("family", "form"), [("llama3", "fp8"), ("gpt_oss", "int4")])
def test_ranks_quantize_what_those_of_octavo_s_families_do(
    family: str, form: str, ranks: RanksOf, tmp_path: Path
) -> None:
    """Scales are those of a rank's part."""
    directory = write_model(family, tmp_path, hidden_size=64, intermediate_size=64)
    found, expected = (
        on_ranks(directory, ranks(2), model_impl=impl, dtype="float32", quantization=form)
        for impl in ("transformers", "native")
    )
    assert found == expected
    native, config = (
        quantized_on_load(read_model_config(directory, impl), form, 2).sharded(Shard(1, 2))
        for impl in ("native", "transformers")
    )
    assert config.quantized_parts == native.quantized_parts


@pytest.mark.parametrize("name", ["fp8_block", "awq"])
def test_ranks_read_their_parts_of_quantized_weights(name: str, ranks: RanksOf) -> None:
    results = []
    for model_impl in ("transformers", "native"):
        with (
            executor_on(ranks(2)) as executor,
            LLM(
                SAMPLES / name,
                dtype="float32",
                model_impl=model_impl,
                executor=executor,
                num_threads=1,
                num_blocks=40,
            ) as llm,
        ):
            outputs = llm.generate([[5, 7, 11, 13], [3, 9] * 12], GREEDY, use_tqdm=False)
        results.append([each.outputs[0].token_ids for each in outputs])
    assert results[0] == results[1]


def built(directory: Path, shard: Shard) -> tuple[TransformersLM, TransformersConfig]:
    config = read_model_config(directory, "transformers").sharded(shard)
    assert isinstance(config, TransformersConfig)
    model = build_model(config, torch.float32, torch.device("cpu"), OneOf(shard))
    assert isinstance(model, TransformersLM)
    return model, config


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [("llama", SIX_HEADS), ("gpt_oss", {"tie_word_embeddings": False}), ("deepseek_v3", {})],
)
def test_ranks_together_hold_the_checkpoint(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """And dummy weights are of the same model, however many ranks there are."""
    write_reference(model_type, tmp_path, **fields)
    size = 3 if fields is SIX_HEADS else 2
    shards = [Shard(rank, size) for rank in range(size)]
    for fill in (load_weights, lambda model, config: fill_with_noise(model, config, 7)):
        models = [built(tmp_path, shard) for shard in shards]
        whole, of_all = built(tmp_path, Shard())
        for model, config in [*models, (whole, of_all)]:
            fill(model, config)
            storages = [each.untyped_storage() for each in model.parameters()]
            sizes = {each.data_ptr(): each.nbytes() for each in storages}
            assert sum(sizes.values()) == 4 * config.num_parameters()
        expected = put_together(tmp_path, [whole])
        found = put_together(tmp_path, [model for model, _ in models])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class Watched(OneOf):
    """Counts the sums that it is asked for itself."""

    num_sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return x


@pytest.mark.parametrize("num_places", [1, 2, 5])
def test_no_sum_of_a_step_follows_one_at_the_same_site(
    num_places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the first one of the next step: buffers are in use until another site is."""
    sites: list[ReductionSite] = []

    def note(partial: Tensor, dtype: torch.dtype, reduction: Reduction) -> Tensor:
        sites.append(reduction.site)
        return partial

    monkeypatch.setattr(sums, "sum_over_ranks", note)
    communicator = Watched(Shard(0, 2))
    summing = sums.RankSums(communicator)
    for _ in range(num_places):
        summing.add_place()
    for _ in range(3):
        summing.begin()
        for _ in range(num_places):
            summing.total(torch.ones(2, 4), torch.float32)
    assert all(one != other for one, other in pairwise(sites))
    assert len(sites) + communicator.num_sums == 3 * num_places
