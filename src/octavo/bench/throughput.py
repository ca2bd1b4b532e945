"""All requests at once, as fast as the engine can: `octavo bench throughput`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.bench.memory_use import MemoryUse, SlotUse, mean_slots, sharing_saves
from octavo.bench.percentiles import Percentiles
from octavo.bench.traces import HASH_BLOCK_SIZE, TraceRequest, make_prompts
from octavo.errors import ConfigError, RequestTooLong
from octavo.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.engine.local_client import LocalClient
    from octavo.outputs import RequestOutput

WARM_UP = TraceRequest(48, 8)
NUM_WARM_UP = 8
# JSON that is not complete before any output's length: records, as they are drawn from texts.
RECORDS = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
            "place": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
        },
        "required": ["name", "age", "colours", "place"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Decoding:
    """How outputs are sampled; every output has exactly the length that the trace gives.

    Raises ConfigError for samples, or a temperature, beside beams.
    """

    n: int = 1
    temperature: float | None = None  # None: greedy, or 1 if there are several samples
    beam_width: int | None = None
    structured: bool = False  # every output is the beginning of JSON that keeps to RECORDS

    def __post_init__(self) -> None:
        if self.beam_width is None:
            return
        for name, is_given in (("n", self.n > 1), ("temperature", self.temperature is not None)):
            if is_given:
                raise ConfigError(name, "it is of no use with beam_width")

    @property
    def is_wide(self) -> bool:
        """Whether a request has more than one sample, or beams."""
        return self.n > 1 or self.beam_width is not None

    def params(self, output_tokens: int, seed: int) -> SamplingParams | BeamSearchParams:
        # With a schema, the end of an output has its place, which is not reached.
        how: dict[str, Any] = {"ignore_eos": True}
        if self.structured:
            how = {"structured": {"json_schema": RECORDS}}
        if self.beam_width is not None:
            return BeamSearchParams(
                self.beam_width, max_tokens=output_tokens, detokenize=False, **how
            )
        temperature = self.temperature
        if temperature is None:
            temperature = 0.0 if self.n == 1 else 1.0
        return SamplingParams(
            n=self.n,
            temperature=temperature,
            max_tokens=output_tokens,
            detokenize=False,
            seed=seed,
            **how,
        )


@dataclass(slots=True)
class ThroughputReport:
    """The outcome of a run. Times in seconds."""

    seconds: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int  # of all samples and beams that were returned
    num_steps: int
    mean_seqs: float  # computed in a step
    time_to_first_token: Percentiles
    time_per_output_token: Percentiles
    preemptions: dict[str, int]
    prefix_hit_rate: float
    sharing_saves: float
    # Means over the steps in which requests waited, and over all steps.
    saturated: SlotUse | None
    whole_run: SlotUse
    num_saturated_steps: int
    skipped: int = 0
    share_of_unstructured: float | None = None  # of the output tokens/s of a run without a schema
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def total_tokens_per_second(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds


def split_by_fit(
    engine: Engine, requests: Sequence[TraceRequest], skip_long: bool
) -> tuple[list[TraceRequest], int]:
    """The requests that the engine can run, and how many it cannot.

    Raises:
        RequestTooLong: some cannot be run, and `skip` is false.
    """
    limit = engine.max_model_len
    fitting = [request for request in requests if request.num_tokens <= limit]
    num_long = len(requests) - len(fitting)
    if num_long and not skip_long:
        longest = max(request.num_tokens for request in requests)
        raise RequestTooLong(
            "trace",
            f"{num_long} of {len(requests)} requests have more tokens (up to {longest}) than a "
            f"sequence may have here ({limit}); skip them, or raise max_model_len or the KV cache",
        )
    if not fitting:
        raise RequestTooLong("trace", f"no request has {limit} tokens or less")
    return fitting, num_long


def run_throughput(
    client: LocalClient,
    requests: Sequence[TraceRequest],
    decoding: Decoding,
    seed: int = 0,
    hash_block_size: int = HASH_BLOCK_SIZE,
    finished: Callable[[RequestOutput], None] = lambda output: None,
) -> ThroughputReport:
    """Queue all requests, run until the last is done, and measure."""
    engine = client.engine
    vocab_size = engine.model_config.vocab_size
    warm_up = [_shortened(WARM_UP, engine.max_model_len)] * NUM_WARM_UP
    run_requests(client, warm_up, make_prompts(warm_up, vocab_size, seed - 1), decoding)
    prompts = make_prompts(requests, vocab_size, seed, hash_block_size)
    kv, scheduler = engine.kv, engine.scheduler
    memory = MemoryUse.watch(engine)
    before = dict(scheduler.num_preemptions)
    num_hits, num_lookups = kv.num_hit_tokens, kv.num_lookup_tokens
    start = engine.clock()
    try:
        outputs = run_requests(client, requests, prompts, decoding, finished)
        seconds = engine.clock() - start
    finally:
        memory.unwatch()
    whole_run = mean_slots(memory.steps)
    assert whole_run is not None, "there was at least one request, and so one step"
    saturated = [step for step in memory.steps if step.is_saturated]
    computing = [step for step in memory.steps if step.num_seqs]
    return ThroughputReport(
        seconds,
        len(outputs),
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(each.token_ids) for output in outputs for each in output.outputs),
        len(memory.steps),
        sum(step.num_seqs for step in computing) / len(computing),
        Percentiles.of([first_token_seconds(output) for output in outputs]),
        Percentiles.of([s for output in outputs for s in per_token_seconds(output)]),
        {kind: scheduler.num_preemptions[kind] - before[kind] for kind in before},
        (kv.num_hit_tokens - num_hits) / max(1, kv.num_lookup_tokens - num_lookups),
        sharing_saves(memory.steps),
        mean_slots(saturated),
        whole_run,
        len(saturated),
    )


def _shortened(request: TraceRequest, max_tokens: int) -> TraceRequest:
    """The request, or one of the same kind for which a sequence of so many tokens has room."""
    prompt_tokens = max(1, min(request.prompt_tokens, max_tokens - request.output_tokens))
    return TraceRequest(prompt_tokens, min(request.output_tokens, max_tokens - prompt_tokens))


def first_token_seconds(output: RequestOutput) -> float:
    """Seconds from arrival to the first token, time in the queue included."""
    assert output.first_token_time is not None, f"{output.request_id} has no token"
    return output.first_token_time - output.arrival_time


def per_token_seconds(output: RequestOutput) -> list[float]:
    """Mean time of the tokens after the first; no value for outputs of one token."""
    num_tokens = max(len(each.token_ids) for each in output.outputs)
    if num_tokens < 2 or output.first_token_time is None:
        return []
    return [(output.finish_time - output.first_token_time) / (num_tokens - 1)]


def run_requests(
    client: LocalClient,
    requests: Sequence[TraceRequest],
    prompts: Sequence[list[int]],
    decoding: Decoding,
    finished: Callable[[RequestOutput], None] = lambda output: None,
) -> list[RequestOutput]:
    """Queue all requests at once, and run until the last is done. Outputs in the order of their
    ends."""
    streams = [
        client.make_request(prompt, decoding.params(request.output_tokens, index))
        for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
    ]
    for stream in streams:
        client.add_request(stream)
    outputs: list[RequestOutput] = []
    while client.has_unfinished:
        for output in client.step():
            outputs.append(output)
            finished(output)
    return outputs
