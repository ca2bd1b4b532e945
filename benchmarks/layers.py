"""A model's layers in a decode step at context 1,024 (--context), without its head.

Some layers with random weights, as the engine makes them, are replayed in a CUDA graph: embedding,
layers, last norm. There are enough of them that weights come from memory. Tokens are random ones,
and so choose different experts; those that are hit are counted. --profile writes where the time
goes, from the end of each kernel to that of the next.

    PYTHONPATH=src python benchmarks/layers.py --batches 1 8 64     # on a GPU
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import step_profile
import torch
from attention_work import GPU, DirectStaging
from gpu_harness import config_directory, copy_bandwidth, device_seconds, report
from torch import Tensor

from octavo.config import QuantizationName
from octavo.models.base import CausalLM
from octavo.models.loader import load_model
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops import AttentionBackend, AttentionBatch, LayerPlace, load_backend, make_backend
from octavo.ops.communicator import SingleRank

DTYPE = torch.bfloat16
BLOCK_SIZE = 16
VOCABULARY = 1024  # rows of the embedding, few so that the head takes no memory
WARM_UP_SECONDS = 0.05
ROUNDS = 9


class Chain:
    """Owns a model of a few layers, and a KV cache of random keys and values."""

    def __init__(
        self,
        model: str,
        num_layers: int,
        context: int,
        most_seqs: int,
        quantization: QuantizationName | None = None,
    ) -> None:
        config = read_model_config(config_directory(model))
        if quantization is not None:
            config = quantized_on_load(config, quantization)
        config = replace(config, layers=config.layers[:num_layers], vocab_size=VOCABULARY)
        self.num_layers = num_layers
        self._context = context
        self.model: CausalLM = load_model(config, DTYPE, GPU, SingleRank(), "dummy")
        kind = load_backend("triton")
        layout = config.kv_layout()
        blocks = -(-context // BLOCK_SIZE)
        groups = len(layout.groups)
        shape = (groups * most_seqs * blocks + 1, BLOCK_SIZE, layout.token_size)
        self._cache = torch.empty(shape, dtype=DTYPE, device=GPU).normal_()
        ids = torch.randperm(groups * most_seqs * blocks, device=GPU).int() + 1
        self._tables = list(ids.view(groups, most_seqs, blocks).unbind())
        layers = self.model.attention_layers
        places, sources = layout.places(), config.kv_sources
        layer_places = [LayerPlace(*places[sources[each.layer_id]]) for each in layers]
        self.backend: AttentionBackend = make_backend(
            kind, layers, layer_places, self._cache, BLOCK_SIZE, DTYPE
        )

    def prepare(self, num_seqs: int) -> Callable[[], Tensor]:
        """What computes one token of so many sequences, as often as it is called, until the next
        batch is prepared."""
        positions = torch.full((num_seqs,), self._context - 1)
        self.backend.plan(
            AttentionBatch(
                query_lens=torch.ones(num_seqs, dtype=torch.int32),
                context_lens=torch.full((num_seqs,), self._context, dtype=torch.int32),
                query_starts=torch.arange(num_seqs + 1, dtype=torch.int32),
                positions=positions,
                block_tables=self._tables,
                slots=[],
                rows=torch.arange(num_seqs, dtype=torch.int32),
                staging=DirectStaging(),
            )
        )
        tokens = torch.randint(VOCABULARY, (num_seqs,), device=GPU)
        on_device = positions.to(GPU)
        return lambda: self.model.forward(tokens, on_device, self.backend)

    def hit(self, work: Callable[[], object]) -> float:
        """How many experts of a layer a step hits."""
        counter = self.model.num_hit_experts
        if counter is None:
            return 0.0
        before = int(counter)
        work()
        return (int(counter) - before) / self.num_layers


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def seconds_in_turns(graphs: list[torch.cuda.CUDAGraph], rounds: int = ROUNDS) -> list[list[float]]:
    """Seconds of a replay of each graph, in each of some rounds; in each round they take turns."""
    times: list[list[float]] = [[] for _ in graphs]
    for graph in graphs:
        graph.replay()
    repeats = max(1, int(WARM_UP_SECONDS / device_seconds(graphs[0].replay)))
    for number in range(rounds):
        order = range(len(graphs)) if number % 2 else reversed(range(len(graphs)))
        for i in order:
            replay = graphs[i].replay
            replay()
            taken = device_seconds(lambda: [replay() for _ in range(repeats)])  # noqa: B023
            times[i].append(taken / repeats)
    return times


def profile(graph: torch.cuda.CUDAGraph) -> tuple[dict[str, float], str]:
    """See step_profile.summary."""
    graph.replay()
    torch.cuda.synchronize()
    with step_profile.profile() as profiler:
        for _ in range(step_profile.STEPS):
            graph.replay()
        torch.cuda.synchronize()
    return step_profile.summary(profiler, step_profile.STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="gpt-oss-20b-mxfp4")
    parser.add_argument("--quantization", choices=get_args(QuantizationName))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--profile", metavar="FILE", help="write tables of kernels to FILE.BATCH")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    torch.manual_seed(0)
    chain = Chain(
        arguments.model,
        arguments.layers,
        arguments.context,
        max(arguments.batches),
        arguments.quantization,
    )
    results = {}
    for batch in arguments.batches:
        work = chain.prepare(batch)
        work()
        hit = chain.hit(work)
        graph = captured(work)
        (times,) = seconds_in_turns([graph])
        layer = 1e6 * statistics.median(times) / chain.num_layers
        results[str(batch)] = {"us_of_a_layer": round(layer, 2), "experts_hit": round(hit, 1)}
        print(f"batch {batch:>4}: {layer:8.2f} us of a layer, {hit:.1f} experts hit", flush=True)
        if arguments.profile:
            kinds, table = profile(graph)
            Path(f"{arguments.profile}.{batch}").write_text(table)
            print(f"            microseconds: {step_profile.describe(kinds)}", flush=True)
    facts = {
        name: getattr(arguments, name) for name in ("model", "quantization", "layers", "context")
    }
    report("layers", copy_tb_s=round(bandwidth / 1e12, 3), **facts, batches=results)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
