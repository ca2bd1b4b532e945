"""Tables of the rotary position embedding (RoFormer, arXiv:2104.09864), made once per model.

The arithmetic is float32 throughout, as in the code that the models were trained with: at long
contexts float32 angles differ visibly from exact ones, and the weights are used to the former.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.layers.config import RotaryConfig
from octavo.ops import RotaryTable


def rotary_table(config: RotaryConfig, max_positions: int, device: torch.device) -> RotaryTable:
    """cos and sin of every position on `device`: float32 [max_positions, config.dim / 2].

    Where frequencies depend on the context, it is `max_positions`, not the length of each sequence:
    keys are cached as rotated, and other sequences may share them.
    """
    frequencies = _frequencies(config, max_positions)
    positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies)
    scale = config.attention_factor
    cos, sin = (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)
    return RotaryTable(cos, sin, config.interleaved)


def _frequencies(config: RotaryConfig, max_positions: int) -> Tensor:
    """Radians that each pair of elements turns by from a position to the next: [dim / 2]."""
    dim = config.dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    frequencies = 1.0 / config.theta**exponents
    match config.kind:
        case "default" | "dynamic":
            # Dynamic scaling changes only positions beyond the model's context, which octavo
            # does not serve.
            return frequencies
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _llama3(config, frequencies)
        case "yarn":
            return _yarn(config, frequencies)
        case "longrope":
            is_long = max_positions > config.original_max_positions
            factors = config.long_factors if is_long else config.short_factors
            return 1.0 / (torch.tensor(factors, device="cpu") * config.theta**exponents)
        case "proportional":
            frequencies[config.num_turning :] = 0
            return frequencies / config.factor


def _llama3(config: RotaryConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1's: slow frequencies are divided by the factor, fast ones kept, a ramp between.

    A frequency is slow or fast by how many turns it makes in the original context.
    """
    turns = config.original_max_positions * frequencies / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / config.factor + kept * frequencies


def _yarn(config: RotaryConfig, frequencies: Tensor) -> Tensor:
    """YaRN's (arXiv:2309.00071, section 3.2): the same idea, with a ramp over dimensions."""
    dim = config.dim

    def dimension(turns: float) -> float:
        """Where in the head the frequency makes so many turns in the original context."""
        wavelength = config.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(config.theta))

    first, last = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / width
    scaled = ramp.clamp(0, 1)
    return scaled * frequencies / config.factor + (1 - scaled) * frequencies
