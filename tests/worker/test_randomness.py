from __future__ import annotations

import torch
from scipy import stats

from octavo.worker.randomness import mix, uniforms


def test_mix_gives_the_published_numbers_of_splitmix64() -> None:
    gamma = 0x9E3779B97F4A7C15
    states = [(1234567 + i * gamma) % (1 << 64) for i in (1, 2, 3)]
    signed = torch.tensor([s - (1 << 64) if s >= 1 << 63 else s for s in states])
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [value % (1 << 64) for value in mix(signed).tolist()] == published


def test_uniforms_are_uniform_along_each_counter() -> None:
    n = 100_000
    counter, fixed = torch.arange(n), torch.full((n,), 3)
    for arguments in (
        (counter, fixed, fixed),
        (fixed, counter, fixed),
        (fixed, fixed, counter),
        (counter - n, fixed, fixed),  # seeds may be negative
    ):
        numbers = uniforms(*arguments)
        assert numbers.dtype == torch.float64
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-3
        # Neighbours know nothing of each other.
        assert abs(stats.pearsonr(numbers[:-1], numbers[1:]).statistic) < 0.012


def test_samples_and_positions_do_not_repeat_each_other() -> None:
    seeds, samples, positions = torch.meshgrid(
        torch.arange(20), torch.arange(40), torch.arange(50), indexing="ij"
    )
    numbers = uniforms(seeds.flatten(), samples.flatten(), positions.flatten())
    assert len(numbers.unique()) == numbers.numel()
