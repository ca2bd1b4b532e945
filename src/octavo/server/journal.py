"""Open requests as the API process knows them: enough to start each one again where it stood."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.step import TokenLogprobs
from octavo.engine.events import Admitted
from octavo.engine.prepared import PreparedRequest


@dataclass(slots=True)
class Sample:
    """One sample's output so far."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # if asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class OpenRequest:
    """One request. Times are seconds of `time.monotonic`."""

    request_id: str
    request: PreparedRequest
    prompt: str | None  # its text, if it came as text
    arrival_time: float
    samples: list[Sample]  # empty for beam search
    admission: Admitted | None = None  # the first one
    admitted_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0
    num_replays: int = 0  # engine processes that died while it was open
    prompt_scores: list[TokenLogprobs] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)
