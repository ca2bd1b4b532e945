"""Random workloads on the symbolic KV cache: one seed, one world, checked after every move."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from typing import get_args

from core.symbolic import (
    HARMFUL,
    VOCABULARY,
    Ask,
    SymbolicExecutor,
    expected_beams,
    expected_samples,
    scores_of,
    sum_of,
    symbols_of,
)
from octavo.config import SchedulerConfig
from octavo.core.invariants import check_scheduler
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import sha256_128
from octavo.core.kv.prefix_matcher import PrefixHit
from octavo.core.kv.specs import CrossAttention, FullAttention, SlidingWindow
from octavo.core.policies import FairShare
from octavo.core.prompt_reading import PooledPrompt, PromptScores
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request, Sequence
from octavo.core.step import StepPlan, StepResult, TokenLogprobs
from octavo.errors import RequestTooLong
from octavo.sampling_params import Pooling

STOP = "a stop string"
NUM_REQUESTS = 12
NUM_FORKS = 6


@dataclass
class Workload:
    """One random world: an engine's settings and the requests that arrive in it."""

    seed: int
    is_harmful: bool = False  # some prompts end in an error, and some steps go wrong by chance
    has_encoder: bool = False
    holds_rows: bool = False  # for some rows no token can be drawn in some steps

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.block_size = rng.choice([1, 2, 3, 4, 8])
        self.specs = rng.choice(
            [
                (FullAttention(),),
                (FullAttention(),),
                (SlidingWindow(rng.randint(1, 9)),),
                (FullAttention(), SlidingWindow(rng.randint(1, 9))),
                (SlidingWindow(3), FullAttention(), SlidingWindow(7)),
                (FullAttention(), *[SlidingWindow(rng.randint(1, 20)) for _ in range(2)]),
            ]
        )
        if self.has_encoder:
            self.specs += (CrossAttention(),) * rng.choice([1, 1, 2])
        span = rng.choice([1, 1, 2, 3, 5])  # how many times as many tokens some groups' blocks hold
        self.block_sizes = tuple(self.block_size * rng.choice([1, span]) for _ in self.specs)
        self.prefixes = [
            [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))] for _ in range(3)
        ]
        self.inputs = [
            tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 7, 20])))
            for _ in range(4)
        ]
        self.asks = [self.ask(number) for number in range(NUM_REQUESTS)]
        max_seqs = rng.choice([1, 2, 4, 6, 8, 8])
        chunked = rng.random() < 0.8
        max_tokens = rng.choice([max_seqs, rng.randint(max_seqs, 30)]) if chunked else 200
        if not chunked and self.seed % 4:
            max_tokens = self.fill_steps(max_seqs)
        self.max_model_len = 200 if chunked else max_tokens
        if self.has_encoder:
            max_tokens = max(max_tokens, rng.choice([8, 21, 30]))  # some inputs are too long
        self.kv = KVCacheManager(
            self.specs,
            self.block_sizes,
            num_blocks=rng.choice([rng.randint(8, 70) * len(self.specs), self.scarce(max_tokens)]),
            num_swap_blocks=rng.choice([0, 10, 1000]),
            enable_prefix_caching=rng.random() < 0.7,
            # A digest of one byte collides all the time: hits must be verified.
            digest=sha256_128 if rng.random() < 0.7 else lambda b: sha256_128(b)[:1],
            max_tails=rng.choice([0, 1, 4, 100]),
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_seqs,
                max_num_batched_tokens=max_tokens,
                policy=rng.choice(["fcfs", "priority", "fair"]),
                aging_seconds=rng.choice([1.0, 1000.0]),
                preemption_mode=rng.choice(["auto", "swap", "recompute"]),
                enable_chunked_prefill=chunked,
                max_passes=rng.randint(0, 4),
                watermark=rng.choice([0.0, 0.05]),
            ),
            self.kv,
            clock=lambda: self.now,
        )
        self.num_input_hits = 0  # admissions that found their encoder input
        self.num_tail_hits = 0  # admissions that copied a block which was not full
        self.num_forks = 0
        self.num_left_out = 0  # steps without the running requests
        self.ended: list[tuple[Ask, list[int]]] = []  # with the tokens of one of their sequences
        self.kv.on_allocate = self.note_admission
        self.now = 0.0
        self.depth = rng.choice([1, 2, 2, 3])  # steps under way at once
        self.executor = SymbolicExecutor(self.specs, self.block_sizes)
        if self.is_harmful:
            self.executor.strikes = lambda: rng.random() < 0.002
        if self.holds_rows:
            fate, share = random.Random(self.seed), rng.choice([0.05, 0.3, 0.7])
            self.executor.holds = lambda: fate.random() < share
        self.failed: list[Ask] = []
        self.alive: dict[str, Ask] = {}
        self.samples: dict[str, list[int]] = {}  # those that are to come, by request
        self.scores: dict[Sequence, list[TokenLogprobs]] = {}  # of all tokens, if asked for

    def note_admission(self, seq: Sequence, hit: PrefixHit) -> None:
        """Either all of an encoder input is found, or nothing."""
        num_tokens = len(seq.request.encoder_token_ids)
        assert (hit.num_encoder_tokens, hit.num_to_encode) in [(num_tokens, 0), (0, num_tokens)]
        self.num_input_hits += hit.num_encoder_tokens > 0
        tail_of = self.kv.prefix_cache.tail_of
        self.num_tail_hits += any(tail_of(block_id) for block_id in hit.partial or () if block_id)

    def scarce(self, chunk: int) -> int:
        """Hardly more blocks than a large request may need; some will be refused."""
        rule = KVCacheManager(self.specs, self.block_sizes, num_blocks=1)
        needs = sorted(rule.worst_case_blocks(ask.request(0.0), chunk) for ask in self.asks)
        return self.rng.choice(needs[len(needs) // 2 :]) + self.rng.randint(0, 6)

    def ask(self, number: int) -> Ask:
        rng = self.rng
        prefix = rng.choice(self.prefixes)[: rng.randint(0, 40)]
        own = [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 1, 5, 12]))]
        if self.is_harmful and rng.random() < 0.15:
            own.insert(rng.randint(0, len(own)), HARMFUL)
        kind = rng.choices(["sample", "beam", "pin", "read"], [6, 3, 0.5, 1])[0]
        encoder_input: tuple[int, ...] = ()
        if self.has_encoder:
            # Prefixes of the decoder are neither pinned nor read.
            kind = "sample" if kind in ("pin", "read") else kind
            encoder_input = rng.choice(self.inputs)
            if self.is_harmful and rng.random() < 0.1:
                encoder_input = (*encoder_input, HARMFUL)
        return Ask(
            name=f"r{number}",
            prompt=tuple([*prefix, *own] or [0]),
            kind=kind,
            width=1 if kind in ("pin", "read") else rng.choice([1, 1, 2, 3, 4]),
            max_tokens=0 if kind in ("pin", "read") else rng.choice([1, 2, 5, 20, 20]),
            seed=rng.randrange(5),
            salt=rng.choice(["", "", "tenant"]),
            priority=rng.choice([0, 0, 1, 5]),
            tenant=rng.choice(["", "a", "a", "b"]),
            early_stopping=rng.choice([True, False, "never"]),
            length_penalty=rng.choice([0.0, 1.0, 2.0, -1.0]),
            stop_id=rng.choice([None, None, 5]),
            wants_logprobs=kind == "sample" and rng.random() < 0.2,
            start=rng.choice([0, 0, 1, 7, 100]),
            pooling=rng.choice(get_args(Pooling)),
            encoder_input=encoder_input,
        )

    def fill_steps(self, max_seqs: int) -> int:
        """Let some prompts leave no room for others in a step, or hardly any. Returns the length of
        steps."""
        rng = random.Random(self.seed)
        longest = max(len(ask.prompt) + ask.max_tokens for ask in self.asks)
        num_tokens = max(max_seqs, longest + rng.choice([0, 0, 1, 5]))
        for place in rng.sample(range(NUM_REQUESTS), 5):
            ask = self.asks[place]
            max_tokens = min(2, ask.max_tokens)
            length = num_tokens - max_tokens - rng.choice([0, 0, 0, 1, 2])
            more = [rng.randrange(VOCABULARY) for _ in range(length - len(ask.prompt))]
            prompt = (*ask.prompt, *more)
            self.asks[place] = replace(ask, prompt=prompt, max_tokens=max_tokens)
        return num_tokens

    def run(self) -> None:
        """Run to the end, checking everything on the way. Raises AssertionError."""
        rng, scheduler = self.rng, self.scheduler
        pending = list(self.asks)
        under_way: deque[tuple[StepPlan, StepResult]] = deque()
        steps = 0
        while pending or scheduler.has_unfinished or under_way:
            while pending and (rng.random() < 0.7 or not scheduler.has_unfinished):
                self.add(pending.pop())
            self.disturb()
            check_scheduler(scheduler)
            while len(under_way) < self.depth:
                plan = scheduler.schedule()
                self.num_left_out += scheduler._has_paused
                check_scheduler(scheduler)
                if not under_way:  # else windows may still be about to leave blocks behind
                    self.check_worst_cases()
                if plan is None:
                    break
                num_tokens = plan.num_tokens + plan.num_encoder_tokens
                assert num_tokens <= scheduler.config.max_num_batched_tokens
                result = self.executor.execute(plan)
                result.compute_seconds = rng.choice([0.0, 0.1])
                result.swap_seconds = rng.choice([0.0, 0.1])
                under_way.append((plan, result))
            steps += 1
            assert steps < 5000, "no progress"
            if not under_way:
                continue
            self.update(*under_way.popleft())
            self.now += 0.1
        self.try_again()
        self.finish()

    def check_worst_cases(self) -> None:
        """No request holds more blocks than it was admitted for."""
        chunk = self.scheduler.config.max_num_batched_tokens
        for request in self.scheduler.running:
            tables = [seq.table for seq in request.sequences if seq.table is not None]
            held = {block_id for table in tables for block_id in table.held()}
            assert len(held) <= self.kv.worst_case_blocks(request, chunk)

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Take in a step's result, and check the requests that it ends."""
        progress = self.scheduler.update(plan, result)
        check_scheduler(self.scheduler)
        for seq in progress.advanced:
            if seq.last_logprobs is not None:
                self.scores.setdefault(seq, []).append(seq.last_logprobs)
        for request in progress.finished:
            self.check_result(request)

    def try_again(self) -> None:
        """Whatever failed, and is harmless by itself, finds nothing unsound in the cache soon."""
        self.executor.strikes = lambda: False
        for name in list(self.kv.pins):
            self.kv.unpin(name)
        for ask in [ask for ask in self.failed if not is_harmful(ask)]:
            for _ in range(2):
                request = ask.request(self.now)
                self.scheduler.add(request)
                self.alive[ask.name], self.samples[ask.name] = ask, list(range(ask.width))
                while not request.is_finished:
                    plan = self.scheduler.schedule()
                    assert plan is not None
                    self.update(plan, self.executor.execute(plan))
                if ask.kind == "pin" and request.error is None:
                    self.kv.unpin(ask.name)
            assert request.error is None, "what failed before has left something in the cache"

    def add(self, ask: Ask) -> None:
        """Queue a request, or one whose samples have begun in another engine."""
        request, outputs = ask.request(self.now), {}
        if request.method.max_length > self.max_model_len:
            return  # as the engine refuses it
        if ask.kind == "sample" and not ask.wants_logprobs and self.rng.random() < 0.1:
            for index, tokens in enumerate(expected_samples(ask)):
                num_known = self.rng.randint(1, len(tokens))
                if num_known < len(tokens):
                    outputs[index] = tokens[:num_known]
        try:
            self.scheduler.resume(request, outputs)
        except RequestTooLong:
            return
        self.alive[ask.name] = ask
        self.samples[ask.name] = list(outputs) or list(range(ask.width))

    def fork(self) -> None:
        """A request that goes on where another one stands or has ended, or a little before."""
        rng = self.rng
        running = [
            (self.alive[request.request_id], seq)
            for request in self.scheduler.requests.values()
            for seq in request.sequences
            if seq.num_output_tokens
        ]
        if running and (not self.ended or rng.random() < 0.5):
            parent, seq = rng.choice(running)
            self.kv.offer_tail(seq)
            tokens = seq.token_ids
        elif self.ended:
            parent, tokens = rng.choice(self.ended[-3:])
        else:
            return
        position = max(1, len(tokens) - rng.choice([0, 0, 0, 1, 2, 9]))
        suffix = [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 1, 3]))]
        self.num_forks += 1
        self.add(
            replace(
                self.ask(NUM_REQUESTS + self.num_forks),
                prompt=(*tokens[:position], *suffix),
                kind=rng.choice(["sample", "sample", "beam"]),
                max_tokens=rng.choice([1, 2, 5, 20]),
                wants_logprobs=False,
                salt=parent.salt,
                encoder_input=parent.encoder_input,
            )
        )

    def disturb(self) -> None:
        """What happens to requests between two steps, sometimes."""
        rng, scheduler = self.rng, self.scheduler
        if self.num_forks < NUM_FORKS and rng.random() < 0.15:
            self.fork()
        if self.alive and rng.random() < 0.03:
            name = rng.choice(sorted(self.alive))
            ask, request = self.alive.pop(name), scheduler.requests[name]
            self.ended += [(ask, list(seq.token_ids)) for seq in request.sequences]
            scheduler.abort(name)
        if self.alive and rng.random() < 0.05:
            request = scheduler.requests[rng.choice(sorted(self.alive))]
            begun = [seq for seq in request.sequences if seq.num_output_tokens]
            if begun and request.method.wants == "token":
                scheduler.finish_by_stop_string(rng.choice(begun), STOP)
                if request.is_finished:
                    self.check_result(request)
        if rng.random() < 0.02 and self.kv.enable_prefix_caching:
            self.kv.reset_prefix_cache()
        if self.kv.pins and rng.random() < 0.02:
            self.kv.unpin(rng.choice(sorted(self.kv.pins)))

    def finish(self) -> None:
        for name in list(self.kv.pins):
            self.kv.unpin(name)
        assert self.kv.pool.num_free == self.kv.pool.num_blocks, "I1: blocks are lost"
        assert self.kv.swap_pool.num_free == self.kv.swap_pool.num_blocks, (
            "I1: swap blocks are lost"
        )
        assert self.scheduler.schedule() is None, "there is nothing left to do"
        if isinstance(self.scheduler.policy, FairShare):
            assert self.scheduler.policy.num_requests() == 0, "the policy knows lost requests"
        still_to_close = set(self.scheduler._lifecycle.take_row_changes().closed)
        assert self.executor.rows.keys() <= still_to_close, "rows are left open on the worker"

    def check_result(self, request: Request) -> None:
        ask = self.alive.pop(request.request_id)
        self.ended += [(ask, seq.token_ids) for seq in request.finished]
        if request.error is not None:
            assert self.is_harmful
            assert "error" in [seq.finish_reason for seq in request.finished]
            self.failed.append(ask)
            return
        # Where every query reads its own token alone (a window of 1), harm does not spread.
        spreads = any(spec.first_needed_token(1) == 0 for spec in self.kv.specs)
        if spreads and request.finished[0].stop_reason != STOP:
            assert HARMFUL not in ask.prompt, "harm went unnoticed"
        assert HARMFUL not in ask.encoder_input or request.finished[0].stop_reason == STOP, (
            "harm in the encoder's input went unnoticed"
        )
        got = [seq.output_token_ids for seq in request.finished]
        if ask.kind in ("pin", "read"):
            assert got == [[]]
        elif ask.kind == "beam":
            assert got == expected_beams(ask), f"{ask} got other beams than alone"
        else:
            self.check_samples(ask, request)
        if ask.kind == "read":
            check_pooled(ask, request)
        for seq in request.finished:
            ended = seq.stop_reason == STOP or not ask.ending_ids.isdisjoint(seq.token_ids[-1:])
            reason = "stop" if ended or ask.kind == "read" else "length"
            reason = "pinned" if ask.kind == "pin" else reason
            assert seq.finish_reason == reason, f"{ask} ended for another reason"

    def check_samples(self, ask: Ask, request: Request) -> None:
        expected = expected_samples(ask)
        assert [seq.sample_index for seq in request.finished] == self.samples[ask.name]
        for seq in request.finished:
            tokens = expected[seq.sample_index]
            if seq.stop_reason == STOP:
                tokens = tokens[: seq.num_output_tokens]
            elif ask.stop_id is not None and tokens[-1] == ask.stop_id:
                assert seq.stop_reason == ask.stop_id
            assert seq.output_token_ids == tokens, f"{ask} got other tokens than alone"
            if ask.wants_logprobs:
                scores = scores_of(seq.token_ids, ask.encoder_input)
                assert self.scores[seq] == scores[len(ask.prompt) :]
        if ask.wants_logprobs:
            assert isinstance(request.reading, PromptScores)
            scores = scores_of(list(ask.prompt), ask.encoder_input)
            assert request.reading.entries == scores[ask.first_read + 1 :]


def check_pooled(ask: Ask, request: Request) -> None:
    assert isinstance(request.reading, PooledPrompt)
    symbols = symbols_of(list(ask.prompt))
    read = {"mean": symbols, "last": symbols[-1:], "cls": symbols[:1]}[ask.pooling]
    assert request.reading.total is not None
    assert request.reading.total.tolist() == sum_of(read).tolist()


def is_harmful(ask: Ask) -> bool:
    return HARMFUL in ask.prompt or HARMFUL in ask.encoder_input
