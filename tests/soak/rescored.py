"""Random work for models with layers of real shapes, whose results are computed a second time.

The engine has everything that makes it fast: captured steps that overlap, chunks, the prefix cache,
a small pool from which requests are preempted and swapped. Afterwards each result is computed as a
prompt, one after the other, with the same weights, the reference implementation of attention, and
keys and values of its own; where there is an encoder, it runs again, too, with torch's attention.
Log-probabilities of tokens may differ by rounding alone. A key that is missing, stale or another
request's changes them by much more.

Requests that do not ask for log-probabilities, whose steps may continue on the device, say nothing
but their tokens: with the request's penalties, bias and limits, a greedy one must be the most
likely one, and a random one that which its seed draws, but for what rounding changes.

How much rounding may change differs between models: experts are chosen otherwise, and inputs of
products in FP8 fall to other numbers. So each result is computed a third time with random noise of
about one rounding in what attention reads and returns. Differences must stay below a small multiple
of the largest that noise makes.

No kernel may be compiled while the engine works: all requests would wait for it.

    PYTHONPATH=src:tests python -m soak.rescored llama llama-fp8 gemma --seconds 60

This is for a GPU; on a CPU the models `tiny` and `tiny-t5` do. Prints how large the differences
were, and one JSON line at the end; the exit status is 1 if a result was wrong or a block was left.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime import JITFunction

from octavo import LLM
from octavo.config import PreemptionMode
from octavo.core.step import SamplingSpec
from octavo.engine.local_client import LocalStream
from octavo.engine.validation import Prompt
from octavo.layers.attention import CrossAttention
from octavo.layers.rotary import RotaryTable
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder, DecoderLayer, Stack
from octavo.ops import (
    AttentionBatch,
    EncodedInputs,
    HeadNorms,
    LayerPlace,
    cached_dtype,
    load_backend,
    make_backend,
)
from octavo.ops.bidirectional import TorchBidirectional
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.worker import cascade
from octavo.worker.device.cpu_sampling import token_weights
from octavo.worker.logit_edits import EditedRow, edit_logits, has_edits
from octavo.worker.randomness import uniforms
from octavo.worker.sampler import SamplingBatch
from soak.offline import Params, Round, change_pins, check_blocks
from soak.random_checkpoint import write_checkpoint
from soak.report import Report
from soak.shapes import SHAPES

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
CHUNK = 1024  # tokens that are computed again at once, of a long context fewer
CHUNK_SCORES = 1 << 29  # of all heads
ROWS_AT_ONCE = 64  # of logits, from which tokens are drawn again
SHAKEN = 3  # every third result is computed with noise, too
NUM_NOISES = 8  # for a result that differs much
LEAST = 1e-4  # no wrong key changes log-probabilities by so little
NUM_FAMILIES = 6  # of prompts, which share their tokens up to a random length
# What families call the number of their layers, or of those of either side. None reads another's.
LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers"),
    *("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"),
)
BYTES_TO_SAVE = cascade.MIN_BYTES  # or none: then few sequences share keys as many do
COMMON: dict[str, Any] = {"tune_kernels": "off", "measure_quantization": False}


@dataclass(frozen=True)
class Setting:
    """A model, and the engine's options."""

    config: str  # one of SHAPES, or a directory of benchmarks/configs
    num_layers: int
    options: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 8192
    num_blocks: int = 1200
    most_at_once: int = 48  # requests
    num_ranks: int = 1  # devices that share every layer; results are computed again on one

    def engine(self, directory: Path, num_ranks: int) -> LLM:
        """An engine that serves the model in `directory`."""
        options = COMMON | self.options | {"max_model_len": self.max_model_len}
        return LLM(
            str(directory),
            num_blocks=self.num_blocks,
            swap_space=1 << 30,
            watermark=0.0,
            max_num_seqs=max(64, self.most_at_once),
            max_num_batched_tokens=min(2048, self.max_model_len),
            tensor_parallel_size=num_ranks,
            **options,
        )


_FP8 = {"quantization": "fp8"}
_FP8_CACHE = {"kv_cache_dtype": "fp8"}
_TRANSFORMERS = {"model_impl": "transformers"}
_TUNED = {"tune_kernels": "auto"}
_LONG: dict[str, Any] = {"max_model_len": 131072, "num_blocks": 12000, "most_at_once": 6}
_MANY: dict[str, Any] = {"max_model_len": 2048, "num_blocks": 16000, "most_at_once": 1000}
_TINY = Setting("tiny", 2, max_model_len=256, num_blocks=24, most_at_once=16)
_T5 = Setting("t5-3b", 3, max_model_len=2048, num_blocks=320)
SETTINGS = {
    "tiny": _TINY,
    "tiny-on-2": replace(_TINY, num_ranks=2),
    "tiny-t5": replace(_TINY, config="tiny-t5", num_blocks=36),
    "tiny-transformers": replace(_TINY, options=_TRANSFORMERS),
    "llama": Setting("llama-3-8b", 3),
    "llama-on-2": Setting("llama-3-8b", 3, num_ranks=2),
    "qwen": Setting("qwen2.5-1.5b", 4),
    "llama-fp8": Setting("llama-3-8b", 3, _FP8 | _FP8_CACHE),
    "llama-int4": Setting("llama-3-8b", 3, {"quantization": "int4"}),
    "llama-tuned": Setting("llama-3-8b", 3, _TUNED),
    "llama-int4-tuned": Setting("llama-3-8b", 3, {"quantization": "int4"} | _TUNED),
    "llama-fp8-cache": Setting("llama-3-8b", 3, _FP8_CACHE),
    "gemma": Setting("gemma-3-4b", 6, max_model_len=16384, num_blocks=2200),
    "gemma-on-2": Setting("gemma-3-4b", 6, max_model_len=16384, num_blocks=2200, num_ranks=2),
    "gemma-fp8-cache": Setting("gemma-3-4b", 6, _FP8_CACHE, max_model_len=16384, num_blocks=2200),
    "qwen-moe": Setting("qwen3-30b-a3b", 2, max_model_len=16384, num_blocks=1500),
    "qwen-moe-fp8": Setting("qwen3-30b-a3b", 2, _FP8, max_model_len=16384, num_blocks=1500),
    "qwen-moe-on-2": Setting("qwen3-30b-a3b", 2, max_model_len=16384, num_blocks=1500, num_ranks=2),
    "gpt-oss": Setting("gpt-oss-20b-mxfp4", 4, max_model_len=16384, num_blocks=1500),
    "opt": Setting("opt-13b", 3, max_model_len=2048),
    "t5": _T5,
    "t5-on-2": replace(_T5, num_ranks=2),
    "t5-fp8-cache": replace(_T5, options=_FP8_CACHE),
    "bart": Setting("bart-large", 3, max_model_len=1024, num_blocks=160),
    "llama-transformers": Setting("llama-3-8b", 3, _TRANSFORMERS, num_blocks=700),
    "qwen-moe-transformers": Setting("qwen3-30b-a3b", 2, _TRANSFORMERS, num_blocks=700),
    "gemma-2": Setting("gemma-2-9b", 4, num_blocks=1500),
    "mpt": Setting("mpt-7b", 3, max_model_len=2048, num_blocks=250),
    "bloom": Setting("bloom-560m", 4, max_model_len=2048, num_blocks=250),
    "glm-4": Setting("glm-4-9b", 3, num_blocks=700),
    "gpt-j": Setting("gpt-j-6b", 3, max_model_len=2048, num_blocks=250),
    "phi-3": Setting("phi-3-mini", 4, max_model_len=4096, num_blocks=400),
    "stablelm": Setting("stablelm-3b", 4, max_model_len=4096, num_blocks=400),
    "smollm3": Setting("smollm3-3b", 4, num_blocks=700),
    "cohere-2": Setting("command-r7b", 4, max_model_len=16384, num_blocks=4000),
    "llama-long": Setting("llama-3.1-8b", 1, **_LONG),
    "llama-fp8-cache-long": Setting("llama-3.1-8b", 1, _FP8_CACHE, **_LONG),
    "gemma-long": Setting("gemma-3-4b", 6, **_LONG),
    "gemma-fp8-cache-long": Setting("gemma-3-4b", 6, _FP8_CACHE, **_LONG),
    "gpt-oss-long": Setting("gpt-oss-20b-mxfp4", 2, **_LONG),
    "qwen-moe-fp8-long": Setting("qwen3-30b-a3b", 1, _FP8, **_LONG | {"max_model_len": 40960}),
    "llama-many": Setting("llama-3-8b", 2, **_MANY),
    "gemma-many": Setting("gemma-3-4b", 6, **_MANY),
    "gpt-oss-many": Setting("gpt-oss-20b-mxfp4", 2, **_MANY),
    "qwen-moe-fp8-many": Setting("qwen3-30b-a3b", 2, _FP8, **_MANY),
    "t5-many": replace(_T5, **_MANY),
}


class LongWork:
    """See Work: prompts of any length, whose results are kept."""

    def __init__(self, setting: Setting, config: ModelConfig) -> None:
        self._longest = setting.max_model_len
        self._vocab_size = config.vocab_size
        self._has_encoder = config.encoder is not None
        self.results: list[Result] = []

    def prompt(self, rng: random.Random) -> Prompt:
        """See Work.prompt."""
        if not self._has_encoder:
            return self.prefix(rng)
        # An encoder's input is found as a whole, and what the decoder starts with by its prefixes.
        of_input = random.Random(rng.randrange(NUM_FAMILIES)) if rng.random() < 0.7 else rng
        encoded = self.prefix(of_input)
        if rng.random() < 0.5:
            return encoded
        return {"prompt": encoded, "decoder_input_ids": self.prefix(rng)}

    def prefix(self, rng: random.Random) -> list[int]:
        """See Work.prefix."""
        family = random.Random(rng.randrange(NUM_FAMILIES))
        shared = [self._token(family) for _ in range(self._length(rng, self._longest // 2))]
        return shared + [self._token(rng) for _ in range(self._length(rng, self._longest // 4))]

    def params(self, rng: random.Random) -> Params:
        """See Work.params: what `PlainModel` computes, too."""
        max_tokens = self._length(rng, min(self._longest // 8, 400))
        if rng.random() < 0.15:
            return BeamSearchParams(rng.randrange(1, 6), max_tokens=max_tokens, ignore_eos=True)
        temperature, logprobs = rng.choice((0.0, 1.0)), rng.choice((None, 0))
        return SamplingParams(
            n=rng.choice((1, 1, 1, 2, 5)) if temperature else 1,
            temperature=temperature,
            seed=rng.randrange(1000),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=None if self._has_encoder else rng.choice((None, None, None, 0)),
            ignore_eos=True,
            **({} if logprobs == 0 else self._changes(rng)),
        )

    def _changes(self, rng: random.Random) -> dict[str, Any]:
        """Parameters that change logits, or leave out tokens; mostly none."""
        return {
            "presence_penalty": rng.choice((0.0, 0.0, 0.0, 2.0)),
            "frequency_penalty": rng.choice((0.0, 0.0, 0.0, 0.5)),
            "repetition_penalty": rng.choice((1.0, 1.0, 1.0, 1.3)),
            "logit_bias": rng.choice((None, None, None, {self._token(rng): 8.0})),
            "top_k": rng.choice((0, 0, 0, 20)),
            "top_p": rng.choice((1.0, 1.0, 1.0, 0.9)),
            "min_p": rng.choice((0.0, 0.0, 0.0, 0.05)),
        }

    def take(self, stream: LocalStream, params: Params) -> None:
        """See Work.take."""
        self.results += results_of(stream, params)

    def _token(self, rng: random.Random) -> int:
        return rng.randrange(10, self._vocab_size)

    @staticmethod
    def _length(rng: random.Random, longest: int) -> int:
        """1 to longest; short ones are as frequent as long ones."""
        return int(math.exp(rng.uniform(0, math.log(longest + 1))))


@dataclass(frozen=True)
class Result:
    """The tokens of a sample or a beam, and what the engine says of them."""

    params: Params  # of the request
    spec: SamplingSpec  # what the engine makes of them
    encoder_token_ids: tuple[int, ...]  # the encoder's input; () without an encoder
    token_ids: list[int]  # with the prompt; behind an encoder, with what the decoder starts with
    num_prompt_tokens: int
    logprobs: list[float]  # of samples: those of the output's tokens
    cumulative_logprob: float  # of beams
    index: int  # among the request's samples
    origin: str  # what the request went through

    @property
    def kind(self) -> str:
        """One of RESULT_KINDS."""
        if isinstance(self.params, BeamSearchParams):
            return "beams"
        if self.params.logprobs is not None:
            return "samples"
        if not self.params.temperature:
            return "greedy"
        has_limits = self.spec.top_k > 0 or self.spec.top_p < 1 or self.spec.min_p > 0
        return "limited" if has_limits else "draws"

    @property
    def has_misses(self) -> bool:
        """Whether only its tokens are known, not what the engine says of them."""
        return self.kind in ("greedy", "draws", "limited")

    @property
    def num_alike(self) -> int:
        """Samples or beams of the request."""
        params = self.params
        return params.beam_width if isinstance(params, BeamSearchParams) else params.n

    @property
    def num_tokens(self) -> int:
        """Tokens that are compared."""
        return len(self.token_ids) - self.num_prompt_tokens


# Samples with log-probabilities; tokens alone of greedy ones, of those that are drawn from all
# tokens, and from some; beams.
RESULT_KINDS = ("samples", "greedy", "draws", "limited", "beams")


def results_of(stream: LocalStream, params: Params) -> Iterator[Result]:
    """One for each of the request's samples, and one for its prompt's log-probabilities."""
    output, request = stream.output, stream.request
    assert output is not None, "it has ended"
    spec, prompt, encoded = request.sampling, request.prompt_token_ids, request.encoder_token_ids
    origin = f"{output.num_preemptions} preemptions, {output.num_cached_tokens} cached tokens"
    if encoded:
        origin += f", {len(encoded)} of the encoder"
    for each in output.outputs:
        if each.finish_reason == "abort":
            continue
        known = [token.logprob for token in each.logprobs or []]
        tokens, total = prompt + each.token_ids, each.cumulative_logprob or 0.0
        yield Result(params, spec, encoded, tokens, len(prompt), known, total, each.index, origin)
    if output.prompt_logprobs is not None and len(prompt) > 1:
        known = [token.logprob for token in output.prompt_logprobs if token is not None]
        yield Result(SamplingParams(logprobs=0), spec, (), prompt, 1, known, 0.0, 0, origin)


class Scores(NamedTuple):
    """What a model says of a result's tokens."""

    logprobs: list[float]
    # How far each token is from the one that the model draws: of greedy ones, how much likelier
    # that is, in nats; of random ones, how far the random number is from those that draw the token.
    misses: list[float]


class NoisyAttention:
    """An implementation of attention, with noise in what it reads and returns."""

    def __init__(self, backend: Any, deviation: float) -> None:
        """
        Args:
            backend: an AttentionBackend, or TorchBidirectional, which has less of it.
            deviation: of the noise, relative to each number; 0: there is none.
        """
        self._backend = backend
        self._deviation = deviation
        self.plan = backend.plan

    def forward(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None = None,
        head_norms: HeadNorms | None = None,
    ) -> Tensor:
        """See AttentionBackend.forward."""
        query, key, value = (self._noisy(each) for each in (query, key, value))
        found = self._backend.forward(layer_id, query, key, value, rotary, head_norms)
        return self._noisy(found)

    def plan_encoded(self, inputs: EncodedInputs) -> None:
        """See AttentionBackend.plan_encoded."""
        self._backend.plan_encoded(inputs)

    def write_encoded(self, layer_id: int, key: Tensor, value: Tensor) -> None:
        """See AttentionBackend.write_encoded."""
        self._backend.write_encoded(layer_id, self._noisy(key), self._noisy(value))

    def attend_encoded(self, layer_id: int, query: Tensor) -> Tensor:
        """See AttentionBackend.attend_encoded."""
        return self._noisy(self._backend.attend_encoded(layer_id, self._noisy(query)))

    def _noisy(self, x: Tensor) -> Tensor:
        if not self._deviation:
            return x
        return (x.float() * (1 + self._deviation * torch.randn_like(x.float()))).to(x.dtype)


class PlainModel:
    """An engine's model, computed with the reference implementation of attention.

    Keys and values are of one sequence, in one block, in the dtype of the engine's cache. Layers
    that read an encoder's input have its keys there; it is no longer than a sequence may be.
    """

    def __init__(self, llm: LLM, deviation: float = 0.0) -> None:
        """llm: which computes nothing while this does; deviation: see NoisyAttention."""
        executor: Any = llm.engine.executor
        self._model: CausalLM = executor._worker.runner._model
        config = llm.engine.model_config
        self._size = config.max_model_len
        self._num_heads = max(layer.attention.num_heads for layer in config.layers)
        layers, table = self._model.attention_layers, self._model.token_table
        self.dtype, self._device = table.dtype, table.device
        backend = load_backend("reference")
        first = layers[0]
        shape = backend.kv_block_shape(self._size, first.num_kv_heads, first.head_dim)
        kv_cache = torch.zeros(
            (2, len(layers), *shape), dtype=cached_dtype(layers, table.dtype), device=self._device
        )
        places = [LayerPlace(0, index) for index in range(len(layers))]
        attention = make_backend(backend, layers, places, kv_cache, self._size, table.dtype)
        self._attention: Any = NoisyAttention(attention, deviation)
        self._encoder_attention: Any = None
        if isinstance(self._model, Decoder) and self._model.encoder is not None:
            specs = [layer.attention.spec for layer in _layers(self._model.encoder)]
            own = TorchBidirectional(specs, self._device)
            self._encoder_attention = NoisyAttention(own, deviation)

    @torch.inference_mode()
    def scores(self, result: Result) -> Scores:
        """What this model says of the result's tokens."""
        token_ids, first = result.token_ids, result.num_prompt_tokens
        if result.encoder_token_ids:
            self._encode(result.encoder_token_ids)
        logprobs: list[float] = []
        misses: list[float] = []
        size = min(CHUNK, max(1, CHUNK_SCORES // (self._num_heads * len(token_ids))))
        for begin in range(0, len(token_ids), size):
            chunk = token_ids[begin : begin + size]
            logits = self._logits(chunk, begin, len(result.encoder_token_ids))
            skipped = max(0, first - 1 - begin)  # rows of tokens that follow and are not compared
            drawn = token_ids[begin + 1 + skipped : begin + 1 + len(chunk)]
            if not drawn:
                continue
            rows = logits[skipped : skipped + len(drawn)].float()
            tokens = torch.tensor(drawn, device=self._device)
            logprobs += _of_tokens(rows.log_softmax(-1), tokens).tolist()
            if result.has_misses:
                misses += _missed_by(rows, tokens, result, begin + 1 + skipped)
        return Scores(logprobs, misses)

    def _encode(self, token_ids: tuple[int, ...]) -> None:
        """Run the encoder, and keep K and V of its result."""
        model, size = self._model, len(token_ids)
        assert isinstance(model, Decoder)
        assert model.encoder is not None
        positions = torch.arange(size)
        self._attention.plan_encoded(
            EncodedInputs(
                lens=torch.tensor([size], dtype=torch.int32),
                starts=torch.tensor([0, size], dtype=torch.int32),
                positions=positions,
                slots=[self._size + positions],
                block_tables=[torch.ones((1, 1), dtype=torch.int32)],
                rows=torch.zeros(1, dtype=torch.int32),
            )
        )
        self._encoder_attention.plan([size], self.dtype)
        vectors = model.embedding.forward(torch.tensor(token_ids, device=self._device))
        with sdpa_kernel(SDPBackend.MATH):  # which computes in float32
            encoded = model.encoder.forward(
                vectors, positions.to(self._device), self._encoder_attention
            )
        for layer in _layers(model):
            cast(CrossAttention, layer.cross_attention).write(encoded, self._attention)

    def _logits(self, token_ids: list[int], begin: int, num_encoded: int) -> Tensor:
        """num_encoded: tokens of the encoder's input."""
        size = len(token_ids)
        positions = torch.arange(begin, begin + size)
        self._attention.plan(
            AttentionBatch(
                query_lens=torch.tensor([size], dtype=torch.int32),
                context_lens=torch.tensor([begin + size], dtype=torch.int32),
                query_starts=torch.tensor([0, size], dtype=torch.int32),
                positions=positions,
                block_tables=[torch.ones((1, 1), dtype=torch.int32)],
                slots=[self._size + positions],
                encoder_lens=torch.tensor([num_encoded], dtype=torch.int32),
            )
        )
        hidden = self._model.forward(
            torch.tensor(token_ids, device=self._device),
            positions.to(self._device),
            self._attention,
        )
        return self._model.logits(hidden)


def _layers(stack: Stack) -> list[DecoderLayer]:
    return [cast(DecoderLayer, layer) for layer in stack.layers]


def _of_tokens(rows: Tensor, tokens: Tensor) -> Tensor:
    """[n]: of each of `rows`, [n, vocab_size], what its token has."""
    return rows.gather(1, tokens[:, None])[:, 0]


def _missed_by(logits: Tensor, tokens: Tensor, result: Result, first: int) -> list[float]:
    """See Scores.misses.

    logits: float32 [n, vocab_size], which are changed; tokens: [n], of a result, at the positions
    from `first` on.
    """
    if has_edits(result.spec):
        text = np.array(result.token_ids, np.int32)
        edit_logits(
            logits,
            [
                EditedRow(i, result.spec, text[: first + i], result.num_prompt_tokens)
                for i in range(len(tokens))
            ],
        )
    if result.kind == "greedy":
        return (logits.amax(1) - _of_tokens(logits, tokens)).tolist()
    parts = zip(logits.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE), strict=True)
    misses: list[float] = []
    for rows, drawn in parts:
        misses += _missed_draws(rows.cpu(), drawn.cpu(), result, first + len(misses))
    return misses


def _missed_draws(logits: Tensor, tokens: Tensor, result: Result, first: int) -> list[float]:
    """See `_missed_by`: of random tokens, whose logits need no more edits."""
    assert isinstance(result.params, SamplingParams), "beams are not drawn"
    assert result.params.seed is not None, "all requests have one"
    n, spec = len(tokens), result.spec
    batch = SamplingBatch(
        num_sampled=n,
        temperature=np.full(n, spec.temperature, np.float32),
        top_k=np.full(n, spec.top_k),
        top_p=np.full(n, spec.top_p),
        min_p=np.full(n, spec.min_p, np.float32),
        seeds=np.full(n, result.params.seed),
        sample_indices=np.full(n, result.index),
        positions=np.arange(first, first + n),
        num_draws=np.ones(n, np.int64),
    )
    seeds, indices, positions = (
        torch.from_numpy(each) for each in (batch.seeds, batch.sample_indices, batch.positions)
    )
    numbers = uniforms(seeds, indices, positions)
    weights = token_weights(logits, batch, logits.amax(1, keepdim=True)).double()
    shares = weights / weights.sum(1, keepdim=True)
    ends = _of_tokens(shares.cumsum(1), tokens)
    begins = ends - _of_tokens(shares, tokens)
    return torch.maximum(begins - numbers, numbers - ends).clamp(min=0).tolist()


def differences(result: Result, scores: Scores, shaken: Scores | None = None) -> list[float]:
    """How much the engine's result differs from what `PlainModel` says of it, by tokens; shaken:
    how much this does instead.

    Of beams only sums are known, so there is one, their mean; a search prefers beams whose errors
    are all of one sign.
    """
    if result.has_misses:
        misses = [0.0] * result.num_tokens if shaken is None else shaken.misses
        return [abs(a - b) for a, b in zip(misses, scores.misses, strict=True)]
    if result.kind == "beams":
        total = result.cumulative_logprob if shaken is None else sum(shaken.logprobs)
        return [abs(total - sum(scores.logprobs)) / result.num_tokens]
    found = result.logprobs if shaken is None else shaken.logprobs
    return [abs(a - b) for a, b in zip(found, scores.logprobs, strict=True)]


def rms(values: list[float]) -> float:
    """The root mean square."""
    return math.sqrt(sum(value**2 for value in values) / len(values))


# Of a result's differences, and how much larger each may be than the largest that noise makes. A
# single wrong token of many does not show in the first one.
MEASURES = {"rms": (rms, 3.0), "largest": (max, 2.0)}


def compare(llm: LLM, results: list[Result], report: Report) -> None:
    """Compute results again, and report violations."""
    plain = PlainModel(llm)
    # One rounding changes a number by a quarter of this on average.
    deviation = torch.finfo(plain.dtype).eps / 2
    quantization = llm.engine.model_config.quantization
    if quantization is not None and quantization.quantizes_inputs:
        # Steps of few tokens do not round inputs, and steps of many do, to numbers of e4m3: results
        # differ by who else is served.
        deviation = max(deviation, torch.finfo(torch.float8_e4m3fn).eps / 8)
    noisy = PlainModel(llm, deviation)
    for kind in RESULT_KINDS:
        of_kind = [each for each in results if each.kind == kind]
        _compare_kind(llm, plain, noisy, kind, of_kind, report)


def _compare_kind(
    llm: LLM,
    plain: PlainModel,
    noisy: PlainModel,
    kind: str,
    results: list[Result],
    report: Report,
) -> None:
    computed = [plain.scores(each) for each in results]
    differ = [differences(*each) for each in zip(results, computed, strict=True)]
    shaken = list(zip(results, computed, strict=True))[::SHAKEN]
    noise = [differences(each, scores, noisy.scores(each)) for each, scores in shaken]
    report.count(kind, len(results))
    for name, (measure, factor) in MEASURES.items():
        largest = max(map(measure, noise), default=0.0)
        for result, scores, values in zip(results, computed, differ, strict=True):
            if measure(values) <= max(LEAST, factor * largest):
                continue
            # Some results hang on a near tie, of two keys or two experts: noise shows it.
            tries = (noisy.scores(result) for _ in range(NUM_NOISES))
            own = max(measure(differences(result, scores, each)) for each in tries)
            if not measure(values) <= factor * own:
                report.violate(
                    f"{result.num_tokens} tokens behind {result.num_prompt_tokens} (of "
                    f"{result.num_alike} {kind}, {result.origin}) differ by {measure(values):.3g} "
                    f"({name}), noise by {largest:.3g} at most and {own:.3g} here; "
                    f"{alone(llm, plain, result, scores)}"
                )
        for what, found in (("differ", differ), ("noise", noise)):
            ordered = sorted(map(measure, found))
            for share in (0.5, 0.99, 1.0) if ordered else ():
                value = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
                report.counts[f"{kind}_{what}_{name}_{share:g}"] = float(f"{value:.3g}")


def alone(llm: LLM, plain: PlainModel, result: Result, scores: Scores) -> str:
    """What the engine says of a result's tokens, as a prompt, and of the same search, while it does
    nothing else and has nothing cached; scores: what `plain` says of the tokens. Models with an
    encoder have no log-probabilities of prompts: of the same request instead."""
    if result.encoder_token_ids:
        return f"alone, by {_differs_alone(llm, plain, result)}"
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    output = _served_alone(llm, result.token_ids, params).output
    assert output is not None
    scored = (output.prompt_logprobs or [])[result.num_prompt_tokens :]
    said = [token.logprob for token in scored if token is not None]
    worst = max(abs(a - b) for a, b in zip(said, scores.logprobs, strict=True))
    text = f"alone, as a prompt, by {worst:.3g}"
    if not isinstance(result.params, BeamSearchParams):
        return text
    return f"{text}, its search by {_differs_alone(llm, plain, result)}"


def _differs_alone(llm: LLM, plain: PlainModel, result: Result) -> str:
    """By how much results of the same request differ when it is served alone."""
    begin = result.token_ids[: result.num_prompt_tokens]
    encoded = list(result.encoder_token_ids)
    prompt: Prompt = {"prompt": encoded, "decoder_input_ids": begin} if encoded else begin
    params = replace(result.params, max_tokens=result.num_tokens)
    found = results_of(_served_alone(llm, prompt, params), params)
    return f"{max(max(differences(each, plain.scores(each))) for each in found):.3g}"


def _served_alone(llm: LLM, prompt: Prompt, params: Params) -> LocalStream:
    """A request that has ended, before which nothing was cached."""
    llm.reset_prefix_cache()
    stream = llm.client.make_request(prompt, params)
    llm.client.add_request(stream)
    while stream.output is None:
        llm.client.step()
    return stream


@contextmanager
def checkpoint(setting: Setting) -> Iterator[Path]:
    """A directory with the model's weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fields: dict[str, Any] = {"torch_dtype": "bfloat16"}
    if setting.config in SHAPES:
        fields |= SHAPES[setting.config]
    else:
        fields |= json.loads((CONFIGS / setting.config / "config.json").read_text())
    fields |= dict.fromkeys(LAYER_COUNTS, setting.num_layers)
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][: setting.num_layers]
    with tempfile.TemporaryDirectory(prefix="octavo-soak-") as name:
        write_checkpoint(Path(name), fields, device)
        yield Path(name)


def run(name: str, seed: int, seconds: float, most: int) -> Report:
    """Work for `seconds`, and then compute at most so many of the results again.

    The report's time begins when the engine serves.
    """
    setting, rng = SETTINGS[name], random.Random(seed)
    cascade.MIN_BYTES = rng.choice((0, BYTES_TO_SAVE))
    with checkpoint(setting) as directory, ExitStack() as serving:
        llm = serving.enter_context(setting.engine(directory, setting.num_ranks))
        work = LongWork(setting, llm.engine.model_config)
        report, pins = Report(name, seconds), list[str]()
        scheduler = llm.engine.scheduler
        with nothing_is_compiled(report):
            while not report.is_late:
                # Left to itself, it nearly always finds the same one cheaper.
                mode = rng.choice(get_args(PreemptionMode))
                scheduler.config = replace(scheduler.config, preemption_mode=mode)
                change_pins(llm, work, rng, pins, report)
                Round(llm, work, rng, report, rng.choice((1, 2, 8, setting.most_at_once))).run()
                check_blocks(llm, report)
                report.count("rounds")
        for mode, number in scheduler.num_preemptions.items():
            report.counts[f"{mode}_preemptions"] = number
        if setting.num_ranks > 1:  # of which each has a part of the weights
            serving.close()
            llm = serving.enter_context(setting.engine(directory, num_ranks=1))
        compare(llm, rng.sample(work.results, min(len(work.results), most)), report)
    report.require("samples", 1)
    report.show()
    return report


@contextmanager
def nothing_is_compiled(report: Report) -> Iterator[None]:
    """Kernels that are compiled in this process meanwhile are violations."""
    compile_kernel = JITFunction._do_compile

    def late(kernel: JITFunction[Any], *args: Any) -> Any:
        constants = {kernel.arg_names[place[0]]: value for place, value in args[3].items()}
        report.violate(f"{kernel.fn.__name__} was compiled while others waited: {constants}")
        return compile_kernel(kernel, *args)

    with patch.object(JITFunction, "_do_compile", late):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak.rescored", description="See the module.")
    parser.add_argument("settings", nargs="+", choices=SETTINGS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="of work, for each setting")
    parser.add_argument("--most", type=int, default=400, help="results to compute again")
    args = parser.parse_args()
    reports = [run(name, args.seed, args.seconds, args.most) for name in args.settings]
    num_violations = sum(report.num_violations for report in reports)
    summary = {report.part: report.values() for report in reports}
    print(json.dumps({"rescored": summary, "seed": args.seed, "violations": num_violations}))
    return 1 if num_violations else 0


if __name__ == "__main__":
    sys.exit(main())
