"""The sampler's distributions, against slow references that are computed here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from octavo.config import SchedulerConfig
from octavo.core.step import Candidates, LogitBias, SamplingSpec, TokenLogprobs
from octavo.ops.vocabulary import VocabularyShard
from octavo.structured.constraint import Words, words_of
from octavo.worker.device.base import Device
from octavo.worker.device.cpu import CpuDevice
from octavo.worker.device.cpu_sampling import WEIGHT_BITS, invert, token_weights
from octavo.worker.logit_edits import EditedRow, edit_logits
from octavo.worker.logprobs import score_tokens
from octavo.worker.sampler import NO_TOKEN, Sampler, SamplingBatch, rows_not_finite


@dataclass(frozen=True)
class Sampled:
    """What was chosen, on the host; dictionaries are keyed by row."""

    token_ids: Tensor
    draws: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]]
    candidates: Candidates | None
    not_finite: list[int]


def sample(logits: Tensor, batch: SamplingBatch, masks: Words | None = None) -> Sampled:
    """What the sampler of the logits' device chooses."""
    device: Device = CpuDevice()
    if logits.is_cuda:
        from octavo.worker.device.cuda import CudaDevice

        device = CudaDevice(logits.device)
    most = int(batch.num_draws.sum()) + len(batch.num_candidates)
    staging = device.staging(SchedulerConfig(max_num_seqs=most, max_num_batched_tokens=most), 1)
    vocab_size = logits.shape[1]
    drawer = device.drawer(staging, vocab_size)
    sampler = Sampler(drawer, staging, VocabularyShard.whole(vocab_size))
    with torch.inference_mode():
        staging.begin()
        staged = sampler.stage(batch)
        staging.flush()
        choice = sampler(logits, staged, masks)
        choice.read_back(device.to_host)
        device.moment().wait()
    first, candidates = choice.first_tokens(), choice.candidates()
    return Sampled(
        torch.from_numpy(first),
        choice.draws(),
        choice.logprobs(),
        candidates,
        rows_not_finite(first, candidates),
    )


def weights_of(logits: Tensor, batch: SamplingBatch) -> Tensor:
    return token_weights(logits, batch, logits.amax(dim=-1, keepdim=True))


GREEDY = SamplingSpec(temperature=0.0)


def make_batch(
    specs: Sequence[SamplingSpec],
    seeds: Sequence[int] | None = None,
    sample_indices: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    num_draws: Sequence[int] | None = None,
    num_expanded: int = 0,
) -> SamplingBatch:
    n = len(specs)
    return SamplingBatch(
        num_sampled=n - num_expanded,
        temperature=np.array([s.temperature for s in specs], np.float32),
        top_k=np.array([s.top_k for s in specs], np.int64),
        top_p=np.array([s.top_p for s in specs], np.float64),
        min_p=np.array([s.min_p for s in specs], np.float32),
        seeds=np.array(range(n) if seeds is None else seeds, np.int64),
        sample_indices=np.array(sample_indices or [0] * n, np.int64),
        positions=np.array(positions or [0] * n, np.int64),
        num_draws=np.array(num_draws or [1] * n, np.int64),
        num_logprobs={i: s.num_logprobs for i, s in enumerate(specs) if s.num_logprobs is not None},
        num_candidates=[s.num_candidates for s in specs[n - num_expanded :]],
    )


def reference_distribution(logits: Sequence[float], spec: SamplingSpec) -> list[float]:
    """One row, token by token, in float64."""
    scaled = [logit / spec.temperature for logit in logits]
    peak = max(scaled)
    shares = [math.exp(value - peak) for value in scaled]
    shares = [share if share >= spec.min_p else 0.0 for share in shares]
    if spec.top_k:
        kth = sorted(shares, reverse=True)[min(spec.top_k, len(shares)) - 1]
        shares = [share if share >= kth else 0.0 for share in shares]
    total, reached, kept = sum(shares), 0.0, []
    for token in sorted(range(len(shares)), key=lambda token: -shares[token]):
        if reached >= spec.top_p * total:
            break
        kept.append(token)
        reached += shares[token]
    return [shares[token] / reached if token in kept else 0.0 for token in range(len(shares))]


LOGITS = [1.5, -0.3, 2.2, 0.0, 0.9, -2.0, 1.1, 0.4, -1.0, 1.9, -0.6]
SPECS = {
    "plain": SamplingSpec(),
    "cold": SamplingSpec(temperature=0.5),
    "hot": SamplingSpec(temperature=1.7),
    "top_k": SamplingSpec(top_k=4),
    "top_p": SamplingSpec(top_p=0.7),
    "min_p": SamplingSpec(min_p=0.2),
    "top_k and top_p": SamplingSpec(temperature=1.3, top_k=5, top_p=0.8),
    "all": SamplingSpec(temperature=0.8, top_k=6, top_p=0.9, min_p=0.15),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("source", ["seeds", "positions", "samples", "draws"])
def test_the_distribution_is_the_target(name: str, source: str) -> None:
    spec, n = SPECS[name], 20_000
    if source == "draws":
        batch = make_batch([spec], seeds=[5], num_draws=[n])
        drawn = sample(torch.tensor([LOGITS]), batch).draws[0]
    else:
        counters = list(range(n))
        batch = make_batch(
            [spec] * n,
            seeds=counters if source == "seeds" else [9] * n,
            positions=counters if source == "positions" else None,
            sample_indices=counters if source == "samples" else None,
        )
        drawn = sample(torch.tensor([LOGITS] * n), batch).token_ids.tolist()
    counts = np.bincount(drawn, minlength=len(LOGITS))
    expected = np.array(reference_distribution(LOGITS, spec)) * n
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-3


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 3_000])
@pytest.mark.parametrize("name", SPECS)
def test_weights_equal_the_reference_for_any_vocabulary(vocab_size: int, name: str) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator) * 2
    weights = weights_of(logits.clone(), make_batch([SPECS[name]] * 3)).double()
    for row, values in zip(weights, logits.tolist(), strict=True):
        expected = torch.tensor(reference_distribution(values, SPECS[name]), dtype=torch.float64)
        torch.testing.assert_close(row / row.sum(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("spread", [0.1, 3.0])  # flat: top_p must sort; peaked: it need not
def test_filters_equal_transformers(spread: float) -> None:
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(8, 5_000, generator=torch.Generator().manual_seed(3)) * spread
    ids = torch.zeros(8, 1, dtype=torch.int64)
    specs = [
        SamplingSpec(temperature=0.7),
        SamplingSpec(top_k=40),
        SamplingSpec(top_k=2_000),
        SamplingSpec(top_p=0.9),
        SamplingSpec(top_p=0.05),
        SamplingSpec(min_p=0.3),
        SamplingSpec(temperature=1.4, top_k=300, top_p=0.8),
        SamplingSpec(temperature=0.9, top_k=300, top_p=0.8, min_p=0.1),
    ]
    weights = weights_of(logits.clone(), make_batch(specs)).double()
    for row, spec in enumerate(specs):
        scores = logits[row : row + 1]
        scores = TemperatureLogitsWarper(spec.temperature)(ids, scores)
        if spec.min_p:
            scores = MinPLogitsWarper(spec.min_p)(ids, scores)
        if spec.top_k:
            scores = TopKLogitsWarper(spec.top_k)(ids, scores)
        if spec.top_p < 1:
            scores = TopPLogitsWarper(spec.top_p)(ids, scores)
        expected = scores[0].double().softmax(-1)
        # Weights are integers: what is less likely than 2 ** -40 of the best token is never drawn.
        assert (weights[row][expected > 1e-10] > 0).all(), spec
        assert (weights[row][expected == 0] == 0).all(), spec
        torch.testing.assert_close(
            weights[row] / weights[row].sum(), expected, rtol=1e-4, atol=1e-10
        )


def random_specs(n: int) -> list[SamplingSpec]:
    names = list(SPECS.values())
    specs = [names[i % len(names)] for i in range(n)]
    for i in range(0, n, 5):
        specs[i] = replace(specs[i], temperature=0.0)
    return specs


@pytest.mark.parametrize("vocab_size", [50, 8_192, 50_257])
def test_drawing_is_batch_invariant(vocab_size: int) -> None:
    n = 24
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    specs = random_specs(n)
    seeds = list(range(100, 100 + n))
    positions = [7 * i for i in range(n)]

    def run(rows: Sequence[int]) -> list[int]:
        batch = make_batch(
            [specs[i] for i in rows],
            [seeds[i] for i in rows],
            positions=[positions[i] for i in rows],
        )
        return sample(logits[list(rows)], batch).token_ids.tolist()

    together = run(range(n))
    assert together == [run([row])[0] for row in range(n)]
    shuffled = np.random.default_rng(0).permutation(n).tolist()
    assert [together[row] for row in shuffled] == run(shuffled)
    assert together[3:8] == run(range(3, 8))


@pytest.mark.parametrize("name", SPECS)
def test_weights_of_a_row_are_bit_equal_in_any_batch(name: str) -> None:
    logits = torch.randn(17, 5_003, generator=torch.Generator().manual_seed(2)) * 3
    together = weights_of(logits.clone(), make_batch([SPECS[name]] * 17))
    others = random_specs(17)
    for row in (0, 7, 16):
        alone = weights_of(logits[row : row + 1].clone(), make_batch([SPECS[name]]))
        assert torch.equal(alone[0], together[row])
        mixed = weights_of(
            logits.clone(), make_batch([*others[:row], SPECS[name], *others[row + 1 :]])
        )
        assert torch.equal(mixed[row], together[row])


def test_the_inverse_is_exact_at_its_ends() -> None:
    vocab_size, top = 150_000, 1 << WEIGHT_BITS
    weights = torch.zeros(3, vocab_size, dtype=torch.int64)
    weights[0, :-3] = top  # the total has more bits than a float64 holds
    weights[0, -4] = top - 1
    weights[1, 777] = 1
    weights[2, [5, 127, 128, 90_000]] = torch.tensor([1, 2, 3, 4])
    lowest, highest = 0.0, 1 - 2.0**-53
    owners = torch.tensor([0, 0, 1, 1])
    noise = torch.tensor([lowest, highest, lowest, highest], dtype=torch.float64)
    assert invert(weights, owners, noise, VocabularyShard.whole(vocab_size)).tolist() == [
        0,
        vocab_size - 4,
        777,
        777,
    ]
    tenths = torch.arange(10, dtype=torch.float64) / 10 + 0.01
    drawn = invert(
        weights, torch.full((10,), 2), tenths, VocabularyShard.whole(vocab_size)
    ).tolist()
    assert drawn == [5, 127, 127, 128, 128, 128, *[90_000] * 4]


def test_draw_i_is_the_first_draw_of_the_i_th_next_sample() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(4))
    spec = SamplingSpec()
    batch = make_batch([spec, spec], [11, 12], [3, 0], [20, 20], num_draws=[5, 1])
    output = sample(logits, batch)
    single = make_batch([spec] * 5, [11] * 5, [3, 4, 5, 6, 7], [20] * 5)
    expected = sample(logits[[0] * 5], single).token_ids.tolist()
    assert output.draws == {0: expected}
    assert output.token_ids[0] == expected[0]
    assert len(set(expected)) > 1


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    for dtype in (torch.float32, torch.bfloat16):
        greedy = make_batch([SamplingSpec(temperature=0.0)] * 2)
        assert sample(logits.to(dtype), greedy).token_ids.tolist() == [1, 0]
    # The same next to rows that draw.
    mixed = make_batch([SamplingSpec(temperature=0.0), SamplingSpec(top_k=1, temperature=1.0)])
    assert sample(logits, mixed).token_ids[0] == 1


def test_the_smallest_temperature_and_logits_of_any_size_are_safe() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-torch.inf, 2.0, 1.0], [3e38, 3e38, -3e38]])
    batch = make_batch([SamplingSpec(temperature=1e-5)] * 3)
    token_ids = sample(logits, batch).token_ids.tolist()
    assert token_ids[:2] == [0, 1]
    assert token_ids[2] in (0, 1)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_row_of_logits_that_are_no_numbers_draws_nothing_alone(broken: float) -> None:
    greedy, searched = SamplingSpec(temperature=0.0), SamplingSpec(num_candidates=2)
    for spec in [*SPECS.values(), greedy, searched]:
        batch = make_batch([spec] * 3, num_expanded=3 if spec is searched else 0)
        logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(7))
        wanted = sample(logits, batch)
        assert wanted.not_finite == []
        logits[1, 7] = broken
        if broken == -math.inf:
            logits[1] = broken
        got = sample(logits, batch)
        assert got.not_finite == [1]
        if spec is searched:
            assert wanted.candidates is not None
            assert got.candidates is not None
            for mine, theirs in zip(got.candidates, wanted.candidates, strict=True):
                assert np.array_equal(mine[::2], theirs[::2])
        else:
            assert got.token_ids[1] == NO_TOKEN
            assert torch.equal(got.token_ids[::2], wanted.token_ids[::2])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_mask_does_not_hide_that_logits_are_no_numbers(broken: float) -> None:
    spec = SamplingSpec(logit_bias=LogitBias.of({7: -100.0}))
    plain = make_batch([spec] * 3, num_draws=[1, 3, 1], num_expanded=1)
    plain = replace(plain, num_candidates=[2])
    edited = [EditedRow(i, spec, np.array([1], np.int32), 1) for i in range(3)]
    mask = words_of([3, 4], 300)
    for batch, masks in (
        (replace(plain, edited=edited), None),
        (replace(plain, mask_places=np.array([-1, 0, 0], np.int32)), np.stack([mask])),
        (replace(plain, mask_places=np.array([0, 1, 1], np.int32)), np.stack([mask, mask])),
    ):
        logits = torch.zeros(3, 300)
        logits[1:, 7] = broken
        output = sample(logits, batch, masks)
        assert output.not_finite == [1, 2]
        assert output.draws == {1: [NO_TOKEN] * 3}
        assert output.token_ids[0] >= 0


@pytest.mark.parametrize("size", [50, 300])
def test_masked_rows_are_drawn_as_if_the_other_tokens_had_no_probability(size: int) -> None:
    """Beside rows without masks, with penalties, several draws, scores and candidates."""
    generator = torch.Generator().manual_seed(size)
    specs = [*SPECS.values(), SamplingSpec(0.0), SamplingSpec(1.0, presence_penalty=1.5)]
    n = len(specs)
    logits = torch.randn(n + 2, size, generator=generator) * 3
    allowed = [torch.randperm(size, generator=generator)[:7].tolist() for _ in range(n + 2)]
    places = [i if i % 3 else -1 for i in range(n + 2)]
    expected = logits.clone()
    for row, place in enumerate(places):
        if place >= 0:
            out = torch.ones(size, dtype=torch.bool)
            out[allowed[row]] = False
            expected[row, out] = -torch.inf
    draws = [3 if i == 1 else 1 for i in range(n + 2)]
    batch = make_batch([*specs, GREEDY, GREEDY], num_draws=draws, num_expanded=2)
    tail = EditedRow(n - 1, specs[-1], np.array([1, *allowed[n - 1][:3]], np.int32), 1)
    batch = replace(batch, num_candidates=[5, 9], edited=[tail], num_logprobs={2: 3, 4: 0})
    masked = replace(batch, mask_places=np.array(places, np.int32))
    masks = np.stack([words_of(ids, size) for ids in allowed])
    own = logits.clone()
    got, wanted = sample(logits, masked, masks), sample(expected, batch)
    assert torch.equal(got.token_ids, wanted.token_ids)
    assert got.draws == wanted.draws
    for row, entries in got.logprobs.items():  # the model's own, as without masks
        for entry in entries:
            assert entry.logprob == pytest.approx(logprobs_of(own)[row][entry.token_id], abs=1e-5)
    assert got.candidates is not None
    for i, row in enumerate((n, n + 1)):
        known = logprobs_of(own)[row]
        ranked = sorted(allowed[row] if places[row] >= 0 else range(size), key=lambda t: -known[t])
        number = min(len(ranked), 9)
        assert got.candidates.token_ids[i, :number].tolist() == ranked[:number]
        assert got.candidates.logprobs[i, :number] == pytest.approx(
            [known[t] for t in ranked[:number]], abs=1e-5
        )
        assert (got.candidates.logprobs[i, number:] == -math.inf).all()


def test_tokens_that_the_model_rules_out_are_no_error() -> None:
    """-inf is the logarithm of 0; only a row of nothing else leaves no token."""
    logits = torch.full((2, 300), -torch.inf)
    logits[0, 9] = 1.0
    for spec in [*SPECS.values(), SamplingSpec(temperature=0.0)]:
        output = sample(logits, make_batch([spec] * 2))
        assert output.token_ids.tolist() == [9, NO_TOKEN]


def test_logits_are_left_unchanged() -> None:
    logits = torch.randn(3, 40)
    before = logits.clone()
    spec = SamplingSpec(num_logprobs=2, num_candidates=4, repetition_penalty=2.0)
    batch = replace(
        make_batch([spec] * 3, num_expanded=1),
        edited=[EditedRow(i, spec, np.array([1, 2], np.int32), 1) for i in range(3)],
    )
    sample(logits, batch)
    assert torch.equal(logits, before)


def logprobs_of(logits: Tensor) -> list[list[float]]:
    return logits.double().log_softmax(-1).tolist()


def test_edits_and_log_probabilities_do_not_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing reads a tensor before the step has ended, nor uploads an array but by `upload`."""

    def waits(*args: object, **options: object) -> None:
        raise AssertionError("the host waits")

    logits, drawn = torch.randn(6, 60), torch.tensor([3, 4, 5, 6])
    spec = SamplingSpec(
        repetition_penalty=1.1,
        presence_penalty=0.5,
        logit_bias=LogitBias.of({7: 1.0}),
        forced_tokens=((0, (4, 5)),),
    )
    wanted = score_tokens(logits, np.array([1, 2, 5]), drawn, [1, 2, 1], [0, 3, 1])
    with monkeypatch.context() as patched:
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"):
            patched.setattr(Tensor, name, waits)
        patched.setattr(torch, "tensor", waits)
        edit_logits(logits.clone(), [EditedRow(0, spec, np.array([1, 2], np.int32), 2)])
        scores = score_tokens(logits, np.array([1, 2, 5]), drawn, [1, 2, 1], [0, 3, 1])
    assert scores.entries() == wanted.entries()
    logprobs = logprobs_of(logits)
    rows = [(1, 3), (2, 4), (2, 5), (5, 6)]
    found = [entry for entries in scores.entries() for entry in entries]
    assert [len(entry.top) for entry in found] == [0, 3, 3, 1]
    for (row, token_id), entry in zip(rows, found, strict=True):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(logprobs[row][token_id], abs=1e-5)
        assert entry.rank == 1 + sum(each > logprobs[row][token_id] for each in logprobs[row])


def test_logprobs_are_of_the_models_own_logits() -> None:
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(5)) * 2
    specs = [
        SamplingSpec(temperature=0.0, num_logprobs=0),
        SamplingSpec(temperature=0.3, top_k=2, num_logprobs=5),
        SamplingSpec(),
        SamplingSpec(repetition_penalty=5.0, num_logprobs=3),
    ]
    batch = make_batch(specs, num_draws=[1, 3, 1, 1])
    batch = replace(batch, edited=[EditedRow(3, specs[3], np.arange(60, dtype=np.int32), 30)])
    output = sample(logits, batch)
    assert set(output.logprobs) == {0, 1, 3}
    for row, entries in output.logprobs.items():
        expected = logprobs_of(logits)[row]
        ranked = sorted(range(60), key=lambda token: -expected[token])
        drawn = output.draws.get(row, [int(output.token_ids[row])])
        assert [entry.token_id for entry in entries] == drawn
        for entry in entries:
            assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
            assert entry.rank == ranked.index(entry.token_id) + 1
            num_top = specs[row].num_logprobs or 0
            assert [token for token, _ in entry.top] == ranked[:num_top]
            for token, logprob in entry.top:
                assert logprob == pytest.approx(expected[token], abs=1e-5)


def test_candidates_are_the_best_tokens_with_their_logprobs() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(6))
    specs = [SamplingSpec(), SamplingSpec(num_candidates=4), SamplingSpec(num_candidates=99)]
    output = sample(logits, make_batch(specs, num_expanded=2))
    # As many as a row asks for at most, but never more than the vocabulary.
    assert output.candidates is not None
    for row, token_ids, logprobs in zip((1, 2), *output.candidates, strict=True):
        expected = logprobs_of(logits)[row]
        assert token_ids.tolist() == sorted(range(30), key=lambda token: -expected[token])
        assert logprobs == pytest.approx([expected[token] for token in token_ids], abs=1e-5)


def test_of_equal_tokens_the_lowest_are_reported_however_many_others_ask_for() -> None:
    logits = torch.randint(5, (3, 400), generator=torch.Generator().manual_seed(7)).float()
    ranked = [sorted(range(400), key=lambda token: (-row[token], token)) for row in logits.tolist()]
    for most in (3, 50, 400):
        specs = [SamplingSpec(temperature=0.0, num_logprobs=number) for number in (3, most)]
        output = sample(logits[:2], make_batch(specs))
        for row, number in enumerate((3, most)):
            [entry] = output.logprobs[row]
            assert [token_id for token_id, _ in entry.top] == ranked[row][:number]
        searched = [SamplingSpec(num_candidates=number) for number in (3, 2, most)]
        candidates = sample(logits, make_batch(searched, num_expanded=3)).candidates
        assert candidates is not None
        assert candidates.token_ids.tolist() == [row[:most] for row in ranked]


def test_an_edited_row_does_not_touch_its_neighbours() -> None:
    logits = torch.zeros(3, 20)
    logits[:, 7], logits[:, 3] = 2.0, 1.0
    spec = SamplingSpec(temperature=0.0, logit_bias=LogitBias.of({7: -50.0}))
    batch = make_batch([SamplingSpec(temperature=0.0), spec, SamplingSpec(temperature=0.0)])
    batch = replace(batch, edited=[EditedRow(1, spec, np.array([1], np.int32), 1)])
    assert sample(logits, batch).token_ids.tolist() == [7, 3, 7]
