"""docs/extending.md, "A decoding method"."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

from octavo import LLM, SamplingParams
from octavo.core.sequence import Sequence, SequenceVerbs

PROMPT = "The old king gives the child"
MAX_TOKENS = 40


class UntilRepeated:
    """Samples that end when they repeat a token of their own output."""

    wants: Literal["token"] = "token"

    def __init__(self, n: int, max_length: int) -> None:
        self.max_sequences = self.num_draws = n
        self.max_length = max_length

    def accept(self, seq: Sequence, token_id: int) -> str | None:
        repeats = token_id in seq.output_token_ids
        seq.token_ids.append(token_id)
        if repeats:
            return "stop"
        return "length" if seq.num_tokens >= self.max_length else None

    def start(self, seq: Sequence, token_ids: Seq[int], verbs: SequenceVerbs) -> None:
        others = [verbs.fork(seq, index) for index in range(1, len(token_ids))]
        verbs.append(others, token_ids[1:])
        seq.token_ids.append(token_ids[0])


def test_a_method_of_one_s_own_decides_when_samples_end() -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM("demo", num_blocks=64) as llm:
        [plain] = llm.generate(PROMPT, params, use_tqdm=False)
        method = UntilRepeated(3, len(plain.prompt_token_ids) + MAX_TOKENS)
        stream = llm.client.make_request(PROMPT, params, method=method)
        llm.client.add_request(stream)
        while stream.output is None:
            llm.client.step()
        num_held = llm.engine.kv.pool.num_held
    assert num_held == 0
    for ours, all_tokens in zip(stream.output.outputs, plain.outputs, strict=True):
        expected: list[int] = []
        for token_id in all_tokens.token_ids:
            expected.append(token_id)
            if expected.count(token_id) > 1:
                break
        assert ours.token_ids == expected
        assert plain.outputs[ours.index].text.startswith(ours.text)
    assert {each.finish_reason for each in stream.output.outputs} == {"stop"}
