"""Runs plans on a device that computes by itself: the host only prepares, and does not wait.

`submit` brings a step's small arrays to the device in one copy, starts all that the step needs, and
returns. What the device draws stays there for the next step, in `last_tokens`, and is copied back
for the host, which asks for it a step later. The host waits only where a row's next token follows
from its text (penalties, bad words) and where log-probabilities were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.step import StepPlan, StepResult, TokenLogprobs
from octavo.models.base import CausalLM
from octavo.ops import AttentionBackend, AttentionBatch, CascadeSegments, PaddedSizes
from octavo.ops.cuda.pending_tokens import fill_pending, keep_tokens
from octavo.worker.block_tables import DeviceTables
from octavo.worker.device_clock import Moment
from octavo.worker.device_kv_cache import DeviceKVCache
from octavo.worker.gpu_sampler import Choice, DrawMode, GpuSampler
from octavo.worker.graphs import Graphs
from octavo.worker.input_batch import Drawn, InputBatch, at_least_one
from octavo.worker.prompt_scores import not_finite, score_prompts
from octavo.worker.sampler import logits_not_finite, rows_not_finite
from octavo.worker.staging import DeviceStaging


@dataclass(frozen=True, slots=True)
class GpuParts:
    """What a runner works with; `tables` belong to `input_batch`."""

    model: CausalLM
    backend: AttentionBackend
    kv_cache: DeviceKVCache
    input_batch: InputBatch
    tables: DeviceTables
    staging: DeviceStaging
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    num_rows: int


class Captured(NamedTuple):
    """Which graph computes a step."""

    size: int  # sequences, if each computes one token; else tokens
    mixed: PaddedSizes | None = None  # of a step with prompts
    shares: bool = False  # keys are read for several sequences at once


class GpuRunner:
    """Owns the tokens drawn last and the captured graphs; steps run in the order of `submit`."""

    def __init__(self, parts: GpuParts, graphs: Graphs | None) -> None:
        """`graphs` are captured now, but for steps that read shared keys."""
        self._parts = parts
        staging, device = parts.staging, parts.device
        self._last_tokens = torch.zeros(parts.num_rows, dtype=torch.int64, device=device)
        # What a captured step leaves of its sequences: hidden states of their last tokens.
        most = staging.max_num_seqs if graphs else 0
        self._hidden = torch.zeros((most, parts.hidden_size), dtype=parts.dtype, device=device)
        self._sampler = GpuSampler(staging)
        self._under_way: GpuStep | None = None
        self._drawn = torch.zeros(staging.max_num_seqs, dtype=torch.int64, device=device)
        self._graphs = graphs
        self._capture()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> GpuStep:
        """Start a step; see Executor.submit."""
        parts = self._parts
        parts.input_batch.apply(plan)
        if self._under_way is not None and parts.input_batch.needs_tokens(plan):
            self._under_way.result()
        started = Moment(parts.device)
        parts.staging.begin()
        chunks = parts.input_batch.prompt_chunks(plan)
        captured = self._stage(plan, None if chunks else self._captured_as(plan), bool(chunks))
        choice = Choice.nothing(parts.device)
        scores: dict[int, list[TokenLogprobs]] = {}
        moved = parts.kv_cache.move(plan)
        if plan.seq_ids:
            hidden = self._forward(plan, captured)
            scores = score_prompts(parts.model, hidden, chunks, parts.vocab_size)
            choice = self._choose(plan, hidden)
        drawn = parts.input_batch.advance(plan)
        choice.read_back()
        step = GpuStep(
            plan, parts.input_batch, drawn, choice, scores, started, moved, Moment(parts.device)
        )
        self._under_way = step
        return step

    @torch.inference_mode()
    def _capture(self) -> None:
        """Capture steps of every kind and size, the largest first: the others fit into its memory.

        A step that is captured while requests are served would keep them waiting. Steps that read
        shared keys are, but their kernels are compiled here.
        """
        graphs = self._graphs
        if graphs is None:
            return
        for mixed in reversed(graphs.mixed):
            self._prepare(graphs, Captured(mixed.num_tokens, mixed))
        for size in reversed(graphs.sizes):
            self._prepare(graphs, Captured(size))
            for mode in get_args(DrawMode):
                graphs.prepare((mode, size), partial(self._draw_captured, size, mode))
        self._stage_padding(Captured(graphs.sizes[0], shares=True))
        self._run_captured(Captured(graphs.sizes[0], shares=True))

    def _prepare(self, graphs: Graphs, captured: Captured) -> None:
        self._stage_padding(captured)
        graphs.prepare(captured, partial(self._run_captured, captured))

    # ---------------------------------------------------------------- inputs

    def _captured_as(self, plan: StepPlan) -> Captured | None:
        """The graph that computes the plan, padded; None if no graph does."""
        graphs, num_seqs = self._graphs, len(plan.seq_ids)
        if graphs is None or num_seqs == 0:
            return None
        if plan.only_decodes:
            return Captured(graphs.size_for(num_seqs))
        num_chunks = sum(n > 1 for n in plan.num_scheduled_tokens)
        wanted = PaddedSizes(plan.num_tokens, num_seqs - num_chunks, num_chunks)
        mixed = graphs.mixed_size_for(wanted)
        return Captured(mixed.num_tokens, mixed) if mixed else None

    def _stage(self, plan: StepPlan, captured: Captured | None, wants_all: bool) -> Captured | None:
        """Bring the step's arrays and what has changed in the tables to the device.

        wants_all: hidden states of all tokens are needed, not of the last ones alone. Returns
        `captured`, with what the tables say.
        """
        parts, batch = self._parts, self._parts.input_batch
        if plan.seq_ids:
            decodes = captured is not None and captured.mixed is None
            num_padding = captured.size - len(plan.seq_ids) if captured and decodes else 0
            inputs = batch.model_input(plan, num_padding)
            if captured and inputs.attention.cascade:
                captured = captured._replace(shares=True)
            attention = inputs.attention
            if captured and captured.mixed:
                attention = replace(attention, padded=captured.mixed)
            self._stage_inputs(inputs.input_ids, attention)
            parts.backend.plan(attention)
            self._stage_last(plan, captured, decodes, wants_all)
            if plan.sampled:
                self._stage_draws(plan, attention.rows if decodes else None)
        parts.kv_cache.stage(plan)
        updates = parts.tables.stage()
        parts.staging.flush()
        parts.tables.update(updates)
        return captured

    def _stage_inputs(self, input_ids: Tensor, attention: AttentionBatch) -> None:
        staging = self._parts.staging
        assert attention.rows is not None, "rows of the device's tables"
        ids, positions = input_ids.numpy(), attention.positions.numpy()
        rows = attention.rows.numpy()
        self._rows = staging.put("rows", rows, staging.max_num_seqs)
        if attention.padded is not None:
            padding = np.zeros(attention.padded.num_tokens - len(ids), np.int64)
            ids, positions = np.concatenate([ids, padding]), np.concatenate([positions, padding])
            self._rows = staging.padded("rows", attention.padded.num_singles)
        self._input_ids = staging.put("input_ids", ids, staging.max_num_tokens)
        self._positions = staging.put("positions", positions, staging.max_num_tokens)

    def _stage_last(
        self, plan: StepPlan, captured: Captured | None, decodes: bool, wants_all: bool
    ) -> None:
        """Where the last tokens of rows stand that come to their end: `_wanted` of the model, or
        `_last` of its result; neither if that has them alone and in order.

        decodes: a captured step computes one token of each row.
        """
        batch, staging = self._parts.input_batch, self._parts.staging
        ending = plan.ending
        self._wanted = self._last = None
        if decodes and ending == plan.seq_ids:
            return
        last = at_least_one(batch.last_tokens(plan, ending)).numpy()
        if captured and captured.mixed:
            last = np.append(
                last, np.zeros(self._most_wanted(captured.mixed) - len(last), np.int64)
            )
        staged = staging.put("last", last, staging.max_num_seqs)
        if decodes or wants_all:
            self._last = staged
        else:
            self._wanted = staged

    def _most_wanted(self, mixed: PaddedSizes) -> int:
        """Sequences, at most, of a captured step with prompts."""
        most = min(mixed.num_tokens, mixed.num_singles + mixed.num_chunks)
        return min(most, self._parts.staging.max_num_seqs)

    def _stage_draws(self, plan: StepPlan, decodes: Tensor | None) -> None:
        """How tokens are drawn; for candidates alone the device needs nothing: see _choose.

        `decodes`: the rows of a captured step of decodes, with padding.
        """
        batch, staging, graphs = self._parts.input_batch, self._parts.staging, self._graphs
        self._sampler.stage(batch.sampling_batch(plan.sampled, plan.expanded))
        if decodes is not None and plan.sampled == plan.seq_ids:
            rows = decodes.numpy()
        else:
            rows = batch.rows_of(plan.sampled).astype(np.int32)
            if graphs is not None and self._sampler.mode is not None:
                padding = np.zeros(graphs.size_for(len(rows)) - len(rows), np.int32)
                rows = np.concatenate([rows, padding])
        self._sampled_rows = staging.put("sampled_rows", rows, staging.max_num_seqs)

    def _stage_padding(self, captured: Captured) -> None:
        """A step of sequences that do not exist."""
        parts, batch = self._parts, self._parts.input_batch
        parts.staging.begin()
        nobody = StepPlan(-1, [], [], [], [])
        inputs = batch.model_input(nobody, 0 if captured.mixed else captured.size)
        attention = replace(inputs.attention, padded=captured.mixed)
        if captured.shares:
            nothing = [CascadeSegments.empty()] * len(attention.block_tables)
            attention = replace(attention, cascade=nothing)
        self._stage_inputs(inputs.input_ids, attention)
        parts.backend.plan(attention)
        self._sampler.stage(batch.sampling_batch([], []))
        nobodys = np.zeros(parts.staging.max_num_seqs, np.int32)
        parts.staging.put("sampled_rows", nobodys, len(nobodys))
        parts.staging.put("last", nobodys.astype(np.int64), len(nobodys))
        parts.staging.flush()

    # ---------------------------------------------------------------- computation

    def _forward(self, plan: StepPlan, captured: Captured | None) -> Tensor:
        """Hidden states of the step's tokens, or of those that are wanted: [n, hidden_size]."""
        if captured is None:
            return self._run(self._wanted)
        assert self._graphs is not None, "nothing is captured without them"
        self._graphs.run(captured, partial(self._run_captured, captured))
        return self._hidden

    def _run(self, wanted: Tensor | None) -> Tensor:
        """The model over the staged tokens; those that are pending are single, and come first."""
        parts = self._parts
        num_single = min(len(self._rows), len(self._input_ids))
        fill_pending(self._input_ids[:num_single], self._rows, self._last_tokens)
        return parts.model.forward(self._input_ids, self._positions, parts.backend, wanted)

    def _run_captured(self, captured: Captured) -> None:
        wanted = None
        if captured.mixed is not None:
            wanted = self._parts.staging.padded("last", self._most_wanted(captured.mixed))
        hidden = self._run(wanted)
        self._hidden[: len(hidden)].copy_(hidden)

    def _choose(self, plan: StepPlan, hidden: Tensor) -> Choice:
        """Draw the next tokens, and keep them where the next step finds them."""
        parts = self._parts
        if not plan.sampled and not plan.expanded:
            return Choice.nothing(parts.device)
        if not plan.sampled:
            self._sampler.stage(parts.input_batch.sampling_batch([], plan.expanded))
        n, mode, graphs = len(plan.sampled), self._sampler.mode, self._graphs
        ending = hidden if self._last is None else hidden[self._last]
        ending = ending[: n + len(plan.expanded)]
        if mode is None or graphs is None:
            choice = self._sampler(parts.model.logits(ending))
            if plan.sampled:
                keep_tokens(choice.first, self._sampled_rows[:n], self._last_tokens)
            return choice
        if hidden is not self._hidden or self._last is not None:
            self._hidden[:n] = ending
        size = graphs.size_for(n)
        graphs.run((mode, size), partial(self._draw_captured, size, mode))
        return Choice(self._drawn[:n])

    def _draw_captured(self, size: int, mode: DrawMode) -> None:
        """A token for each hidden state; rows of padding all keep theirs in row 0."""
        logits = self._parts.model.logits(self._hidden[:size])
        token_ids = self._sampler.draw_padded(logits, mode)
        rows = self._parts.staging.padded("sampled_rows", size)
        keep_tokens(token_ids, rows, self._last_tokens)
        self._drawn[:size].copy_(token_ids)


class GpuStep:
    """A step that was started; its result can be asked for once or more."""

    def __init__(
        self,
        plan: StepPlan,
        input_batch: InputBatch,
        drawn: Drawn,
        choice: Choice,
        prompt_logprobs: dict[int, list[TokenLogprobs]],
        started: Moment,
        moved: Moment,
        ended: Moment,
    ) -> None:
        self._plan = plan
        self._input_batch = input_batch
        self._drawn = drawn
        self._choice = choice
        self._prompt_logprobs = prompt_logprobs
        self._moments = (started, moved, ended)
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Wait for the device; the rows learn what was drawn."""
        if self._result is None:
            self._result = self._collect()
        return self._result

    def _collect(self) -> StepResult:
        started, moved, ended = self._moments
        ended.wait()
        plan, choice = self._plan, self._choice
        first: NDArray[np.int64] = choice.first_tokens()
        self._input_batch.fill(self._drawn, first)
        candidates = choice.candidates()
        ids = plan.ending
        failed = [ids[row] for row in rows_not_finite(first, candidates)]
        swaps = bool(plan.swap_out or plan.swap_in)
        return StepResult(
            plan.step_id,
            first.tolist(),
            draws={ids[row]: tokens for row, tokens in choice.draws().items()},
            candidates=candidates,
            logprobs={ids[row]: entries for row, entries in choice.logprobs.items()},
            prompt_logprobs=self._prompt_logprobs,
            errors=logits_not_finite([*not_finite(self._prompt_logprobs), *failed]),
            compute_seconds=ended.seconds_since(moved) if plan.seq_ids else 0.0,
            swap_seconds=moved.seconds_since(started) if swaps else 0.0,
        )
