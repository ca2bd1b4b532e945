"""Runs a model on a few sequences with the reference attention backend, without a worker."""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import Tensor

from octavo.models.base import CausalLM
from octavo.ops import AttentionBatch, EncodedInputs, LayerPlace, load_backend, make_backend

BLOCK_SIZE = 8


class DenseHarness:
    """Owns a KV cache in which sequence i has the consecutive blocks i * n + 1 .. i * n + n, for
    its own tokens and, in layers that read an encoder, for those of its encoder input."""

    def __init__(self, model: CausalLM, max_len: int, max_seqs: int = 1) -> None:
        layers = model.attention_layers
        backend = load_backend("reference")
        dtype = next(model.parameters()).dtype
        blocks_per_seq = -(-max_len // BLOCK_SIZE)
        shapes = [
            backend.kv_block_shape(BLOCK_SIZE, layer.num_kv_heads, layer.head_dim)
            for layer in layers
        ]
        places, end = [], 0
        for layer, shape in zip(layers, shapes, strict=True):
            size = math.prod(shape)
            index = -(-end // size)  # a layer's part begins at a multiple of its size
            places.append(LayerPlace(int(layer.reads_encoder), index))
            end = (index + 1) * size
        kv_cache = torch.zeros(1 + max_seqs * blocks_per_seq, end, dtype=dtype)
        self.model = model
        self.attention = make_backend(backend, layers, places, kv_cache, BLOCK_SIZE)
        self.tables = 1 + torch.arange(max_seqs * blocks_per_seq, dtype=torch.int32).view(
            max_seqs, blocks_per_seq
        )
        self.lengths = [0] * max_seqs
        self.encoder_lens = torch.zeros(max_seqs, dtype=torch.int32)

    @torch.inference_mode()
    def encode(self, inputs: dict[int, list[int]]) -> None:
        """Run the encoder for sequences, of which it is the first step."""
        counts = [len(ids) for ids in inputs.values()]
        rows = list(inputs)
        self.encoder_lens[rows] = torch.tensor(counts, dtype=torch.int32)
        slots = torch.cat([self._slots(seq, range(n)) for seq, n in zip(rows, counts, strict=True)])
        positions = torch.cat([torch.arange(count) for count in counts])
        places = EncodedInputs(
            lens=torch.tensor(counts, dtype=torch.int32),
            starts=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            positions=positions,
            slots=[slots, slots],
            block_tables=[],
            rows=torch.tensor(rows, dtype=torch.int32),
        )
        self.attention.plan_encoded(places)
        token_ids = torch.tensor([token for ids in inputs.values() for token in ids])
        self.model.encode(token_ids, positions, counts, self.attention)

    def _slots(self, seq: int, positions: range) -> Tensor:
        """int64: where tokens of a sequence lie."""
        found = [
            int(self.tables[seq, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            for position in positions
        ]
        return torch.tensor(found, dtype=torch.int64)

    def run(self, chunks: dict[int, list[int]]) -> list[Tensor]:
        """Append tokens to sequences; the logits of all of them, a tensor for each sequence."""
        return list(torch.split(self.logits(chunks), [len(ids) for ids in chunks.values()]))

    @torch.inference_mode()
    def logits(self, chunks: dict[int, list[int]], logits_indices: Tensor | None = None) -> Tensor:
        """Append tokens to sequences; the logits of all, or at `logits_indices`."""
        starts = {seq: self.lengths[seq] for seq in chunks}
        positions = [starts[seq] + i for seq, ids in chunks.items() for i in range(len(ids))]
        slots = []
        for seq, ids in chunks.items():
            self.lengths[seq] += len(ids)
            slots.append(self._slots(seq, range(starts[seq], self.lengths[seq])))
        counts = [len(ids) for ids in chunks.values()]
        rows = list(chunks)
        batch = AttentionBatch(
            query_lens=torch.tensor(counts, dtype=torch.int32),
            context_lens=torch.tensor([self.lengths[seq] for seq in rows], dtype=torch.int32),
            query_starts=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            positions=torch.tensor(positions),
            block_tables=[self.tables[rows]] * 2,
            slots=[torch.cat(slots)] * 2,
            encoder_lens=self.encoder_lens[rows],
        )
        self.attention.plan(batch)
        token_ids = torch.tensor([token for ids in chunks.values() for token in ids])
        hidden = self.model.forward(token_ids, batch.positions, self.attention, logits_indices)
        return self.model.logits(hidden)
