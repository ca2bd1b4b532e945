"""Batches for the benchmarks of the attention kernels, and the time per launch in a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu_harness import device_seconds
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import (
    AttentionBackend,
    AttentionBatch,
    KVScales,
    LayerPlace,
    LayerSpec,
    RotaryTable,
    ScoreFunction,
    StagingPart,
    load_backend,
    make_backend,
)

BLOCK_SIZE, HEAD_DIM = 16, 128
GPU = torch.device("cuda")
# name: query heads, KV heads, layers, whether there is a rotary embedding
MODELS = {
    "llama-3-8b 32/8": (32, 8, 32, True),
    "opt-13b 40/40": (40, 40, 40, False),
    "qwen3-0.6b 16/8": (16, 8, 28, True),
}
SHAPES = MODELS | {
    "gemma-2-9b 16/8": (16, 8, 42, True),
    "qwen3-30b-a3b 32/4": (32, 4, 48, True),
    "gemma-3-4b 8/4": (8, 4, 34, True),
}
HEAD_DIMS = {"gemma-3-4b 8/4": 256}  # others: HEAD_DIM
BEYOND_L2 = 400 << 20  # bytes


class DirectStaging:
    """Uploads each array in a copy of its own; addresses are valid for one plan only."""

    max_num_seqs, max_num_tokens = 1024, 65536

    def __init__(self, device: torch.device = GPU) -> None:
        self._device = device

    def put(
        self, name: str, values: NDArray[Any], capacity: int, part: StagingPart = "sequences"
    ) -> Tensor:
        assert values.size <= capacity, name
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def begin(self) -> None:
        """See Staging.begin: nothing is kept."""

    def flush(self, then: Callable[[], None] | None = None) -> None:
        """See Staging.flush: everything has been uploaded."""
        if then is not None:
            then()

    send = flush

    def receive(self) -> None:
        """See Staging.receive: it has been."""

    def release(self) -> None:
        """See Staging.release: nothing is uploaded again."""


@dataclass
class Work:
    """A batch of equal sequences, their KV cache, and a backend that has planned the batch.

    `new` is the number of new tokens per sequence; the last ones of `context`.
    """

    model: str
    num_seqs: int
    context: int
    new: int
    head_dim: int = HEAD_DIM
    kv_scales: KVScales | None = None  # of an FP8 KV cache

    def __post_init__(self) -> None:
        self.heads, self.kv_heads, _, rotated = SHAPES[self.model]
        n, blocks, head_dim = self.num_seqs, -(-self.context // BLOCK_SIZE), self.head_dim
        stored = torch.bfloat16 if self.kv_scales is None else torch.float8_e4m3fn
        self.kv_bytes = n * self.context * self.kv_heads * 2 * head_dim * stored.itemsize
        self.num_layers = min(16, max(2, -(-BEYOND_L2 // self.kv_bytes)))
        kind = load_backend("triton")
        block = kind.kv_block_shape(BLOCK_SIZE, self.kv_heads, head_dim)
        shape = (n * blocks + 1, self.num_layers, *block)
        self.cache = torch.empty(shape, dtype=stored, device=GPU)
        for part in torch.split(self.cache, max(1, (1 << 28) // self.cache[0].numel())):
            part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=GPU))
        self.table = (torch.randperm(n * blocks, device=GPU) + 1).int().view(n, blocks)
        fused = torch.randn(n * self.new, self.heads + 2 * self.kv_heads, head_dim, device=GPU)
        sizes = [self.heads, *(2 * [self.kv_heads])]
        query, key, value = torch.split(fused.bfloat16(), sizes, dim=1)
        self.heads_of_tokens = (query, key, value)
        self.rotary = rotary_table(self.context, head_dim) if rotated else None
        self.batch = self._batch()
        self.backend = self.backend_for(ScoreFunction(head_dim**-0.5))

    def backend_for(self, scores: ScoreFunction, window: int | None = None) -> AttentionBackend:
        """One over the same cache that computes these scores, and has planned the batch."""
        layers = [
            LayerSpec(
                *(i, self.heads, self.kv_heads, self.head_dim, scores, window),
                kv_scales=self.kv_scales,
            )
            for i in range(self.num_layers)
        ]
        places = [LayerPlace(0, i) for i in range(self.num_layers)]
        kind, dtype = load_backend("triton"), torch.bfloat16
        backend = make_backend(kind, layers, places, self.cache, BLOCK_SIZE, dtype)
        backend.plan(self.batch)
        return backend

    def _batch(self) -> AttentionBatch:
        n, new = self.num_seqs, self.new
        return AttentionBatch(
            query_lens=torch.full((n,), new, dtype=torch.int32),
            context_lens=torch.full((n,), self.context, dtype=torch.int32),
            query_starts=torch.arange(n + 1, dtype=torch.int32) * new,
            positions=torch.arange(self.context - new, self.context).repeat(n),
            block_tables=[self.table],
            slots=[],
            rows=torch.arange(n, dtype=torch.int32),
            staging=DirectStaging(),
        )

    def forward(self, layer: int) -> Tensor:
        query, key, value = self.heads_of_tokens
        return self.backend.forward(layer, query, key, value, self.rotary)


def rotary_table(positions: int, head_dim: int = HEAD_DIM) -> RotaryTable:
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.arange(positions).float()[:, None] * inverse
    return RotaryTable(angles.cos().to(GPU), angles.sin().to(GPU))


def seconds(launch: Callable[[int], object], num_layers: int, launches: int) -> float:
    """Seconds per launch: the median over replays of a CUDA graph that cycles the layers."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i % num_layers)
    # Everything is slower for a while after a large allocation.
    began = time.perf_counter()
    while time.perf_counter() - began < 0.15:
        graph.replay()
        torch.cuda.synchronize()
    return statistics.median(device_seconds(graph.replay) / launches for _ in range(7))
