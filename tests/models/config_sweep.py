"""Whether octavo computes what transformers does of random config.json files, or refuses them.

    PYTHONPATH=src:tests:tests/models python tests/models/config_sweep.py llama --seeds 100

draws as many for each of the families named, and prints what differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
import traceback
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import transformers
from dense_harness import DenseHarness
from random_configs import MAX_PROMPT, Drawing, respelled
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import model_zoo
from octavo.config import ModelImpl
from octavo.errors import ConfigError, ModelError
from octavo.models.config import ModelConfig
from octavo.models.loader import load_model
from octavo.models.registry import OWN_FAMILIES, read_model_config
from octavo.ops.communicator import SingleRank

COMPOSITE = ("gemma3", "gemma4", "mistral3")
FAMILIES = tuple(family for family in OWN_FAMILIES if family not in COMPOSITE)
# Types that octavo serves through transformers, some of which it has a family of, too.
FALLBACK = (
    *("arcee", "apertus", "deepseek_v3", "dots1", "ernie4_5", "helium", "minimax_m2", "nemotron"),
    *("olmo", "persimmon", "phi", "modernbert-decoder"),
    *("mistral", "gemma2", "olmo3", "granite", "gpt_oss", "cohere2", "qwen2_moe"),
)
# Of the largest logit. Differences of rounding are a hundredth of it.
TOLERANCE = 3e-4


class Outcome(NamedTuple):
    """served, refused (octavo's message), invalid (transformers' own error)."""

    kind: str
    message: str = ""


class Fault(AssertionError):
    """What octavo did with a config.json that it must not do."""


def outcome_of(
    family: str, seed: int, directory: Path, model_impl: ModelImpl = "native"
) -> Outcome:
    """Draw, write and serve a model.

    Raises:
        Fault: it is served with other logits, or refused without naming a field.
    """
    drawing = Drawing(family, seed)
    try:
        reference = write_reference(drawing, seed, directory)
    except Exception as error:  # whatever checks a configuration or a model of transformers' has
        return Outcome("invalid", f"{type(error).__name__}: {error}")
    return compare(directory, reference, seed, model_impl)


def write_reference(drawing: Drawing, seed: int, directory: Path) -> PreTrainedModel:
    """A random model in a directory, as transformers understands its config.json."""
    fields = drawing.kind(**drawing.fields).to_dict()
    # Before 5.0 files had no architectures if they were written by hand.
    kind = auto_class(fields)
    fields["architectures"] = [kind._model_mapping[drawing.kind].__name__]
    fields = respelled(fields, Random(f"{drawing.family} {seed} spelling"), drawing.nullable())
    return write_model(fields, directory, seed)


def auto_class(fields: dict[str, Any]) -> Any:
    if fields.get("is_encoder_decoder"):
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def write_model(fields: dict[str, Any], directory: Path, seed: int = 0) -> PreTrainedModel:
    """Random weights for a config.json, and transformers' model of both."""
    path = directory / "config.json"
    text = json.dumps(fields, indent=1)
    path.write_text(text)
    config = AutoConfig.from_pretrained(directory)
    model: PreTrainedModel = auto_class(fields).from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    model_zoo.randomise(model.eval(), seed)
    model.save_pretrained(directory)
    path.write_text(text)
    (directory / "generation_config.json").unlink(missing_ok=True)
    # Tables that follow from the configuration are not in the file.
    return model_zoo.load_reference(directory) if config.is_encoder_decoder else model


def compare(
    directory: Path, reference: PreTrainedModel, seed: int, model_impl: ModelImpl = "native"
) -> Outcome:
    """Logits of octavo and of transformers, of a prompt at once, in chunks and token by token."""
    try:
        config = read_model_config(directory, model_impl)
        model = load_model(config, torch.float32, torch.device("cpu"), SingleRank())
    except (ModelError, ConfigError) as error:
        check_message(str(error), json.loads((directory / "config.json").read_text()))
        return Outcome("refused", str(error).replace(str(directory), "."))
    random = Random(seed)
    prompt = model_zoo.random_token_ids(
        min(MAX_PROMPT, config.max_model_len), seed, config.vocab_size
    )
    source = model_zoo.random_token_ids(random.randint(1, 50), seed + 1, config.vocab_size)
    given = {"input_ids": torch.tensor([prompt])}
    if config.encoder is not None:
        given = {
            "input_ids": torch.tensor([source]),
            "decoder_input_ids": torch.tensor([prompt]),
        }
    try:
        with torch.inference_mode():
            want: Tensor = reference(**given, use_cache=False).logits[0]
    except Exception as error:
        return Outcome("invalid", f"forward: {type(error).__name__}: {error}")
    if not want.isfinite().all():
        return Outcome("invalid", "transformers' logits are not finite")
    cuts = sorted({0, random.randrange(1, len(prompt)), len(prompt) - 2, len(prompt) - 1})
    for ends in ([0], cuts):
        harness = DenseHarness(model, len(prompt))
        if config.encoder is not None:
            harness.encode({0: source})
        got = torch.cat(
            [
                harness.run({0: prompt[start:end]})[0]
                for start, end in pairwise([*ends, len(prompt)])
            ]
        )
        difference = ((got - want).abs().max() / want.abs().max()).item()
        if not difference < TOLERANCE:
            raise Fault(f"logits differ by {difference:.1e} of the largest ({ends}){_told(config)}")
    return Outcome("served")


def _told(config: ModelConfig) -> str:
    return f", max_model_len {config.max_model_len}"


def check_message(message: str, fields: dict[str, Any]) -> None:
    """A refusal must name a field of the file, or one that it lacks."""
    found = set(re.findall(r"\w+", message.partition("config.json")[2] or message))
    usual = CONFIG_MAPPING[fields["model_type"]]().to_dict()
    names = set(fields) | set(usual)
    for value in (*fields.values(), *usual.values()):
        if isinstance(value, dict):
            names |= value.keys()
    is_lack = re.search(r"has no \w+", message)
    is_of_weights = re.search(r"\.weight|\.bias", message)
    if not (found & names or is_lack or is_of_weights):
        raise Fault(f"the refusal names no field: {message}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--model-impl", default="native")
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(60)
    is_bad = False
    for family in arguments.families or FAMILIES:
        kinds: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            with tempfile.TemporaryDirectory() as name:
                try:
                    outcome = outcome_of(family, seed, Path(name), arguments.model_impl)
                except Fault as fault:
                    is_bad = True
                    outcome = Outcome("FAULT", str(fault))
                    print(f"{family} {seed}: {fault}", flush=True)
                except Exception:
                    is_bad = True
                    outcome = Outcome("CRASH")
                    print(f"{family} {seed}: {traceback.format_exc(limit=-3)}", flush=True)
            kinds[outcome.kind] += 1
            reasons[f"{outcome.kind}: {outcome.message[:110]}"] += 1
        gc.collect()
        print(family, dict(kinds), flush=True)
        for reason, count in reasons.most_common(40):
            if not reason.startswith("served"):
                print(f"    {count:3} {reason}")
    return is_bad


if __name__ == "__main__":
    sys.exit(main())
