"""lm-eval: log-likelihoods of choices and generation until a stop, with both ways to tokenize.

The tasks are small files, because data sets come from the network otherwise.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL, MODEL = sys.argv[1:3]
QUESTIONS = [
    ("Once upon a time there", [" was a", " fish the of"], 0),
    ("One morning, a little girl", [" king king king", " went to the"], 1),
    ("English => German\nThe cat is small. =>", [" Die Katze ist klein.", " castle"], 0),
]
CHOICES = """
task: octavo_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
STORIES = """
task: octavo_stories
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def evaluate(folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """The responses of each task's samples, in the order of the documents."""
    server = {"model": "demo", "base_url": f"{URL}/v1/completions", "num_concurrent": 2}
    results = simple_evaluate(
        model="local-completions",
        model_args=server | arguments,
        tasks=["octavo_choices", "octavo_stories"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert results is not None
    assert results["results"]["octavo_choices"]["acc,none"] == 1.0
    return {
        task: [s["resps"] for s in sorted(samples, key=lambda s: s["doc_id"])]
        for task, samples in results["samples"].items()
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "questions.jsonl"
        rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "choices.yaml").write_text(CHOICES.format(data=data))
        (folder / "stories.yaml").write_text(STORIES.format(data=data))
        local = {"tokenizer_backend": "huggingface", "tokenizer": MODEL, "batch_size": 2}
        by_local = evaluate(folder, local)
        by_remote = evaluate(folder, {"tokenizer_backend": "remote"})
    assert by_local == by_remote, (by_local, by_remote)
    for [story] in by_local["octavo_stories"]:
        assert story[0]
        assert "." not in story[0]
    [[first_was, first_fish], *_] = by_local["octavo_choices"]
    assert first_was[0][1], "the likelier choice is what greedy decoding writes"
    assert not first_fish[0][1]
    print("log-likelihoods and generation; tokenizers: local and remote")


if __name__ == "__main__":
    main()
