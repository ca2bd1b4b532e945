"""Requests to a model with an encoder, from the prompt to the core, without the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from core.symbolic import SymbolicExecutor, chain, drawn_token, origin
from octavo import BeamSearchParams, SamplingParams
from octavo.bench.memory_use import MemoryUse
from octavo.config import make_config
from octavo.core.kv.specs import group_layers
from octavo.core.step import FinishedStep, PendingStep, StepPlan
from octavo.engine.engine import Engine
from octavo.engine.local_client import LocalClient, LocalStream
from octavo.engine.recorder import Recorder
from octavo.engine.snapshot import take_snapshot, unpack_ids
from octavo.engine.validation import Prompt, RequestPreparer
from octavo.errors import ConfigError, InvalidRequest, RequestTooLong
from octavo.executor.base import KVCapacity
from octavo.memory_budget import KVShape, MemoryBudget
from octavo.models.config import DecodingRules, ModelConfig
from octavo.models.registry import read_model_config
from octavo.simulation.config import SimulationConfig

START = 3
MODEL = {
    "model_type": "bart",
    "architectures": ["BartForConditionalGeneration"],
    "vocab_size": 50,
    "d_model": 32,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
    "max_position_embeddings": 40,
    "decoder_start_token_id": START,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "bos_token_id": 0,
}
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
INPUT = [5, 6, 4, 5, 6, 4, 5, 6, 4, 5]  # three blocks


class Executor(SymbolicExecutor):
    """Carries plans out at once."""

    is_asynchronous = False

    def __init__(self, model: ModelConfig, num_blocks: int) -> None:
        layout = group_layers(model.kv_specs())
        super().__init__(layout.specs, layout.block_sizes(4))
        budget = MemoryBudget(0, 0, 0, 0, 0, 1, 4, num_blocks, 0, num_blocks)
        self.capacity = KVCapacity(num_blocks, num_blocks, layout, 1, budget)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> PendingStep:
        self.plans.append(plan)
        return FinishedStep(self.execute(plan))

    def check(self) -> None:
        """Nothing can fail."""

    def shutdown(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("bart")
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "generation_config.json").write_text("{}")
    return read_model_config(directory)


def make_client(model: ModelConfig, num_blocks: int = 100, **options: Any) -> LocalClient:
    options = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, **options}
    config = make_config(str(model.path), **options)
    return LocalClient(Engine(config, model, Executor(model, num_blocks)))


@pytest.fixture
def client(model: ModelConfig) -> Iterator[LocalClient]:
    made = make_client(model)
    yield made
    made.engine.close()


def run(client: LocalClient, prompt: Prompt, params: Any = GREEDY) -> LocalStream:
    stream = client.make_request(prompt, params)
    client.add_request(stream)
    while stream.output is None:
        client.step()
    return stream


def expected(decoder_input_ids: list[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What the symbolic executor draws under INPUT, by the definition."""
    symbol, tokens = origin(INPUT), list(decoder_input_ids)
    for token_id in tokens:
        symbol = chain(symbol, token_id)
    for _ in range(num_tokens):
        tokens.append(drawn_token(symbol, seed, 0))
        symbol = chain(symbol, tokens[-1])
    return tokens[len(decoder_input_ids) :]


def plans_of(client: LocalClient) -> list[StepPlan]:
    executor = client.engine.executor
    assert isinstance(executor, Executor)
    return executor.plans


def test_the_prompt_is_the_encoder_s_input_and_the_decoder_begins_with_its_start(
    client: LocalClient,
) -> None:
    params = replace(GREEDY, seed=9)
    output = run(client, INPUT, params).output
    assert output is not None
    [first, *_] = plans_of(client)
    [row] = first.opened
    assert (row.token_ids, row.encoder_token_ids) == ((START,), tuple(INPUT))
    assert first.encoded == [row.seq_id]
    assert output.prompt_token_ids == INPUT
    assert output.outputs[0].token_ids == expected([START], 5, seed=9)
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("given", "begins"), [([START, 8], [START, 8]), ([8, 9], [START, 8, 9]), ((8,), [START, 8])]
)
def test_decoder_input_ids_come_after_the_start(
    client: LocalClient, given: Any, begins: list[int]
) -> None:
    params = replace(GREEDY, seed=9)
    output = run(client, {"prompt": INPUT, "decoder_input_ids": given}, params).output
    assert output is not None
    assert plans_of(client)[0].opened[0].token_ids == tuple(begins)
    assert output.outputs[0].token_ids == expected(begins, 5, seed=9)


def test_an_equal_prompt_counts_as_cached(client: LocalClient) -> None:
    first, again = run(client, INPUT).output, run(client, INPUT).output
    assert first is not None
    assert again is not None
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, len(INPUT))
    assert sum(len(plan.encoded) for plan in plans_of(client)) == 1


def test_the_context_is_the_decoder_s_alone(client: LocalClient) -> None:
    output = run(client, [4] * 40, SamplingParams(max_tokens=None, ignore_eos=True)).output
    assert output is not None
    assert len(output.outputs[0].token_ids) == 39


@pytest.mark.parametrize(
    ("prompt", "params", "field", "message"),
    [
        ([4] * 41, GREEDY, "prompt", "41 tokens are too many for the model's encoder, which tak"),
        ([4] * 400_000, GREEDY, "prompt", "400000 tokens are too many"),
        ([], GREEDY, "prompt", "it is empty"),
        ([50], GREEDY, "prompt", "token id 50 is outside the vocabulary of 50"),
        ({"decoder_input_ids": [1]}, GREEDY, "prompt", "it is missing beside"),
        ({"prompt": [1], "decoder_ids": [1]}, GREEDY, "prompt", "it has no field 'decoder_ids'"),
        ({"prompt": {"prompt": [1]}}, GREEDY, "prompt", "is neither text nor a list of token ids"),
        ({"prompt": [4], "decoder_input_ids": []}, GREEDY, "decoder_input_ids", "it is empty"),
        ({"prompt": [4], "decoder_input_ids": "x"}, GREEDY, "decoder_input_ids", "'x' is not a"),
        ({"prompt": [4], "decoder_input_ids": 7}, GREEDY, "decoder_input_ids", "7 is not a list"),
        ({"prompt": [4], "decoder_input_ids": [-1]}, GREEDY, "decoder_input_ids", "token id -1 is"),
        (
            {"prompt": [4], "decoder_input_ids": [4] * 39},
            GREEDY,
            "decoder_input_ids",
            "40 tokens leave no room for output in a context of 40 tokens",
        ),
        (
            [4],
            replace(GREEDY, prompt_logprobs=1),
            "prompt_logprobs",
            "an encoder does not predict its input",
        ),
    ],
    ids=lambda each: str(each)[:40] if isinstance(each, str) else None,
)
def test_what_cannot_be_is_refused_with_its_field(
    client: LocalClient, prompt: Any, params: SamplingParams, field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.make_request(prompt, params)
    assert caught.value.field == field
    assert message in str(caught.value)
    assert not client.has_unfinished


def test_prefixes_are_not_pinned(client: LocalClient) -> None:
    with pytest.raises(InvalidRequest, match="prefix: inputs of an encoder are found as a whole"):
        client.pin_prefix(INPUT, "name")


def test_decoder_input_ids_mean_nothing_without_an_encoder() -> None:
    from octavo import LLM

    with LLM("demo", num_blocks=64) as llm:
        with pytest.raises(InvalidRequest, match="decoder_input_ids: the model has no encoder"):
            llm.generate({"prompt": "Once", "decoder_input_ids": [1]}, use_tqdm=False)
        [output] = llm.generate({"prompt": "Once"}, use_tqdm=False)
        assert output.prompt == "Once"


def test_an_input_that_no_step_can_take_is_refused_before_it_is_queued(model: ModelConfig) -> None:
    client = make_client(model, max_num_batched_tokens=16)
    client.make_request([4] * 15, GREEDY)
    with pytest.raises(RequestTooLong, match=r"16 tokens .* which takes 15 tokens in a step"):
        client.make_request([4] * 16, GREEDY)
    client = make_client(
        model, max_num_batched_tokens=40, max_model_len=40, enable_chunked_prefill=False
    )
    with pytest.raises(RequestTooLong, match=r"39 tokens of encoder input and .* of the decoder's"):
        client.make_request([4] * 39, GREEDY)


def test_the_pool_must_hold_an_encoder_input_beside_the_sequence(model: ModelConfig) -> None:
    """40 tokens of input take 10 blocks."""
    assert make_client(model, num_blocks=20).engine.max_model_len == 40
    assert make_client(model, num_blocks=13).engine.max_model_len == 12
    with pytest.raises(ConfigError, match="10 blocks hold no sequence of 2 tokens beside 40 of e"):
        make_client(model, num_blocks=10)
    with pytest.raises(ConfigError, match="40 tokens beside 40 of encoder input do not fit into"):
        make_client(model, num_blocks=13, max_model_len=40)
    assert make_client(model, num_blocks=10, max_num_batched_tokens=16).engine.max_model_len == 24


@pytest.mark.parametrize("policy", ["orca-max", "orca-pow2", "orca-oracle", "fastertransformer"])
def test_policies_that_reserve_for_sequences_alone_are_refused(
    model: ModelConfig, policy: str
) -> None:
    with pytest.raises(ConfigError, match=f"memory_policy: {policy} reserves memory for seq"):
        make_client(model, memory_policy=policy, enable_prefix_caching=False)


def test_memory_counts_the_encoder_s_input(model: ModelConfig) -> None:
    shape = KVShape(model.kv_layout(), 4, 4, encoder_len=40)
    assert shape.blocks_for(9, chunk=64) == 3 + 10
    assert shape.held_bytes(12) == shape.read_bytes(12) == (3 + 10) * shape.block_bytes


def test_no_simulation_knows_the_time_of_an_encoder(model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"model: .* has an encoder, whose time the cost model"):
        SimulationConfig(str(model.path), "a100-40gb").prepare()


def test_a_snapshot_shows_both_tables(client: LocalClient) -> None:
    stream = client.make_request(INPUT, GREEDY)
    client.add_request(stream)
    client.step()
    snapshot = take_snapshot(client.engine, 1)
    [view] = snapshot.running
    [seq] = view.sequences
    assert [len(unpack_ids(table)) for table in seq.tables] == [1, 3]
    assert view.num_prompt_tokens == len(INPUT)


def test_counters_include_the_encoder_s_tokens(client: LocalClient) -> None:
    admitted: list[Any] = []
    recorder = Recorder(client.engine, admitted.append)
    run(client, INPUT)
    run(client, INPUT)
    assert recorder.counters.num_computed_tokens == (10 + 5) + 5
    assert [(each.num_tokens, each.num_hit_tokens) for each in admitted] == [(11, 0), (11, 10)]


def test_the_memory_in_use_includes_the_encoder_s_blocks(client: LocalClient) -> None:
    """10 tokens of input and 1 of the decoder's, in blocks of 4."""
    memory = MemoryUse.watch(client.engine)
    run(client, INPUT, replace(GREEDY, max_tokens=1))
    [step] = memory.steps
    assert (step.num_logical_blocks, step.num_physical_blocks) == (4, 4)
    assert (step.slots.token_states, step.slots.held) == (11, 16)


# -------------------------------------------------------------------- rules of the output


def prepared_spec(model: ModelConfig, prompt: Prompt, params: Any) -> Any:
    preparer = RequestPreparer(model, None, make_config(str(model.path)))
    return preparer.prepare(prompt, params, 40).sampling


def test_the_model_s_rules_reach_every_request(model: ModelConfig) -> None:
    rules = DecodingRules(7, (2,), no_repeat_ngram_size=3, bad_words=((1,), (4, 5)))
    strict = replace(model, decoding_rules=rules)
    for params in (GREEDY, BeamSearchParams(beam_width=4, max_tokens=5)):
        spec = prepared_spec(strict, INPUT, params)
        assert spec.forced_tokens == ((0, (7,)), (4, (2,)))
        assert spec.no_repeat_ngram_size == 3
        assert spec.bad_sequences == ((1,), (4, 5))
        assert prepared_spec(model, INPUT, params).forced_tokens == ()


def test_no_first_token_is_forced_behind_decoder_input_ids(model: ModelConfig) -> None:
    strict = replace(model, decoding_rules=DecodingRules(7, (2,)))
    begun: Prompt = {"prompt": INPUT, "decoder_input_ids": [START, 8]}
    assert prepared_spec(strict, begun, GREEDY).forced_tokens == ((4, (2,)),)
    alone: Prompt = {"prompt": INPUT, "decoder_input_ids": [START]}
    assert prepared_spec(strict, alone, GREEDY).forced_tokens == ((0, (7,)), (4, (2,)))
