"""Serve a workload in virtual time: `simulate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from octavo.bench.memory_use import MemoryUse
from octavo.bench.traces import TraceRequest, generate_prompts
from octavo.core.sequence import Request
from octavo.engine.engine import Engine
from octavo.engine.interrupts import InterruptsAfter
from octavo.engine.local_client import LocalClient
from octavo.errors import RequestTooLong
from octavo.outputs import RequestOutput
from octavo.simulation.config import SimulationConfig
from octavo.simulation.executor import ShapeTracker, SimulatedExecutor, VirtualClock
from octavo.simulation.result import RequestRecord, SimulationResult, StepSample
from octavo.simulation.step_shape import CopiedExtents, PaddedBatches, RowLengths
from octavo.simulation.workloads import Workload

# Called after steps in which requests finished, with their records, and with how long each request
# that has no token yet has waited for it so far, in virtual seconds. True ends the simulation.
Watcher = Callable[[Sequence[RequestRecord], Iterable[float]], bool]


def _watch_nothing(records: Sequence[RequestRecord], waits: Iterable[float]) -> bool:
    return False


def simulate(
    config: SimulationConfig,
    workload: Workload,
    until: float | None = None,
    finished: Watcher = _watch_nothing,
) -> SimulationResult:
    """Run the real engine, scheduler and KV cache manager on a workload.

    Every output has exactly the length that the workload gives. Equal arguments give equal
    results. Prompts are random tokens, equal where `hash_ids` are equal, if prefix caching is on;
    without it their tokens do not matter and are all the same.

    Args:
        config: the model, its devices and the engine's options.
        workload: who comes when; nothing of it is checked but that every request fits.
        until: end at the first step that ends at or after this time, in virtual seconds. None: when
            the last request is served.
        finished: sees how it goes, and may end it all.

    Raises:
        ConfigError, ModelError, OutOfMemory: from `config`, before anything runs.
        RequestTooLong: a request can never fit; which one, and the limit.
    """
    return Simulation(config, workload, finished).run(until)


def longest_sequence(config: SimulationConfig) -> int:
    """The most tokens, prompt and output, that a sequence may have. Raises as `simulate` does."""
    return _make_engine(config, VirtualClock())[0].max_model_len


class Simulation:
    """One run. Owns the clock, the engine and the records."""

    def __init__(
        self,
        config: SimulationConfig,
        workload: Workload,
        finished: Watcher = _watch_nothing,
    ) -> None:
        self.clock = VirtualClock()
        self.engine, self._executor = _make_engine(config, self.clock)
        self._client = LocalClient(self.engine)
        self._memory = MemoryUse.watch(self.engine)
        self._decoding = workload.decoding
        self._shares = self._decoding.is_wide and config.cache.memory_policy == "paged"
        self._requests = workload.requests
        self._prompts = self._make_prompts(workload.hash_block_size, config.seed)
        self._finished = finished
        # Arrival and tenant of open requests, in order of arrival.
        self._arrivals: dict[str, tuple[float, str]] = {}
        self._records: list[RequestRecord] = []
        self._blocks_to_share: list[int] = []  # at each step
        self._samples: list[StepSample] = []
        self._is_over = False
        self._executor.count_requests = self._look
        self._check_lengths()

    def run(self, until: float | None = None) -> SimulationResult:
        """Serve all requests, or those that can be served in time."""
        with InterruptsAfter():  # steps have their ends in it, and set no handlers
            self._serve(until)
        return self._result()

    def _serve(self, until: float | None) -> None:
        requests = self._requests
        num_added = 0
        while not self._is_over and (until is None or self.clock.now < until):
            while num_added < len(requests) and _arrival(requests[num_added]) <= self.clock.now:
                self._add(num_added)
                num_added += 1
            if self.engine.has_unfinished:
                self._step()
            elif num_added < len(requests):
                self.clock.now = _arrival(requests[num_added])
            else:
                break

    def _check_lengths(self) -> None:
        """Every request must be able to run, before the first one does."""
        limit = self.engine.max_model_len
        for number, request in enumerate(self._requests):
            if request.num_tokens > limit:
                raise RequestTooLong(
                    "workload",
                    f"request {number} has {request.prompt_tokens} + {request.output_tokens} "
                    f"tokens, but a sequence may have {limit} here",
                )
            if self._decoding.is_wide:
                self._check_width(number, request)

    def _check_width(self, number: int, request: TraceRequest) -> None:
        """Several sequences of a request must fit together."""
        params = self._decoding.params(request.output_tokens, number)
        try:
            self._client.make_request([0] * request.prompt_tokens, params)
        except RequestTooLong as error:
            raise RequestTooLong("workload", f"request {number}: {error}") from error

    def _make_prompts(self, hash_block_size: int, seed: int) -> Iterator[list[int]]:
        if self.engine.kv.enable_prefix_caching:
            vocab_size = self.engine.model_config.vocab_size
            return generate_prompts(self._requests, vocab_size, seed, hash_block_size)
        return ([0] * request.prompt_tokens for request in self._requests)

    def _add(self, number: int) -> None:
        request = self._requests[number]
        params = self._decoding.params(request.output_tokens, number)
        stream = self._client.make_request(next(self._prompts), params, tenant=request.tenant)
        self._arrivals[stream.request_id] = (_arrival(request), request.tenant)
        self._client.add_request(stream)

    def _look(self) -> int:
        """When a step is submitted: how many requests run, and what they will share."""
        running = self.engine.scheduler.running
        self._blocks_to_share.append(sum(map(_blocks_to_share, running)) if self._shares else 0)
        return len(running)

    def _step(self) -> None:
        outputs = self._client.step()
        number = len(self._samples)
        assert number < len(self._executor.spans), "requests wait, and none of them can run"
        scheduler = self.engine.scheduler
        memory = self._memory.steps[number]
        if shared := self._blocks_to_share[number]:
            memory = replace(memory, num_logical_blocks=memory.num_logical_blocks + shared)
        self._samples.append(
            StepSample(
                *self._executor.spans[number],
                len(scheduler.waiting),
                len(scheduler.swapped),
                sum(scheduler.num_preemptions.values()),
                memory,
            )
        )
        if outputs:
            records = [self._record(output) for output in outputs]
            self._records += records
            self._is_over = self._finished(records, self._waits())

    def _waits(self) -> Iterator[float]:
        requests, now = self.engine.scheduler.requests, self.clock.now
        for request_id, (arrival, _) in self._arrivals.items():
            if requests[request_id].first_token_time is None:
                yield now - arrival

    def _record(self, output: RequestOutput) -> RequestRecord:
        assert output.first_token_time is not None, f"{output.request_id} has no token"
        arrival, tenant = self._arrivals.pop(output.request_id)
        return RequestRecord(
            len(output.prompt_token_ids),
            max(len(each.token_ids) for each in output.outputs),
            arrival,
            output.first_token_time,
            output.finish_time,
            output.num_cached_tokens,
            output.num_preemptions,
            tenant,
        )

    def _result(self) -> SimulationResult:
        kv, scheduler = self.engine.kv, self.engine.scheduler
        return SimulationResult(
            self._records,
            self._samples,
            len(self._requests) - len(self._records),
            dict(scheduler.num_preemptions),
            kv.num_lookup_tokens,
            kv.num_hit_tokens,
            kv.block_size,
            kv.pool.num_blocks,
        )


def _make_engine(config: SimulationConfig, clock: VirtualClock) -> tuple[Engine, SimulatedExecutor]:
    machine = config.prepare()
    tracker: ShapeTracker
    rows = tracker = RowLengths(machine.model.window_sizes)
    if config.cache.memory_policy == "fastertransformer":
        tracker = PaddedBatches(rows)
    elif config.cache.memory_policy != "paged" and config.copies_extents:
        tracker = CopiedExtents(rows)
    executor = SimulatedExecutor(
        machine.capacity,
        machine.cost_model,
        clock,
        tracker,
        config.beam_spacing,
        config.seed,
        config.overlap,
    )
    return Engine(config.engine_config, machine.model, executor, clock=clock), executor


def _blocks_to_share(request: Request) -> int:
    """Entries that samples or beams still to come will have in block tables. The paper's software
    has them from the start, so its sharing counts from the prompt on."""
    to_come = request.method.max_sequences - len(request.sequences) - len(request.finished)
    if to_come <= 0 or not request.sequences or (table := request.sequences[0].table) is None:
        return 0
    return to_come * sum(map(len, table.block_ids))


def _arrival(request: TraceRequest) -> float:
    return request.arrival_s or 0.0
