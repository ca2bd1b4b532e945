"""Where ranks add up what each of them has computed, in models of every family."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from dense_harness import DenseHarness
from torch import Tensor

import model_zoo
from octavo.layers import norm
from octavo.models.loader import load_model
from octavo.models.registry import read_model_config
from octavo.ops.communicator import ReductionSite, SingleRank
from octavo.parallel import Shard


class Alike(SingleRank):
    """A rank of two that takes the other one for its equal."""

    shard = Shard(0, 2)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([x, x])


@pytest.mark.parametrize("name", model_zoo.NAMES + model_zoo.ENCODER_DECODER_NAMES)
def test_consecutive_reductions_are_at_different_sites(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of a site hold what other ranks send until it is read, and ranks may be a reduction
    ahead of others; also from one step to the next."""
    sites: list[ReductionSite] = []
    norm_on = norm._norm_on

    def noted(x: Tensor) -> Callable[..., list[Tensor]]:
        def reduce(*args: Any, **options: Any) -> list[Tensor]:
            if options.get("reduction") is not None:
                sites.append(options["reduction"].site)
            return norm_on(x)(*args, **options)

        return reduce

    monkeypatch.setattr(norm, "_norm_on", noted)
    config = read_model_config(model_zoo.model_directory(name)).sharded(Alike.shard)
    model = load_model(config, torch.float32, torch.device("cpu"), Alike(), "dummy")
    harness = DenseHarness(model, 16)
    for _ in range(2):
        if config.encoder is not None:
            harness.encode({0: [3, 4, 5]})
        harness.logits({0: [2, 7]})
    assert len(sites) > 4
    assert all(one != other for one, other in pairwise(sites))
