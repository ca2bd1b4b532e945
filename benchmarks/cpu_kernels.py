"""octavo's CPU kernels compared with other implementations of the same operations.

Attention over scattered blocks (decode: 64 sequences of 32-767 tokens; prefill: 8 prompts of
16-512), projections, and the small operations between them. The fastest of several rounds counts,
in CPU time with one thread and in wall-clock time with several. Prints tables, and one JSON line at
the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import Tensor

from octavo.ops import (
    AttentionBatch,
    LayerPlace,
    LayerSpec,
    RotaryTable,
    ScoreFunction,
    load_backend,
)
from octavo.ops.cpu import onednn
from octavo.ops.cpu import row_ops as cpu_ops
from octavo.ops.epilogue import Epilogue
from octavo.ops.linear import LinearKernel, TorchLinear, has_numba_kernel, make_linear_kernel

Times = dict[str, dict[str, float]]  # case -> implementation -> milliseconds

BLOCK_SIZE = 16
NUM_LAYERS = 4  # several, so that the data of a layer has left the CPU's cache when it runs again
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# name: query heads, KV heads, head size, hidden size, intermediate size
MODELS = {"llama-15m": (6, 2, 64, 384, 1024), "qwen3-0.6b": (16, 8, 128, 1024, 3072)}


@dataclass(frozen=True)
class Work:
    """A batch and the inputs of its attention."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: AttentionBatch
    inputs: tuple[Tensor, Tensor, Tensor]
    num_blocks: int

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype


def make_work(model: str, dtype: torch.dtype, sequences: Sequence[tuple[int, int]]) -> Work:
    """`sequences` holds (context length, new tokens) of each one; their blocks are scattered."""
    heads, kv_heads, head_dim, *_ = MODELS[model]
    contexts, lens = (np.array(x, np.int32) for x in zip(*sequences, strict=True))
    needed = -(-contexts // BLOCK_SIZE)
    blocks = np.random.default_rng(1).permutation(needed.sum()).astype(np.int32) + 1
    tables = np.zeros((len(lens), needed.max()), np.int32)
    tables[np.arange(needed.max()) < needed[:, None]] = blocks
    starts = np.concatenate(([0], lens.cumsum())).astype(np.int32)
    positions = np.concatenate([np.arange(c - n, c) for c, n in sequences])
    owners = np.repeat(np.arange(len(lens)), lens)
    slots = tables[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    slots += positions % BLOCK_SIZE
    fused = torch.randn(len(positions), heads + 2 * kv_heads, head_dim).to(dtype)
    query, key, value = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
    batch = AttentionBatch(
        query_lens=torch.from_numpy(lens),
        context_lens=torch.from_numpy(contexts),
        query_starts=torch.from_numpy(starts),
        positions=torch.from_numpy(positions),
        block_tables=[torch.from_numpy(tables)],
        slots=[torch.from_numpy(slots)],
    )
    return Work(heads, kv_heads, head_dim, batch, (query, key, value), int(needed.sum()) + 1)


def octavo_attention(work: Work) -> Callable[[], object]:
    """The cpu backend, including rotary embedding and the KV write."""
    backend_class = load_backend("cpu")
    shape = backend_class.kv_block_shape(BLOCK_SIZE, work.kv_heads, work.head_dim)
    cache = torch.randn(work.num_blocks, NUM_LAYERS, *shape).to(work.dtype)
    scores = ScoreFunction(work.head_dim**-0.5)
    layers = [
        LayerSpec(i, work.heads, work.kv_heads, work.head_dim, scores) for i in range(NUM_LAYERS)
    ]
    places = [LayerPlace(0, i) for i in range(NUM_LAYERS)]
    backend = backend_class(layers, places, cache, BLOCK_SIZE, cache.dtype)
    frequencies = 10000.0 ** (-torch.arange(0, work.head_dim, 2) / work.head_dim)
    angles = torch.arange(1024)[:, None] * frequencies
    rotary = RotaryTable(angles.cos(), angles.sin())
    backend.plan(work.batch)
    return lambda: [backend.forward(i, *work.inputs, rotary) for i in range(NUM_LAYERS)]


def token_major_cache(work: Work) -> Tensor:
    """The usual layout: [layers, K and V, num_blocks, block_size, kv_heads, head_dim]."""
    shape = (NUM_LAYERS, 2, work.num_blocks, BLOCK_SIZE, work.kv_heads, work.head_dim)
    return torch.randn(shape).to(work.dtype)


def gather_and_pad(work: Work) -> Callable[[], object]:
    """torch: gather every sequence's blocks, pad to the longest, one masked SDPA (decode only)."""
    cache, table = token_major_cache(work), work.batch.block_tables[0].long()
    tokens = torch.arange(table.shape[1] * BLOCK_SIZE)
    mask = (tokens < work.batch.context_lens[:, None])[:, None, None, :]
    query = work.inputs[0].transpose(0, 1)[None].transpose(0, 2)  # [seqs, heads, 1, head_dim]

    def attend(layer: Tensor) -> Tensor:
        key, value = (layer[i][table].flatten(1, 2).transpose(1, 2) for i in (0, 1))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    return lambda: [attend(layer) for layer in cache]


def sequence_by_sequence(work: Work) -> Callable[[], object]:
    """torch: gather each sequence's blocks, then SDPA; a prompt's K and V are used directly."""
    cache, table = token_major_cache(work), work.batch.block_tables[0].long()
    contexts, starts = work.batch.context_lens.tolist(), work.batch.query_starts.tolist()

    def attend(layer: Tensor, seq: int) -> Tensor:
        query, key, value = (x[starts[seq] : starts[seq + 1]] for x in work.inputs)
        prompt = len(query) == contexts[seq]
        if not prompt:
            ids = table[seq, : -(-contexts[seq] // BLOCK_SIZE)]
            key, value = (layer[i][ids].flatten(0, 1)[: contexts[seq]] for i in (0, 1))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=prompt, enable_gqa=True)

    return lambda: [attend(layer, seq) for layer in cache for seq in range(len(contexts))]


@njit(nogil=True, fastmath=True)
def _plain_decode(query: Any, keys: Any, values: Any, table: Any, contexts: Any, out: Any) -> None:
    """Straightforward loops; query [seqs, heads, dim], keys [blocks, block_size, kv_heads, dim]."""
    num_seqs, heads, dim = query.shape
    size, group_size = keys.shape[1], heads // keys.shape[2]
    scores = np.empty(8192, np.float32)
    for seq in range(num_seqs):
        for head in range(heads):
            top = np.float32(-1e30)
            for t in range(contexts[seq]):
                key = keys[table[seq, t // size], t % size, head // group_size]
                score = np.float32(0)
                for d in range(dim):
                    score += query[seq, head, d] * key[d]
                scores[t] = score
                top = max(top, score)
            total = np.float32(0)
            row = out[seq, head]
            row[:] = 0
            for t in range(contexts[seq]):
                weight = np.exp(scores[t] - top)
                total += weight
                value = values[table[seq, t // size], t % size, head // group_size]
                for d in range(dim):
                    row[d] += weight * value[d]
            for d in range(dim):
                row[d] /= total


def plain_numba(work: Work) -> Callable[[], object]:
    """Plain loops, vectorised by Numba and LLVM; decode, fp32, one thread."""
    cache = token_major_cache(work).numpy()
    query = work.inputs[0].contiguous().numpy()
    table, contexts = work.batch.block_tables[0].numpy(), work.batch.context_lens.numpy()
    out = np.empty_like(query)
    return lambda: [_plain_decode(query, k, v, table, contexts, out) for k, v in cache]


def best_ms(call: Callable[[], object], rounds: int) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    times = []
    for _ in range(rounds):
        begin = clock()
        call()
        times.append(clock() - begin)
    return 1e3 * min(times)


def measure_attention(rounds: int) -> Times:
    random = np.random.default_rng(0)
    prompts = [(int(n), int(n)) for n in random.integers(16, 513, 8)]
    decodes = [(int(n), 1) for n in random.integers(32, 768, 64)]
    results: Times = {}
    for model in MODELS:
        for name, dtype in DTYPES.items():
            for phase, sequences in (("decode", decodes), ("prefill", prompts)):
                makers = {"octavo": octavo_attention, "torch, one by one": sequence_by_sequence}
                if phase == "decode":
                    makers["torch, gathered"] = gather_and_pad
                    if name == "fp32" and torch.get_num_threads() == 1:
                        makers["plain Numba"] = plain_numba
                work = make_work(model, dtype, sequences)
                results[f"{phase} {model} {name}"] = {
                    name: best_ms(make(work), rounds) / NUM_LAYERS for name, make in makers.items()
                }
    return results


def measure_projections(rounds: int) -> Times:
    """The gate and up projection, with weights that have left the CPU's cache, as in a step."""
    results: Times = {}
    for model, (*_, hidden, inner) in MODELS.items():
        for name, dtype in DTYPES.items():
            weights = [torch.randn(2 * inner, hidden).to(dtype) for _ in range(NUM_LAYERS)]
            kernels: dict[str, list[LinearKernel]] = {}
            if has_numba_kernel(weights[0]):
                kernels["octavo"] = [make_linear_kernel(weight) for weight in weights]
            if onednn.can_pack(weights[0]):
                kernels["oneDNN, packed"] = [onednn.OneDnnLinear(weight) for weight in weights]
            kernels["F.linear"] = [TorchLinear(weight) for weight in weights]
            for tokens in (1, 16, 64, 512):
                x = torch.randn(tokens, hidden).to(dtype)
                calls = {name: partial(apply_all, x, each) for name, each in kernels.items()}
                results[f"gate+up {model} {name}, {tokens} tokens"] = {
                    name: best_ms(call, rounds) / NUM_LAYERS for name, call in calls.items()
                }
    return results


def apply_all(x: Tensor, kernels: Sequence[LinearKernel]) -> list[Tensor]:
    return [kernel.apply(x, None, Epilogue.NONE) for kernel in kernels]


def plain_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(residual.add_(x), weight.shape, weight, eps)


def plain_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def measure_small_ops(rounds: int) -> Times:
    results: Times = {}
    for tokens, model in ((64, "llama-15m"), (512, "qwen3-0.6b")):
        *_, hidden, inner = MODELS[model]
        for name, dtype in DTYPES.items():
            x, residual = torch.randn(2, tokens, hidden).to(dtype)
            norm = (x, residual, torch.ones(hidden).to(dtype), 1e-6)
            gate_up = (torch.randn(tokens, 2 * inner).to(dtype),)
            cases: list[tuple[str, Callable[..., object], Callable[..., object], Any]] = [
                ("add, RMS norm", cpu_ops.add_rms_norm, plain_add_rms_norm, norm),
                (
                    "SiLU, mul",
                    partial(cpu_ops.apply_gate, epilogue=Epilogue.SILU_MUL),
                    plain_silu_mul,
                    gate_up,
                ),
            ]
            for op, ours, plain, args in cases:
                results[f"{op} {model} {name}, {tokens} tokens"] = {
                    "octavo": best_ms(partial(ours, *args), 10 * rounds),
                    "torch": best_ms(partial(plain, *args), 10 * rounds),
                }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: Times = {}
    with torch.inference_mode():
        for measure in (measure_attention, measure_projections, measure_small_ops):
            results.update(measure(args.rounds))
    for case, times in results.items():
        others = "".join(
            f"   {name} {ms:.3f} ({ms / times['octavo']:.1f}x)"
            for name, ms in times.items()
            if name != "octavo"
        )
        print(f"{case:<40}{times['octavo']:>9.3f} ms{others}")
    rounded = {
        case: {name: round(ms, 4) for name, ms in times.items()} for case, times in results.items()
    }
    print(json.dumps({"benchmark": "cpu_kernels", "threads": args.threads, "ms": rounded}))


if __name__ == "__main__":
    main()
