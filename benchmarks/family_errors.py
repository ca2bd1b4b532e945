"""Errors of bfloat16 log-probabilities of every model family: octavo's beside transformers' own.

The models are those of tests/model_zoo.py, WIDER times as wide, for octavo's own kernels.
octavo computes prompts and greedy tokens in bfloat16; transformers computes the same tokens in
float32, which is the reference, and in bfloat16. Prints, for each family, the mean and the largest
absolute error of a token's log-probability, in thousandths, in prompts and of generated tokens; one
JSON line at the end.

    PYTHONPATH=src:tests python benchmarks/family_errors.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import model_zoo
from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput

WIDER = 4
WIDTHS = ["hidden_size", "n_embd", "intermediate_size", "ffn_dim", "ffn_hidden_size", "head_dim"]
WIDTHS += ["d_model", "word_embed_proj_dim", "query_pre_attn_scalar", "n_inner"]
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 12, 60, 20
PARAMS = SamplingParams(
    temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=1, logprobs=1
)
Errors = dict[str, list[float]]


def write(name: str, directory: Path) -> Path:
    fields = model_zoo.MODELS[name][1]
    if "longrope" in str(fields):  # has a factor for each pair of its head's elements
        return model_zoo.write_model(name, directory)
    wide = {key: fields[key] * WIDER for key in WIDTHS if isinstance(fields.get(key), int)}
    return model_zoo.write_model(name, directory, **wide)


def say(directory: Path, device: str, prompts: list[list[int]]) -> list[RequestOutput]:
    options: dict[str, Any] = {"num_blocks": 200, "max_num_seqs": 16, "max_model_len": 128}
    if device == "cuda":
        options["cuda_graphs"] = False
    with LLM(str(directory), dtype="bfloat16", device=device, **options) as llm:
        return llm.generate(prompts, PARAMS, use_tqdm=False)


def logprobs(
    directory: Path, device: str, dtype: torch.dtype, ids: list[list[int]]
) -> torch.Tensor:
    """[sequences, tokens - 1]: of each token but the first, as transformers computes them."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    model.to(device)
    tokens = torch.tensor(ids, device=device)
    with torch.inference_mode():
        logits = model(tokens).logits.float()
    every = logits[:, :-1].log_softmax(-1)
    return every.gather(2, tokens[:, 1:, None]).squeeze(2).cpu()


def measure(name: str, directory: Path, device: str) -> dict[str, Errors]:
    """part -> implementation -> [mean, largest] error of a log-probability, in thousandths."""
    write(name, directory)
    prompts = [model_zoo.random_token_ids(PROMPT_TOKENS, seed=i) for i in range(NUM_PROMPTS)]
    outputs = say(directory, device, prompts)
    ids = [p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)]
    ours = torch.tensor(
        [
            [
                each.logprob
                for each in (*(o.prompt_logprobs or ())[1:], *(o.outputs[0].logprobs or ()))
            ]
            for o in outputs
        ]
    )
    expected = logprobs(directory, device, torch.float32, ids)
    theirs = logprobs(directory, device, torch.bfloat16, ids)
    parts = {"prompt": slice(0, PROMPT_TOKENS - 1), "generated": slice(PROMPT_TOKENS - 1, None)}
    found: dict[str, Errors] = {}
    for part, columns in parts.items():
        found[part] = {}
        for who, values in (("octavo", ours), ("transformers", theirs)):
            error = 1e3 * (values - expected)[:, columns].abs()
            found[part][who] = [round(error.mean().item(), 3), round(error.max().item(), 2)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--families", nargs="*", default=list(model_zoo.MODELS))
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    results: dict[str, dict[str, Errors]] = {}
    print("| model | prompt: octavo / transformers | generated |\n|---|---|---|")
    for name in arguments.families:
        with tempfile.TemporaryDirectory() as directory:
            errors = results[name] = measure(name, Path(directory) / name, arguments.device)
        cells = [
            f"{part['octavo'][0]} / {part['transformers'][0]}, "
            f"{part['octavo'][1]} / {part['transformers'][1]}"
            for part in errors.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    print(json.dumps({"benchmark": "family_errors", "device": device, "errors": results}))


if __name__ == "__main__":
    main()
