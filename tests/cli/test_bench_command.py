from __future__ import annotations

import json
from pathlib import Path

import pytest
from click_harness import Octavo


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [(20 + 7 * i % 60, 5 + 3 * i % 20) for i in range(30)]
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{p},{o}\n" for p, o in rows))
    return path


def test_throughput_of_a_trace(octavo: Octavo, model: list[str], trace: Path) -> None:
    args = ("bench", "throughput", *model[:2], "--num-blocks", 40, "--trace", trace)
    result = octavo(*args, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    rows = [tuple(map(int, line.split(","))) for line in trace.read_text().splitlines()[1:]]
    assert report["num_requests"] == 30
    assert report["num_prompt_tokens"] == sum(p for p, _ in rows)
    assert report["num_output_tokens"] == sum(o for _, o in rows)  # lengths are forced
    for part in ("saturated", "whole_run"):
        slots = report[part]
        parts = ("token_states", "reservation", "internal", "external")
        assert sum(slots[name] for name in parts) == pytest.approx(100)
        assert slots["waste_of_held"] < slots["waste_of_pool"] < 100
    text = octavo(*args, "--num-prompts", 4).stdout
    for word in ("requests/s", "time to first token", "preemptions", "waste of the pool"):
        assert word in text


def test_shared_blocks_of_a_trace_are_found_in_the_prefix_cache(
    octavo: Octavo, model: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"prompt_tokens": 40, "output_tokens": 2, "hash_ids": [1, 2, 10 + i]} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    args = ("bench", "throughput", *model, "--trace", path, "--hash-block-size", 16, "--json")
    report = json.loads(octavo(*args).stdout)
    assert report["prefix_hit_rate"] == pytest.approx(4 * 32 / (5 * 40))


def test_samples_share_their_prompt(octavo: Octavo, model: list[str]) -> None:
    args = ("bench", "throughput", *model, "--num-prompts", 4, "--input-len", 64, "--json")
    shared = json.loads(octavo(*args, "--output-len", 8, "--n", 4).stdout)
    assert shared["num_output_tokens"] == 4 * 4 * 8
    assert shared["sharing_saves"] > 0.4
    beams = json.loads(octavo(*args, "--output-len", 8, "--beam-width", 3).stdout)
    assert beams["num_output_tokens"] == 4 * 3 * 8
    assert beams["sharing_saves"] > 0.4


def test_latency(octavo: Octavo, model: list[str]) -> None:
    args = ("bench", "latency", *model, "--batch-size", 2, "--output-len", 6, "--num-warm-up", 1)
    report = json.loads(octavo(*args, "--num-iterations", 3, "--json").stdout)
    assert report["num_iterations"] == 3
    assert 0 < report["first_token"]["mean"] < report["batch"]["mean"]
    assert report["batch"]["at"]["10"] <= report["batch"]["at"]["99"]
    assert "batch latency" in octavo(*args, "--num-iterations", 1).stdout


def test_requests_that_are_too_long(octavo: Octavo, model: list[str], trace: Path) -> None:
    args = ("bench", "throughput", *model, "--trace", trace, "--max-model-len", 60)
    num_long = sum(
        sum(map(int, line.split(","))) > 60 for line in trace.read_text().splitlines()[1:]
    )
    assert 0 < num_long < 30
    refused = octavo(*args)
    assert refused.exit_code == 1
    assert f"error: trace: {num_long} of 30 requests have more tokens" in refused.stderr
    skipped = json.loads(octavo(*args, "--skip-long", "--json").stdout)
    assert (skipped["skipped"], skipped["num_requests"]) == (num_long, 30 - num_long)


def test_a_context_that_is_shorter_than_the_warm_up(octavo: Octavo, model: list[str]) -> None:
    args = ("bench", "throughput", *model, "--max-model-len", 20, "--num-prompts", 1, "--json")
    result = octavo(*args, "--input-len", 16, "--output-len", 4)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_output_tokens"] == 4


def test_mistakes(octavo: Octavo, model: list[str], trace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.csv"
    broken.write_text("prompt_tokens,output_tokens\n5,3\n5,many\n")
    for args, exit_code, message in (
        (["--trace", broken], 1, f"error: {broken}:3: output_tokens is 'many'"),
        (["--trace", trace, "--input-len", 3], 2, "--trace brings lengths"),
        (["--n", 2, "--temperature", 0], 1, "error: n: 2 greedy samples"),
        (["--beam-width", 0], 1, "error: beam_width: 0 is less than 1"),
        (["--beam-width", 2, "--n", 2], 1, "error: n: it is of no use with beam_width"),
        (["--beam-width", 2, "--temperature", 1], 1, "error: temperature: it is of no use with"),
        (["--num-prompts", 0], 2, "0 is not in the range"),
    ):
        result = octavo("bench", "throughput", *model, *args)
        assert message in result.stderr
        assert result.exit_code == exit_code


def test_models_command(octavo: Octavo) -> None:
    text = octavo("models").stdout
    for word in (
        "llama",
        "Qwen3ForCausalLM",
        "octavo.models.families.gpt2",
        "bfloat16",
        "recompute",
    ):
        assert word in text
    listed = json.loads(octavo("models", "--json").stdout)
    assert listed["native"]["opt"]["architecture"] == "OPTForCausalLM"
    assert listed["transformers"]["tested"]["mixtral"] == "MixtralForCausalLM"
    assert {"llama", "qwen3", "gemma3", "phi3"} <= set(listed["gguf"])
