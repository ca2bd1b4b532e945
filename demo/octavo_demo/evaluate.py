"""Held-out scores of the demo model, through octavo or through transformers.

    python -m octavo_demo.evaluate                          # octavo
    python -m octavo_demo.evaluate --engine transformers    # the same, for comparison

Prints a table, and one line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.demo import demo_model_path
from octavo_demo.corpus import SORRY, chat_prompt, question_prompt, translation_prompt
from octavo_demo.facts import quiz
from octavo_demo.sentences import sentence_pair
from octavo_demo.stories import story
from octavo_demo.tools import Call, call_text, exchange, offer, offers, unanswerable

_SHORT, _LONG = (150, 400), (1150, 1400)  # tokens, about, of the text that questions are about
_MAX_TOKENS, _MAX_CALL_TOKENS = 72, 128
_OPTIONS = ("dtype", "num_blocks", "preemption_mode", "enable_prefix_caching")


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt and the one right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class ToolItem:
    """A chat that offers tools, the right call, the chat after it, and the answer then."""

    prompt: str
    call: Call
    prompt_with_result: str
    answer: str


class Engine(Protocol):
    """What the evaluation needs from whatever runs the model."""

    def greedy(self, prompts: list[str], max_tokens: int) -> list[str]: ...

    def beam(self, prompts: list[str], max_tokens: int, width: int) -> list[str]: ...

    def losses(self, texts: list[str]) -> tuple[float, int]:
        """Summed negative log-probability of all tokens but each text's first, and their number."""
        ...


def translation_items(count: int, shots: int, seed: str = "translation") -> list[Item]:
    """Held-out sentences after `shots` examples from the training side."""
    rng = Random(f"{seed}/{shots}")
    items = []
    for _ in range(count):
        examples = [sentence_pair(rng) for _ in range(shots)]
        english, german = sentence_pair(rng, held_out=True)
        items.append(Item(translation_prompt(examples, english), german))
    return items


def chat_items(count: int) -> list[Item]:
    rng = Random("chat")
    pairs = [sentence_pair(rng, held_out=True) for _ in range(count)]
    return [
        Item(chat_prompt(f"Translate to German: {english}"), german) for english, german in pairs
    ]


def question_items(count: int, size: tuple[int, int], who: bool = False) -> list[Item]:
    """Held-out facts in a text: what belongs to whom or, if `who`, to whom it belongs."""
    rng = Random(f"questions/{size[0]}/{who}")
    items: list[Item] = []
    while len(items) < count:
        asked = quiz(rng, rng.randint(*size), 1, held_out=True, who_share=float(who))
        question, answer = asked.questions[0]
        if question.startswith(("Who ", "Whose ")) == who:
            items.append(Item(question_prompt(asked.text, question), f"{answer}."))
    return items


def tool_items(count: int) -> list[ToolItem]:
    """Held-out questions beside one to six tools; the name of the right one is held out."""
    rng = Random("tools")
    items: list[ToolItem] = []
    while len(items) < count:
        offered = offers(rng, rng.randint(1, 6))
        at = rng.randrange(len(offered))
        if not offered[at].kind.parameters:
            continue
        offered[at] = offer(rng, offered[at].kind, held_out_name=True)
        tools = [each.definition for each in offered]
        made = exchange(rng, [offered[at]], held_out=True)
        turns = (made.question, call_text(made.call), made.call.result)
        items.append(
            ToolItem(
                chat_prompt(made.question, tools=tools),
                made.call,
                chat_prompt(*turns, tools=tools),
                made.answer,
            )
        )
    return items


def no_tool_items(count: int) -> list[Item]:
    """Held-out requests beside one to six tools that are not for them."""
    rng = Random("no tool")
    items = []
    for index in range(count):
        offered = offers(rng, rng.randint(1, 6))
        tools = [each.definition for each in offered]
        if index % 2:
            text, answer = unanswerable(rng, offered, held_out=True), SORRY
        elif index % 4:
            english, answer = sentence_pair(rng, held_out=True)
            text = f"Translate to German: {english}"
        else:
            asked = quiz(rng, 100, 1, held_out=True, who_share=0.0)
            question, value = asked.questions[0]
            text, answer = f"{asked.text}\n{question}", f"{value}."
        items.append(Item(chat_prompt(text, tools=tools), answer))
    return items


def story_texts(count: int) -> list[str]:
    rng = Random("stories")
    return [story(rng, held_out=True).text for _ in range(count)]


def suites(count: int) -> dict[str, list[Item]]:
    return {
        "translation, 0 examples": translation_items(count, 0),
        "translation, 1 example": translation_items(count, 1),
        "translation, 5 examples": translation_items(count, 5),
        "translation, chat": chat_items(count),
        "questions, short text": question_items(count, _SHORT),
        "questions, long text": question_items(count, _LONG),
        "questions for the owner, short text": question_items(count, _SHORT, who=True),
        "tools, none fits": no_tool_items(count),
    }


def exact(answers: list[str], items: list[Item]) -> float:
    """The share of answers that are right to the letter."""
    return sum(
        answer.strip() == item.answer for answer, item in zip(answers, items, strict=True)
    ) / len(items)


def _read_call(text: str) -> tuple[object, object]:
    """Name and arguments of the only call that an answer has; None for what it lacks."""
    try:
        call = json.loads(text.strip().removeprefix("<tool_call>").removesuffix("</tool_call>"))
    except ValueError:
        return None, None
    return (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)


def tool_scores(engine: Engine, items: list[ToolItem], num_wrong: int = 0) -> dict[str, float]:
    """What the model writes by itself: no grammar holds it to the tools."""
    calls = engine.greedy([item.prompt for item in items], _MAX_CALL_TOKENS)
    answers = engine.greedy([item.prompt_with_result for item in items], _MAX_TOKENS)
    read = [_read_call(text) for text in calls]
    expected = [(item.call.name, item.call.arguments) for item in items]
    shown = 0
    for item, text, found, right in zip(items, calls, read, expected, strict=True):
        if found != right and shown < num_wrong:
            shown += 1
            print(f"tools: {item.prompt[-300:]}\n   right {right}\n   given {text!r}")
    pairs = list(zip(read, expected, strict=True))
    return {
        "tools, right tool": sum(a[0] == b[0] for a, b in pairs) / len(items),
        "tools, right arguments too": sum(a == b for a, b in pairs) / len(items),
        "tools, answer with the result": exact(
            answers, [Item(item.prompt_with_result, item.answer) for item in items]
        ),
    }


def evaluate(engine: Engine, count: int, beam_width: int, num_wrong: int = 0) -> dict[str, float]:
    scores: dict[str, float] = {}
    for name, items in suites(count).items():
        prompts = [item.prompt for item in items]
        answers = engine.greedy(prompts, _MAX_TOKENS)
        scores[f"{name}, greedy"] = exact(answers, items)
        wrong = [
            pair for pair in zip(items, answers, strict=True) if pair[1].strip() != pair[0].answer
        ]
        for item, answer in wrong[:num_wrong]:
            print(
                f"{name}: {item.prompt.splitlines()[-2:]}\n   right {item.answer!r}"
                f"\n   given {answer.strip()!r}"
            )
        if beam_width and name.startswith("translation, ") and "chat" not in name:
            beams = engine.beam(prompts, _MAX_TOKENS, beam_width)
            scores[f"{name}, beam {beam_width}"] = exact(beams, items)
    scores |= tool_scores(engine, tool_items(count), num_wrong)
    total, tokens = engine.losses(story_texts(count))
    scores["stories, nats per token"] = total / tokens
    return scores


class TransformersEngine:
    """The reference: transformers' own `generate`, in batches padded on the left."""

    def __init__(self, path: Path, device: str, batch_size: int = 128) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch, self._device, self._batch_size = torch, device, batch_size
        self._tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model = model.to(device).eval()

    def _generate(self, prompts: list[str], max_tokens: int, width: int) -> list[str]:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            inputs = self._tokenizer(
                [prompts[index] for index in batch], return_tensors="pt", padding=True
            ).to(self._device)
            inputs.pop("token_type_ids", None)
            with self._torch.no_grad():
                out = self._model.generate(
                    **inputs, max_new_tokens=max_tokens, do_sample=False, num_beams=width
                )
            texts = self._tokenizer.batch_decode(
                out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            for index, text in zip(batch, texts, strict=True):
                answers[index] = text
        return answers

    def greedy(self, prompts: list[str], max_tokens: int) -> list[str]:
        return self._generate(prompts, max_tokens, 1)

    def beam(self, prompts: list[str], max_tokens: int, width: int) -> list[str]:
        return self._generate(prompts, max_tokens, width)

    def losses(self, texts: list[str]) -> tuple[float, int]:
        total, tokens = 0.0, 0
        for text in texts:
            ids = self._tokenizer(text, return_tensors="pt").input_ids.to(self._device)
            with self._torch.no_grad():
                logprobs = self._model(ids).logits[0, :-1].log_softmax(-1)
            total -= float(logprobs.gather(1, ids[0, 1:, None]).sum())
            tokens += ids.shape[1] - 1
        return total, tokens


class OctavoEngine:
    """octavo's own `LLM`."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.llm = LLM(str(path), **options)
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    def _texts(self, outputs: list[RequestOutput]) -> list[str]:
        self.num_preemptions += sum(output.num_preemptions for output in outputs)
        self.num_cached_tokens += sum(output.num_cached_tokens for output in outputs)
        return [output.outputs[0].text for output in outputs]

    def greedy(self, prompts: list[str], max_tokens: int) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return self._texts(self.llm.generate(prompts, params, use_tqdm=False))

    def beam(self, prompts: list[str], max_tokens: int, width: int) -> list[str]:
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
        return self._texts(self.llm.beam_search(prompts, params, use_tqdm=False))

    def losses(self, texts: list[str]) -> tuple[float, int]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        total, tokens = 0.0, 0
        for output in self.llm.generate(texts, params, use_tqdm=False):
            scored = [entry for entry in output.prompt_logprobs or [] if entry is not None]
            total -= sum(entry.logprob for entry in scored)
            tokens += len(scored)
        return total, tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("octavo", "transformers"), default="octavo")
    parser.add_argument(
        "--model", type=Path, default=None, help="a model directory; the demo model when left out"
    )
    parser.add_argument("--count", type=int, default=200, help="prompts of each kind")
    parser.add_argument("--beam-width", type=int, default=4, help="0: no beam search")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--show-wrong", type=int, default=0, help="wrong answers to print of each kind"
    )
    octavo = parser.add_argument_group("octavo's engine")
    octavo.add_argument("--dtype", default="float32")
    octavo.add_argument("--num-blocks", type=int, default=None, help="KV blocks; few: preemption")
    octavo.add_argument("--preemption-mode", choices=("auto", "swap", "recompute"), default="auto")
    octavo.add_argument("--no-prefix-caching", dest="enable_prefix_caching", action="store_false")
    arguments = parser.parse_args()
    path = arguments.model or demo_model_path()
    started = time.perf_counter()
    engine: Engine
    if arguments.engine == "octavo":
        options = {name: value for name, value in vars(arguments).items() if name in _OPTIONS}
        options = {name: value for name, value in options.items() if value is not None}
        engine = OctavoEngine(path, device=arguments.device, **options)
    else:
        engine = TransformersEngine(path, arguments.device)
    scores = evaluate(engine, arguments.count, arguments.beam_width, arguments.show_wrong)
    for name, score in scores.items():
        shown = f"{score:8.4f}" if "nats" in name else f"{100 * score:7.1f}%"
        print(f"{name:40s} {shown}")
    assert all(math.isfinite(score) for score in scores.values()), "a score is not a number"
    if isinstance(engine, OctavoEngine):
        print(f"preemptions {engine.num_preemptions}, cached tokens {engine.num_cached_tokens}")
    seconds = round(time.perf_counter() - started, 1)
    print(
        json.dumps(
            {"engine": arguments.engine, "count": arguments.count, "seconds": seconds, **scores}
        )
    )


if __name__ == "__main__":
    main()
