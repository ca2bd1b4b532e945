from __future__ import annotations

from octavo_paper.demo_sharing import DemoSharing


def test_real_beams_share_more_than_real_samples() -> None:
    """More sequences than run at once, so that requests wait, as in figure 15."""
    beams = DemoSharing(beam_width=4, num_requests=36).run()
    samples = DemoSharing(n=4, num_requests=36).run()
    assert beams["num_steps"] > 10
    assert samples["num_steps"] > 10
    assert 0.02 < samples["sharing_saves"] < 0.2 < beams["sharing_saves"] < 0.75
