"""Whether a model type is served through transformers with transformers' tokens, or why not."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

from fallback.shrunken import MODEL_TYPES, VOCAB_SIZE, shrunken_config
from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.models.fallback.tested import RECORD, Tested, read_tested
from octavo.models.registry import read_model_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- begin of the sweep's tables -->", "<!-- end of the sweep's tables -->"
PROMPT_LENGTHS = (3, 50)
NUM_TOKENS = 8
MAX_PARAMETERS = 10_000_000
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Outcome(NamedTuple):
    """What became of one model type."""

    model_type: str
    architecture: str | None  # None: no model of the type could be made
    refused: str | None  # why; None: it is served


class Reference(NamedTuple):
    """A random model in a directory, and what transformers generates with it."""

    directory: Path
    model: PreTrainedModel


def write_reference(model_type: str, directory: Path, **fields: object) -> Reference:
    """Write a random model of a type, and read it as transformers does."""
    torch.manual_seed(0)
    config = shrunken_config(model_type, **fields)
    is_whole = config.get_text_config() is config
    auto_class = AutoModelForCausalLM if is_whole else AutoModelForMultimodalLM
    model = auto_class.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.15 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    model.save_pretrained(directory)
    model = auto_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return Reference(directory, model.eval())


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    """Random token ids, without those of special tokens."""
    return [
        torch.randint(
            3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)
        ).tolist()
        for length in lengths
    ]


def reference_tokens(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """transformers' greedy continuation, without its end tokens; not that of `generate`, which
    numbers positions otherwise than some models do themselves."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def reference_beams(model: PreTrainedModel, prompt: list[int], width: int) -> list[list[int]]:
    """What transformers' beam search finds, best first."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[list[int]] = found[:, len(prompt) :].tolist()
    return tokens


def served_tokens(directory: Path, **options: object) -> list[list[int]]:
    """The same by octavo: in chunks, beside each other, then again from the prefix cache."""
    given = {
        "num_blocks": 120,
        "block_size": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
        "model_impl": "transformers",
        **options,
    }
    with LLM(directory, **given) as llm:
        first = [
            each.outputs[0].token_ids for each in llm.generate(prompts(), GREEDY, use_tqdm=False)
        ]
        again = [
            each.outputs[0].token_ids for each in llm.generate(prompts(), GREEDY, use_tqdm=False)
        ]
    assert again == first, "the prefix cache changes tokens"
    return first


def outcome_of(model_type: str) -> Outcome:
    """Serve a random model of the type.

    Raises:
        AssertionError: it is served with other tokens.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            shrunken_config(model_type).save_pretrained(directory)
        except Exception as error:  # whatever a configuration's own checks raise
            reason = " ".join(str(error).split())
            return Outcome(model_type, None, f"no small model could be made: {reason[:150]}")
        try:
            config = read_model_config(directory, "transformers")
        except ModelError as error:
            return _refused(model_type, error, directory)
        if config.num_parameters() > MAX_PARAMETERS:
            return Outcome(model_type, config.architecture, "no small model could be made")
        try:
            reference = write_reference(model_type, directory)
        except ImportError as error:
            reason = " ".join(str(error).split())
            return Outcome(model_type, None, f"no small model could be made: {reason[:150]}")
        try:
            tokens = served_tokens(directory)
        except ModelError as error:
            return _refused(model_type, error, directory)
        expected = [reference_tokens(reference.model, each) for each in prompts()]
        assert tokens == expected, f"{model_type}: {tokens} instead of {expected}"
    return Outcome(model_type, config.architecture, None)


def _refused(model_type: str, error: ModelError, directory: Path) -> Outcome:
    """Without the directory, whose name is another one in each sweep."""
    whole = str(error).removeprefix(f"{directory}: ")
    _, _, reason = whole.partition(f"through transformers {transformers.__version__}: ")
    return Outcome(model_type, None, " ".join((reason or whole).split())[:200])


def sweep(model_types: Sequence[str] = MODEL_TYPES) -> tuple[Tested, list[str]]:
    """The outcomes of all types, and those that failed: that crashed, or have other tokens."""
    served: dict[str, str] = {}
    refused: dict[str, str] = {}
    failed: list[str] = []
    for model_type in model_types:
        try:
            outcome = outcome_of(model_type)
        except Exception as error:  # the others are to be tried all the same
            failed.append(model_type)
            print(f"{model_type}: FAILED, {type(error).__name__}: {error}", flush=True)
            continue
        if outcome.refused is None:
            assert outcome.architecture is not None
            served[model_type] = outcome.architecture
        else:
            refused[model_type] = outcome.refused
        print(f"{model_type}: {outcome.refused or 'served'}", flush=True)
        gc.collect()
    return Tested(transformers.__version__, served, refused), failed


def write(found: Tested) -> None:
    """Put outcomes into the record, and its tables between their marks in docs/models.md."""
    before = Tested(found.transformers, {}, {})
    if RECORD.exists() and read_tested().transformers == found.transformers:
        before = read_tested()
    served = {k: v for k, v in before.served.items() if k not in found.refused} | found.served
    refused = {k: v for k, v in before.refused.items() if k not in found.served} | found.refused
    known = Tested(found.transformers, dict(sorted(served.items())), dict(sorted(refused.items())))
    RECORD.write_text(json.dumps(asdict(known), indent=1) + "\n", encoding="utf-8")
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    text = f"{head}{BEGIN}\n\n{known.tables()}\n\n{END}{tail}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; none: all")
    parser.add_argument("--write", action="store_true", help="record what they came to")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found, failed = sweep(arguments.types or MODEL_TYPES)
    print(f"{len(found.served)} served, {len(found.refused)} refused, {len(failed)} failed")
    if arguments.write:
        write(found)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
