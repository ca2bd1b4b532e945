"""What stands for a decoder whose hidden states are known."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


class _Hidden(tuple[Tensor]):
    """What a decoder returns, with hidden states alone."""

    @property
    def last_hidden_state(self) -> Tensor:
        """[1, num_tokens, hidden_size]."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        """Whatever else decoders return: nothing."""
        if name.startswith("__"):
            raise AttributeError(name)


class Decoded(nn.Module):
    """Stands for a decoder whose hidden states are known, and for decoders inside it, which some
    models call by themselves (OPT)."""

    hidden: Tensor

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        for name, child in base.named_children():
            if isinstance(child, PreTrainedModel):
                self.__dict__[name] = self

    def forward(self, *inputs: Any, **named: Any) -> _Hidden:
        """Whatever the inputs are."""
        return _Hidden((self.hidden,))
