"""A tiny model of random weights, and helpers that drive a worker by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from octavo.config import make_config
from octavo.core.kv.specs import FullAttention, KVLayout, KVSpec, SlidingWindow, group_layers
from octavo.core.step import OpenedRow, SamplingSpec, StepPlan, StepResult, TableWrite
from octavo.models.config import TokenSize, dense_token_size
from octavo.ops import AttentionBackend, LayerSpec, ScoreFunction, load_backend
from octavo.ops.communicator import SingleRank
from octavo.worker.device.cpu import CpuDevice
from octavo.worker.kv_cache import KVCache
from octavo.worker.model_runner import ModelRunner

VOCAB_SIZE = 50
HEADS = (4, 2, 8)  # query heads, KV heads, and their elements
GREEDY = SamplingSpec(temperature=0.0)


class FakeModel:
    """Attention layers with learned projections and positions, and nothing else."""

    num_hit_experts = None

    def __init__(
        self,
        windows: Sequence[int | None] = (None, None),
        seed: int = 0,
        device: torch.device | str = "cpu",
        heads: Sequence[tuple[int, int, int]] | None = None,
    ) -> None:
        """heads: as HEADS, by layer, with as many elements of all queries together; None: HEADS."""
        generator = torch.Generator().manual_seed(seed)
        self.device = device

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device) * 0.5

        size = HEADS[0] * HEADS[2]
        self.attention_layers = [
            LayerSpec(i, *sizes, ScoreFunction(sizes[2] ** -0.5), window)
            for i, (window, sizes) in enumerate(
                zip(windows, heads or [HEADS] * len(windows), strict=True)
            )
        ]
        self.embedding = weights(VOCAB_SIZE, size) * 2
        self.positions = weights(512, size)
        self.qkv = [
            weights(size, size + 2 * layer.num_kv_heads * layer.head_dim)
            for layer in self.attention_layers
        ]
        self.forward_calls: list[int] = []
        self.config = SimpleNamespace(
            encoder=None,
            longest_encoder_input=lambda _: 0,
            max_model_len=512,
            vocab_size=VOCAB_SIZE,
            hidden_size=size,
            kv_layout=self.kv_layout,
            kv_sources=range(len(windows)),
        )

    def kv_layout(self, token_size: TokenSize = dense_token_size) -> KVLayout:
        """As ModelDescription.kv_layout."""
        layers = self.attention_layers
        specs: list[KVSpec | None] = [
            FullAttention() if layer.window is None else SlidingWindow(layer.window)
            for layer in layers
        ]
        return group_layers(
            specs, [token_size(layer.num_kv_heads, layer.head_dim) for layer in layers]
        )

    def parameters(self) -> Iterator[Tensor]:
        return iter([self.embedding])

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        logits_indices: Tensor | None = None,
    ) -> Tensor:
        self.forward_calls.append(len(input_ids))
        hidden = self.embedding[input_ids] + self.positions[positions]
        for layer, weights in zip(self.attention_layers, self.qkv, strict=True):
            query, key, value = _heads(layer, hidden @ weights)
            hidden = torch.tanh(hidden + attention.forward(layer.layer_id, query, key, value))
        return hidden if logits_indices is None else hidden[logits_indices]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.T

    def expected_logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [num_tokens, VOCAB_SIZE], computed densely without any cache."""
        return self.logits(self.expected_hidden(token_ids))

    def expected_hidden(self, token_ids: Sequence[int]) -> Tensor:
        """What the logits are computed from: float32 [num_tokens, hidden_size]."""
        length = len(token_ids)
        hidden = self.embedding[torch.tensor(token_ids)] + self.positions[:length]
        places = torch.arange(length, device=self.device)
        distance = places[:, None] - places[None, :]
        for layer, weights in zip(self.attention_layers, self.qkv, strict=True):
            visible = (distance >= 0) & (distance < (layer.window or length))
            query, key, value = _heads(layer, hidden @ weights)
            repeats = layer.num_heads // layer.num_kv_heads
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            scores = torch.einsum("qhd,khd->hqk", query, key) * layer.scores.scale
            probs = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", probs, value).reshape(length, -1)
            hidden = torch.tanh(hidden + attended)
        return hidden


def _heads(layer: LayerSpec, projected: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values [num_tokens, heads, elements]."""
    heads = projected.view(len(projected), -1, layer.head_dim)
    return heads.split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), dim=1)


def make_runner(
    model: FakeModel,
    block_size: int = 4,
    num_blocks: int = 200,
    num_swap_blocks: int = 50,
    backend_name: str = "reference",
) -> tuple[ModelRunner, KVCache]:
    config = make_config("fake", block_size=block_size, max_num_seqs=16)
    runner = ModelRunner(
        config,
        model.config,
        model,
        load_backend(backend_name),
        (num_blocks, num_swap_blocks),
        CpuDevice(),
        SingleRank(),
    )
    return runner, runner.kv_cache


class Driver:
    """Plays the core for plain sequences: each has its own blocks, taken in order."""

    def __init__(self, runner: ModelRunner, block_sizes: Sequence[int] = (4,)) -> None:
        """`block_sizes`: tokens per block, by KV group."""
        self.runner = runner
        self.block_sizes = block_sizes
        self.next_block = 1
        self.step_id = 0
        self.lengths: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.held: dict[int, list[int]] = {}  # blocks, by group

    def opened(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        sampling: SamplingSpec = GREEDY,
        num_prompt_tokens: int | None = None,
        seed: int = 0,
        sample_index: int = 0,
        num_draws: int = 1,
    ) -> OpenedRow:
        self.lengths[seq_id] = len(token_ids)
        self.computed[seq_id] = 0
        self.held[seq_id] = [0] * len(self.block_sizes)
        return OpenedRow(
            seq_id,
            tuple(token_ids),
            len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
            0,
            sampling,
            seed,
            sample_index,
            num_draws,
        )

    def step(
        self,
        scheduled: dict[int, int],
        opened: Sequence[OpenedRow] = (),
        expanded: Sequence[int] = (),
    ) -> StepResult:
        """Compute so many tokens of each sequence; those that reach their end are sampled."""
        writes = []
        ending = []
        for seq_id, num_tokens in scheduled.items():
            end = self.computed[seq_id] + num_tokens
            held = self.held[seq_id]
            for group, size in enumerate(self.block_sizes):
                needed = -(-end // size) - held[group]
                if needed > 0:
                    ids = tuple(range(self.next_block, self.next_block + needed))
                    self.next_block += needed
                    writes.append(TableWrite(seq_id, group, held[group], ids))
                    held[group] += needed
            self.computed[seq_id] = end
            if end == self.lengths[seq_id]:
                ending.append(seq_id)
        sampled = [seq_id for seq_id in ending if seq_id not in expanded]
        for seq_id in sampled:
            self.lengths[seq_id] += 1
        plan = StepPlan(
            step_id=self.step_id,
            seq_ids=list(scheduled),
            num_scheduled_tokens=list(scheduled.values()),
            sampled=sampled,
            expanded=[seq_id for seq_id in ending if seq_id in expanded],
            opened=list(opened),
            table_writes=writes,
        )
        self.step_id += 1
        return self.runner.submit(plan).result()
