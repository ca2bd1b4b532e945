"""Runs one plan through the model: rows, block moves, forward, sampling, result."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from octavo.core.step import StepPlan, StepResult
from octavo.models.base import CausalLM
from octavo.ops import AttentionBackend
from octavo.worker.input_batch import InputBatch, at_least_one
from octavo.worker.kv_cache import KVCache
from octavo.worker.prompt_scores import not_finite, score_prompts
from octavo.worker.sampler import Sampler, SamplerOutput, logits_not_finite


class ModelRunner:
    """Owns the rows of the running sequences, and computes on one device."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        kv_cache: KVCache,
        input_batch: InputBatch,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._backend = backend
        self._kv_cache = kv_cache
        self._input_batch = input_batch
        self._vocab_size = vocab_size
        self._sampler = Sampler()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self._input_batch.apply(plan)
        swap_seconds = self._kv_cache.move(plan)
        result = StepResult(plan.step_id, token_ids=[], swap_seconds=swap_seconds)
        if plan.seq_ids:
            started = perf_counter()
            last = self._input_batch.last_tokens(plan, plan.ending)
            chunks = self._input_batch.prompt_chunks(plan)
            hidden = self._forward(plan, None if chunks else at_least_one(last))
            if chunks:
                scores = score_prompts(self._model, hidden, chunks, self._vocab_size)
                result.prompt_logprobs = scores
                result.errors = logits_not_finite(not_finite(scores))
                hidden = hidden[last]
            self._sample(plan, hidden, result)
            result.compute_seconds = perf_counter() - started
        return result

    def _forward(self, plan: StepPlan, wanted: Tensor | None) -> Tensor:
        """Hidden states of the step's tokens or of the `wanted` ones, [n, hidden_size]."""
        inputs = self._input_batch.model_input(plan)
        positions = inputs.attention.positions
        self._backend.plan(inputs.attention)
        return self._model.forward(inputs.input_ids, positions, self._backend, wanted)

    def _sample(self, plan: StepPlan, hidden: Tensor, result: StepResult) -> None:
        """Choose the next tokens, put them into the result, and advance the rows.

        hidden: [len(plan.ending), hidden_size], of their last tokens, if there are any.
        """
        ending = plan.ending
        output = SamplerOutput(torch.empty(0, dtype=torch.int64), {}, {}, None, [])
        if ending:
            logits = self._model.logits(hidden)
            batch = self._input_batch.sampling_batch(plan.sampled, plan.expanded)
            output = self._sampler(logits, batch)
        token_ids = output.token_ids.numpy()
        self._input_batch.fill(self._input_batch.advance(plan), token_ids)
        result.errors |= logits_not_finite(ending[row] for row in output.not_finite)
        result.token_ids = token_ids.tolist()
        result.draws = {ending[row]: drawn for row, drawn in output.draws.items()}
        result.logprobs = {ending[row]: entries for row, entries in output.logprobs.items()}
        result.candidates = output.candidates
