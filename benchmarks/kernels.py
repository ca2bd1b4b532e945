"""Attention kernels and KV block copies on one GPU, compared with PyTorch and the copy bandwidth.

Scattered blocks of 16 tokens; bf16, head size 128. Launches are replayed from a CUDA graph that
cycles through layers which together exceed the L2 cache. Prints tables, and one JSON line at the
end.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from attention_work import BLOCK_SIZE, GPU, HEAD_DIM, MODELS, Work, seconds
from gpu_harness import copy_bandwidth, report
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from octavo.core.step import StepPlan
from octavo.ops import KVScales, ScoreFunction
from octavo.ops.cuda.attention_prefill import (
    HopperPrefillConfig,
    PrefillConfig,
    prefill_attention,
    prefill_config,
)
from octavo.ops.cuda.attention_scores import KernelScores
from octavo.ops.cuda.attention_work_items import Sequences, prefill_items
from octavo.ops.cuda.block_copy import copy_blocks
from octavo.ops.cuda.kv_write import HeadChanges, write_kv
from octavo.worker.device.cuda import CudaDevice
from octavo.worker.kv_cache import KVCache
from octavo.worker.staging import UploadStaging

DECODES = [(64, 1024), (64, 4096), (64, 8192), (256, 1024), (256, 4096), (1, 8192), (16, 32768)]
SMALL_DECODES = [(1, 1024), (8, 1024)]
PREFILLS = [(8, 512), (1, 2048), (4, 2048), (1, 8192)]
CHUNKS = [(8, 512, 512), (4, 2048, 2048), (1, 8192, 8192), (1, 2048, 16_384), (1, 512, 8192)]
Table = dict[str, dict[str, float]]


def measure_decode(kv_scales: KVScales | None) -> tuple[Table, Table]:
    """(TB/s of K and V, microseconds per launch) of one layer's decode, including the KV write.

    kv_scales: of an FP8 KV cache.
    """
    rates: Table = {}
    times: Table = {}
    for model in MODELS:
        rates[model], times[model] = {}, {}
        for num_seqs, context in DECODES + SMALL_DECODES:
            work = Work(model, num_seqs, context, new=1, kv_scales=kv_scales)
            launches = max(work.num_layers, min(48, int(4e9 / work.kv_bytes)))
            elapsed = seconds(work.forward, work.num_layers, launches)
            case = f"{num_seqs}x{context}"
            rates[model][case] = round(work.kv_bytes / elapsed / 1e12, 2)
            times[model][case] = round(elapsed * 1e6, 1)
    return rates, times


def measure_prefill() -> dict[str, Table]:
    """TFLOP/s of causal attention, paged, and PyTorch's on dense tensors; TB/s of the KV write."""
    kernels: dict[str, Callable[[Work], Callable[[int], object]]] = {
        "prefill, TFLOP/s": paged_prefill,
        "prefill, the kernel that any GPU has": partial(paged_prefill, is_for_hopper=False),
        "prefill, SDPA with FlashAttention 2, dense": sdpa(SDPBackend.FLASH_ATTENTION),
        "prefill, SDPA with cuDNN, dense": sdpa(SDPBackend.CUDNN_ATTENTION),
        "prefill, varlen_attn, dense": varlen,
    }
    results: dict[str, Table] = {kernel: {model: {} for model in MODELS} for kernel in kernels}
    write_rates: Table = {model: {} for model in MODELS}
    for model in MODELS:
        for num_seqs, context in PREFILLS:
            case = f"{num_seqs}x{context}"
            work = Work(model, num_seqs, context, new=context)
            flops = 2 * num_seqs * context**2 * work.heads * HEAD_DIM
            for kernel, make in kernels.items():
                elapsed = seconds(make(work), work.num_layers, 8)
                results[kernel][model][case] = round(flops / elapsed / 1e12)
            moved = 2 * sum(x.numel() for x in work.heads_of_tokens[1:])
            moved += 2 * work.heads_of_tokens[0].numel() if work.rotary else 0
            elapsed = seconds(kv_write(work), work.num_layers, 8)
            write_rates[model][case] = round(2 * moved / elapsed / 1e12, 2)
    return results | {"KV write, TB/s read plus written": write_rates}


def measure_chunks(kv_scales: KVScales | None) -> Table:
    """TFLOP/s of causal attention to new tokens and to those before them, with the KV write.

    kv_scales: of an FP8 KV cache, whose blocks may have to be converted.
    """
    rates: Table = {}
    for model in MODELS:
        rates[model] = {}
        for num_seqs, new, context in CHUNKS:
            work = Work(model, num_seqs, context, new, kv_scales=kv_scales)
            flops = 4 * num_seqs * new * (context - new / 2) * work.heads * HEAD_DIM
            elapsed = seconds(work.forward, work.num_layers, 8)
            rates[model][f"{num_seqs}x{new} of {context}"] = round(flops / elapsed / 1e12)
    return rates


def paged_prefill(work: Work, is_for_hopper: bool = True) -> Callable[[int], None]:
    group_size, query = work.heads // work.kv_heads, work.heads_of_tokens[0]
    config: PrefillConfig | HopperPrefillConfig
    config = prefill_config(torch.bfloat16, HEAD_DIM, group_size)
    if is_for_hopper and torch.cuda.get_device_capability()[0] == 9:
        config = HopperPrefillConfig.of(work.batch.context_lens.tolist(), None, HEAD_DIM)
    starts = work.batch.query_starts.numpy()[:-1]
    rows, lens = work.batch.rows, work.batch.query_lens
    assert rows is not None
    seqs = Sequences(starts, rows.numpy(), work.batch.context_lens.numpy(), lens.numpy())
    items = prefill_items(seqs, None, config.tile, BLOCK_SIZE, config.rows // group_size)
    on_device = torch.from_numpy(items.reshape(-1)).to(GPU)
    output = query.new_empty(len(query), work.heads * HEAD_DIM)
    scores = KernelScores.of(ScoreFunction(HEAD_DIM**-0.5), GPU)

    def attend(layer: int) -> None:
        cache = work.cache[:, layer]
        prefill_attention(query, cache, work.table, on_device, output, scores, None, config)

    return attend


def kv_write(work: Work) -> Callable[[int], Tensor]:
    rows = torch.arange(work.num_seqs).repeat_interleave(work.new)
    tokens = torch.stack((rows, work.batch.positions), 1).int().flatten().to(GPU)
    changes = HeadChanges(work.rotary, None, None)

    def write(layer: int) -> Tensor:
        cache = work.cache[:, layer]
        query, key, value = work.heads_of_tokens
        return write_kv(query, key, value, tokens, work.table, cache, changes)

    return write


def sdpa(backend: SDPBackend) -> Callable[[Work], Callable[[int], Tensor]]:
    """PyTorch's attention over prompts of equal length; K and V are repeated for GQA."""

    def make(work: Work) -> Callable[[int], Tensor]:
        group_size = work.heads // work.kv_heads
        query, key, value = (
            x.unflatten(0, (work.num_seqs, work.new)).transpose(1, 2).contiguous()
            for x in work.heads_of_tokens
        )
        key, value = (x.repeat_interleave(group_size, 1) for x in (key, value))

        def attend(layer: int) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        return attend

    return make


def varlen(work: Work) -> Callable[[int], object]:
    """PyTorch's FlashAttention over packed prompts; K and V are repeated for GQA."""
    query, key, value = work.heads_of_tokens
    query = query.contiguous()
    key, value = (x.repeat_interleave(work.heads // work.kv_heads, 1) for x in (key, value))
    starts = work.batch.query_starts.to(GPU)
    causal: dict[str, Any] = {"is_causal": True}
    if "window_size" in inspect.signature(varlen_attn).parameters:
        causal = {"window_size": (-1, 0)}
    return lambda layer: varlen_attn(
        query, key, value, starts, starts, work.new, work.new, **causal
    )


def measure_copies() -> Table:
    """Copy-on-write: TB/s read plus written, compared with `index_copy_` in PyTorch."""
    results: Table = {}
    for model, (_, kv_heads, layers, _) in MODELS.items():
        words = layers * kv_heads * 2 * BLOCK_SIZE * HEAD_DIM
        num_blocks = max(160, int(4e9 / words / 2))
        shape = (num_blocks, layers * kv_heads * 2, BLOCK_SIZE, HEAD_DIM)
        cache = torch.empty(shape, dtype=torch.bfloat16, device=GPU).normal_()
        results[model] = {}
        for count in (1, 8, 64):
            pairs = torch.randperm(num_blocks, device=GPU)[: 2 * count].view(count, 2).int()
            sources, targets = pairs.long().unbind(1)
            copies = torch.cat((pairs, torch.full_like(pairs[:, :1], BLOCK_SIZE)), 1)
            moved = 4 * count * words
            ours = seconds(partial(_copy, cache, copies), 1, 10)
            theirs = seconds(partial(_index_copy, cache, sources, targets), 1, 10)
            results[model][f"{count} blocks"] = round(moved / ours / 1e12, 2)
            results[model][f"{count} blocks, torch"] = round(moved / theirs / 1e12, 2)
    return results


def _copy(cache: Tensor, copies: Tensor, _: int) -> None:
    copy_blocks(cache, copies)


def _index_copy(cache: Tensor, sources: Tensor, targets: Tensor, _: int) -> None:
    cache.index_copy_(0, targets, cache[sources])


def measure_swaps() -> Table:
    """GB/s when a request of 1,024 scattered tokens is swapped, and of one contiguous copy."""
    results: Table = {}
    for model, (_, kv_heads, layers, _) in MODELS.items():
        shape = (layers, kv_heads, 2, BLOCK_SIZE, HEAD_DIM)
        count = 1024 // BLOCK_SIZE
        cache = KVCache(4 * count, 4 * count, shape, torch.bfloat16, CudaDevice(GPU))
        num_bytes = count * cache.blocks[0].nbytes
        rng = np.random.default_rng(0)
        on_device, on_host = (1 + rng.permutation(4 * count)[:count] for _ in range(2))
        out = list(zip(on_device.tolist(), on_host.tolist(), strict=True))
        back = [(host, device) for device, host in out]
        results[model] = {
            "out": _swap_rate(cache, num_bytes, swap_out=out),
            "in": _swap_rate(cache, num_bytes, swap_in=back),
        }
        dense, host = cache.blocks[1 : count + 1], cache.swapped[1 : count + 1]
        results[model]["out, one copy"] = _rate(partial(host.copy_, dense, True), num_bytes)
        results[model]["in, one copy"] = _rate(partial(dense.copy_, host, True), num_bytes)
    return results


def _swap_rate(cache: KVCache, num_bytes: int, **moves: Any) -> float:
    plan = StepPlan(0, [], [], [], [], **moves)
    return _rate(lambda: cache.move(plan, []), num_bytes)


def _rate(move: Callable[[], object], num_bytes: int) -> float:
    """GB/s by the host's clock, from the call to the end of the move."""
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        started = time.perf_counter()
        move()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return round(num_bytes / statistics.median(times[2:]) / 1e9, 1)


def measure_plan() -> Table:
    """Microseconds that `plan` takes on the host, for decodes of mixed lengths."""
    results: Table = {}
    for num_seqs in (1, 64, 256):
        work = Work("llama-3-8b 32/8", num_seqs, 1024, new=1)
        lens = np.random.default_rng(0).integers(1, 1024, num_seqs).astype(np.int32)
        work.batch.context_lens.copy_(torch.from_numpy(lens))
        staging = UploadStaging(GPU, 256, 8192)
        batch = replace(work.batch, staging=staging)
        times = []
        for _ in range(50):
            staging.begin()
            started = time.perf_counter()
            work.backend.plan(batch)
            times.append(time.perf_counter() - started)
        results[f"{num_seqs} decodes"] = {"us": round(statistics.median(times) * 1e6, 1)}
    return results


def show(title: str, table: Table) -> None:
    print(title)
    for row, cells in table.items():
        print(f"  {row:<18}" + "  ".join(f"{name} {value:g}" for name, value in cells.items()))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        copy_tb_s = round(copy_bandwidth() / 1e12, 2)
        print(f"device-to-device copy: {copy_tb_s} TB/s")
        rates, times = measure_decode(None)
        fp8_rates, fp8_times = measure_decode(KVScales(0.5, 0.25))
        results = {
            "decode, TB/s of K and V": rates,
            "decode, us": times,
            "decode with FP8 KV, TB/s of K and V": fp8_rates,
            "decode with FP8 KV, us": fp8_times,
            **measure_prefill(),
            "chunks of prompts, TFLOP/s": measure_chunks(None),
            "chunks of prompts with FP8 KV, TFLOP/s": measure_chunks(KVScales(0.5, 0.25)),
            "block copy, TB/s": measure_copies(),
            "swap of 1,024 tokens, GB/s": measure_swaps(),
            "plan": measure_plan(),
        }
    for title, table in results.items():
        show(title, table)
    report("kernels", copy_tb_s=copy_tb_s, results=results)


if __name__ == "__main__":
    main()
