"""What layers with weights have in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

# Names in a checkpoint -> where each tensor goes: a parameter or a view of one, in the shape that
# the file has. A parameter may have several names (tied embeddings); one of them must be there.
WeightTargets = dict[str, Tensor]


class WeightOwner(nn.Module):
    """A module with parameters of its own."""

    def targets(self, names: Sequence[str]) -> WeightTargets:
        """Where a checkpoint's tensors go, which are named after `names` of this module."""
        (name,) = names
        own = self.named_parameters(recurse=False)
        return {f"{name}.{key}": parameter for key, parameter in own}

    def finalize(self) -> None:
        """Rearrange the loaded weights for the device that they are on; called once."""
