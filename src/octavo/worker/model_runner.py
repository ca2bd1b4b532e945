"""Runs plans through the model: rows, uploads, block moves, forward, sampling, results.

There is one way for every device. `submit` puts a step's small arrays where the device finds them,
starts all that the step needs, and returns. On a device that computes while the host goes on (a
GPU), drawn tokens stay there for the next step, and are copied back for the host, which asks for
them a step later. Where the host must know a row's text before its next token is drawn (bad words,
grammars), the step is started, but its tokens are drawn only when those of the step before are
known: by then the device computes, so that it need not wait for the host.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product, starmap
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.config import EngineConfig
from octavo.core.kv.specs import CrossAttention, FullAttention, KVLayout
from octavo.core.step import BlockCopy, StepPlan
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.ops import (
    MOST_CONTINUED,
    AttentionBackend,
    CapturedBackend,
    CascadeSegments,
    ContinuingBackend,
    LayerPlace,
    LayerSpec,
    PaddedSizes,
    Staging,
    cached_dtype,
    make_backend,
    token_size_of,
)
from octavo.ops.communicator import Communicator
from octavo.ops.vocabulary import VocabularyShard
from octavo.structured.constraint import ConstraintLibrary, Words, num_words
from octavo.structured.guidance import constraint_library
from octavo.worker.block_tables import BlockTables, DeviceTables
from octavo.worker.cascade import least_saved_keys
from octavo.worker.device.base import Delivered, Device
from octavo.worker.graphs import Graphs
from octavo.worker.input_batch import (
    EncoderInput,
    InputBatch,
    Int32s,
    Int64s,
    ModelInput,
    PromptChunk,
)
from octavo.worker.kv_cache import KVCache
from octavo.worker.logprobs import rows_at_once
from octavo.worker.prompt_reading import read_prompts
from octavo.worker.row_edits import RowEdits
from octavo.worker.row_masks import MaskedRows, PendingMasks, RowMasks
from octavo.worker.sampler import (
    Choice,
    DrawKind,
    DrawMode,
    Sampler,
    StagedSampling,
)
from octavo.worker.submitted_step import SubmittedStep

Integer = TypeVar("Integer", bound=np.integer[Any])
# Rows up to which kernels of the head depend on their number in steps that are not padded.
_FEW_ROWS = 64
_DRAW_KINDS = list(starmap(DrawKind, product(get_args(DrawMode), (False, True))))
_MOST_VARIED = 1025  # tokens up to which kernels of layers depend on their number


class Captured(NamedTuple):
    """Which graph computes a step."""

    size: int  # sequences, if each computes one token; else tokens
    mixed: PaddedSizes | None = None  # the padded sizes of a step with prompts
    kernels: Hashable = None  # of attention: see AttentionBackend.plan


class StagedStep(NamedTuple):
    """The inputs of one step, on the device once the staging was flushed."""

    captured: Captured | None  # None: no graph computes it
    input_ids: Tensor  # int64 [num_tokens]; negative where the device alone knows the token
    positions: Tensor  # int64 [num_tokens]
    rows: Tensor  # int32: rows of the sequences, those with one token first
    # int64: where the tokens stand whose logits are needed: among the step's tokens, asked of the
    # model, or among the hidden states that it returned. Neither: these have them alone, in order.
    logits_indices: Tensor | None
    hidden_indices: Tensor | None
    sampling: StagedSampling | None  # None: no row reaches its end
    masked: MaskedRows | None  # rows whose tokens need masks, if there are some
    sampled_rows: Tensor | None  # int32: rows whose tokens stay on the device, perhaps with padding
    results: Delivered | None  # where a graph that draws writes
    is_staged: Tensor | None  # of steps that may be continued; see PendingTokens.begin


class Continued(NamedTuple):
    """A step that the device can go on with by itself."""

    seq_ids: list[int]
    staged: StagedStep
    steps_left: int  # before the host plans attention again


class DrawInputs(NamedTuple):
    """What the tokens of a step are drawn from."""

    staged: StagedStep | None  # None: nothing is computed
    hidden: Tensor | None  # as `_forward` returns them
    masks: PendingMasks | None  # if they were started


class ModelRunner:
    """Owns the rows of the running sequences, the tokens drawn last and the captured graphs.

    Steps run in the order of `submit`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: CausalLM,
        backend_class: type[AttentionBackend],
        num_blocks: tuple[int, int],
        device: Device,
        communicator: Communicator,
        graphs: Graphs | None = None,
    ) -> None:
        """
        Args:
            model_config: of the communicator's shard, like the model.
            model: on the device.
            num_blocks: KV blocks on the device and in the swap tier.
            communicator: with the runners of the other shards, which run the same plans.
            graphs: captured now, except those of steps with cascade attention; or, if they are not
                to be captured, launched with all other kernels.
        """
        scheduler, block_size = config.scheduler, config.cache.block_size
        layers = model.attention_layers
        layout = model_config.kv_layout(token_size_of(backend_class))
        dtype = next(model.parameters()).dtype
        # While rows fork, children are there before their parents have gone; row 0 is padding.
        num_rows = 2 * scheduler.max_num_seqs + 1
        encoder = model_config.encoder
        self._longest = max(model_config.max_model_len, encoder.max_model_len if encoder else 0)
        self._longest_encoded = model_config.longest_encoder_input(scheduler.max_num_batched_tokens)
        places, sources = layout.places(), model_config.kv_sources
        layer_places = [LayerPlace(*places[sources[layer.layer_id]]) for layer in layers]
        self._device = device
        self._model = model
        # What the model reads, and what is read when tokens are drawn: each is uploaded while the
        # device still computes with the other one of the step before.
        self._staging = device.staging(scheduler, _num_shapes(layers, layer_places))
        self._draw_staging = device.staging(scheduler, 0)
        block_shape, copies_whole_blocks = _block_shape(layout, layers, block_size, backend_class)
        self.kv_cache = KVCache(
            *num_blocks,
            block_shape,
            cached_dtype(layers, dtype),
            device,
            copies_whole_blocks,
        )
        self._backend = make_backend(
            backend_class, layers, layer_places, self.kv_cache.blocks, block_size, dtype
        )
        self._continuing = self._backend if isinstance(self._backend, ContinuingBackend) else None
        self._capturing = self._backend if isinstance(self._backend, CapturedBackend) else None
        vocab_size = model_config.vocab_size

        def library() -> ConstraintLibrary:
            path, eos_ids = model_config.path, model_config.eos_token_ids
            return constraint_library(path, vocab_size, eos_ids, communicator.shard.size)

        masks = RowMasks(num_rows, vocab_size, library)
        if config.owns_process and find_spec("llguidance") is not None:
            masks.prepare()
        least_saved = max(
            least_saved_keys(layer.num_kv_heads, layer.head_dim, self.kv_cache.blocks.itemsize)
            for layer in layers
        )
        tables = _make_tables(layout, block_size, num_rows, self._longest, device, least_saved)
        vocabulary = VocabularyShard(vocab_size, communicator)
        edits = device.edits(num_rows, scheduler.max_num_seqs, vocabulary)
        self._edits = RowEdits(edits)
        self._batch = InputBatch(
            *(tables, num_rows, self._staging, masks, self._edits), encoder is not None
        )
        drawer = device.drawer(self._draw_staging, vocab_size)
        self._sampler = Sampler(drawer, self._draw_staging, vocabulary, edits)
        self._pending = device.pending_tokens(num_rows, edits)
        self._under_way: SubmittedStep | None = None
        self._continued: Continued | None = None
        self._graphs = graphs
        if graphs is not None:
            # What captured steps leave: hidden states of the last tokens.
            most, place = scheduler.max_num_seqs, device.torch_device
            self._hidden = torch.zeros((most, model_config.hidden_size), dtype=dtype, device=place)
            with torch.inference_mode():
                if graphs.captures:
                    self._capture(graphs)
                else:
                    self._launch_kernels(graphs.sizes)
        if model.num_hit_experts is not None:
            model.num_hit_experts.zero_()

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Start a step; see Executor.submit."""
        device, batch, staging = self._device, self._batch, self._staging
        previous = self._under_way
        if previous is not None and batch.changes_rows(plan):
            previous.finish_draw()  # for which the rows must be as they were
        with torch.inference_mode(), device.computing:
            batch.apply(plan)
            staging.begin()
            self._draw_staging.begin()
            staged, chunks = self._continue(plan), list[PromptChunk]()
            if staged is None and plan.seq_ids:
                chunks = batch.prompt_chunks(plan)
                staged = self._stage(plan, bool(chunks))
            copies = self.kv_cache.stage(plan.copies, staging)
            table_update = batch.stage_tables()
            if previous is not None:
                previous.finish_draw()  # as late as can be: masks may still be missing
            staging.flush(None if table_update is None else table_update.carry_out)
            self._draw_staging.send()  # once the tokens before are drawn, which layers do not await
            started = (
                device.moment() if previous is None else previous.end_ahead() or device.moment()
            )
            self._edits.carry_out()
            swapped = self.kv_cache.move(plan, copies) or started
            if plan.encoded:
                self._encode(plan.encoded)
            step = SubmittedStep(plan, batch, started, swapped)
            awaits_tokens = batch.awaits_tokens(plan)
            masked = None if staged is None else staged.masked
            hidden = masks = None
            if masked is not None and not awaits_tokens and batch.has_compiled(masked):
                masks = self._start_masks(masked)  # while the host or the device computes
            if staged is not None:
                if staged.captured is None:
                    hidden = self._forward(staged)
                else:
                    hidden = self._replay(staged.captured, staged)
                self._start_reading(step, staged, hidden, chunks)
            staging.release()
            step.drawn = batch.advance(plan)
            draw = partial(self._start_draw, step, DrawInputs(staged, hidden, masks))
            if awaits_tokens:
                assert previous is not None, "it draws these tokens"
                previous.follow(draw)
            else:
                draw()
            if device.is_asynchronous:
                self._under_way = step
            else:
                step.result()
                if masked is not None:  # while the host decides on the next step
                    batch.start_masks_ahead(plan.sampled)
        return step

    def _start_reading(
        self, step: SubmittedStep, staged: StagedStep, hidden: Tensor, chunks: list[PromptChunk]
    ) -> None:
        """Start to bring to the host what a computed step says beside its tokens: what is read of
        prompts, and how many experts were hit."""
        to_host = self._device.to_host
        step.read = read_prompts(self._model, hidden, chunks, self._sampler, to_host)
        if self._model.num_hit_experts is not None:
            step.num_hit_experts = (
                to_host(self._model.num_hit_experts)
                if staged.results is None
                else staged.results.counter
            )

    def shutdown(self) -> None:
        """End what runs beside the steps. Nothing is submitted any more."""
        self._batch.shutdown()

    # ---------------------------------------------------------------- inputs

    def _continue(self, plan: StepPlan) -> StagedStep | None:
        """The step before with other results, if this one is the same one token further."""
        before, self._continued = self._continued, None
        if before is None or not before.steps_left or not plan.continues(before.seq_ids):
            return None
        assert self._pending is not None, "they are kept where steps are continued"
        self._continued = before._replace(steps_left=before.steps_left - 1)
        return before.staged._replace(results=self._pending.next_results())

    def _stage(self, plan: StepPlan, wants_all: bool) -> StagedStep:
        """Put the step's arrays where the next upload takes them along.

        wants_all: hidden states of all tokens are needed, not of the last ones alone.
        """
        batch, ending = self._batch, plan.ending
        captured = None if wants_all else self._captured_as(plan)
        decodes = captured is not None and captured.mixed is None
        num_padding = captured.size - len(plan.seq_ids) if captured and decodes else 0
        inputs = batch.model_input(plan, num_padding)
        attention = inputs.attention
        if captured is not None and captured.mixed is not None:
            if self._capturing is None or self._capturing.captures(attention):
                attention = replace(attention, padded=captured.mixed)
            else:
                captured = None
        input_ids, positions, rows = self._stage_inputs(inputs, attention.padded)
        kernels = self._backend.plan(attention)
        if captured is not None:
            captured = captured._replace(kernels=kernels)
        logits_indices = hidden_indices = sampling = sampled_rows = results = None
        masked = None
        if not (plan.only_decodes and ending == plan.seq_ids):
            indices = batch.logits_indices(plan, ending)
            if decodes or wants_all:
                hidden_indices = self._stage_indices(indices, captured, self._draw_staging)
            else:
                logits_indices = self._stage_indices(indices, captured, self._staging)
        if ending:
            how = batch.sampling_batch(plan.sampled, plan.expanded)
            sampling = self._sampler.stage(how)
            if how.mask_places is not None:
                masked = batch.masked_rows(ending)
            if self._pending is not None and plan.sampled:
                padded_rows = inputs.rows if decodes and plan.sampled == plan.seq_ids else None
                sampled_rows = self._stage_sampled_rows(plan, padded_rows, sampling)
                if self._graphs is not None and sampling.is_plain:
                    are_scored = bool(sampling.kind.scored)
                    results = self._pending.stage_results(self._draw_staging, are_scored)
        staged = StagedStep(
            captured,
            input_ids,
            positions,
            rows,
            logits_indices,
            hidden_indices,
            sampling,
            masked,
            sampled_rows,
            results,
            self._stage_mark() if decodes else None,
        )
        if not attention.cascade and self._may_continue(plan, staged):
            self._continued = Continued(plan.seq_ids, staged, MOST_CONTINUED)
        return staged

    def _may_continue(self, plan: StepPlan, staged: StagedStep) -> bool:
        """Whether the device has all that the next step of the same sequences needs, which read no
        keys together."""
        return (
            self._continuing is not None
            and staged.is_staged is not None
            and staged.captured is not None
            and staged.results is not None
            and plan.sampled == plan.seq_ids
            and self._batch.are_plain(plan.seq_ids)
        )

    def _stage_mark(self) -> Tensor:
        """What tells the graph of a step of decodes that the step is staged."""
        return self._staging.put("is_staged", np.ones(1, np.int32), 1)

    def _stage_inputs(
        self, inputs: ModelInput, padded: PaddedSizes | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and rows, padded to the sizes of a captured step, if it is one."""
        staging = self._staging
        ids, positions, rows = inputs.input_ids, inputs.positions, inputs.rows
        if padded is not None:
            ids = _padded(ids, padded.num_tokens)
            positions = _padded(positions, padded.num_tokens)
            rows = _padded(rows, padded.num_singles)
        staged_rows = staging.put("rows", rows, staging.max_num_seqs)
        return (
            staging.put("input_ids", ids, staging.max_num_tokens, part="tokens"),
            staging.put("positions", positions, staging.max_num_tokens, part="tokens"),
            staged_rows,
        )

    def _stage_indices(
        self, indices: Int64s, captured: Captured | None, staging: Staging
    ) -> Tensor:
        """Where the tokens stand whose logits are needed; token 0 if there are none, because
        CausalLM.forward needs one."""
        num_indices = max(1, len(indices))
        if captured is not None and captured.mixed is not None:
            num_indices = self._num_indices(captured.mixed)
        values = _padded(indices, num_indices)
        return staging.put("logits_indices", values, staging.max_num_seqs)

    def _stage_sampled_rows(
        self, plan: StepPlan, padded_rows: Int32s | None, sampling: StagedSampling
    ) -> Tensor:
        """The rows of `plan.sampled`; padded_rows: the same with padding, if they are known."""
        staging = self._draw_staging
        rows = padded_rows
        if rows is None:
            rows = self._batch.rows_of(plan.sampled).astype(np.int32)
            if self._graphs is not None and sampling.is_plain:
                rows = _padded(rows, self._graphs.size_for(len(rows)))
        return staging.put("sampled_rows", rows, staging.max_num_seqs)

    # ---------------------------------------------------------------- computation

    def _encode(self, seq_ids: Sequence[int]) -> None:
        """Run the encoder for the inputs of these sequences, and write K and V of its result."""
        self._run_encoder(self._batch.encoder_input(seq_ids))

    def _run_encoder(self, given: EncoderInput) -> None:
        device = self._device
        self._backend.plan_encoded(given.places)
        self._model.encode(
            device.upload(given.input_ids),
            device.upload(given.positions),
            given.lens,
            self._backend,
        )

    def _forward(self, staged: StagedStep) -> Tensor:
        """Hidden states of the step's tokens, or of those at `logits_indices`: [n, hidden_size]."""
        ids, positions, rows = staged.input_ids, staged.positions, staged.rows
        if staged.is_staged is not None:
            assert self._pending is not None, "graphs are for devices that keep tokens"
            draws = self._sampler.drawer.captured_draws(len(rows), "greedy")
            items = [] if self._continuing is None else self._continuing.decode_items()
            self._pending.begin(staged.is_staged, ids, positions, rows, draws, items)
        elif self._pending is not None:
            # Tokens that the host does not know are single, and come first.
            self._pending.fill(ids[: min(len(rows), len(ids))], rows)
        return self._model.forward(ids, positions, self._backend, staged.logits_indices)

    def _start_masks(self, masked: MaskedRows) -> PendingMasks:
        """Start to fill the step's masks; the tokens before those to be drawn are known."""
        sampler = self._sampler
        size = len(masked), num_words(sampler.vocabulary.size)
        return self._batch.start_masks(masked, sampler.drawer.room_for_masks(*size))

    def _start_draw(self, step: SubmittedStep, inputs: DrawInputs) -> None:
        """Draw the step's tokens; those before them are known, if they matter.

        While a library computes masks, the host has other things to do: the tokens are then drawn
        by `step.finish_draw`, in the thread that submits steps.
        """
        staged = inputs.staged
        if inputs.masks is None and staged is not None and staged.masked is not None:
            inputs = inputs._replace(masks=self._start_masks(staged.masked))
        step.draw = partial(self._draw, step, inputs)
        if inputs.masks is None or not inputs.masks.computes:
            step.finish_draw()

    def _draw(self, step: SubmittedStep, inputs: DrawInputs) -> None:
        """Start to draw the step's tokens by their masks, if they have some."""
        device, batch, plan = self._device, self._batch, step.plan
        staged, hidden, masks = inputs
        with torch.inference_mode(), device.computing:
            self._draw_staging.receive()
            if staged is None or staged.sampling is None:
                choice = Choice.nothing(device.torch_device)
            else:
                assert hidden is not None, "the step has computed something"
                words, sampling = None, staged.sampling
                if masks is not None:
                    ids, late = plan.ending, self._late_masks(plan, masks)
                    words, errors = masks.result(late)
                    step.errors = {ids[index]: error for index, error in errors.items()}
                    step.undrawn = frozenset(ids[masks.rows.logits_rows[i]] for i in late)
                if sampling.batch.edited:
                    edited = batch.with_texts(plan.ending, sampling.batch.edited)
                    sampling = sampling._replace(batch=replace(sampling.batch, edited=edited))
                choice = self._choose(plan, staged, sampling, words, hidden)
            self._draw_staging.release()
            choice.read_back(device.to_host)
            step.choice, step.ended = choice, device.moment()

    def _late_masks(self, plan: StepPlan, masks: PendingMasks) -> list[int]:
        """Indices of the masked rows that sit this step out, as the first rank decides. It waits
        only if nothing else would be done in this step."""
        late, ids = list[int](), plan.ending
        communicator = self._sampler.vocabulary.communicator
        if communicator.shard.rank == 0:
            late = masks.late()
            if late and len({ids[masks.rows.logits_rows[i]] for i in late}) == len(plan.seq_ids):
                masks.wait_for_one()
                late = masks.late()
        if communicator.shard.size > 1 and masks.follow_grammars:
            is_late = np.zeros(len(masks.rows), np.bool_)
            is_late[late] = True
            late = np.flatnonzero(communicator.broadcast(is_late)).tolist()
        return late

    def _choose(
        self,
        plan: StepPlan,
        staged: StagedStep,
        sampling: StagedSampling,
        masks: Words | None,
        hidden: Tensor,
    ) -> Choice:
        """Draw the next tokens, and keep them where the next step finds them."""
        graphs, n = self._graphs, len(plan.sampled)
        ending = hidden if staged.hidden_indices is None else hidden[staged.hidden_indices]
        ending = ending[: n + len(plan.expanded)]
        if graphs is None or not sampling.is_plain:
            rows = None if staged.sampled_rows is None else staged.sampled_rows[:n]
            choice = self._sampler(self._model.logits(ending), sampling, masks, rows)
            if self._pending is not None and rows is not None:
                self._pending.keep(choice.first, rows, sampling.kind.has_records)
            return choice
        if hidden is not self._hidden or staged.hidden_indices is not None:
            self._hidden[:n] = ending
        assert staged.sampled_rows is not None, "tokens are drawn"
        if masks is not None:
            self._sampler.drawer.take_masks(masks)
        work = partial(self._draw_captured, sampling.kind, staged.sampled_rows)
        key = sampling.kind, len(staged.sampled_rows)
        graphs.run(key, work, is_rare=bool(sampling.kind.scored))
        assert staged.results is not None, "staged with the rows"
        assert self._pending is not None, "it has staged them"
        choice = Choice(staged.results.token_ids[:n], is_delivered=True)
        if sampling.kind.scored:
            scored = sampling.batch.num_logprobs
            indices, num_top = list(scored), list(scored.values())
            choice.score(indices, self._pending.scores(staged.results, indices, num_top))
        return choice

    # ---------------------------------------------------------------- captured steps

    @property
    def _lengths(self) -> list[int]:
        """A context of each range for which attention of few sequences has kernels of its own."""
        limits: tuple[int, ...] = getattr(self._backend, "context_limits", ())
        return [*(each for each in limits if each < self._longest), self._longest]

    def _capture(self, graphs: Graphs) -> None:
        """Capture steps of every kind and size, the largest first: the others fit into its memory.

        A step that is captured while requests are served would keep them waiting. Steps with
        cascade attention are, but their kernels have been compiled by `_launch_kernels`.
        """
        for mixed, longest in product(reversed(graphs.mixed), self._lengths):
            staged = self._stage_padding(Captured(mixed.num_tokens, mixed), longest)
            graphs.prepare(staged.captured, partial(self._forward_captured, staged))
        for size in reversed(graphs.sizes):
            for longest in self._lengths:
                staged = self._stage_padding(Captured(size), longest)
                graphs.prepare(staged.captured, partial(self._forward_captured, staged))
            assert staged.sampled_rows is not None, "those of padding"
            for kind in _DRAW_KINDS:
                work = partial(self._draw_captured, kind, staged.sampled_rows)
                graphs.prepare((kind, size), work)

    def _launch_kernels(self, sizes: Sequence[int]) -> None:
        """Launch the kernels of steps of all kinds, whether a graph will hold them or not, so that
        none is compiled while requests are served. `sizes`: Graphs.sizes."""
        no_tokens = self._device.upload(np.array([BlockCopy(0, 0, 0)], np.int32))
        self._device.copy_blocks(self.kv_cache.blocks, no_tokens)
        for size in _some_up_to(self._longest_encoded):
            self._run_encoder(self._batch.encoder_padding(size))
        self._launch_steps(sizes)
        self._edits.prepare()
        vocabulary, hidden = self._sampler.vocabulary, self._hidden
        scored = min(self._staging.max_num_tokens, rows_at_once(vocabulary.size))  # of prompts
        most = max(len(hidden), scored)
        rows = hidden.new_zeros((most, hidden.shape[1]))
        few = range(1, min(most, _FEW_ROWS) + 1)
        for number in sorted({*few, *_some_up_to(most)}):
            logits = self._model.logits(rows[:number])
        self._sampler.drawer.compile(logits, vocabulary)
        assert self._pending is not None, "graphs are for devices that keep tokens"
        nothing = torch.zeros(1, dtype=torch.int64, device=rows.device)
        for are_edited in (False, True):
            self._pending.keep(nothing, nothing.int(), are_edited)
        if vocabulary.is_whole:
            self._draw_staging.begin()
            self._pending.stage_results(self._draw_staging, are_scored=True)
            self._draw_staging.flush()
            kinds = self._sampler.drawer.score_kinds
            self._pending.score(logits[:1], nothing, nothing.int() - 1, kinds)

    def _launch_steps(self, sizes: Sequence[int]) -> None:
        """Run steps that differ in their kernels: of decodes, which draw, and of decodes beside
        prompts, both with cascade attention and without; and of prompts that are scored, of which
        the hidden states of all tokens are returned."""
        most = self._staging.max_num_tokens
        launched = set[Hashable]()
        for size, longest, has_cascade in product(sizes, self._lengths, (False, True)):
            num_tokens = min(size + 1, most)
            mixed = PaddedSizes(num_tokens, size, num_chunks=1)
            for captured in (Captured(size), Captured(num_tokens, mixed)):
                staged = self._stage_padding(captured, longest, has_cascade)
                assert staged.captured is not None, "it is padded as a captured step"
                tokens = (captured.size - 1).bit_length()
                kind = staged.captured.kernels, captured.mixed is None, tokens
                if kind in launched:
                    continue
                launched.add(kind)
                self._forward(staged)
                if staged.sampled_rows is not None:
                    for each in _DRAW_KINDS:
                        self._draw_captured(each, staged.sampled_rows)
        for size in _some_up_to(min(most, _MOST_VARIED)):
            staged = self._stage_padding(Captured(size, PaddedSizes(size, 1, num_chunks=1)))
            self._forward(staged._replace(logits_indices=None))

    def _captured_as(self, plan: StepPlan) -> Captured | None:
        """The graph that computes the plan, padded; None if no graph does."""
        graphs, num_seqs = self._graphs, len(plan.seq_ids)
        if graphs is None:
            return None
        if plan.only_decodes:
            return Captured(graphs.size_for(num_seqs))
        num_chunks = sum(n > 1 for n in plan.num_scheduled_tokens)
        needed = PaddedSizes(plan.num_tokens, num_seqs - num_chunks, num_chunks)
        mixed = graphs.mixed_size_for(needed)
        return Captured(mixed.num_tokens, mixed) if mixed else None

    def _num_indices(self, mixed: PaddedSizes) -> int:
        """Logits indices of a captured step with prompts: one per sequence, at most."""
        most = min(mixed.num_tokens, mixed.num_singles + mixed.num_chunks)
        return min(most, self._staging.max_num_seqs)

    def _stage_padding(
        self, captured: Captured, longest: int = 1, has_cascade: bool = False
    ) -> StagedStep:
        """Upload a step that is padding alone, with the kernels of sequences of so many tokens."""
        batch, staging, drawing = self._batch, self._staging, self._draw_staging
        staging.begin()
        drawing.begin()
        nothing = StepPlan(-1, [], [], [], [])
        inputs = batch.model_input(nothing, 0 if captured.mixed else captured.size)
        attention = replace(inputs.attention, padded=captured.mixed, longest=longest)
        if has_cascade:
            empty = [CascadeSegments.empty()] * len(attention.block_tables)
            attention = replace(attention, cascade=empty)
        staged_inputs = self._stage_inputs(inputs, captured.mixed)
        captured = captured._replace(kernels=self._backend.plan(attention))
        sampling = self._sampler.stage(batch.sampling_batch([], []))
        rows = np.zeros(staging.max_num_seqs, np.int32)
        sampled_rows = drawing.put("sampled_rows", rows, len(rows))
        indices = staging.put("logits_indices", rows.astype(np.int64), len(rows))
        assert self._pending is not None, "graphs are for devices that keep tokens"
        results = self._pending.stage_results(drawing, are_scored=False)
        is_staged = None if captured.mixed else self._stage_mark()
        staging.flush()
        drawing.flush()
        return StagedStep(
            captured,
            *staged_inputs,
            logits_indices=indices[: self._num_indices(captured.mixed)] if captured.mixed else None,
            hidden_indices=None,
            sampling=sampling,
            masked=None,
            sampled_rows=None if captured.mixed else sampled_rows[: captured.size],
            results=results,
            is_staged=is_staged,
        )

    def _replay(self, captured: Captured, staged: StagedStep) -> Tensor:
        """Run the step's graph: hidden states as `_forward` returns them, then padding."""
        assert self._graphs is not None, "nothing is captured without them"
        self._graphs.run(captured, partial(self._forward_captured, staged))
        return self._hidden

    def _forward_captured(self, staged: StagedStep) -> None:
        hidden = self._forward(staged)
        self._hidden[: len(hidden)].copy_(hidden)

    def _draw_captured(self, kind: DrawKind, rows: Tensor) -> None:
        """A token for each hidden state; rows of padding all keep theirs in row 0."""
        size = len(rows)
        logits = self._model.logits(self._hidden[:size])
        token_ids = self._sampler.draw_captured(logits, kind, rows)
        assert self._pending is not None, "graphs are for devices that keep tokens"
        if kind.scored:
            numbers = self._sampler.drawer.captured_scores(size)
            self._pending.score(logits, token_ids, numbers, kind.scored)
        counter = self._model.num_hit_experts
        self._pending.deliver(token_ids, rows, counter, kind.has_records)


def _some_up_to(most: int) -> list[int]:
    """Powers of two and what follows them, up to `most`, and `most`: of each range of sizes that
    kernels differ by, one."""
    powers = [1 << bits for bits in range(most.bit_length())]
    sizes = {size for power in powers for size in (power, power + 1) if size < most}
    return sorted((sizes | {most}) - {0})


def _block_shape(
    layout: KVLayout, layers: Sequence[LayerSpec], block_size: int, kind: type[AttentionBackend]
) -> tuple[tuple[int, ...], bool]:
    """Of one block, and whether blocks are copied whole: as many layers as it has room for, each as
    the backend has them; or, where layers or their blocks differ, as many elements for each token
    as the largest group needs. Layers may differ where their sizes do not: two heads of 256
    elements are as many as one of 512."""
    heads = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(heads) > 1 or len(set(layout.block_sizes(block_size))) > 1:
        return (block_size, layout.token_size), True
    shape = kind.kv_block_shape(block_size, *heads.pop())
    return (layout.token_size * block_size // math.prod(shape), *shape), False


def _num_shapes(layers: Sequence[LayerSpec], places: Sequence[LayerPlace]) -> int:
    """How many kinds of layers attention is planned for, at most: each stages arrays of its own."""
    shapes = {
        (
            *(layer.num_heads, layer.num_kv_heads, layer.head_dim),
            *(layer.window, place.span, layer.reads_encoder),
        )
        for layer, place in zip(layers, places, strict=True)
    }
    return len(shapes)


def _make_tables(
    layout: KVLayout, block_size: int, num_rows: int, longest: int, device: Device, least_saved: int
) -> BlockTables:
    """The block tables of all rows; also on the device, if its attention reads them there.

    longest: tokens of the longest sequence, or of the longest input of an encoder; least_saved: see
    `least_saved_keys`.
    """
    block_sizes = layout.block_sizes(block_size)
    on_device = None
    if device.keeps_tables:
        max_blocks = -(-longest // min(block_sizes))
        have_windows = [not isinstance(group.spec, FullAttention) for group in layout.groups]
        on_device = DeviceTables(
            block_sizes, have_windows, num_rows, max_blocks, device.torch_device, least_saved
        )
    of_encoder = [isinstance(spec, CrossAttention) for spec in layout.specs]
    return BlockTables(block_sizes, num_rows, on_device, of_encoder)


def _padded(values: NDArray[Integer], length: int) -> NDArray[Integer]:
    """The first `length` values, with zeros behind them if there are fewer."""
    if len(values) >= length:
        return values[:length]
    return np.concatenate([values, np.zeros(length - len(values), values.dtype)])
