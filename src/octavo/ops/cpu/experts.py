"""Experts whose weights are packed as those of linear.py: one call for all that were hit."""

from __future__ import annotations

from ctypes import addressof, c_int64
from functools import cache

import numpy as np
import torch
from torch import Tensor

from octavo.ops.cpu.linear import UNITS_PER_THREAD, WORTH_SHARING, pack_all
from octavo.ops.cpu.linear_kernel import BLOCK, JOB, compile_grouped
from octavo.ops.cpu.row_ops import apply_gate, weighted_sum
from octavo.ops.cpu.threads import Runner, make_runner
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import ExpertWeights, Routed, RowLists
from octavo.ops.quantized import Rounding

_Args = c_int64 * 4


class PackedExperts:
    """Owns packed copies of all experts, which one call of our kernel computes."""

    def __init__(self, weights: ExpertWeights, epilogue: Epilogue) -> None:
        self._up = _Grouped(weights.up, weights.up_bias)
        self._down = _Grouped(weights.down, weights.down_bias)
        self._epilogue = epilogue

    def rounding(self, num_tokens: int, top_k: int) -> Rounding:
        """See ExpertsKernel.rounding."""
        return Rounding.NONE

    def apply_partial(self, x: Tensor, routed: Routed) -> Tensor:
        """See ExpertsKernel.apply_partial."""
        lists: RowLists = routed.lists
        rows = x[lists.order // routed.ids.shape[1]]
        inner = apply_gate(self._up.apply(rows, lists), self._epilogue)
        return weighted_sum(self._down.apply(inner, lists), lists.places, routed.weights)


class _Grouped:
    """Owns the packed weights of one projection of all experts."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        _, self._out_features, self._in_features = weight.shape
        self._blocks = pack_all(weight)
        self._bias = bias
        self._depth = self._in_features * weight.element_size() // 4
        self._num_blocks = -(-self._out_features // BLOCK)
        self._run = _runner(weight.dtype)

    def apply(self, x: Tensor, lists: RowLists) -> Tensor:
        """y of dense x [num_rows, in_features], whose rows are those of the experts in turn."""
        output = x.new_empty((len(x), self._out_features))
        size, num_jobs = x.element_size(), len(lists.hit)
        threads = torch.get_num_threads()
        work = max(len(x), 8 * num_jobs) * self._out_features * self._in_features
        if work < WORTH_SHARING:
            threads = 1
        per_unit = max(1, self._num_blocks * num_jobs // (UNITS_PER_THREAD * threads))
        per_unit = min(per_unit, self._num_blocks)
        jobs = np.zeros(num_jobs, JOB)
        jobs["x"] = x.data_ptr() + lists.starts * (self._in_features * size)
        jobs["x_stride"] = self._in_features * size
        jobs["weight"] = self._blocks.data_ptr() + lists.hit * (self._blocks[0].numel() * size)
        if self._bias is not None:
            jobs["bias"] = self._bias.data_ptr() + lists.hit * (self._out_features * size)
        jobs["output"] = output.data_ptr() + lists.starts * (self._out_features * size)
        jobs["num_rows"] = lists.counts
        jobs["out_features"] = self._out_features
        jobs["depth"] = self._depth
        jobs["blocks_per_unit"] = per_unit
        units_per_job = -(-self._num_blocks // per_unit)
        args = _Args(0, jobs.ctypes.data, num_jobs * units_per_job, units_per_job)
        self._run(addressof(args), threads)
        return output


@cache
def _runner(dtype: torch.dtype) -> Runner:
    return make_runner(compile_grouped(bf16=dtype == torch.bfloat16))
