"""Rows that go wrong end alone, and NaN that lies in free blocks reaches no one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import model_zoo
from daily_cases import checkered
from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.core.invariants import check_scheduler
from octavo.engine.local_client import LocalClient
from octavo.engine.validation import Params
from octavo.errors import LogitsNotFinite

BAD = 319  # its embedding is NaN
Ask = tuple[list[int], Params]


def prompt(length: int, seed: int) -> list[int]:
    return model_zoo.random_token_ids(length, seed, vocab_size=BAD)


def make_client(monkeypatch: pytest.MonkeyPatch, **options: Any) -> LocalClient:
    model_zoo.embed_as_nan(BAD, monkeypatch)
    options = {"num_blocks": 200, "block_size": 8, "max_num_batched_tokens": 128} | options
    name = options.pop("model", "llama3")
    return LLM(
        str(model_zoo.model_directory(name)), device="cpu", max_num_seqs=128, **options
    ).client


def run(client: LocalClient, asks: list[Ask]) -> list[RequestOutput]:
    streams = [client.make_request(token_ids, params) for token_ids, params in asks]
    for stream in streams:
        client.add_request(stream)
    finished = {}
    while client.has_unfinished:
        outputs = client.step()
        check_scheduler(client.engine.scheduler)
        finished |= {each.request_id: each for each in outputs}
    assert client.engine.kv.pool.num_held == client.engine.kv.num_pinned_blocks
    assert client.num_open == 0
    return [finished[stream.request_id] for stream in streams]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def sampling(**fields: Any) -> SamplingParams:
    never = {BAD: -100.0}
    fields = {"max_tokens": 6, "seed": 7, "ignore_eos": True, "logit_bias": never} | fields
    return SamplingParams(**fields)


INNOCENT: list[Params] = [
    sampling(temperature=0),
    sampling(top_p=0.9),
    sampling(top_k=20, min_p=0.01),
    sampling(temperature=0, repetition_penalty=1.3),
    sampling(n=2),
    sampling(temperature=0, logprobs=2, prompt_logprobs=1),
    BeamSearchParams(2, max_tokens=4, ignore_eos=True),
]
SYSTEM = prompt(20, seed=99)  # begins several prompts
# With the number of tokens that come before the error.
HARMFUL: dict[str, tuple[list[int], Params, int]] = {
    "greedy": ([5, BAD, 6], sampling(temperature=0), 0),
    "random": ([*SYSTEM, BAD], sampling(top_p=0.5, top_k=5), 0),
    "in the middle": ([*SYSTEM, 5], sampling(allowed_token_ids=[BAD], logit_bias=None), 1),
    "masked": ([BAD], sampling(allowed_token_ids=[4, 5]), 0),
    "penalised": ([BAD, 9], sampling(temperature=0, frequency_penalty=0.5), 0),
    "samples": ([*SYSTEM, BAD, 4], sampling(n=3), 0),
    "logprobs": ([4, BAD], sampling(logprobs=3, prompt_logprobs=2), 0),
    "beams": ([*SYSTEM, BAD], BeamSearchParams(3, max_tokens=5), 0),
    "chunks": ([*prompt(130, 3), BAD, *prompt(150, 4)], sampling(), 0),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_without_finite_logits_end_alone(
    backend: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(monkeypatch, attention_backend=backend, overlap=overlap)
    innocent: list[Ask] = [
        ([*SYSTEM, *prompt(1 + i % 9, i)], INNOCENT[i % len(INNOCENT)]) for i in range(40)
    ]
    wanted = tokens(run(client, innocent))
    client.engine.kv.reset_prefix_cache()
    asks = list(innocent)
    for place, (token_ids, params, _) in enumerate(HARMFUL.values()):
        asks.insert(4 * place + 1, (token_ids, params))
    outputs = run(client, asks)
    for name, (_, _, num_tokens) in HARMFUL.items():
        output = outputs.pop(asks.index(HARMFUL[name][:2]))
        asks.remove(HARMFUL[name][:2])
        assert output.error is not None, name
        assert "not finite" in output.error
        assert {each.finish_reason for each in output.outputs} == {"error"}
        assert {len(each.token_ids) for each in output.outputs} == {num_tokens}, name
    assert [output.error for output in outputs] == [None] * len(innocent)
    assert tokens(outputs) == wanted
    assert tokens(run(client, innocent)) == wanted, "what is cached is sound"


@pytest.mark.parametrize("is_aborted", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
def test_what_a_prompt_spoils_before_it_fails_costs_others_nothing(
    overlap: bool, is_aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN times a weight of 0 is NaN, so a token spoils those before it, too. They are cached with
    the first chunk of their prompt, and others begin with them, whose logits say so at last."""
    client = make_client(monkeypatch, attention_backend="reference", overlap=overlap)
    others: list[Ask] = [([*SYSTEM, *prompt(2 + i, i)], each) for i, each in enumerate(INNOCENT)]
    others.append(([*SYSTEM, *prompt(200, 8)], sampling(temperature=0)))
    wanted = tokens(run(client, others))
    scores = run(client, others[5:6])[0].prompt_logprobs
    client.engine.kv.reset_prefix_cache()
    harmful = client.make_request([*SYSTEM, BAD, *prompt(300, 3)], sampling())
    client.add_request(harmful)
    for _ in range(2):
        client.step()
    if is_aborted:
        client.abort_request(harmful)
    streams = [client.make_request(*each) for each in others]
    for stream in streams:
        client.add_request(stream)
    finished = {}
    while client.has_unfinished:
        finished |= {each.request_id: each for each in client.step()}
        check_scheduler(client.engine.scheduler)
    outputs = [finished[stream.request_id] for stream in streams]
    assert [each.error for each in outputs] == [None] * len(outputs)
    assert tokens(outputs) == wanted
    assert outputs[5].prompt_logprobs == scores
    assert any(stream.request.avoids_cache for stream in streams), "some had what is spoilt"
    assert client.engine.kv.pool.num_held == 0
    if not is_aborted:
        assert finished[harmful.request_id].error is not None
    assert tokens(run(client, others)) == wanted, "what is cached is sound"


ENGINES: list[tuple[str, dict[str, Any]]] = [
    ("cpu", {"dtype": "float32"}),
    ("cpu", {"dtype": "bfloat16"}),
    ("cpu", {"dtype": "bfloat16", "block_size": 5}),
    ("cpu", {"block_size": 16}),
    ("reference", {}),
]


@pytest.mark.parametrize(("backend", "options", "model"), checkered(ENGINES, ("llama3", "qwen2")))
def test_what_free_blocks_hold_is_never_read(
    backend: str, options: dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN times a weight of 0 is NaN. Blocks are scarce, and swapped, copied and shared."""
    asks: list[Ask] = [
        (
            [*SYSTEM[: 3 * i], *prompt(1 + 2 * i, i)],
            replace(INNOCENT[i % len(INNOCENT)], max_tokens=25),
        )
        for i in range(14)
    ]
    results = []
    for filler in (0.0, float("nan")):
        client = make_client(
            monkeypatch,
            model=model,
            attention_backend=backend,
            num_blocks=400 // options.get("block_size", 8),
            max_model_len=80,
            watermark=0.0,
            preemption_mode="swap",
            **options,
        )
        kv_cache = client.engine.executor._worker.runner.kv_cache  # type: ignore[attr-defined]
        kv_cache.blocks.fill_(filler)
        kv_cache.swapped.fill_(filler)
        outputs = run(client, asks)
        assert [output.error for output in outputs] == [None] * len(asks)
        results.append(tokens(outputs))
        assert client.engine.scheduler.num_preemptions["swap"] > 0
    assert results[0] == results[1]


def test_offline_streams_and_pins_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    model_zoo.embed_as_nan(BAD, monkeypatch)
    directory = str(model_zoo.model_directory("llama3"))
    llm = LLM(directory, device="cpu", num_blocks=64, block_size=8, max_model_len=128)
    deltas = llm.stream([5, 6], sampling(allowed_token_ids=[BAD], logit_bias=None))
    assert next(deltas).token_ids == [BAD]
    with pytest.raises(LogitsNotFinite, match="not finite numbers"):
        next(deltas)
    with pytest.raises(LogitsNotFinite, match="not finite numbers"):
        llm.pin_prefix([*SYSTEM, BAD, *SYSTEM], "bad")
    assert llm.engine.kv.pins == {}
    llm.pin_prefix(SYSTEM[:16], "good")
    [failed] = llm.generate([[*SYSTEM, BAD]], sampling(), use_tqdm=False)
    assert failed.error is not None
    assert failed.num_cached_tokens == 16
    [fine] = llm.generate([[*SYSTEM, 5]], sampling(), use_tqdm=False)
    assert fine.num_cached_tokens == 16, "a pinned prefix is sound, and stays"
    assert llm.engine.kv.pool.num_held == 2
