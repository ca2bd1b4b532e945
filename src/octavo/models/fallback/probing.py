"""What modules of transformers' are tried out with: random numbers, and stubs for submodules."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

PROBED_MAGNITUDES = (-1.0, 4.0)  # powers of 10: activations that clamp show their limits


class Stub(nn.Module):
    """Returns a tensor, and keeps what it was given."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result
        self.given: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Whatever x is."""
        self.given.append(x)
        return self.result


def copied(module: nn.Module) -> nn.Module:
    """The module without its hooks, with the same submodules and parameters."""
    probe = copy.copy(module)
    probe.__dict__ = dict(module.__dict__)
    return probe


def called(module: nn.Module, x: Tensor) -> object:
    """The module's result; None if it needs more than a tensor."""
    try:
        with torch.no_grad():
            return type(module).forward(module, x)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return None


def of_all_sizes(values: Tensor) -> Tensor:
    """Normal numbers [..., rows, n], of which each row has another size."""
    sizes = torch.logspace(*PROBED_MAGNITUDES, values.shape[-2], device=values.device)
    return values * sizes[:, None]


def are_rows_alike(result: Tensor, expected: Tensor) -> bool:
    """Whether no element differs by more than rounding: an activation's tail is the difference of
    numbers as large as its input."""
    if result.shape != expected.shape:
        return False
    largest = expected.abs().amax(-1, keepdim=True)
    return bool(((result - expected).abs() <= 1e-5 * expected.abs() + 1e-6 * largest).all())


class RandomNumbers:
    """Normal numbers, in every place others: tensors of one shape must not be taken for each
    other."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device="cpu")
