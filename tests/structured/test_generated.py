"""A model of random weights keeps to generated schemas: what it ends is valid, whatever it says.

Random models would write long strings and numbers, so a bias draws them to what ends things. What
they do not end within their tokens is counted apart.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

import model_zoo
from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequest
from structured.generated import schema

MAX_TOKENS = 400
# By the text of tokens; the random model's logits are some units apart.
ENDINGS = {'"': 9.0, "}": 6.0, "]": 6.0, ",": 4.0, ":": 4.0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = Path(tmp_path_factory.mktemp("model"))
    model_zoo.write_model("qwen2", directory, max_position_embeddings=1024)
    with LLM(directory, device="cpu", num_blocks=2000, max_num_seqs=64) as llm:
        yield llm


def biases(llm: LLM) -> dict[int, float]:
    """Towards endings, and away from white space and digits."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    found = {}
    for token_id in range(model_zoo.VOCAB_SIZE):
        text = tokenizer.token_bytes(token_id).decode(errors="replace")
        if text in ENDINGS:
            found[token_id] = ENDINGS[text]
        elif text and not text.strip():
            found[token_id] = -30.0
        elif text.isdigit():
            found[token_id] = -3.0
    return found


def check(llm: LLM, seeds: range) -> Counter[str]:
    """Generate for each schema, and validate what has ended. Returns how many came to what."""
    counts: Counter[str] = Counter()
    bias = biases(llm)
    accepted = []
    for seed in seeds:
        params = dict(max_tokens=MAX_TOKENS, seed=seed, temperature=1.0, logit_bias=bias)
        try:
            stream = llm.client.make_request(
                [5, 6, 7 + seed % 200],
                SamplingParams(structured={"json_schema": schema(seed)}, **params),
            )
        except InvalidRequest:
            counts["refused"] += 1
            continue
        llm.client.add_request(stream)
        accepted.append((seed, stream))
    while llm.client.has_unfinished:
        llm.client.step()
    for seed, stream in accepted:
        output = stream.output
        assert output is not None
        assert output.error is None, f"schema {seed}: {output.error}"
        [sample] = output.outputs
        counts[sample.finish_reason] += 1
        if sample.finish_reason == "stop":
            value = json.loads(sample.text)
            try:
                jsonschema.Draft202012Validator(schema(seed)).validate(value)
            except jsonschema.ValidationError as error:
                raise AssertionError(f"schema {seed} gave {sample.text!r}") from error
    return counts


def test_what_ends_is_valid(llm: LLM) -> None:
    counts = check(llm, range(48))
    assert counts["stop"] >= 30, counts


@pytest.mark.slow
def test_what_ends_is_valid_for_1000_schemas(llm: LLM) -> None:
    counts = check(llm, range(1000, 2000))
    print(dict(counts))
    assert counts["stop"] >= 800, counts
