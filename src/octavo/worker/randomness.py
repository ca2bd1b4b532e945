"""Counter-based randomness: a number is a hash of its seed, sample and position; there is no state.

Draws are batch-invariant, and a recomputed sequence draws the same tokens again. Only integer
operations are used, which wrap alike on every device, so CPU and GPU give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


# Constants of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
# OOPSLA 2014, with Stafford's "variant 13" finaliser).
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of int64; each input bit flips half of the output."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def uniforms(seeds: Tensor, sample_indices: Tensor, positions: Tensor) -> Tensor:
    """float64 [n] in [0, 1), each a function of its (seed, sample, position) alone.

    Args:
        seeds, sample_indices, positions: int64 [n].
    """
    state = mix(seeds + _GAMMA)
    state = mix(state + (sample_indices + 1) * _GAMMA)
    state = mix(state + (positions + 1) * _GAMMA)
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53
