"""A picture of the core at one moment: blocks, queues, block tables. Plain values, to be sent."""

from __future__ import annotations

import msgspec


class TierView(msgspec.Struct, frozen=True):
    """A tier's blocks. Byte i of `ref_counts` and `is_cached` is about block i + 1 (0 is the null
    block and no memory of its own)."""

    num_blocks: int
    num_free: int  # cached ones included
    num_free_cached: int
    ref_counts: bytes  # holders of each block; 255 stands for 255 or more
    is_cached: bytes  # 1: the prefix cache can find the block's contents


class SequenceView(msgspec.Struct, frozen=True):
    """One chain of tokens and where its KV lies."""

    seq_id: int
    index: int  # which of the request's samples or beams it is
    num_tokens: int
    num_computed_tokens: int
    on_device: bool  # False: the block ids are of the swap tier
    block_ids: list[list[int]]  # per KV group; 0 is the null block; empty: it holds no blocks
    cumulative_logprob: float  # of beams, and of samples whose log-probabilities were asked for
    output_token_ids: list[int] | None = None  # only if asked for


class RequestView(msgspec.Struct, frozen=True):
    """One request. Times are seconds of `time.monotonic`, which all processes share."""

    request_id: str
    status: str  # "waiting", "running", "swapped" or "finished"
    method: str  # "sampling", "beam_search" or "pin_prefix"
    max_sequences: int  # n, or the beam width
    max_length: int  # tokens, prompt included
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_preemptions: int
    arrival_time: float
    sequences: list[SequenceView]  # those alive


class PinView(msgspec.Struct, frozen=True):
    """A pinned prefix and its blocks."""

    name: str
    num_tokens: int
    block_ids: list[list[int]]  # per KV group


class Snapshot(msgspec.Struct, frozen=True):
    """Everything at one moment. Lists of requests are in the order in which they run."""

    time: float  # of time.monotonic
    step: int  # steps taken since the engine process started
    block_size: int  # tokens
    device: TierView
    swap: TierView
    running: list[RequestView]
    swapped: list[RequestView]
    waiting: list[RequestView]  # the first `max_waiting` of them
    num_waiting: int  # all of them
    pins: list[PinView]
