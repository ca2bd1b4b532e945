"""What rounding a model's weights on load costs, measured: the KL divergence of its logits.

A short text goes through the loaded model, and once more through the same model with every
projection that was rounded computed from the files, whose weights are read a second time for that:
256 MB, or one expert, at once. Everything else, such as norms, embeddings and routers, is the same
in both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.host_memory import host_memory
from octavo.layers.config import ExpertsConfig, LinearConfig
from octavo.layers.experts import ExpertsMethod, PlainExperts, QuantizedExperts
from octavo.layers.linear import LinearMethod, PlainLinear, QuantizedLinear, RoundedLinear
from octavo.layers.mlp import GATED_EPILOGUES
from octavo.model_files import open_files
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig
from octavo.models.dequantize import StoredTensor
from octavo.models.loader import checkpoint_of, open_weights
from octavo.ops import (
    AttentionBatch,
    LayerPlace,
    load_backend,
    make_backend,
    token_size_of,
)
from octavo.ops.communicator import Communicator
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.experts import Routed

logger = logging.getLogger(__name__)

TEXT = """\
The lighthouse stood where the river meets the sea, and for ninety years its keepers wrote down \
what they saw: the height of the tide, the direction of the wind, and the name of every ship \
that passed. In the winter of 1913 a storm broke the great lamp. "We could not see our own \
hands," the keeper's daughter remembered later, "but my father climbed the 172 steps with a \
bucket of burning oil, and he stayed there until the morning." Nobody was lost that night. Today \
the light is electric, and nobody lives in the tower; a computer in a city 40 miles away counts \
the ships, measures the wind and the waves, and sends a report each hour. The old books are kept \
in a museum, where scientists have copied their numbers into tables. If the tide in March is \
compared with the tide of a hundred years ago, it is higher by about 18 centimetres, which is \
1.8 millimetres for each year. That is small, but it does not stop, and the harbour wall was \
built for the sea as it was then.
"""
MAX_TOKENS = 256
CHUNK_ELEMENTS = 1 << 27  # of a weight that are read at once
ROOM_GIB = 2  # of free memory; what is taken is less
ROWS_AT_ONCE = 16  # of logits that are compared at once, in float64

Tensors = Mapping[str, StoredTensor]  # those of the files, as Checkpoint.translate names them


class QuantizationLoss(NamedTuple):
    """How far the next-token distributions of rounded weights are from those of the files'."""

    mean: float  # KL divergence in nats, over the positions of a text
    largest: float
    num_tokens: int  # of the text


def report_loss(
    model: CausalLM, config: ModelConfig, communicator: Communicator, is_dummy: bool = False
) -> None:
    """Measure what rounding the weights on load has cost, and log it; or log why that is not known.

    All ranks call it together, after the model's `finalize`, and the first one logs. Where the log
    leaves such lines out, nothing is measured.

    Args:
        model: of the communicator's shard, as `config` describes it.
        config: with a quantization that the loader has carried out.
        is_dummy: the weights are random, and in no file.
    """
    if not logger.isEnabledFor(logging.INFO):  # of all ranks, which have the level of the engine
        return
    started = time.perf_counter()
    ids = [] if is_dummy else text_ids(config)
    obstacle = None
    if is_dummy:
        obstacle = "the weights are random"
    elif config.encoder is not None:
        obstacle = "the model has an encoder"
    elif not ids:
        obstacle = "the model has no tokenizer that its vocabulary fits"
    elif not _has_room(model.token_table.device, communicator):
        obstacle = f"beside the weights, less than {ROOM_GIB} GiB are free"
    if obstacle is not None:
        if communicator.shard.rank == 0:
            logger.info("the KL divergence of the quantized model is not measured: %s", obstacle)
        return
    loss = measure_loss(model, config, communicator, ids)
    if communicator.shard.rank == 0:
        logger.info(
            "KL divergence from the model with the weights in the files, over %d tokens of a text: "
            "mean %.2g nats, largest %.2g (measured in %.1f s)",
            loss.num_tokens,
            loss.mean,
            loss.largest,
            time.perf_counter() - started,
        )


def text_ids(config: ModelConfig) -> list[int]:
    """TEXT in the model's tokens; none if it has no tokenizer, or one for another vocabulary."""
    tokenizer = open_files(config.path).tokenizer()
    if tokenizer is None:
        return []
    try:
        ids: list[int] = tokenizer.backend.encode(TEXT).ids
    except Exception:  # a vocabulary that cannot spell it; the library raises nothing more precise
        return []
    fits = all(token_id < config.vocab_size for token_id in ids)
    return ids[: min(MAX_TOKENS, config.max_model_len)] if fits else []


def measure_loss(
    model: CausalLM, config: ModelConfig, communicator: Communicator, ids: Sequence[int]
) -> QuantizationLoss:
    """The KL divergence D(files' weights || rounded weights) at every token of a text.

    Args: see `report_loss`; ids: at least one token, and at most max_model_len.

    Raises ModelError if a tensor of the files cannot be read.
    """
    dtype, device = model.token_table.dtype, model.token_table.device
    with torch.inference_mode(), open_weights(config).tensors(dtype, device) as stored:
        translated = checkpoint_of(model, config).translate(stored)
        tensors = {key: tensor for key, (_, _, tensor) in translated}
        hidden = _hidden_states(model, ids)
        with _weights_of_files(model, config, tensors):
            expected = model.logits(_hidden_states(model, ids))
        divergences = []
        for begin in range(0, len(ids), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            found = model.logits(hidden[rows])
            divergences.append(_divergences(expected[rows], found, communicator))
    all_rows = torch.cat(divergences)
    return QuantizationLoss(float(all_rows.mean()), float(all_rows.amax()), len(ids))


def _divergences(expected: Tensor, found: Tensor, communicator: Communicator) -> Tensor:
    """KL divergence of each row [num_rows], by this rank's logits [num_rows, num_tokens]."""
    expected, found = (_log_softmax(each.double(), communicator) for each in (expected, found))
    shares = expected.exp() * (expected - found)
    own = shares.masked_fill(expected == -torch.inf, 0).sum(dim=-1)
    return communicator.all_gather(own).sum(dim=0)


def _log_softmax(logits: Tensor, communicator: Communicator) -> Tensor:
    """Over the vocabulary, of which each rank has a part."""
    totals = communicator.all_gather(logits.logsumexp(dim=-1, keepdim=True))
    return logits - totals.logsumexp(dim=0)


def _hidden_states(model: CausalLM, ids: Sequence[int]) -> Tensor:
    """CausalLM.forward of one sequence: [num_tokens, hidden_size]. Keys and values are not rounded,
    even if those of the served model's KV cache are."""
    dtype, device = model.token_table.dtype, model.token_table.device
    size = len(ids)
    backend_class = load_backend("reference")
    layers = [replace(layer, kv_scales=None) for layer in model.attention_layers]
    # Each layer has a KV group of its own, with one block; block 0 is null.
    token_size = token_size_of(backend_class)
    most = max(token_size(layer.num_kv_heads, layer.head_dim) for layer in layers)
    cache = torch.zeros((1 + len(layers), size, most), dtype=dtype, device=device)
    places = [LayerPlace(group, 0) for group in range(len(layers))]
    backend = make_backend(backend_class, layers, places, cache, size)
    positions, blocks = torch.arange(size), range(1, 1 + len(layers))
    backend.plan(
        AttentionBatch(
            query_lens=torch.tensor([size], dtype=torch.int32),
            context_lens=torch.tensor([size], dtype=torch.int32),
            query_starts=torch.tensor([0, size], dtype=torch.int32),
            positions=positions,
            block_tables=[torch.full((1, 1), block, dtype=torch.int32) for block in blocks],
            slots=[size * block + positions for block in blocks],
        )
    )
    return model.forward(torch.tensor(ids, device=device), positions.to(device), backend)


def _has_room(device: torch.device, communicator: Communicator) -> bool:
    """Whether every rank has so much."""
    free = host_memory()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (
        int(communicator.all_gather(torch.tensor([free], device=device)).amin()) >= ROOM_GIB << 30
    )


@contextmanager
def _weights_of_files(model: CausalLM, config: ModelConfig, tensors: Tensors) -> Iterator[None]:
    """A context in which what was rounded is computed from the files."""
    dtype, device = model.token_table.dtype, model.token_table.device
    checkpoint = checkpoint_of(model, config)
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for path, module in list(model.named_modules()):
            other: nn.Module
            if isinstance(module, RoundedLinear) and config.tied_embeddings:
                part = _Part.of_table(model.tied_table)
                other = _LinearOfFiles(module.bias, [part], dtype, device)
            elif isinstance(module, QuantizedLinear | RoundedLinear):
                parts = _parts(module.config, checkpoint.names_of(path, module), tensors)
                other = _LinearOfFiles(module.bias, parts, dtype, device)
            elif isinstance(module, QuantizedExperts):
                names = checkpoint.names_of(path, module)
                other = _ExpertsOfFiles(module.config, names, tensors, dtype, device)
            else:
                continue
            owner_path, _, name = path.rpartition(".")
            owner = model.get_submodule(owner_path)
            replaced.append((owner, name, module))
            setattr(owner, name, other)
        yield
    finally:
        for owner, name, module in replaced:
            setattr(owner, name, module)


class _Part(NamedTuple):
    """Some outputs of a projection: rows of a matrix."""

    read: Callable[[slice], Tensor]  # some of the rows: [num_rows, in_features]
    num_rows: int
    num_columns: int
    num_outputs: int  # those behind the rows are padding

    @classmethod
    def of_table(cls, table: Tensor) -> _Part:
        """All rows of a tensor in memory."""
        num_rows, num_columns = table.shape
        return cls(lambda rows: table[rows], num_rows, num_columns, num_rows)

    @classmethod
    def of_file(cls, stored: StoredTensor, where: tuple[slice, ...], num_outputs: int) -> _Part:
        """A slice of a tensor in a file."""
        first, columns = where

        def read(rows: slice) -> Tensor:
            begin = first.start
            return stored.read((slice(begin + rows.start, begin + rows.stop), columns))

        return cls(read, first.stop - first.start, columns.stop - columns.start, num_outputs)


def _parts(config: LinearConfig, names: Sequence[str], tensors: Tensors) -> list[_Part]:
    """The weight of a projection in a checkpoint, in the order of its outputs."""
    with torch.device("meta"):
        targets = PlainLinear(config).targets(names)
    return [
        _Part.of_file(tensors[name], each.where, len(each.target))
        for name, target in targets.items()
        for each in target.slices
        if isinstance(each.target, Tensor) and each.target.dim() == 2  # and not a bias
    ]


class _LinearOfFiles(LinearMethod):
    """Reads its weight whenever it computes; the bias was not rounded, and is that of the model."""

    def __init__(
        self, bias: Tensor | None, parts: Sequence[_Part], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._bias = None if bias is None else bias.detach()
        self._parts = parts
        self._dtype = dtype
        self._device = device

    def forward(self, x: Tensor, epilogue: Epilogue = Epilogue.NONE) -> Tensor:
        """See LinearMethod.forward."""
        return apply_epilogue(self.forward_partial(x), epilogue)

    def forward_partial(self, x: Tensor) -> Tensor:
        """See LinearMethod.forward_partial."""
        results, begin = [], 0
        for part in self._parts:
            result = x.new_zeros(len(x), part.num_outputs)
            step = max(1, CHUNK_ELEMENTS // part.num_columns)
            for first in range(0, part.num_rows, step):
                rows = slice(first, min(first + step, part.num_rows))
                weight = part.read(rows).to(self._device, self._dtype)
                bias = None
                if self._bias is not None:
                    bias = self._bias[begin + rows.start : begin + rows.stop]
                result[:, rows] = F.linear(x, weight, bias)
            begin += part.num_outputs
            results.append(result)
        return torch.cat(results, dim=1)


class _ExpertsOfFiles(ExpertsMethod):
    """Reads the weights of one expert after the other, of those that some token takes."""

    def __init__(
        self,
        config: ExpertsConfig,
        names: Sequence[str],
        tensors: Tensors,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        routing = replace(config.routing, num_experts=1, top_k=1, num_groups=1, top_groups=1)
        self._config = replace(config, routing=routing, shared=None)
        self._names = names
        self._tensors = tensors
        self._dtype = dtype
        self._device = device

    def forward_partial(self, hidden: Tensor, routed: Routed) -> Tensor:
        """See ExpertsMethod.forward_partial; complete, in hidden's dtype."""
        epilogue = GATED_EPILOGUES[self._config.activation]
        one = self._allocated()
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in sorted(set(routed.ids.flatten().tolist())):
            self._read(expert, one)
            biases = [None if each is None else each[0] for each in (one.up_bias, one.down_bias)]
            tokens, places = (routed.ids == expert).nonzero(as_tuple=True)
            inner = apply_epilogue(F.linear(hidden[tokens], one.up[0], biases[0]), epilogue)
            result = F.linear(inner, one.down[0], biases[1]).float()
            # A token takes an expert once, so each call adds one number to a sum.
            total.index_add_(0, tokens, result * routed.weights[tokens, places, None])
        return total.to(hidden.dtype)

    def _allocated(self) -> PlainExperts:
        """Memory for one expert."""
        with torch.device("meta"):
            one = PlainExperts(self._config)
        for name, parameter in list(one.named_parameters()):
            weight = torch.empty(parameter.shape, dtype=self._dtype, device=self._device)
            setattr(one, name, nn.Parameter(weight, requires_grad=False))
        return one

    def _read(self, expert: int, one: PlainExperts) -> None:
        """Fill in the weights and biases of that expert."""
        names = [each.replace("*", str(expert)) for each in self._names]
        for name, target in one.targets(names).items():
            for destination, where in target.slices:
                if len(names) == 2:  # all experts are in one tensor
                    where = (slice(expert, expert + 1), *where[1:])
                assert isinstance(destination, Tensor), "plain experts have no slots"
                destination.copy_(self._tensors[name].read(where).view(destination.shape))
