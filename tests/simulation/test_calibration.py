from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from model_zoo import model_directory, random_token_ids
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, TraceError
from octavo.simulation.calibration import calibrate, cost_model_of, read_calibration
from octavo.simulation.config import SimulationConfig
from octavo.simulation.cost_model import Coefficients, ModelSize
from octavo.simulation.models import find_model
from octavo.simulation.step_records import Setting, StepRecord, StepRecorder, read_step_records
from octavo.simulation.step_shape import StepShape

TRUE = Coefficients(
    step_overhead=3e-3,
    layer_overhead=5e-5,
    seq_overhead=1e-4,
    weight_efficiency=0.7,
    gemm_efficiency=0.5,
    kv_efficiency=0.4,
    attention_efficiency=0.2,
    copy_efficiency=0.3,
    swap_efficiency=0.6,
)
SETTING = Setting(ModelSize.of(find_model("opt-13b"), "float16"), "a100-40gb", 1, 16)


def made_up_steps(count: int, noise: float = 0.0, setting: Setting = SETTING) -> list[StepRecord]:
    """Decodes, of one sequence often, prompts, and both, priced by `TRUE`."""
    draw, model = random.Random(0), cost_model_of(setting, TRUE)
    records = []
    for _ in range(count):
        num_seqs = draw.choice([1, draw.randint(2, 200), draw.randint(2, 200)])
        prompt = draw.choice([0, 0, draw.randint(20, 2000)])
        shape = StepShape(
            num_seqs,
            num_seqs + prompt,
            num_seqs,
            num_seqs * draw.randint(10, 600),
            prompt * (prompt + 1) // 2,
            num_copied_blocks=draw.choice([0, 50]),
            num_swapped_blocks=draw.choice([0, 0, 100]),
        )
        seconds = model.seconds(shape) * draw.uniform(1 - noise, 1 + noise)
        records.append(StepRecord.of(shape, seconds, 0.0, 0.0))
    return records


def test_known_coefficients_are_found_again() -> None:
    calibration = calibrate(SETTING, made_up_steps(300))
    for name in calibration.fitted:
        found = getattr(calibration.coefficients, name)
        assert found == pytest.approx(getattr(TRUE, name), rel=0.05), name
    assert len(calibration.fitted) == 9
    assert abs(calibration.on_held_out.total) < 0.002
    assert calibration.on_held_out.p90 < 0.01


def test_several_devices() -> None:
    """What a step costs at least, and what an all-reduce does, cannot be told apart; sums can."""
    setting = replace(SETTING, num_gpus=4)
    calibration = calibrate(setting, made_up_steps(300, setting=setting))
    assert {"reduce_efficiency", "reduce_latency"} <= set(calibration.fitted)
    assert abs(calibration.on_held_out.total) < 0.002


def test_noise_leaves_the_sum_unbiased() -> None:
    calibration = calibrate(SETTING, made_up_steps(600, noise=0.3))
    assert abs(calibration.on_fitted.total) < 1e-3
    assert abs(calibration.on_held_out.total) < 0.05
    assert calibration.on_held_out.num_steps == 150


def test_what_no_step_tells_stays() -> None:
    records = [replace(r, num_swapped_blocks=0, num_copied_blocks=0) for r in made_up_steps(60)]
    start = Coefficients(swap_efficiency=0.123)
    calibration = calibrate(SETTING, records, start)
    assert calibration.coefficients.swap_efficiency == 0.123
    assert "swap_efficiency" not in calibration.fitted


@pytest.mark.parametrize("are_several", [{False}, {True}, {False, True}])
def test_what_layers_take_stays_unless_there_are_steps_of_one_token_and_of_several(
    are_several: set[bool],
) -> None:
    """And layers without experts, whose steps of one token do not have it."""
    model, setting = SETTING.model, SETTING
    if len(are_several) == 2:
        setting = replace(SETTING, model=replace(model, num_expert_layers=model.num_layers))
    records = [r for r in made_up_steps(200) if (r.num_tokens > 1) in are_several]
    start = Coefficients(layer_overhead=1.23e-5)
    calibration = calibrate(setting, records, start)
    assert calibration.coefficients.layer_overhead == 1.23e-5
    assert "layer_overhead" not in calibration.fitted
    assert abs(calibration.on_held_out.total) < 0.02


def test_too_few_steps() -> None:
    with pytest.raises(ConfigError, match="steps: 15 steps are too few for 9 unknowns"):
        calibrate(SETTING, made_up_steps(15))


def test_a_calibration_is_for_one_model_and_device(tmp_path: Path) -> None:
    calibration = calibrate(SETTING, made_up_steps(60))
    calibration.write(tmp_path / "cal.json")
    again = read_calibration(tmp_path / "cal.json")
    assert again == calibration
    config = SimulationConfig("opt-13b", "a100-40gb")
    assert again.apply(config).coefficients == calibration.coefficients
    with pytest.raises(ConfigError, match="calibration: it was made for another model: weight_by"):
        again.apply(replace(config, model="llama-13b"))
    with pytest.raises(ConfigError, match="it was made on a100-40gb, and this is a100-80gb"):
        again.apply(replace(config, gpu="a100-80gb"))
    (tmp_path / "cal.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cal.json is not a calibration"):
        read_calibration(tmp_path / "cal.json")


def test_an_engine_s_steps_are_recorded(tmp_path: Path) -> None:
    """Two requests of 40 and 5 tokens in, 6 and 3 out: one step computes the prompts."""
    file = tmp_path / "steps.jsonl"
    with LLM(str(model_directory("llama")), num_blocks=60, block_size=8) as llm:
        llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        prompts = [random_token_ids(40, seed=1), random_token_ids(5, seed=2)]
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (6, 3)]
        with StepRecorder(llm.engine, file, "cpu"):
            llm.generate(prompts, params, use_tqdm=False)
            llm.generate(prompts[0][:3], params[0], use_tqdm=False)
        assert llm.engine.observers == []
        num_layers = llm.engine.model_config.num_layers
    setting, records = read_step_records(file)
    assert (setting.gpu, setting.block_size, setting.model.num_layers) == ("cpu", 8, num_layers)
    # The first step of each call is not known to have begun when the engine was idle.
    assert [r.num_seqs for r in records] == [2, 2, 1, 1, 1, *[1] * 5]
    assert [r.kv_tokens for r in records] == [41 + 6, 42 + 7, 43, 44, 45, 4, 5, 6, 7, 8]
    assert all(r.seconds >= r.compute_seconds > 0 for r in records)


def test_a_calibration_of_another_version_is_not_misread(tmp_path: Path) -> None:
    file = tmp_path / "cal.json"
    calibrate(SETTING, made_up_steps(60)).write(file)
    text = file.read_text()
    for old, new, message in [
        (
            "layer_overhead",
            "layers",
            r"cal.json .*: layer_overhead is missing, layers is not known$",
        ),
        ("copies_save", "saves", r"cal.json .*: copies_save is missing, saves is not known$"),
        ('"fitted"', '"made": 1, "fitted"', r"cal.json is not a calibration: made is not known$"),
    ]:
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(ConfigError, match=message):
            read_calibration(file)
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"cal.json is not a calibration: maximum recursion"):
        read_calibration(file)


OTHER_VERSION = r"steps.jsonl:1: copies_save is missing, saves is not known$"


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    head = json.dumps({"octavo_steps": 3, **asdict(SETTING)})
    good = json.dumps(asdict(made_up_steps(1)[0]))
    for lines, message in [
        (["{}"], r'steps.jsonl:1: it does not begin with {"octavo_steps": 3'),
        ([head.replace('"octavo_steps": 3', '"octavo_steps": 2'), good], "it does not begin with"),
        ([head.replace('"copies_save"', '"saves"'), good], OTHER_VERSION),
        (
            [head.replace('"weight_bytes"', '"bytes"'), good],
            r"field `weight_bytes` - at `\$.model`",
        ),
        (
            [head.replace('"gpu": "a100-40gb"', '"gpu": []'), good],
            r"l:1: .* got `array` - at `\$.gpu`",
        ),
        ([head.replace('"num_gpus": 1', '"num_gpus": 0'), good], r"l:1: .*>= 1 - at `\$.num_gpus`"),
        ([head.replace('"block_size": 16', '"block_size": 0'), good], r"1 - at `\$.block_size`"),
        ([head], "it has no steps"),
        ([head, good, "{"], r"steps.jsonl:3: it is not JSON"),
        ([head, "[" * 100_000], r"steps.jsonl:2: it is not JSON"),
        ([head, good.replace("num_seqs", "num_rows")], r"steps.jsonl:2: it must be an object with"),
        ([head, good.replace('"num_seqs": ', '"num_seqs": -')], r"jsonl:2: num_seqs is -\d+, not"),
    ]:
        file.write_text("\n".join(lines) + "\n")
        with pytest.raises(TraceError, match=message):
            read_step_records(file)
    with pytest.raises(TraceError, match="cannot be read"):
        read_step_records(tmp_path / "nothing")
