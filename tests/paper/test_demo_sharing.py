from __future__ import annotations

import pytest

from octavo_paper import demo_sharing
from octavo_paper.demo_sharing import DemoSharing


@pytest.mark.slow
def test_real_beams_share_more_than_real_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than run at once, so that requests wait, as in figure 15; of both, half as
    many."""
    monkeypatch.setattr(demo_sharing, "NUM_BLOCKS", demo_sharing.NUM_BLOCKS // 2)
    monkeypatch.setattr(demo_sharing, "MAX_SEQS", demo_sharing.MAX_SEQS // 2)
    beams = DemoSharing(beam_width=4, num_requests=20).run()
    samples = DemoSharing(n=4, num_requests=20).run()
    assert beams["num_steps"] > 10
    assert samples["num_steps"] > 10
    assert 0.02 < samples["sharing_saves"] < 0.2 < beams["sharing_saves"] < 0.75
