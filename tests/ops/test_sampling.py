"""The sampler's kernels draw what a CPU draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.core.step import SamplingSpec
from octavo.ops.cuda import sampling
from octavo.ops.cuda import sampling_candidates as candidates
from octavo.ops.cuda.sampling import NO_TOKEN, DeviceDraws, sample
from octavo.ops.cuda.sampling_candidates import best_tokens
from octavo.ops.cuda.sampling_shortlist import CAPACITY
from octavo.ops.vocabulary import VocabularyShard
from octavo.structured.constraint import Words, words_of
from octavo.worker.device.cpu_sampling import CpuDrawer
from octavo.worker.sampler import SamplingBatch
from worker.test_sampler import SPECS, make_batch, random_specs

pytestmark = pytest.mark.usefixtures("poisoned")
ROWS = [*SPECS.values(), *random_specs(8)]
VOCABULARIES = {"cpu": [100], "cuda": [50, 8_192, 50_272, 151_936]}


@pytest.fixture(autouse=True)
def small_chunks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter rows are short; they should still take several programs. Of more than
    16 draws, as most tests make, a program has several strips."""
    monkeypatch.setattr(sampling, "SOME_DRAWS", 16)
    if device.type == "cpu":
        monkeypatch.setattr(sampling, "CHUNK", 64)
        monkeypatch.setattr(sampling, "STRIP", 8)
        monkeypatch.setattr(sampling, "SMALL_CHUNK", 32)
        monkeypatch.setattr(sampling, "SORTED", 16)  # of some rows all are sorted
        monkeypatch.setattr(candidates, "CHUNK", 64)


def to_device(
    batch: SamplingBatch, device: torch.device, masks: Words | None = None
) -> DeviceDraws:
    places = batch.mask_places
    if places is None:
        places = np.full(len(batch.num_draws), -1, np.int32)
    owners = np.repeat(np.arange(len(batch.num_draws)), batch.num_draws)
    number = np.arange(len(owners)) - np.searchsorted(owners, owners)
    with np.errstate(divide="ignore"):
        log_min_p = np.log(batch.min_p)

    def put(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[owners]).to(device)

    return DeviceDraws(
        rows=torch.from_numpy(owners).to(device),
        temperature=put(batch.temperature),
        top_k=put(batch.top_k),
        top_p=put(batch.top_p),
        log_min_p=put(log_min_p),
        seeds=put(batch.seeds),
        sample_indices=put(batch.sample_indices) + torch.from_numpy(number).to(device),
        positions=put(batch.positions),
        mask_places=put(places),
        masks=torch.from_numpy(np.zeros((1, 1), np.int32) if masks is None else masks).to(device),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_are_those_of_the_cpu(device: torch.device, dtype: torch.dtype) -> None:
    for vocab_size in VOCABULARIES[device.type]:
        generator = torch.Generator().manual_seed(vocab_size)
        logits = (torch.randn(len(ROWS), vocab_size, generator=generator) * 2).to(dtype)
        seeds = list(range(50, 50 + len(ROWS)))
        batch = make_batch(ROWS, seeds, positions=seeds, num_draws=[1, 3] + [1] * (len(ROWS) - 2))
        wanted = CpuDrawer().draw(logits.float(), batch, VocabularyShard.whole(vocab_size))
        # Rows may have a stride.
        wide = torch.empty(len(ROWS), vocab_size + 8, dtype=dtype)
        wide[:, :vocab_size] = logits
        drawn = sample(wide.to(device)[:, :vocab_size], to_device(batch, device)).cpu()
        # exp differs in its last bit, so a draw may fall to a neighbour once in millions.
        differ = int((drawn != wanted).sum())
        assert differ == 0 if device.type == "cpu" else differ <= 1


def test_draws_without_limits_are_those_of_the_cpu(device: torch.device) -> None:
    """Where no row has top_k or top_p, their kernel is left out; min_p still holds."""
    specs = [SamplingSpec(temperature=t, min_p=p) for t in (0.0, 0.7, 2.0) for p in (0.0, 0.2, 0.9)]
    logits = torch.randn(len(specs), 150, generator=torch.Generator().manual_seed(8)) * 2
    for seed in range(4):
        batch = make_batch(specs, [seed] * len(specs))
        draws = replace(to_device(batch, device), is_limited=False)
        wanted = CpuDrawer().draw(logits, batch, VocabularyShard.whole(150))
        assert torch.equal(sample(logits.to(device), draws).cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_draws_are_those_of_the_cpu(device: torch.device, dtype: torch.dtype) -> None:
    """Several draws share a masked row; rows without masks are left as they are."""
    for vocab_size in VOCABULARIES[device.type]:
        generator = torch.Generator().manual_seed(vocab_size)
        logits = (torch.randn(len(ROWS), vocab_size, generator=generator) * 2).to(dtype)
        seeds = list(range(50, 50 + len(ROWS)))
        batch = make_batch(ROWS, seeds, positions=seeds, num_draws=[1, 3] + [1] * (len(ROWS) - 2))
        ids = [torch.randperm(vocab_size, generator=generator)[: 1 + 2 * i] for i in range(9)]
        masks = np.stack([words_of(each.tolist(), vocab_size) for each in ids])
        places = np.array([i % 10 - 1 for i in range(len(ROWS))], np.int32)
        batch = replace(batch, mask_places=places)
        drawer = CpuDrawer()
        drawer.take_masks(masks)
        expected = logits.float()
        wanted = drawer.draw(expected, batch, VocabularyShard.whole(vocab_size))
        mine = logits.to(device)
        for draws in (to_device(batch, device, masks),):
            drawn = sample(mine, draws).cpu()
            differ = int((drawn != wanted).sum())
            assert differ == 0 if device.type == "cpu" else differ <= 1
        assert torch.equal(mine.cpu().float(), expected)
        logits[3, 5] = torch.nan  # in a masked row, and ruled out or not
        logits[4, 6] = torch.inf
        greedy = replace(to_device(batch, device, masks), is_greedy=True)
        greedy.temperature.zero_()
        drawn = sample(logits.to(device), greedy)
        assert [drawn[i].item() for i in (5, 6)] == [NO_TOKEN.value] * 2


def test_limits_of_rows_with_and_without_a_shortlist(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few likely tokens decide, or more than a shortlist holds, or all of the row."""
    if device.type == "cpu":
        monkeypatch.setattr(sampling, "SMALL_CHUNK", 4096)
    vocab_size = CAPACITY + 3_000
    generator = torch.Generator().manual_seed(5)
    likely = torch.randn(vocab_size, generator=generator) * 2
    likely[::500] += 12
    flat = likely * 0.01
    asked: list[tuple[Tensor, dict[str, float]]] = [
        (likely, {"top_k": 20, "top_p": 0.9}),
        (likely, {"top_p": 0.6}),
        (likely, {"top_p": 0.9, "min_p": 0.05}),
        (likely, {"top_p": 0.99999}),
        (flat, {"top_p": 0.9}),
        (flat, {"top_k": vocab_size - 10}),
        (flat, {"top_k": vocab_size - 10, "min_p": 1.0}),
        (flat, {"top_k": CAPACITY, "top_p": 0.5, "temperature": 0.01}),
    ]
    specs = [SamplingSpec(**({"temperature": 0.8} | each)) for _, each in asked]  # type: ignore[arg-type]
    logits = torch.stack([row for row, _ in asked])
    for seed in range(3):
        batch = make_batch(specs, [seed] * len(specs))
        wanted = CpuDrawer().draw(logits, batch, VocabularyShard.whole(vocab_size))
        assert torch.equal(sample(logits.to(device), to_device(batch, device)).cpu(), wanted)


def test_the_limits_keep_ties(device: torch.device) -> None:
    """top_k 4, but five tokens share the largest logit; the last of them stays, too."""
    spec = SPECS["top_k"]
    row = torch.tensor([0.0, 1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 0.5], dtype=torch.float16)
    drawn = sample(row.to(device).expand(16, -1), to_device(make_batch([spec] * 16), device))
    assert set(drawn.tolist()) <= {1, 2, 3, 5, 6}
    assert 6 in drawn


def test_the_greedy_token_is_the_first_of_equals(device: torch.device) -> None:
    logits = torch.zeros(2, 150, device=device)
    logits[0, [70, 71, 140]] = 3.0
    draws = to_device(make_batch([SPECS["plain"]] * 2), device)
    draws.temperature.zero_()
    assert sample(logits, draws).tolist() == [70, 0]


def test_logits_that_are_not_finite_give_no_token(device: torch.device) -> None:
    logits = torch.randn(6, 150, generator=torch.Generator().manual_seed(3))
    logits[1] = torch.nan
    logits[2, 70] = torch.nan
    logits[3, 149] = torch.inf
    logits[4] = -torch.inf
    logits[5, :149] = -torch.inf
    specs = [SamplingSpec(temperature=0)] * 6
    kinds = [replace(to_device(make_batch(specs), device), is_greedy=True)]
    if device.type == "cuda":  # the interpreter makes no integers of NaN
        kinds += [to_device(make_batch([SPECS[name]] * 6), device) for name in SPECS]
    for draws in kinds:
        drawn = sample(logits.to(device), draws).tolist()
        assert drawn[1:5] == [NO_TOKEN.value] * 4
        assert 0 <= drawn[0] < 150
        assert drawn[5] == 149


@pytest.mark.parametrize("number", [1, 6, 16])
def test_candidates(device: torch.device, number: int) -> None:
    for vocab_size in VOCABULARIES[device.type]:
        logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
        logits[0, 5:20] = -torch.inf
        wanted = logits.double().log_softmax(dim=-1).topk(number, dim=-1)
        values, ids = best_tokens(logits.to(device), number)
        assert torch.equal(ids.cpu().long(), wanted.indices)
        torch.testing.assert_close(values.cpu().double(), wanted.values, rtol=1e-5, atol=1e-5)


def test_of_equal_candidates_the_lower_id_comes_first(device: torch.device) -> None:
    logits = torch.zeros(1, 150, device=device)
    logits[0, 130] = 1.0
    assert best_tokens(logits, 4)[1].tolist() == [[130, 0, 1, 2]]


def test_a_captured_draw_follows_its_inputs(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a CUDA device")
    logits = torch.empty(len(ROWS), 32_000, device=device, dtype=torch.bfloat16)
    draws = to_device(make_batch(ROWS), device)
    sample(logits.normal_(), draws)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sample(logits, draws)
    for position in range(5):
        logits.normal_()
        draws.positions.fill_(position)
        graph.replay()
        assert torch.equal(drawn, sample(logits, draws))
