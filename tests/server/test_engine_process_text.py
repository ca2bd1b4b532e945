"""The client over a real engine process gives what the offline engine gives: tokens, text, scores.

Also when the process is killed on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM
from octavo.config import make_config
from octavo.outputs import RequestOutput, SequenceDelta
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.engine_process.client import EngineClient
from server.clients import assert_nothing_is_held, kill, run

# In bfloat16, what else is in a batch may round a sample to another token.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_blocks": 256,
    "swap_space": 1 << 24,
    "num_threads": 1,
}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as offline:
        yield offline


ASKED: list[tuple[str | list[int], SamplingParams | BeamSearchParams]] = [
    (PROMPT, SamplingParams(temperature=0, max_tokens=60)),
    (PROMPT, SamplingParams(seed=1, n=3, max_tokens=60, logprobs=2)),
    (PROMPT, SamplingParams(seed=2, max_tokens=80, stop=["the", ". "], min_tokens=12)),
    (
        PROMPT,
        SamplingParams(seed=2, n=2, max_tokens=80, stop="."),
    ),
    (
        PROMPT,
        SamplingParams(seed=3, max_tokens=80, stop=[" and "], include_stop_str_in_output=True, n=2),
    ),
    (
        "The dog",
        SamplingParams(
            seed=4,
            max_tokens=60,
            frequency_penalty=0.5,
            presence_penalty=0.2,
            repetition_penalty=1.1,
            bad_words=["was", "cat"],
            ignore_eos=True,
        ),
    ),
    ("The dog", SamplingParams(temperature=0, max_tokens=30, prompt_logprobs=1, logprobs=0)),
    ([5, 6, 7, 8], SamplingParams(seed=5, max_tokens=40, detokenize=False, top_k=20, top_p=0.9)),
    ("The cat", BeamSearchParams(3, max_tokens=20)),
]


def facts(output: RequestOutput, tolerance: float = 0.0) -> dict[str, Any]:
    """What must be equal. Log-probabilities may differ in their last bits in other company."""
    scores = [output.prompt_logprobs, *[sample.logprobs for sample in output.outputs]]
    entries = [entry for part in scores if part for entry in part if entry is not None]
    values = [entry.logprob for entry in entries]
    values += [sample.cumulative_logprob or 0.0 for sample in output.outputs]
    values += [sample.score or 0.0 for sample in output.outputs]
    return {
        "prompt": (output.prompt, output.prompt_token_ids),
        "outputs": [
            (s.index, s.token_ids, s.text, s.finish_reason, s.stop_reason) for s in output.outputs
        ],
        "scored": [(entry.token_id, len(entry.top)) for entry in entries],
        "values": pytest.approx(values, abs=tolerance) if tolerance else values,
    }


def offline(llm: LLM) -> list[dict[str, Any]]:
    outputs = []
    for prompt, params in ASKED:
        generate: Any = llm.generate if isinstance(params, SamplingParams) else llm.beam_search
        outputs += generate(prompt, params, use_tqdm=False)
    return [facts(output, tolerance=0.05) for output in outputs]


async def stream_all(client: EngineClient, slowly: bool) -> list[dict[str, Any]]:
    async def one(prompt: str | list[int], params: Any) -> dict[str, Any]:
        stream = await client.generate(prompt, params)
        pieces: dict[int, SequenceDelta] = {}
        output: RequestOutput | None = None
        async for event in stream:
            if slowly:
                await asyncio.sleep(0.02)
            if isinstance(event, RequestOutput):
                output = event
                continue
            assert stream.prompt_logprobs is not None or params.prompt_logprobs is None
            piece = pieces.setdefault(event.index, SequenceDelta("", event.index, "", []))
            assert piece.finish_reason is None, "a sample goes on after its end"
            piece.text += event.text
            piece.token_ids += event.token_ids
            piece.logprobs += event.logprobs
            piece.finish_reason = event.finish_reason
            piece.stop_reason = event.stop_reason
        assert output is not None
        output = await stream.result()
        for index, piece in pieces.items():
            whole = output.outputs[index]
            assert (piece.text, piece.token_ids) == (whole.text, whole.token_ids)
            assert (piece.finish_reason, piece.stop_reason) == (
                whole.finish_reason,
                whole.stop_reason,
            )
            assert piece.logprobs == (whole.logprobs or [])
        return facts(output)

    return list(await asyncio.gather(*[one(*asked) for asked in ASKED]))


def test_the_same_as_offline(llm: LLM) -> None:
    async def test() -> None:
        client = EngineClient(make_config("demo", **OPTIONS))
        await client.start()
        try:
            expected = offline(llm)
            assert await stream_all(client, slowly=False) == expected
            killing = asyncio.create_task(kill(client, times=1, num_steps=6))
            assert await stream_all(client, slowly=True) == expected
            await killing
            await assert_nothing_is_held(client)
        finally:
            await client.close()

    run(test())


@pytest.mark.slow
def test_twenty_kills(llm: LLM) -> None:
    """Four users send everything again and again while the engine process is killed."""

    async def test() -> int:
        client = EngineClient(make_config("demo", **OPTIONS))
        await client.start()
        num_rounds = 0
        try:
            expected = offline(llm)

            async def user() -> None:
                nonlocal num_rounds
                while not killing.done():
                    assert await stream_all(client, slowly=False) == expected
                    num_rounds += 1

            killing = asyncio.create_task(kill(client, times=20, num_steps=20))
            await asyncio.gather(killing, *[user() for _ in range(4)])
            assert client.info.num_restarts == 20
            await assert_nothing_is_held(client)
        finally:
            await client.close()
        return num_rounds

    assert run(test(), seconds=600) >= 4
