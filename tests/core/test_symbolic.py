"""Random workloads on the symbolic KV cache; and proof that it notices broken rules."""

from __future__ import annotations

import pytest

from core.symbolic import Workload


@pytest.mark.parametrize("batch", range(8))
def test_random_workloads(batch: int) -> None:
    for seed in range(50 * batch, 50 * (batch + 1)):
        Workload(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(100))
def test_random_workloads_nightly(batch: int) -> None:
    for seed in range(1000 + 100 * batch, 1000 + 100 * (batch + 1)):
        Workload(seed).run()
