from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM
from octavo.bench.throughput import Decoding, run_throughput
from octavo.bench.traces import read_trace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_less_than_four_percent_is_wasted() -> None:
    """Figure 2 for vLLM: 3.7 % with OPT-13B's pool on 40 GB, 983 blocks of 16, while requests wait.

    Where KV goes does not depend on the model's size, so a tiny one does.
    """
    requests = read_trace(BENCHMARKS / "traces/bench_sharegpt_1000.csv")
    options = {"load_format": "dummy", "num_blocks": 983, "max_num_batched_tokens": 2560}
    with LLM(str(BENCHMARKS / "configs/tiny"), **options) as llm:
        report = run_throughput(llm.client, requests, Decoding())
    assert report.num_output_tokens == 335_125
    assert report.saturated is not None
    assert report.num_saturated_steps > 0.8 * report.num_steps
    assert report.saturated.waste_of_pool < 0.04
    assert report.saturated.waste_of_held < 0.02
