"""Microseconds of a decoder layer of one sequence: a chain of layers in a CUDA graph, by context.

The layers are the model's own, with random weights: what is timed is what a step runs between its
embedding and its head, without the host. Several layers take turns, so that weights come from
memory. With --splits, the keys of a sequence are cut into other numbers of splits, too.

    PYTHONPATH=src python benchmarks/layer_chain.py --models qwen3-30b-a3b --quantization fp8
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from gpu_harness import config_directory, device_seconds, report
from numpy.typing import NDArray
from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder, DecoderLayer
from octavo.models.loader import load_model
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.base import AttentionBatch, LayerPlace
from octavo.ops.communicator import SingleRank
from octavo.ops.cuda.attention import TritonBackend
from octavo.ops.cuda.attention_decode import DecodeConfig

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BLOCK_SIZE = 16
CONTEXTS = (512, 1024, 1040, 1536, 2048, 4096, 8192)
ROUNDS, REPEATS = 7, 12  # medians of so many samples, of so many replays each


class Uploads:
    """Uploads each array by itself."""

    max_num_seqs, max_num_tokens = 1, 1

    def put(
        self, name: str, values: NDArray[Any], capacity: int, of_tokens: bool = False
    ) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE)

    def begin(self) -> None:
        """See Staging.begin."""

    def flush(self, then: object = None) -> None:
        """See Staging.flush."""

    def release(self) -> None:
        """See Staging.release."""


def read_shortened(name: str, num_layers: int, quantization: str) -> ModelConfig:
    """The model with fewer layers."""
    content = json.loads((config_directory(name) / "config.json").read_text())
    text = content.get("text_config", content)
    text["num_hidden_layers"] = num_layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:num_layers]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(content))
        config = read_model_config(directory)
    return config if quantization == "none" else quantized_on_load(config, cast(Any, quantization))


class Chain:
    """Owns a model's layers, and the cache of one sequence."""

    def __init__(self, config: ModelConfig, longest: int) -> None:
        model = cast(Decoder, load_model(config, DTYPE, DEVICE, SingleRank(), "dummy"))
        self.layers = [cast(DecoderLayer, layer) for layer in model.layers]
        specs = model.attention_layers
        shape = TritonBackend.kv_block_shape(BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        num_blocks = -(-longest // BLOCK_SIZE)
        cache = torch.randn((1 + num_blocks, len(specs), *shape), device=DEVICE, dtype=DTYPE)
        places = [LayerPlace(0, i) for i in range(len(specs))]
        self._backend = TritonBackend(specs, places, cache, BLOCK_SIZE, DTYPE)
        self._table = (torch.randperm(num_blocks, device=DEVICE) + 1).to(torch.int32)[None]
        self._residual, hidden = torch.randn(2, 1, config.hidden_size, device=DEVICE, dtype=DTYPE)
        has_experts = hasattr(self.layers[0].mlp, "router")
        self._hidden = hidden.float() if has_experts else hidden  # as the layer before leaves it

    def plan(self, context: int) -> None:
        """Attend to so many tokens, the new one included, from here on."""
        one = torch.ones(1, dtype=torch.int32)
        batch = AttentionBatch(
            query_lens=one,
            context_lens=one * context,
            query_starts=torch.tensor((0, 1), dtype=torch.int32),
            positions=torch.tensor([context - 1]),
            block_tables=[self._table],
            slots=[],
            rows=one - 1,
            staging=Uploads(),
        )
        self._backend.plan(batch)

    def run(self, count: int) -> None:
        """So many layers, which take turns."""
        hidden, residual = cast(Any, (self._hidden, self._residual))
        for i in range(count):
            layer = self.layers[i % len(self.layers)]
            hidden, residual = layer.forward(hidden, residual, self._backend)

    def microseconds(self, context: int) -> float:
        """Of a layer."""
        count = 3 * len(self.layers)
        self.plan(context)
        self.run(count)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(count)

        def replays() -> None:
            for _ in range(REPEATS):
                graph.replay()

        replays()
        samples = [device_seconds(replays) for _ in range(ROUNDS)]
        return 1e6 * statistics.median(samples) / (REPEATS * count)


def measure(chain: Chain, contexts: Sequence[int], splits: int) -> dict[int, float]:
    """By context; splits: into how many a sequence that is not long is cut, 0: by the rule."""
    if not splits:
        return {context: round(chain.microseconds(context), 2) for context in contexts}
    with patch.object(DecodeConfig, "splits_of_each", lambda *_: splits):
        return measure(chain, contexts, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["qwen3-30b-a3b"])
    parser.add_argument("--quantization", choices=("none", "fp8", "int4"), default="none")
    parser.add_argument("--contexts", nargs="*", type=int, default=CONTEXTS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--splits", nargs="*", type=int, default=[], help="besides the rule's")
    arguments = parser.parse_args()
    found: dict[str, dict[int, float]] = {}
    for model in arguments.models:
        config = read_shortened(model, arguments.layers, arguments.quantization)
        with torch.inference_mode():
            chain = Chain(config, max(arguments.contexts))
            for splits in (0, *arguments.splits):
                name = f"{model}, {splits} splits" if splits else model
                found[name] = measure(chain, arguments.contexts, splits)
                print(name, *(f"{at}: {us:.2f}" for at, us in found[name].items()), flush=True)
        del chain
    report("layer_chain", quantization=arguments.quantization, microseconds=found)


if __name__ == "__main__":
    main()
