"""The sampler on a GPU: the same bits, or the same tokens as on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.step import SamplingSpec
from octavo.worker.randomness import uniforms
from worker.test_sampler import SPECS, make_batch, random_specs, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")


def test_uniforms_have_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(-(1 << 62), 1 << 62, (3, 100_000), generator=generator)
    assert torch.equal(uniforms(*counters), uniforms(*counters.to(GPU)).cpu())


@pytest.mark.parametrize("vocab_size", [50, 8_192, 151_936])
def test_every_filter_leaves_the_tokens_of_the_cpu(vocab_size: int) -> None:
    """The same uniform numbers pick the same tokens only where the weights are the same."""
    specs = [spec for spec in SPECS.values() for _ in range(16)]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(SPECS), vocab_size, generator=generator) * 2
    logits = logits.repeat_interleave(16, dim=0)
    batch = make_batch(specs, positions=list(range(len(specs))))
    ours, theirs = sample(logits.to(GPU), batch).token_ids, sample(logits, batch).token_ids
    # exp differs in its last bit, so a draw may fall to a neighbour once in millions.
    assert int((ours != theirs).sum()) <= 1


@pytest.mark.parametrize("vocab_size", [50, 8_192, 151_936])
def test_drawing_is_batch_invariant(vocab_size: int) -> None:
    n = 64
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(2)).to(GPU) * 2
    specs = random_specs(n)
    seeds = list(range(100, 100 + n))
    together = sample(logits, make_batch(specs, seeds)).token_ids.tolist()
    for rows in (range(1), range(7, 8), range(20, 33), range(n - 1, n)):
        part = slice(rows.start, rows.stop)
        some = sample(logits[part], make_batch(specs[part], seeds[part])).token_ids.tolist()
        assert some == together[part]
    on_cpu = sample(logits.cpu(), make_batch(specs, seeds)).token_ids.tolist()
    # exp differs in its last bit, so a draw may fall to a neighbour once in millions.
    assert np.mean(np.array(on_cpu) == np.array(together)) > 0.98


def test_logprobs_and_candidates() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(3))
    specs = [SamplingSpec(num_logprobs=4), SamplingSpec(num_logprobs=0)]
    specs.append(SamplingSpec(num_candidates=6))
    batch = make_batch(specs, num_draws=[3, 1, 1], num_expanded=1)
    ours, theirs = sample(logits.to(GPU), batch), sample(logits, batch)
    assert ours.draws == theirs.draws
    assert ours.candidates is not None
    assert theirs.candidates is not None
    assert (ours.candidates.token_ids == theirs.candidates.token_ids).all()
    for row, entries in ours.logprobs.items():
        for entry, expected in zip(entries, theirs.logprobs[row], strict=True):
            assert (entry.token_id, entry.rank) == (expected.token_id, expected.rank)
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-5)
