"""Workloads: lengths and arrivals of requests, and how they are decoded (paper section 6.1).

A `WorkloadSpec` is a plain description that can be hashed, stored and sent to another process;
`build` makes its requests. Every output is forced to its length, as in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.bench.throughput import Decoding
from octavo.bench.traces import HASH_BLOCK_SIZE, TraceRequest
from octavo.errors import ConfigError, shown
from octavo.simulation import arrivals, sources

PREFIX_BLOCK = 16  # the shared part of a prefix is whole blocks of the paper's block size
MAX_SHARED_TOKENS = 1 << 20  # of a prefix, or behind a hash id; no model has a longer context
HISTORY_TOKENS = 1024  # the chatbot's prompt: the last tokens of a conversation
CHATBOT_OUTPUT_LIMIT = 1016


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The parameters of a workload.

    Raises ConfigError for invalid values.
    """

    source: str  # a name in `sources.SOURCES`, or a trace file
    rate: float | None = None  # requests per second; None: the trace's own arrivals
    duration: float | None = None  # seconds of arrivals; None: the whole trace
    seed: int = 0
    burstiness: float | None = None  # None: Poisson in quanta of 10 ms; else gamma
    n: int = 1  # parallel samples
    beam_width: int | None = None
    prefix_tokens: int = 0  # in front of every prompt, the same for all
    # Chatbot: the chance that a request starts a conversation; else it is a later turn of one.
    new_conversation: float | None = None
    hash_block_size: int = HASH_BLOCK_SIZE  # tokens behind one of the trace's hash_ids

    def __post_init__(self) -> None:
        if self.rate is not None and self.duration is None:
            raise ConfigError("duration", "a rate needs a duration")
        if self.burstiness is not None and self.rate is None:
            raise ConfigError("burstiness", "a trace's own arrivals have their own")
        if self.seed < 0:
            raise ConfigError("seed", f"{self.seed} is negative")
        for name in ("prefix_tokens", "hash_block_size"):
            number = getattr(self, name)
            if not 0 <= number <= MAX_SHARED_TOKENS:
                raise ConfigError(
                    name, f"{shown(number)} is not between 0 and {MAX_SHARED_TOKENS:,}"
                )
        if self.new_conversation is not None and not 0 < self.new_conversation <= 1:
            raise ConfigError("new_conversation", f"{self.new_conversation} is not in (0, 1]")

    def at_rate(self, rate: float) -> WorkloadSpec:
        return replace(self, rate=rate)

    @property
    def decoding(self) -> Decoding:
        return Decoding(n=self.n, beam_width=self.beam_width)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrivals, and how all of them are decoded."""

    # Each with `arrival_s`, seconds from the start; without, it is there from the start.
    requests: tuple[TraceRequest, ...]
    decoding: Decoding
    hash_block_size: int  # tokens behind one of the requests' hash_ids


def build(spec: WorkloadSpec, pairs: Sequence[TraceRequest] | None = None) -> Workload:
    """The requests of a workload; equal specs give equal requests.

    Args:
        spec: what they are.
        pairs: what the source has, where it was read before; None: it is read.

    Raises ConfigError or TraceError for a source that cannot be read or has no arrivals.
    """
    if pairs is None:
        pairs = sources.read_source(spec.source)
    requests = _replayed(spec, pairs) if spec.rate is None else _generated(spec, pairs)
    hash_block_size = spec.hash_block_size
    if spec.prefix_tokens:
        if any(request.hash_ids for request in requests):
            raise ConfigError("prefix_tokens", f"{spec.source} brings shared prefixes of its own")
        requests = [with_prefix(request, spec.prefix_tokens) for request in requests]
        hash_block_size = PREFIX_BLOCK
    return Workload(tuple(requests), spec.decoding, hash_block_size)


def with_prefix(request: TraceRequest, num_tokens: int) -> TraceRequest:
    """Put a prefix in front. Its whole blocks are the same for all; the rest is the request's own
    (the paper's artifact cuts the shared part down to a multiple of the block size)."""
    return replace(
        request,
        prompt_tokens=num_tokens + request.prompt_tokens,
        hash_ids=tuple(range(num_tokens // PREFIX_BLOCK)),
    )


def chatbot(
    pairs: Sequence[TraceRequest], num_requests: int, new_conversation: float, seed: int
) -> list[TraceRequest]:
    """Turns of conversations, cut to the last 1,024 tokens, answered with at most 1,016.

    The multi-round conversations of the paper are not at hand: a conversation here is a row of
    independent first turns. How many came before a request is geometric, so a share of
    `new_conversation` of the requests has no history.
    """
    draw = np.random.default_rng(seed)
    requests = []
    for _ in range(num_requests):
        num_before = int(draw.geometric(new_conversation)) - 1
        turns = [pairs[int(i)] for i in draw.integers(len(pairs), size=num_before + 1)]
        history = sum(turn.num_tokens for turn in turns[:-1])
        requests.append(
            TraceRequest(
                min(HISTORY_TOKENS, history + turns[-1].prompt_tokens),
                min(CHATBOT_OUTPUT_LIMIT, turns[-1].output_tokens),
            )
        )
    return requests


def _generated(spec: WorkloadSpec, pairs: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Lengths in random order, at generated times."""
    assert spec.rate is not None
    assert spec.duration is not None
    if spec.burstiness is None:
        times = arrivals.poisson(spec.rate, spec.duration, spec.seed)
    else:
        times = arrivals.gamma(spec.rate, spec.duration, spec.seed, spec.burstiness)
    if not times:
        raise ConfigError(
            "rate", f"no request arrives in {spec.duration:g} s at {spec.rate:g} requests/s"
        )
    if spec.new_conversation is not None:
        lengths = chatbot(pairs, len(times), spec.new_conversation, spec.seed)
    else:
        lengths = shuffled(pairs, len(times), spec.seed)
    return [replace(length, arrival_s=time) for length, time in zip(lengths, times, strict=True)]


def shuffled(pairs: Sequence[TraceRequest], count: int, seed: int) -> list[TraceRequest]:
    """`count` of the pairs in random order; all of them before one comes twice."""
    draw = np.random.default_rng(seed)
    chosen: list[TraceRequest] = []
    while len(chosen) < count:
        chosen += [pairs[int(i)] for i in draw.permutation(len(pairs))]
    return chosen[:count]


def _replayed(spec: WorkloadSpec, requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    if spec.new_conversation is not None:
        raise ConfigError("new_conversation", "conversations are made at a rate; give one")
    times = [request.arrival_s for request in requests]
    if None in times:
        raise ConfigError("rate", f"{spec.source} has no arrival times; give a rate and a duration")
    limit = float("inf") if spec.duration is None else spec.duration
    ordered = sorted(requests, key=lambda request: request.arrival_s or 0.0)
    kept = [request for request in ordered if (request.arrival_s or 0.0) < limit]
    if not kept:
        raise ConfigError("duration", f"no request of {spec.source} arrives in {limit:g} s")
    return kept
