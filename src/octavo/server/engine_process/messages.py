"""Messages between the API process and the engine process: msgpack, with token ids only.

The API process tokenizes, detokenizes and searches for stop strings, so that the engine process can
be replaced at any time: the API process has all that is needed to resume a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from octavo.config import EngineConfig, QuantizationName
from octavo.core.step import TokenLogprobs
from octavo.engine.events import Admitted, BlockEvents, Counters, Gauges, Preempted
from octavo.engine.results import ErrorReport, PromptScores, StepResults
from octavo.engine.snapshot import RequestView, Snapshot
from octavo.engine.validation import PreparedRequest
from octavo.memory_budget import MemoryBudget

# ---------------------------------------------------------------- to the engine process


class Start(msgspec.Struct, tag=True):
    """The first message: create an engine. The reply is EngineInfo or StartFailed."""

    config: EngineConfig
    path: str  # of the model; what a hub id in `config` stands for may have changed
    log_level: int  # as in the logging module; records are sent back as LogLine


class ResumedSample(msgspec.Struct, array_like=True):
    """A sample that was in progress when the engine process died."""

    index: int
    token_ids: list[int]  # the output so far


class Add(msgspec.Struct, tag=True):
    """Queue a request. The reply is Reply. With `samples`, the request is resumed."""

    ticket: int
    request_id: str
    request: PreparedRequest
    arrival_time: float
    samples: list[ResumedSample] = []  # the unfinished ones; empty: it has not begun


class Abort(msgspec.Struct, tag=True):
    """End a request at once. There is no reply, only the acknowledgement of all commands; reports
    of it that still arrive are ignored."""

    request_id: str


class FinishSample(msgspec.Struct, tag=True):
    """A sample's text has reached a stop string. Acknowledged as Abort."""

    request_id: str
    index: int
    stop: str


class OfferTail(msgspec.Struct, tag=True):
    """Forks of a running sample follow: let them find its last block. There is no reply."""

    request_id: str
    index: int


class Pin(msgspec.Struct, tag=True):
    """Compute a prefix and pin its blocks. The reply is Reply, when that is done."""

    ticket: int
    name: str
    token_ids: list[int]
    cache_salt: str


class Unpin(msgspec.Struct, tag=True):
    """Unpin a prefix. The reply is Reply."""

    ticket: int
    name: str


class ResetPrefixCache(msgspec.Struct, tag=True):
    """Forget all cached prefixes except pinned ones. The reply is Reply."""

    ticket: int


class Look(msgspec.Struct, tag=True):
    """Take a snapshot. The reply is Seen. With `request_id`: of this request, with its tokens."""

    ticket: int
    request_id: str | None = None


class Watch(msgspec.Struct, tag=True):
    """Subscribe to all events, or only to those that are always sent."""

    on: bool


Command = (
    Start | Add | Abort | FinishSample | OfferTail | Pin | Unpin | ResetPrefixCache | Look | Watch
)


# ---------------------------------------------------------------- from the engine process


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """An engine's properties. Sent once it is ready."""

    model: str  # as it was configured
    pid: int
    max_model_len: int  # tokens, prompt and output; with an encoder: of the decoder
    max_encoder_len: int | None  # tokens of a prompt that an encoder reads; None without one
    vocab_size: int
    block_size: int  # tokens
    num_blocks: int
    num_swap_blocks: int
    kv_groups: str  # which layers share block tables: KVLayout as a text
    kv_group_names: tuple[str, ...]  # of each block table, in their order
    max_num_seqs: int
    enable_prefix_caching: bool
    policy: str
    dtype: str  # as configured, or that of the weights' files
    stored_quantization: str | None  # the method of the weights' files
    load_quantization: QuantizationName | None  # as configured, or what "auto" has chosen
    weight_copy_bytes: int  # of copies of weights, of all ranks; 0: there are none
    kv_cache_dtype: str  # of cached keys and values
    device: str
    num_ranks: int  # devices that share the model
    budget: MemoryBudget  # of each of them
    predicts_steps: bool  # whether Counters.predicted_seconds has a meaning
    num_restarts: int = 0  # engine processes before this one

    @property
    def max_prompt_len(self) -> int:
        """Tokens of the longest prompt, without any room for output beside it."""
        return self.max_model_len if self.max_encoder_len is None else self.max_encoder_len

    @property
    def quantization(self) -> str:
        """How the weights are quantized, for people."""
        return self.load_quantization or self.stored_quantization or "none"


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be created; the process ends."""

    error: ErrorReport
    traceback: str


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """A step raised an error; the process ends."""

    message: str
    traceback: str
    is_kill_from_outside: bool = False  # of one of its ranks; see Death


class Reply(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    error: ErrorReport | None = None


class Seen(msgspec.Struct, frozen=True, tag=True):
    ticket: int
    snapshot: Snapshot | None = None
    request: RequestView | None = None  # None: it is not known, or no longer


class LogLine(msgspec.Struct, frozen=True, tag=True):
    """A log record of the engine process."""

    time: float  # as of time.time
    level: int
    logger: str
    message: str


class Admission(msgspec.Struct, frozen=True, tag=True):
    """A request was admitted. Comes before the step that computes the request's first tokens, so
    that it is known which requests were running when the process died."""

    admitted: Admitted


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    """What the first so many commands have ended is computed no longer, not even by a step that is
    still under way. Sent at once where no step is; otherwise the next report says so."""

    num_commands: int


class StepReport(msgspec.Struct, tag=True):
    """The results of one step for all requests. Sent after every step, and also without one when
    requests have left and no step is due."""

    time: float  # as of time.monotonic
    num_commands: int  # as in Acknowledged
    is_computing: bool  # the next step is under way; it may compute what has ended in this one
    counters: Counters
    gauges: Gauges
    results: StepResults[bytes] = msgspec.field(default_factory=StepResults.none)
    admitted: list[Admitted] = []  # sent separately, and added here when they arrive
    preempted: list[Preempted] = []
    watched: BlockEvents = msgspec.field(default_factory=BlockEvents.none)


Message = (
    EngineInfo
    | StartFailed
    | Crashed
    | Reply
    | Seen
    | LogLine
    | Admission
    | Acknowledged
    | StepReport
)


encode = msgspec.msgpack.Encoder().encode
decode_command: Any = msgspec.msgpack.Decoder(Command).decode
decode_message: Any = msgspec.msgpack.Decoder(Message).decode

# The log-probabilities of twenty tokens take 2.5 KB as objects, and a tenth of that packed; and
# Python's garbage collector looks at objects, while everything else waits. They are packed where
# they are computed, and unpacked when they are read.
pack_logprobs: Callable[[TokenLogprobs], bytes] = msgspec.msgpack.Encoder().encode
unpack_logprobs: Callable[[bytes], TokenLogprobs] = msgspec.msgpack.Decoder(TokenLogprobs).decode


def pack_results(results: StepResults[TokenLogprobs]) -> StepResults[bytes]:
    """What a step brought as it is sent: with packed log-probabilities."""
    packed: list[Any] = [
        [*map(pack_logprobs, scores)] if scores else () for scores in results.tokens.logprobs
    ]
    tokens: Any = results.tokens._replace(logprobs=packed)
    prompts = [
        PromptScores(each.request_id, [*map(pack_logprobs, each.scores)])
        for each in results.prompt_scores
    ]
    return StepResults(prompts, tokens, results.finished, results.embeddings)
