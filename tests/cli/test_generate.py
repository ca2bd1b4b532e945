from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click_harness import Octavo

from model_zoo import embed_as_nan, model_directory, write_model
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.engine.tokenizer import Tokenizer

PROMPT = "The quick brown fox"


def test_the_command_gives_what_the_api_gives(octavo: Octavo, model: list[str]) -> None:
    result = octavo(
        "generate", *model, PROMPT, "A block", "--json", "--temperature", 0, "--max-tokens", 9
    )
    assert result.exit_code == 0, result.output
    with LLM(str(model_directory("llama")), num_blocks=200) as llm:
        params = SamplingParams(temperature=0, max_tokens=9)
        expected = llm.generate([PROMPT, "A block"], params, use_tqdm=False)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == [PROMPT, "A block"]
    for line, output in zip(lines, expected, strict=True):
        assert line["outputs"][0]["token_ids"] == output.outputs[0].token_ids
        assert line["outputs"][0]["text"] == output.outputs[0].text
    # The budget was shown before, a summary after.
    assert "KV cache" in result.stderr
    assert "of 200 at most" in result.stderr
    assert "preemptions: 0 by swap, 0 by recompute" in result.stderr


def test_what_quantizing_costs_is_printed(octavo: Octavo, model: list[str]) -> None:
    options = (*model, PROMPT, "--max-tokens", 1, "--quantization", "fp8")
    result = octavo("generate", *options)
    assert "relative errors of the layers, in %" in result.stderr
    assert "KL divergence from the model with the weights in the files" in result.stderr
    assert "relative errors" not in octavo("generate", *options, "--quiet").stderr


def test_an_output_that_does_not_continue_its_prompt_has_its_own_line(octavo: Octavo) -> None:
    model = ("--model", model_directory("bart"), "--num-blocks", 100)
    result = octavo("generate", *model, PROMPT, "--max-tokens", 3, "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == PROMPT


def test_beams_have_the_model_s_penalty_unless_another_is_given(
    octavo: Octavo, tmp_path: Path
) -> None:
    directory = write_model("llama", tmp_path)
    (directory / "generation_config.json").write_text('{"repetition_penalty": 1.8}')
    command = ("generate", "--model", directory, "--num-blocks", 200, PROMPT, "--beam-width", 3)
    with LLM(str(directory), num_blocks=200) as llm:
        for penalty, given in ((1.8, ()), (1.0, ("--repetition-penalty", 1, "--min-tokens", 2))):
            params = BeamSearchParams(3, max_tokens=6, repetition_penalty=penalty)
            [output] = llm.beam_search(PROMPT, params, use_tqdm=False)
            listed = octavo(*command, "--max-tokens", 6, "--quiet", *given).stdout
            for each in output.outputs:
                assert f"[{each.index}] (score {each.score:.4f})" in listed


def test_beams_and_samples_are_listed(octavo: Octavo, model: list[str]) -> None:
    beams = octavo("generate", *model, PROMPT, "--beam-width", 3, "--max-tokens", 6, "--quiet")
    assert beams.exit_code == 0, beams.output
    assert beams.stderr == ""
    with LLM(str(model_directory("llama")), num_blocks=200) as llm:
        [output] = llm.beam_search(PROMPT, BeamSearchParams(3, max_tokens=6), use_tqdm=False)
    for each in output.outputs:
        assert f"[{each.index}] (score {each.score:.4f})" in beams.stdout
    samples = octavo("generate", *model, PROMPT, "--n", 2, "--logprobs", 2, "--max-tokens", 3)
    assert "  [0] " in samples.stdout
    assert "  [1] " in samples.stdout
    assert samples.stdout.count("likeliest") == 2


def test_prompts_from_a_file_and_a_pipe(octavo: Octavo, model: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    args = ("generate", *model, "--max-tokens", 2, "--quiet", "--json")
    from_file = octavo(*args, "--file", file)
    piped = octavo(*args, stdin="one\n\ntwo\n")
    prompts = [json.loads(line)["prompt"] for line in from_file.stdout.splitlines()]
    assert prompts == ["one", "two"]
    assert [json.loads(line)["prompt"] for line in piped.stdout.splitlines()] == prompts


@pytest.mark.parametrize(
    ("args", "exit_code", "message"),
    [
        (["--temperature", "nan"], 1, "error: temperature: nan is not finite"),
        (["--top-p", "0"], 1, "error: top_p: 0.0 leaves no token"),
        (["--n", "0"], 1, "error: n: 0 is less than 1"),
        (["--beam-width", "-1"], 1, "error: beam_width: -1 is less than 1"),
        (["--max-tokens", "0"], 1, "error: max_tokens: 0 is less than 1"),
        (["--logprobs", "99"], 1, "error: logprobs: 99 is more than max_logprobs (20)"),
        (["--block-size", "0"], 1, "error: block_size: 0 is not between 1 and 256"),
        (["--attention-backend", "x"], 1, "error: attention_backend: 'x' is not one of"),
        (["--kv-cache-memory", "1GiB"], 1, "give either kv_cache_memory or num_blocks, not both"),
        (["--max-model-len", "9999"], 1, "error: max_model_len: 9999 is more than the 512"),
        (["--length-penalty", "1"], 2, "--length-penalty needs --beam-width"),
        (["--beam-width", "2", "--top-p", "0.5"], 2, "--top-p is of no use with --beam-width"),
        (["--swap-space", "lots"], 2, "'lots' is not a size such as 4GiB"),
        (["--no-such-option"], 2, "No such option"),
        (["--file", "/no/such/file"], 2, "No such file"),
    ],
)
def test_a_mistake_ends_in_one_clear_line(
    octavo: Octavo, model: list[str], args: list[str], exit_code: int, message: str
) -> None:
    result = octavo("generate", *model, *([] if "--file" in args else [PROMPT]), *args, "--quiet")
    assert message in result.stderr
    assert result.exit_code == exit_code
    assert "Traceback" not in result.output
    if exit_code == 1:
        assert result.stderr.count("\n") == 1


def test_what_cannot_be_a_model(octavo: Octavo, tmp_path: Path) -> None:
    for name, message in (
        ("no-such-model", "error: no model 'no-such-model'"),
        (str(tmp_path), "config.json"),
    ):
        result = octavo("generate", "--model", name, PROMPT)
        assert result.exit_code == 1
        assert message in result.stderr
    empty = octavo("generate", "--model", str(tmp_path), stdin="\n \n")
    assert empty.exit_code == 2
    assert "there is no prompt" in empty.stderr


def test_an_empty_or_too_long_prompt(octavo: Octavo, model: list[str]) -> None:
    too_long = octavo("generate", *model, "a block " * 600)
    assert too_long.exit_code == 1
    assert "leave no room for output in a context of 512 tokens" in too_long.stderr
    many = octavo("generate", *model, "fine", "")
    assert many.exit_code == 1
    assert "prompt 2 of 2: prompt: it is empty" in many.stderr


def test_ctrl_c_ends_the_command_with_130() -> None:
    program = "from octavo.cli.main import main; main(prog_name='octavo')"
    model = str(model_directory("llama"))
    # Thousands of tokens for many prompts: it is still running when the signal comes.
    args = ["generate", "--model", model, "--ignore-eos", "--max-tokens", "400", *["a"] * 400]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *args, "--attention-backend", "reference"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("swap tier"):  # the last line of the budget: the model is loaded
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors


def test_a_prompt_that_cannot_be_computed_fails_after_the_others(
    octavo: Octavo, model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_directory("llama")
    [*_, bad] = Tokenizer.from_directory(directory).encode(PROMPT)
    embed_as_nan(bad, monkeypatch)
    args = ("generate", *model, "A block", PROMPT, "one", "--max-tokens", 2, "--json", "--quiet")
    result = octavo(*args)
    assert result.exit_code == 1
    outputs = [json.loads(line) for line in result.stdout.splitlines()]
    assert [output["error"] is None for output in outputs] == [True, False, True]
    assert outputs[1]["outputs"][0]["finish_reason"] == "error"
    assert result.stderr.startswith("error: prompt 2 of 3 has failed: the model's logits")
