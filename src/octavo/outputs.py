"""What a client gets back: whole outputs, and what each step adds to them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from octavo.core.step import TokenLogprobs


@dataclass(slots=True)
class SequenceOutput:
    """One continuation of a prompt: a sample or a beam.

    Example:
        >>> [output] = llm.generate("Once upon a time", SamplingParams(n=2, temperature=0.8))
        >>> for sample in output.outputs:
        ...     print(sample.text, sample.finish_reason)
    """

    index: int
    """Which of the request's samples it is, or a beam's place among the best."""
    token_ids: list[int]
    """Those of the output alone, with the token that ended it."""
    text: str
    """What the tokens say, up to the stop string or the token that ended it. Empty if the model has
    no tokenizer, or `detokenize` is off."""
    finish_reason: str
    """Why it ended: "stop" (an end token, a stop token or a stop string), "length" (`max_tokens` or
    the end of the context), "abort", "cancelled" (this sample alone), or "error" if the request has
    failed."""
    stop_reason: int | str | None = None
    """After "stop": the stop token's id or the stop string. None: the model's own end token."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, if they were asked for. Beams have none."""
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities; known for beams, and if `logprobs` were asked for."""
    score: float | None = None
    """What beams are ranked by: cumulative_logprob / length ** length_penalty."""


@dataclass(slots=True)
class RequestOutput:
    """All that came of one request. Times are in seconds, on the clock of `time.monotonic`.

    Example:
        >>> [output] = llm.generate("Once upon a time")
        >>> output.outputs[0].text, output.finish_time - output.arrival_time
    """

    request_id: str
    """Names the request while it is open."""
    prompt: str | None
    """The prompt's text as it was given; None if token ids were given."""
    prompt_token_ids: list[int]
    """The prompt's tokens: those of the encoder's input, if the model has an encoder."""
    outputs: list[SequenceOutput]
    """Samples in the order of their index, or beams, best first."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """If they were asked for: entry i scores prompt token i; the first has no predecessor and is
    None."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    num_preemptions: int = 0
    """How often the request had to give its blocks back, and came in again."""
    arrival_time: float = 0.0
    """When it was queued."""
    first_token_time: float | None = None
    """When its first token was drawn; None if it has none."""
    finish_time: float = 0.0
    """When it ended."""
    error: str | None = None
    """Why it could not be computed to its end. None: it was."""
    embedding: array[float] | None = None
    """What `embed` asked for: float32, as many as the model's hidden size, or as `dimensions`."""

    @property
    def finish_reason(self) -> str:
        """Why the first sample or the best beam ended; of an embedding, "stop"; "abort" where
        there is neither."""
        if self.outputs:
            return self.outputs[0].finish_reason
        return "abort" if self.embedding is None else "stop"


@dataclass(slots=True)
class SequenceDelta:
    """What a step added to one sample.

    Example:
        >>> for delta in llm.stream("Once upon a time"):
        ...     print(delta.text, end="", flush=True)
    """

    request_id: str
    """Names the request while it is open."""
    index: int
    """Which of the request's samples it belongs to."""
    text: str
    """May be empty while a character or a stop string is incomplete."""
    token_ids: list[int]
    """The new tokens, with the one that ended the sample."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per new token, if they were asked for."""
    finish_reason: str | None = None
    """Why the sample ended, as in SequenceOutput; None before its last delta."""
    stop_reason: int | str | None = None
    """What ended it, as in SequenceOutput; None before the sample's last delta."""
