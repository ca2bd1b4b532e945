"""Training in miniature, on the CPU: it learns something, stops, goes on, and exports."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.demo import demo_model_path
from octavo_demo import train
from octavo_demo.corpus import EOS, documents
from octavo_demo.model import ModelShape
from octavo_demo.packing import WEIGHT_SHIFT, ShardSpec, make_shard, shards
from octavo_demo.tokenizer import train_tokenizer
from octavo_demo.train import TrainConfig, Trainer, learning_rate

CONFIG = TrainConfig(
    shape=ModelShape(
        hidden_size=32,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_length=256,
    ),
    steps=4,
    batch_rows=2,
    warmup_steps=2,
    shard_rows=4,
    held_out_rows=2,
    evaluate_every=100,
    checkpoint_every=2,
    num_workers=0,
    compile=False,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _held_out_rows_once() -> Iterator[None]:
    """Making them takes seconds, and gives the same rows to every trainer."""
    make, made = Trainer._held_out_rows, {}

    def make_once(self: Trainer) -> dict[str, NDArray[np.uint16]]:
        if not made:
            made.update(make(self))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_held_out_rows", make_once)
        yield


def trainer(directory: Path) -> Trainer:
    directory.mkdir(exist_ok=True)
    shutil.copy(demo_model_path() / "tokenizer.json", directory)
    return Trainer(CONFIG, directory, CPU)


def weights(of: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in of.model.named_parameters()}


def assert_same(a: Trainer, b: Trainer) -> None:
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, weights(b)[name]), name


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    before = weights(whole)
    whole.train()
    stopped = trainer(tmp_path / "stopped")
    stopped.train(until=3)  # in the middle of a shard
    again = trainer(tmp_path / "stopped")
    again.resume()
    assert again.step == 3
    again.train()
    assert again.step == whole.step == 4
    assert_same(whole, again)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(whole).items())


@pytest.mark.parametrize("num_rows", ["0", "48", "1024"])
def test_steps_must_divide_a_shard(
    num_rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else a resumed run would have other rows."""
    monkeypatch.setattr(
        "sys.argv", ["train", "--directory", str(tmp_path), "--batch-rows", num_rows]
    )
    monkeypatch.setattr(train, "Trainer", None)
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert f"error: {num_rows} rows of a step do not divide 512" in capsys.readouterr().err


def test_an_exported_model_is_what_transformers_computes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = trainer(tmp_path / "run")
    run.train(until=1)
    run.export(tmp_path / "model")
    demo_model_path(tmp_path / "model")  # with a manifest that fits
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    again = trainer(tmp_path / "again")
    again.load_weights(tmp_path / "model")
    ids = torch.arange(40).view(1, 40) * 7
    loss = again.model(ids[:, :-1], ids[:, 1:], torch.ones(1, 39))
    expected = theirs(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    rates = [learning_rate(TrainConfig(steps=100, warmup_steps=10), step) for step in range(100)]
    assert rates[0] < rates[5] < rates[9] == max(rates)
    assert rates[99] < 0.01 * max(rates)


def spec(row_length: int = 1025) -> ShardSpec:
    return ShardSpec(demo_model_path() / "tokenizer.json", "rows", 4, row_length)


def test_rows_are_full_and_begin_with_a_document() -> None:
    rows = make_shard(spec(), 0)
    assert rows.shape == (4, 1025)
    ids = rows & ((1 << WEIGHT_SHIFT) - 1)
    assert ids.max() < 4096
    # Little is lost at the ends of rows, and what fills them is not trained.
    assert (ids != 0).mean() > 0.9
    assert rows[0, -1] == 0 or ids[0, -1] != 0
    assert np.array_equal(rows, make_shard(spec(), 0))
    assert not np.array_equal(rows, make_shard(spec(), 1))


def test_processes_make_the_same_rows() -> None:
    alone = list(shards(spec(), 3, 2, num_workers=0))
    together = list(shards(spec(), 3, 2, num_workers=2))
    for a, b in zip(alone, together, strict=True):
        assert np.array_equal(a, b)


def test_tokenizer_training_is_deterministic() -> None:
    texts = [train_tokenizer(600, 40).to_str() for _ in range(2)]
    assert texts[0] == texts[1]
    assert EOS in texts[0]
    assert next(documents("x")) == next(documents("x"))
