"""What one rank holds: which slices of the checkpoint, how many parameters, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sharded import model_for
from torch import Tensor

import model_zoo
from octavo.config import SchedulerConfig
from octavo.errors import ConfigError, ModelError
from octavo.memory_budget import estimate_activations
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.loader import build_model, fill_with_noise, load_weights, weight_targets
from octavo.models.registry import FAMILIES, read_model_config
from octavo.models.safetensors_files import TensorInFile
from octavo.ops.communicator import SingleRank
from octavo.parallel import Shard

CPU = torch.device("cpu")
SIZES = (2, 3, 4)
SLOW = pytest.mark.slow


class OneOf(SingleRank):
    """A rank of a group that never exchanges anything."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard


def built(directory: Path, shard: Shard) -> CausalLM:
    config = read_model_config(directory).sharded(shard)
    return build_model(config, torch.float32, CPU, OneOf(shard))


def put_together(directory: Path, models: list[CausalLM]) -> dict[str, Tensor]:
    """A checkpoint's tensors by the slices that ranks hold; each element must be held, and where
    several ranks hold it, they must agree."""
    whole: dict[str, Tensor] = {}
    for rank, model in enumerate(models):
        config = read_model_config(directory).sharded(Shard(rank, len(models)))
        for name, target in weight_targets(model, config).items():
            tensor = whole.setdefault(name, torch.full(target.shape, torch.nan))
            for part, where in target.slices:
                before = tensor[where]
                rows = part[: len(before)].reshape(before.shape)
                assert (before.isnan() | (before == rows)).all()
                tensor[where] = rows
                assert (part[len(before) :] == 0).all()
    return whole


def variants() -> list[tuple[str, int]]:
    names = model_zoo.NAMES + model_zoo.ENCODER_DECODER_NAMES
    return [(name, size) for name in names for size in SIZES]


@pytest.mark.parametrize(("name", "size"), variants())
def test_ranks_together_hold_the_checkpoint(name: str, size: int) -> None:
    directory = model_for(name, size)
    if directory is None:
        pytest.skip("its heads do not divide")
    models = []
    for rank in range(size):
        config = read_model_config(directory).sharded(Shard(rank, size))
        model = built(directory, Shard(rank, size))
        load_weights(model, config)
        assert sum(each.numel() for each in model.parameters()) == config.num_parameters()
        models.append(model)
    whole = put_together(directory, models)
    names = FAMILIES[read_model_config(directory).family].weights
    for name, tensor in load_file(directory / "model.safetensors").items():
        assert torch.equal(whole[names.without_prefix(name)], tensor), name
    assert all(tensor.isfinite().all() for tensor in whole.values())


# Of each family one size by day, and of each size every third family.
ONE_SIZE_EACH = [
    pytest.param(*variant, marks=() if i // len(SIZES) % len(SIZES) == i % len(SIZES) else SLOW)
    for i, variant in enumerate(variants())
]


@pytest.mark.parametrize(("name", "size"), ONE_SIZE_EACH)
def test_dummy_weights_are_of_the_same_model(name: str, size: int) -> None:
    directory = model_for(name, size)
    if directory is None:
        pytest.skip("its heads do not divide")
    models = [built(directory, Shard(rank, size)) for rank in range(size)]
    for rank, model in enumerate(models):
        fill_with_noise(model, read_model_config(directory).sharded(Shard(rank, size)), 7)
    alone = built(directory, Shard())
    fill_with_noise(alone, read_model_config(directory), 7)
    expected = put_together(directory, [alone])
    found = put_together(directory, models)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_only_slices_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what two ranks divide, each reads one half."""
    directory = model_zoo.model_directory("llama")
    num_read = 0
    original = TensorInFile.read

    def counting(self: TensorInFile, where: tuple[slice, ...]) -> Tensor:
        nonlocal num_read
        tensor = original(self, where)
        num_read += tensor.numel()
        return tensor

    monkeypatch.setattr(TensorInFile, "read", counting)
    config = read_model_config(directory).sharded(Shard(1, 2))
    load_weights(built(directory, Shard(1, 2)), config)
    assert num_read == config.num_parameters()
    assert num_read < 0.52 * read_model_config(directory).num_parameters()


def _kv_heads(config: ModelConfig) -> int:
    return config.layers[0].attention.num_kv_heads


def test_memory_is_the_rank_s_own() -> None:
    whole = read_model_config(model_zoo.model_directory("llama3"))
    half = whole.sharded(Shard(1, 2))
    assert (_kv_heads(half), half.vocab_size) == (_kv_heads(whole) // 2, whole.vocab_size)
    assert 0.5 < half.weight_bytes(2) / whole.weight_bytes(2) < 0.6  # the rotary table is whole
    quarter = whole.sharded(Shard(3, 4))
    assert _kv_heads(quarter) == 1  # of two, which two ranks hold each
    scheduler = SchedulerConfig()
    sizes = [estimate_activations(each, scheduler, 2) for each in (whole, half, quarter)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


@pytest.mark.parametrize(
    ("name", "size", "overrides", "message"),
    [
        ("llama", 3, {}, r"the number of attention heads \(4\) cannot .* among 3 ranks"),
        ("llama", 8, {}, r"the number of attention heads \(4\) cannot .* among 8 ranks"),
        (
            "llama",
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            r"the number of KV heads \(3\) cannot .* among 2 ranks",
        ),
        (
            "llama",
            3,
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            r"the number of KV heads \(2\) neither divides 3 ranks",
        ),
        ("llama", 4, {"intermediate_size": 82}, r"the intermediate size \(82\) cannot"),
        ("llama", 4, {"vocab_size": 5}, "4 ranks are too many for a vocabulary of 5 tokens"),
    ],
)
def test_what_does_not_divide_is_refused(
    name: str, size: int, overrides: dict[str, int], message: str, tmp_path: Path
) -> None:
    fields = json.loads((model_zoo.model_directory(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | overrides))
    config = read_model_config(tmp_path)
    for rank in (0, size - 1):
        with pytest.raises(ConfigError, match=f"^tensor_parallel_size: .*{message}"):
            config.sharded(Shard(rank, size))


def test_faults_of_files_are_named_on_every_rank(tmp_path: Path) -> None:
    """A tensor of the wrong shape, though its slice would fit."""
    shutil.copytree(model_zoo.model_directory("llama"), tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"intermediate_size": 60}))
    for rank in range(2):
        config = read_model_config(tmp_path).sharded(Shard(rank, 2))
        with pytest.raises(
            ModelError, match=r"has shape \[48, 80\]; config.json asks for \[48, 60"
        ):
            load_weights(built(tmp_path, Shard(rank, 2)), config)
