"""Errors of bfloat16 logits against float32: octavo's, compared with those of torch's own forward.

Every model family is measured on random weights in which a few channels are 100 times as large as
the others, in the residual stream and in the feed-forward block. The large channels of the
feed-forward block are pairs that nearly cancel in the down projection, or independent channels with
`--weights outliers`. A cell is an error in percent of the logits' standard deviation: the mean over
all logits, or the largest error of a seed, each averaged over the seeds. octavo is worse in a cell
(*) if its error is larger by more than 2% and by more than three standard errors of the difference
over the seeds; where both round alike, either may be ahead by chance. Prints a table and one JSON
line; the exit status is 1 if octavo is worse in any cell.

    PYTHONPATH=src python benchmarks/logits_error.py                       # on this machine's CPU
    PYTHONPATH=src python benchmarks/logits_error.py --device cuda --partial-sums all --times

`--partial-sums` chooses how a GPU keeps the split-K partial sums that a norm adds up
(ops/cuda/linear.py). Several choices are compared side by side: float32, bfloat16, and "halved",
which is float32 with half as many partial sums. `--torch transformers` uses that library's models
as torch's forward; by default the forward is written out below, with the same roundings.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from attention_work import DirectStaging
from torch import Tensor, nn

from octavo.layers.linear import LinearMethod, PlainLinear
from octavo.layers.norm import LayerNorm, Norm
from octavo.layers.rotary import rotary_table
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.loader import build_model, weight_targets
from octavo.models.registry import read_model_config
from octavo.ops import (
    AttentionBatch,
    KVScales,
    LayerPlace,
    LayerSpec,
    cached_dtype,
    load_backend,
    make_backend,
)
from octavo.ops.communicator import SingleRank
from octavo.ops.epilogue import Epilogue, apply_epilogue

FAMILIES = ("gpt2", "opt", "llama", "mistral", "qwen2", "qwen3")
OUTLIER = 100.0
NUM_OUTLIERS = 3
VOCAB_SIZE = 512
BLOCK_SIZE = 16
NUM_STANDARD_ERRORS, MARGIN = 3, 0.02
WINDOW = 20  # Mistral's
# Split-K partial sums: their dtype, and the divisor of their number.
PARTIAL_SUMS = {
    "float32": (torch.float32, 1),
    "bfloat16": (torch.bfloat16, 1),
    "halved": (torch.float32, 2),
}
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Scale:
    """The sizes of models and batches."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int
    prefills: tuple[int, ...]  # prompt lengths
    decodes: tuple[int, ...]  # numbers of sequences
    context: int  # tokens before the decoded one
    seeds: int


SCALES = {
    # Qwen3-0.6B's widths, for whose GEMMs both kinds of split-K were measured to be faster.
    "cuda": Scale(1024, 16, 8, 128, 3072, 4, (64, 256, 512), (1, 8, 16, 32, 64, 128, 256), 24, 6),
    "cpu": Scale(256, 4, 2, 64, 768, 3, (64, 256), (1, 16, 64), 24, 6),
    "tiny": Scale(64, 2, 1, 32, 96, 2, (17,), (1, 3), 8, 2),
}


def model_config(family: str, scale: Scale) -> ModelConfig:
    """The config of a small model of `family`, as read from a model directory."""
    positions = max(*scale.prefills, scale.context + 1) + 1
    fields: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": scale.hidden,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": scale.hidden // scale.head_dim,
        "max_position_embeddings": positions,
        "dtype": "bfloat16",
    }
    if family == "gpt2":
        fields |= {"n_inner": scale.inner}
    elif family == "opt":
        fields |= {"ffn_dim": scale.inner}
    else:
        fields |= {"intermediate_size": scale.inner, "num_key_value_heads": scale.kv_heads}
        fields |= {"num_attention_heads": scale.heads, "head_dim": scale.head_dim}
    if family == "mistral":
        fields |= {"sliding_window": WINDOW}
    if family == "qwen2":  # its config has no head_dim
        fields |= {"num_attention_heads": scale.hidden // scale.head_dim}
        fields |= {"num_key_value_heads": max(1, scale.hidden // scale.head_dim // 2)}
        del fields["head_dim"]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(fields))
        return read_model_config(directory)


# ---------------------------------------------------------------- weights


def random_model(config: ModelConfig, device: torch.device, seed: int, cancels: bool) -> CausalLM:
    """A bfloat16 model with outliers, not yet packed. Its weights are the same on every device."""
    model = build_model(config, BF16, device, SingleRank())
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor, deviation: float) -> Tensor:
        return (torch.randn(like.shape, generator=generator) * deviation).to(like)

    for module in model.modules():
        if isinstance(module, PlainLinear) and module.weight is not model.embedding.weight:
            assert module.weight is not None
            module.weight.copy_(normal(module.weight, module.weight.shape[1] ** -0.5))
        elif isinstance(module, nn.Module) and type(module).__name__.endswith("Embedding"):
            module.get_parameter("weight").copy_(normal(module.get_parameter("weight"), 1.0))
        if isinstance(module, Norm) and module.weight is not None:
            module.weight.copy_(1 + normal(module.weight, 0.1))
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            bias.copy_(normal(bias, 0.05))
    outliers = torch.randperm(config.hidden_size, generator=generator)[:NUM_OUTLIERS].to(device)
    model.embedding.weight[:, outliers] *= OUTLIER
    for layer in model.layers:  # type: ignore[union-attr]
        for norm in (layer.attention_norm, layer.mlp_norm):
            norm.weight[outliers] /= OUTLIER
        _add_outlier_pairs(layer.mlp.up, layer.mlp.down, generator, cancels)
    model.norm.weight[outliers] /= OUTLIER  # type: ignore[index, union-attr, operator]
    return model


def _add_outlier_pairs(
    up: PlainLinear, down: PlainLinear, generator: torch.Generator, cancels: bool
) -> None:
    """Make pairs of inner channels large, one in each half; those that cancel are nearly equal."""
    assert up.weight is not None
    assert down.weight is not None
    size = down.weight.shape[1]
    for _ in range(NUM_OUTLIERS):
        first = int(torch.randint(size // 2, (), generator=generator))
        second = size // 2 + int(torch.randint(size - size // 2, (), generator=generator))
        down.weight[:, first] *= OUTLIER
        if not cancels:
            down.weight[:, second] *= OUTLIER
            continue
        for begin in range(0, up.weight.shape[0], size):  # the gate rows, then the up rows
            up.weight[begin + second] = up.weight[begin + first]
            if up.bias is not None:
                up.bias[begin + second] = up.bias[begin + first]
        down.weight[:, second] = -0.99 * down.weight[:, first]


# ---------------------------------------------------------------- torch's own forward


class PlainTorch:
    """Owns a copy of a model's weights in one dtype; rounds where transformers' models do.

    In float32 it is the reference: nothing is fused, and attention is written out.
    """

    def __init__(self, model: CausalLM, config: ModelConfig, dtype: torch.dtype) -> None:
        self._model: Any = copy.deepcopy(model).to(dtype)
        self._config = config
        self._dtype = dtype
        self._past: list[tuple[Tensor, Tensor]] = []

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """Append ids [num_seqs, n] to all sequences -> float32 [num_seqs, n, vocab_size]."""
        model, config = self._model, self._config
        begin = self._past[0][0].shape[2] if self._past else 0
        positions = torch.arange(begin, begin + ids.shape[1], device=ids.device)
        hidden = F.embedding(ids, model.embedding.weight)
        if config.positions is not None:
            places = positions + config.positions.offset
            hidden = hidden + F.embedding(places, model.positions.weight)
        past, self._past = self._past, []
        for i, layer in enumerate(model.layers):
            attended = self._attend(
                i, layer, self._norm(layer.attention_norm, hidden), positions, past
            )
            hidden = hidden + self._linear(layer.attention.output, attended)
            inner = self._linear(layer.mlp.up, self._norm(layer.mlp_norm, hidden))
            if layer.mlp.epilogue == Epilogue.SILU_MUL:
                gate, inner = inner.chunk(2, dim=-1)
                inner = F.silu(gate) * inner
            else:
                inner = apply_epilogue(inner, layer.mlp.epilogue)
            hidden = hidden + self._linear(layer.mlp.down, inner)
        return self._linear(model.head.linear, self._norm(model.norm, hidden)).float()

    def forget(self) -> None:
        """Drop the KV cache: the next tokens begin new sequences."""
        self._past = []

    def _linear(self, linear: Any, x: Tensor) -> Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        if isinstance(norm, LayerNorm):
            return F.layer_norm(x, (norm.config.size,), norm.weight, norm.bias, norm.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return norm.weight * wide.to(x.dtype)

    def _attend(
        self,
        index: int,
        layer: Any,
        hidden: Tensor,
        positions: Tensor,
        past: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        spec: LayerSpec = layer.attention.spec
        num_seqs, num_new, _ = hidden.shape
        heads = self._linear(layer.attention.qkv, hidden).view(num_seqs, num_new, -1, spec.head_dim)
        counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        query, key, value = heads.transpose(1, 2).split(counts, dim=1)
        if layer.attention.head_norms is not None:
            query_norm, key_norm, _ = layer.attention.head_norms
            query, key = self._norm(query_norm, query), self._norm(key_norm, key)
        if layer.attention.rotary is not None:
            query, key = self._rotate(query, positions), self._rotate(key, positions)
        if past:
            key = torch.cat((past[index][0], key), dim=2)
            value = torch.cat((past[index][1], value), dim=2)
        self._past.append((key, value))
        group_size = spec.num_heads // spec.num_kv_heads
        key, value = (x.repeat_interleave(group_size, 1) for x in (key, value))
        distance = positions[:, None] - torch.arange(key.shape[2], device=positions.device)
        mask = distance >= 0
        window = spec.window
        if window is not None:
            mask &= distance < window
        scale = spec.scores.scale
        if self._dtype == FP32:
            scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask, -math.inf)
            attended = scores.softmax(-1) @ value
        else:
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale
            )
        return attended.transpose(1, 2).reshape(num_seqs, num_new, -1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        config = self._config
        table = rotary_table(config.rotaries[0], config.max_model_len, x.device)
        cos, sin = (
            torch.cat((half, half), dim=-1)[positions].to(x.dtype)
            for half in (table.cos, table.sin)
        )
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


class TransformersTorch:
    """transformers' own model, with its fused attention."""

    def __init__(self, model: CausalLM, config: ModelConfig, dtype: torch.dtype) -> None:
        import transformers

        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(_published(config)))
            theirs = transformers.AutoConfig.from_pretrained(directory)
        device = next(model.parameters()).device
        self._model = transformers.AutoModelForCausalLM.from_config(
            theirs, dtype=dtype, attn_implementation="sdpa"
        )
        own = self._model.state_dict()
        prefixes = ("", "model.", "transformer.", "model.decoder.")
        for name, target in weight_targets(model, config).items():
            full = next(prefix + name for prefix in prefixes if prefix + name in own)
            for tensor, index in target.slices:
                own[full][index].copy_(tensor)
        self._model = self._model.to(device).eval()
        self._past: Any = None

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """See PlainTorch.logits."""
        out = self._model(ids, past_key_values=self._past, use_cache=True)
        self._past = out.past_key_values
        logits: Tensor = out.logits.float()
        return logits

    def forget(self) -> None:
        """See PlainTorch.forget."""
        self._past = None


def _published(config: ModelConfig) -> dict[str, Any]:
    """The fields of transformers' config.json for a model of these shapes."""
    fields: dict[str, Any] = {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.layers[0].attention.num_heads,
        "num_key_value_heads": config.layers[0].attention.num_kv_heads,
        "head_dim": config.layers[0].attention.head_dim,
        "max_position_embeddings": config.max_model_len,
        "word_embed_proj_dim": config.hidden_size,
    }
    for name in ("n_inner", "ffn_dim", "intermediate_size"):
        fields[name] = config.layers[0].mlp.intermediate_size
    return fields | {"sliding_window": WINDOW if config.family == "mistral" else None}


# ---------------------------------------------------------------- octavo


class Octavo:
    """Owns octavo's model, packed as for serving, and a paged KV cache."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        backend: str,
        max_num_seqs: int,
        kv_scales: KVScales | None = None,
    ) -> None:
        """kv_scales: of an FP8 KV cache."""
        self._model = copy.deepcopy(model)
        for module in self._model.modules():
            if isinstance(module, LinearMethod):
                module.finalize()
        self._device = model.embedding.weight.device
        layers = [replace(layer, kv_scales=kv_scales) for layer in model.attention_layers]
        backend_class = load_backend(backend)
        blocks_per_seq = -(-config.max_model_len // BLOCK_SIZE)
        attention = config.layers[0].attention
        shape = backend_class.kv_block_shape(BLOCK_SIZE, attention.num_kv_heads, attention.head_dim)
        size = (1 + max_num_seqs * blocks_per_seq, len(layers), *shape)
        cache = torch.zeros(size, dtype=cached_dtype(layers, BF16), device=self._device)
        places = [LayerPlace(0, i) for i in range(len(layers))]
        self._attention = make_backend(backend_class, layers, places, cache, BLOCK_SIZE, BF16)
        tables = 1 + torch.arange(max_num_seqs * blocks_per_seq, dtype=torch.int32)
        self._tables = tables.view(max_num_seqs, blocks_per_seq)
        self._length = 0

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        """See PlainTorch.logits."""
        num_seqs, num_new = ids.shape
        begin, self._length = self._length, self._length + num_new
        positions = torch.arange(begin, self._length)
        tables = self._tables[:num_seqs]
        slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = AttentionBatch(
            query_lens=torch.full((num_seqs,), num_new, dtype=torch.int32),
            context_lens=torch.full((num_seqs,), self._length, dtype=torch.int32),
            query_starts=torch.tensor([0, *accumulate([num_new] * num_seqs)], dtype=torch.int32),
            positions=positions.repeat(num_seqs),
            block_tables=[tables.to(self._device)],
            slots=[slots.flatten()],
            staging=DirectStaging(self._device),
        )
        self._attention.plan(batch)
        places = batch.positions.to(self._device)
        hidden = self._model.forward(ids.flatten(), places, self._attention)
        return self._model.logits(hidden).float().view(num_seqs, num_new, -1)

    def forget(self) -> None:
        """See PlainTorch.forget."""
        self._length = 0


# ---------------------------------------------------------------- errors


Errors = dict[
    str, dict[str, list[tuple[float, float]]]
]  # cell -> implementation -> (mean, largest) of each seed


def cells(scale: Scale) -> dict[str, tuple[int, int, bool]]:
    """name -> (sequences, tokens that precede the last step, whether that step is a decode)."""
    prefills = {f"prefill {n}": (1, n, False) for n in scale.prefills}
    return prefills | {f"decode {n}": (n, scale.context, True) for n in scale.decodes}


def run_cell(model: Any, ids: Tensor, decodes: bool) -> Tensor:
    """The logits that are compared, flat."""
    model.forget()
    if not decodes:
        logits: Tensor = model.logits(ids)
        return logits.flatten()
    model.logits(ids[:, :-1])
    last: Tensor = model.logits(ids[:, -1:])
    return last.flatten()


def measure_family(
    family: str, scale: Scale, device: torch.device, args: argparse.Namespace
) -> Errors:
    config = model_config(family, scale)
    errors: Errors = {name: {} for name in cells(scale)}
    for seed in range(args.seeds or scale.seeds):
        model = random_model(config, device, seed, args.weights == "cancelling")
        plain = TransformersTorch if args.torch == "transformers" else PlainTorch
        octavo = Octavo(model, config, args.backend, max(scale.decodes))
        reference, peer = PlainTorch(model, config, FP32), plain(model, config, BF16)
        generator = torch.Generator().manual_seed(1000 + seed)
        for name, (num_seqs, before, decodes) in cells(scale).items():
            shape = (num_seqs, before + decodes)
            ids = torch.randint(VOCAB_SIZE, shape, generator=generator).to(device)
            expected = run_cell(reference, ids, decodes)
            rows = {"torch": run_cell(peer, ids, decodes)}
            for kind in args.partial_sums:
                with partial_sums_in(kind):
                    rows[f"octavo ({kind} partial sums)" if kind else "octavo"] = run_cell(
                        octavo, ids, decodes
                    )
            unit = 100 / expected.std().item()
            for implementation, logits in rows.items():
                error = (logits - expected).abs()
                pair = (round(error.mean().item() * unit, 4), round(error.max().item() * unit, 4))
                errors[name].setdefault(implementation, []).append(pair)
    return errors


@contextmanager
def partial_sums_in(name: str) -> Iterator[None]:
    """Make the GPU keep split-K partial sums as PARTIAL_SUMS says; "" for a CPU, which has none."""
    if not name:
        yield
        return
    from octavo.ops.cuda import linear
    from octavo.ops.cuda.linear_table import choose_tiles

    dtype, divisor = PARTIAL_SUMS[name]

    def fewer(*shape: Any) -> Any:
        tiles = choose_tiles(*shape)
        return tiles and replace(tiles, splits=max(1, tiles.splits // divisor))

    with (
        patch.object(linear, "PARTIAL_DTYPE", dtype),
        patch.object(linear, "choose_tiles", fewer),
    ):
        yield


def is_worse(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether `ours` exceed `theirs`, seed by seed, by more than chance explains."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    noise = statistics.stdev(differences) / len(differences) ** 0.5
    margin = max(NUM_STANDARD_ERRORS * noise, MARGIN * statistics.mean(theirs))
    return statistics.mean(differences) > margin


def show(family: str, errors: Errors) -> int:
    """Print a row per cell; returns the number of cells in which octavo is worse."""
    num_worse = 0
    for name, implementations in errors.items():
        theirs = implementations["torch"]
        texts = []
        for implementation, ours in implementations.items():
            columns = list(zip(*ours, strict=True))
            worse = [
                is_worse(column, theirs_column)
                for column, theirs_column in zip(columns, zip(*theirs, strict=True), strict=True)
            ]
            num_worse += sum(worse) if implementation != "torch" else 0
            texts += [
                f"{statistics.mean(column):.3f}{'*' if flag and implementation != 'torch' else ''}"
                for column, flag in zip(columns, worse, strict=True)
            ]
        print(f"| {family} | {name} | {' | '.join(texts)} |", flush=True)
    return num_worse


def layer_times(kinds: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds per layer without attention: model -> tokens -> kind of partial sums."""
    import dense_kernels as dense

    result: dict[str, dict[str, dict[str, float]]] = {}
    for model, (_, num_layers, shapes) in dense.MODELS.items():
        weights = [[dense.weight_of(shape) for shape in shapes] for _ in range(num_layers)]
        result[model] = {}
        for count in (8, 16, 32, 64, 128, 256, 384, 512):
            times = {}
            for kind in kinds:
                with partial_sums_in(kind):
                    times[kind] = dense.Layers(model, weights, count).octavo_time()
            result[model][str(count)] = times
        print(f"{model}: {result[model]}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", choices=tuple(SCALES), help="default: that of the device")
    parser.add_argument("--backend", help="attention backend; default: the fast one of the device")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument(
        "--partial-sums", default="float32", help=f"for cuda: {', '.join(PARTIAL_SUMS)}, or all"
    )
    parser.add_argument("--weights", choices=("cancelling", "outliers"), default="cancelling")
    parser.add_argument("--torch", choices=("plain", "transformers"), default="plain")
    parser.add_argument("--seeds", type=int, help="at least 2; default: that of the scale")
    parser.add_argument(
        "--times", action="store_true", help="also print times of layers, by kind of partial sums"
    )
    args = parser.parse_args()
    device = torch.device(args.device)
    kinds = ",".join(PARTIAL_SUMS) if args.partial_sums == "all" else args.partial_sums
    args.partial_sums = kinds.split(",") if device.type == "cuda" else [""]
    args.backend = args.backend or ("triton" if device.type == "cuda" else "cpu")
    scale = SCALES[args.scale or args.device]
    began, num_worse = time.monotonic(), 0
    names = [
        "torch",
        *(f"octavo ({kind} partial sums)" if kind else "octavo" for kind in args.partial_sums),
    ]
    print("| model | step | " + " | ".join(f"{name}: mean | largest" for name in names) + " |")
    print("|---" * (2 + 2 * len(names)) + "|")
    all_errors: dict[str, Errors] = {}
    for family in args.families.split(","):
        all_errors[family] = measure_family(family, scale, device, args)
        num_worse += show(family, all_errors[family])
    facts: dict[str, Any] = {
        "benchmark": "logits_error",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "against": args.torch,
        "weights": args.weights,
        "cells": 2 * len(names[1:]) * len(cells(scale)) * len(all_errors),
        "worse": num_worse,
        "percent": all_errors,
    }
    if args.times:
        facts["layer_us"] = layer_times(args.partial_sums)
    print(json.dumps(facts | {"seconds": round(time.monotonic() - began, 1)}))
    return int(num_worse > 0)


if __name__ == "__main__":
    sys.exit(main())
