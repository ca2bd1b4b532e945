"""Random work for the offline engine: afterwards no block is held, and its memory stays flat."""

from __future__ import annotations

import random
from typing import Any, Protocol

from octavo.core.invariants import check_scheduler
from octavo.engine.local_client import LocalStream
from octavo.engine.snapshot import take_snapshot
from octavo.engine.validation import Prompt
from octavo.errors import InvalidRequest, RequestTooLong
from octavo.llm import LLM
from octavo.outputs import RequestOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams
from soak.report import Memory, Report

Params = SamplingParams | BeamSearchParams  # of requests
MAX_GROWTH_MIB = 24.0
MAX_PINS = 3
# While no request ends; one by one, those of any round take a fraction of it.
MAX_STEPS = 100_000
VOCABULARY = 4000  # token ids that the demo model knows
# Few blocks, so that requests are preempted and swapped, and blocks evicted, all the time.
OPTIONS: dict[str, Any] = {
    "num_blocks": 48,
    "max_model_len": 256,
    "swap_space": 2 << 20,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 128,
    "num_threads": 1,
}


class Work(Protocol):
    """What requests ask for, and what becomes of their results."""

    def prefix(self, rng: random.Random) -> list[int]:
        """The token ids of the next prefix to be pinned."""
        ...

    def prompt(self, rng: random.Random) -> Prompt:
        """The next request's prompt, in token ids."""
        ...

    def params(self, rng: random.Random) -> Params:
        """How the next request is decoded."""
        ...

    def take(self, stream: LocalStream, params: Params) -> None:
        """Called when a request has ended."""
        ...


class DemoWork:
    """See Work: short requests to the demo model, whose results are not compared with any."""

    def prefix(self, rng: random.Random) -> list[int]:
        """See Work.prefix."""
        return self.prompt(rng)

    def prompt(self, rng: random.Random) -> list[int]:
        """See Work.prompt: of one of five families, which share their tokens up to a random
        length."""
        family = random.Random(rng.randrange(5))
        tokens = [family.randrange(10, VOCABULARY) for _ in range(rng.randrange(1, 120))]
        return tokens + [rng.randrange(10, VOCABULARY) for _ in range(rng.randrange(1, 40))]

    def params(self, rng: random.Random) -> Params:
        """See Work.params."""
        max_tokens = rng.randrange(1, 90)
        if rng.random() < 0.2:
            width = rng.randrange(1, 5)
            return BeamSearchParams(width, max_tokens=max_tokens, ignore_eos=rng.random() < 0.5)
        temperature = rng.choice((0.0, 0.8, 1.2))
        return SamplingParams(
            n=rng.choice((1, 1, 2, 4)) if temperature else 1,
            temperature=temperature,
            presence_penalty=rng.choice((0.0, 0.5)),
            seed=rng.randrange(1000),
            max_tokens=max_tokens,
            stop=rng.choice((None, ["the"])),
            logprobs=rng.choice((None, None, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
            ignore_eos=rng.random() < 0.7,
        )

    def take(self, stream: LocalStream, params: Params) -> None:
        """See Work.take."""


class Round:
    """Some concurrent requests, a few of which are aborted at random moments."""

    def __init__(
        self, llm: LLM, work: Work, rng: random.Random, report: Report, most: int = 24
    ) -> None:
        """most: requests."""
        self._most = most
        self._client = llm.client
        self._work = work
        self._rng = rng
        self._report = report
        self._open: dict[str, tuple[LocalStream, Params]] = {}

    def run(self) -> None:
        rng = self._rng
        waiting = rng.randint(1, self._most)
        share = rng.choice((0.7, 0.99))  # of requests that another one follows before the next step
        num_steps = 0  # since a request has ended
        while (waiting or self._client.has_unfinished) and num_steps < MAX_STEPS:
            while waiting and rng.random() < share:
                waiting -= 1
                self._add()
            if self._open and rng.random() < 0.02:
                self._abort(rng.choice(sorted(self._open)))
            num_steps += 1
            for output in self._client.step():
                num_steps = 0
                if output.request_id in self._open:  # it was not aborted
                    self._take(output)
                self._report.count("requests")
            self._report.count("steps")
        for stream, params in self._open.values():
            self._report.violate(f"a request is lost, or does not end: {params}")
            self._client.abort_request(stream)

    def _take(self, output: RequestOutput) -> None:
        stream, params = self._open.pop(output.request_id)
        if what := missing(output, params):
            self._report.violate(f"{what}: {params}")
        else:
            self._work.take(stream, params)

    def _add(self) -> None:
        rng = self._rng
        salt = rng.choice(("", "", "a"))
        prompt, params = self._work.prompt(rng), self._work.params(rng)
        try:
            stream = self._client.make_request(prompt, params, cache_salt=salt)
        except RequestTooLong:  # for the blocks that pinned prefixes leave
            self._report.count("requests_refused")
            return
        self._client.add_request(stream)
        self._open[stream.request_id] = stream, params

    def _abort(self, request_id: str) -> None:
        stream, _ = self._open.pop(request_id)
        self._client.abort_request(stream)
        self._report.count("aborts")


def missing(output: RequestOutput, params: Params) -> str:
    """What a request that was not aborted should have brought and has not; "" if nothing."""
    if output.error is not None:
        return f"a request failed, {output.error}"
    if isinstance(params, BeamSearchParams):
        return "" if len(output.outputs) == params.beam_width else "a beam is missing"
    if len(output.outputs) != params.n:
        return "a sample is missing"
    if (output.prompt_logprobs is None) != (params.prompt_logprobs is None):
        return "log-probabilities of the prompt are missing, or were not asked for"
    for sample in output.outputs:
        num_tokens = len(sample.token_ids)
        if sample.finish_reason == "length" and num_tokens != params.max_tokens:
            return f"{num_tokens} tokens"
        if sample.finish_reason != "length" and params.ignore_eos and not params.stop:
            return f"{sample.finish_reason} after {num_tokens} tokens"
        if len(sample.logprobs or ()) != (0 if params.logprobs is None else num_tokens):
            return f"{len(sample.logprobs or ())} log-probabilities of {num_tokens} tokens"
    return ""


def change_pins(llm: LLM, work: Work, rng: random.Random, pins: list[str], report: Report) -> None:
    if pins and (len(pins) >= MAX_PINS or rng.random() < 0.4):
        llm.unpin_prefix(pins.pop(rng.randrange(len(pins))))
    elif rng.random() < 0.5:
        try:
            pins.append(llm.pin_prefix(work.prefix(rng), cache_salt=rng.choice(("", "a"))))
            report.count("pins")
        except InvalidRequest:  # too short, too few blocks would be left, or there is an encoder
            report.count("pins_refused")
    if rng.random() < 0.05:
        llm.reset_prefix_cache()


def check_blocks(llm: LLM, report: Report) -> None:
    """While nothing runs, only pins may hold blocks. In place of those that left a window is 0."""
    snapshot = take_snapshot(llm.engine, 0)
    pinned = {block for pin in snapshot.pins for group in pin.block_ids for block in group} - {0}
    held = {number + 1 for number, count in enumerate(snapshot.device.ref_counts) if count}
    if held != pinned:
        report.violate(
            f"blocks {sorted(held ^ pinned)} are held and not pinned, or pinned and free"
        )
    if snapshot.swap.num_free != snapshot.swap.num_blocks:
        report.violate(f"{snapshot.swap.num_held} swap blocks are held")
    check_scheduler(llm.engine.scheduler)


def run(seed: int, seconds: float) -> Report:
    rng = random.Random(seed)
    memory = Memory("self", MAX_GROWTH_MIB)
    pins: list[str] = []
    work = DemoWork()
    with LLM("demo", **OPTIONS) as llm:
        report = Report("offline", seconds)
        while not report.is_late:
            change_pins(llm, work, rng, pins, report)
            Round(llm, work, rng, report).run()
            check_blocks(llm, report)
            memory.sample()
            report.count("rounds")
        for mode, number in llm.engine.scheduler.num_preemptions.items():
            report.counts[f"{mode}_preemptions"] = number
    report.require("requests", 1)
    memory.check_growth(report)
    report.show()
    return report
