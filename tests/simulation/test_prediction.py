"""How long the steps of a running engine should take."""

from __future__ import annotations

from dataclasses import replace

import pytest

import model_zoo
from octavo import LLM, SamplingParams
from octavo.core.scheduler import Progress
from octavo.core.step import StepPlan, StepResult
from octavo.engine.recorder import Recorder
from octavo.simulation.cost_model import CostModel, ModelSize
from octavo.simulation.gpus import DRIVER_NAMES, GPUS
from octavo.simulation.prediction import find_predictor
from octavo.simulation.step_shape import RowLengths

H200 = "NVIDIA H200"


def pretend(llm: LLM, device_name: str = H200, num_ranks: int = 1) -> None:
    """That the engine computes on such devices."""
    executor = llm.engine.executor
    executor.capacity = replace(  # type: ignore[misc]
        executor.capacity, device_name=device_name, num_ranks=num_ranks
    )


def test_what_is_known_is_priced_by_the_simulators_model() -> None:
    """Of rounded weights in the form that the device keeps, and with the model's windows."""
    prompts = [model_zoo.random_token_ids(size, seed=size) for size in (5, 60, 33)]
    directory = str(model_zoo.model_directory("gemma2"))
    options = {"dtype": "bfloat16", "quantization": "fp8", "max_num_batched_tokens": 64}
    with LLM(directory, num_blocks=90, max_num_seqs=8, **options) as llm:
        assert find_predictor(llm.engine) is None, "a CPU"
        pretend(llm, num_ranks=2)
        predictor = find_predictor(llm.engine)
        assert predictor is not None
        recorder = Recorder(llm.engine, lambda admitted: None, predictor.seconds)
        plans: list[StepPlan] = []

        def keep(plan: StepPlan, result: StepResult, progress: Progress) -> None:
            plans.append(plan)

        llm.engine.observers.append(keep)
        for n in (1, 3):
            params = SamplingParams(n=n, temperature=1, seed=1, max_tokens=10, ignore_eos=True)
            llm.generate(prompts, params, use_tqdm=False)
        model = llm.engine.model_config
        size = ModelSize.of(model.kept_by("hopper"), "bfloat16")
        assert size.weight_bytes < ModelSize.of(model.kept_by("none"), "bfloat16").weight_bytes
        cost = CostModel(size, GPUS["h200"], 2, llm.engine.kv.block_size)
        rows = RowLengths(model.window_sizes)
    shapes = [rows.follow(plan) for plan in plans]
    assert max(shape.num_tokens for shape in shapes) > 60
    assert recorder.counters.num_steps == len(plans)
    expected = sum(map(cost.seconds, shapes))
    assert recorder.counters.predicted_seconds == pytest.approx(expected)


def test_what_is_not_known_is_not_predicted() -> None:
    for model, device_name, dtype in [
        ("llama", "NVIDIA H100 PCIe", "bfloat16"),
        ("llama", "", "bfloat16"),
        ("llama", H200, "float32"),
        ("t5", H200, "bfloat16"),
    ]:
        with LLM(str(model_zoo.model_directory(model)), dtype=dtype, num_blocks=400) as llm:
            pretend(llm, device_name)
            assert find_predictor(llm.engine) is None, (model, device_name, dtype)
    assert set(DRIVER_NAMES.values()) == {name for name in GPUS if name != "cpu"}
