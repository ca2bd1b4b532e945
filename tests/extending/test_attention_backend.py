"""docs/extending.md, "An attention backend"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from toys import Register

from model_zoo import model_directory, random_token_ids
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.ops import (
    AttentionBatch,
    HeadNorms,
    LayerPlace,
    LayerSpec,
    RotaryTable,
    ScoreFunction,
    make_backend,
)
from octavo.registry import ATTENTION_BACKENDS
from octavo.worker import worker

PROMPTS = [random_token_ids(length, seed=length) for length in (3, 40, 75)]


class TokenMajor:
    """Keeps a token's K and V beside each other, and attends by torch's own attention."""

    score_features: frozenset[str] = frozenset()  # scaled dot products alone

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        layer_places: Sequence[LayerPlace],
        kv_cache: Tensor,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        def shape(layer: LayerSpec, place: LayerPlace) -> tuple[int, ...]:
            size = place.span * block_size
            return self.kv_block_shape(size, layer.num_kv_heads, layer.head_dim)

        self._layers = {
            layer.layer_id: (layer, place.group, place.blocks(kv_cache, shape(layer, place)))
            for layer, place in zip(layers, layer_places, strict=True)
        }
        self._batch: AttentionBatch | None = None

    @staticmethod
    def kv_block_shape(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (block_size, num_kv_heads, 2 * head_dim)

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def forward(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None = None,
        head_norms: HeadNorms | None = None,
    ) -> Tensor:
        batch, (layer, group, cache) = self._batch, self._layers[layer_id]
        assert batch is not None
        if head_norms is not None:
            query, key, value = head_norms.apply(query, key, value)
        if rotary is not None:
            query, key = rotary.apply(query, batch.positions), rotary.apply(key, batch.positions)
        slots, size = batch.slots[group], cache.shape[1]
        cache[slots // size, slots % size] = torch.cat((key, value), dim=-1)
        outputs = []
        for i, context_len in enumerate(batch.context_lens.tolist()):
            rows = slice(*batch.query_starts[i : i + 2].tolist())
            blocks = batch.block_tables[group][i][: -(-context_len // size)].long()
            tokens = cache[blocks].flatten(0, 1)[:context_len]
            k, v = tokens.transpose(0, 1).split(layer.head_dim, dim=-1)
            q = query[rows].transpose(0, 1)
            ago = torch.arange(context_len)[-q.shape[1] :, None] - torch.arange(context_len)
            mask = (ago >= 0) & (ago < (layer.window or context_len))
            attended = F.scaled_dot_product_attention(
                q[None], k[None], v[None], mask, scale=layer.scores.scale, enable_gqa=True
            )
            outputs.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)

    def read_slot(self, layer_id: int, slot: int) -> tuple[Tensor, Tensor]:
        layer, _, cache = self._layers[layer_id]
        k, v = cache.flatten(0, 1)[slot].split(layer.head_dim, dim=-1)
        return k.clone(), v.clone()


def test_scores_that_a_backend_does_not_compute_are_refused() -> None:
    scores = ScoreFunction(0.25, softcap=30.0, alibi_slopes=(0.5, 0.25))
    layer = LayerSpec(3, num_heads=2, num_kv_heads=1, head_dim=16, scores=scores)
    cache = torch.zeros(2, 1, *TokenMajor.kv_block_shape(8, 1, 16))
    reason = "TokenMajor does not compute alibi_slopes, softcap, .* layer 3"
    with pytest.raises(ConfigError, match=reason):
        make_backend(TokenMajor, [layer], [LayerPlace(0, 0)], cache, 8)
    plain = replace(layer, scores=ScoreFunction(0.25))
    assert isinstance(make_backend(TokenMajor, [plain], [LayerPlace(0, 0)], cache, 8), TokenMajor)


@pytest.mark.parametrize(("model", "feature"), [("gemma2", "softcap"), ("mpt", "alibi_slopes")])
def test_a_model_with_such_scores_is_refused_before_it_is_loaded(
    register: Register, model: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(ATTENTION_BACKENDS, "token-major", TokenMajor)
    monkeypatch.setattr(worker, "load_model", lambda *_: pytest.fail("loaded all the same"))
    with pytest.raises(ConfigError, match=f"TokenMajor does not compute {feature}"):
        LLM(model_directory(model), attention_backend="token-major", num_blocks=60)


@pytest.mark.parametrize("model", ["llama", "qwen3", "mistral"])
def test_a_backend_of_one_s_own_serves_the_same_tokens(register: Register, model: str) -> None:
    register(ATTENTION_BACKENDS, "token-major", TokenMajor)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    tokens = {}
    for backend in ("reference", "token-major"):
        options = {"num_blocks": 60, "block_size": 8, "dtype": "float32"}
        with LLM(model_directory(model), attention_backend=backend, **options) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        tokens[backend] = [output.outputs[0].token_ids for output in outputs]
    assert tokens["token-major"] == tokens["reference"]
