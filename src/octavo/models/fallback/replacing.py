"""octavo's layers in the place of a model's own, where both compute the same.

Whether they do is tried out: a module gets small random weights, or stubs in the place of its
projections, and what it returns is compared with what octavo's layer would. Nothing depends on the
names of classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.float12 import PIECE_ROWS
from octavo.layers.base import WeightOwner
from octavo.layers.config import LinearConfig, NormConfig
from octavo.layers.linear import LinearMethod, make_linear
from octavo.layers.norm import make_norm
from octavo.models.fallback.build import Built, output_embeddings
from octavo.models.fallback.config import Weight
from octavo.models.fallback.probing import (
    RandomNumbers,
    Stub,
    are_rows_alike,
    called,
    copied,
    of_all_sizes,
)
from octavo.models.fallback.recording import RotationCall
from octavo.models.fallback.sums import RankSums
from octavo.ops import RotaryTable
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.parallel import OPTION

GATED = (Epilogue.SILU_MUL, Epilogue.GELU_TANH_MUL)
PLAIN = (Epilogue.RELU, Epilogue.SILU, Epilogue.GELU, Epilogue.GELU_TANH)
PROBED_ROWS, PROBED_SIZE = 64, 8
PROBED_POSITIONS = 5
SMALL = 1e-3  # the size of elements with which a norm's epsilon shows

# Layers that own weights, with the names of transformers' modules that they stand for.
Owners = list[tuple[WeightOwner, tuple[str, ...]]]


class Projection(nn.Module):
    """Stands for a Linear, or for this rank's part of its outputs."""

    def __init__(self, method: LinearMethod, linear: nn.Linear) -> None:
        super().__init__()
        self.method = method
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.detach()  # without data, for code that asks for its dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., outputs]."""
        return self.method.forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class SummedProjection(Projection):
    """Stands for a Linear of which each rank has a part of the inputs."""

    def __init__(self, method: LinearMethod, linear: nn.Linear, sums: RankSums) -> None:
        super().__init__(method, linear)
        self._sums = sums
        sums.add_place()

    def forward(self, x: Tensor) -> Tensor:
        """[..., this rank's inputs] -> [..., out_features]."""
        flat = x.reshape(-1, x.shape[-1])
        return self._sums.project(self.method, flat).view(*x.shape[:-1], -1)


class MergedProjections(nn.Module):
    """One product for several Linears that read the same tensor."""

    def __init__(self, method: LinearMethod, sizes: Sequence[int]) -> None:
        super().__init__()
        self.method = method
        self._sizes = list(sizes)
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, number: int, x: Tensor) -> Tensor:
        """The outputs of one of the Linears, for x [..., in_features]."""
        if x is not self._input or self._parts[number] is None:
            y = self.method.forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            self._input, self._parts = x, list(torch.split(y, self._sizes, dim=-1))
        found, self._parts[number] = self._parts[number], None
        if not any(each is not None for each in self._parts):
            self._input = None  # nothing is kept from step to step
        assert found is not None
        return found


class ProjectionPart(nn.Module):
    """Stands for one of the Linears of MergedProjections, or for this rank's part of it."""

    def __init__(self, whole: MergedProjections, number: int, linear: nn.Linear) -> None:
        super().__init__()
        self._whole = (whole,)  # in a tuple, so that it is not a submodule
        self._number = number
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.detach()  # without data, for code that asks for its dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., outputs], dense in its last dimension alone."""
        return self._whole[0].part(self._number, x)


class FeedForward(nn.Module):
    """Stands for a block of two or three Linears with an activation, gated or not."""

    def __init__(
        self, up: LinearMethod, epilogue: Epilogue, down: LinearMethod, sums: RankSums | None
    ) -> None:
        """sums: set if each rank has a part of the elements between the projections."""
        super().__init__()
        self.up, self.epilogue, self.down = up, epilogue, down
        self._sums = sums
        if sums is not None:
            sums.add_place()

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same."""
        inner = self.up.forward(x.reshape(-1, x.shape[-1]), self.epilogue)
        if self._sums is None:
            result = self.down.forward(inner)
        else:
            result = self._sums.project(self.down, inner)
        return result.view(*x.shape[:-1], -1)


class RowNorm(nn.Module):
    """Stands for a norm of the last dimension."""

    def __init__(self, config: NormConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """[1, num_tokens, (heads,) size] or [num_tokens, size] -> the same."""
        is_step = x.dim() > 2 and x.shape[0] == 1
        rows = x[0] if is_step and x.stride(-1) == 1 else x.reshape(-1, x.shape[-1])
        return self.norm.forward(rows)[0].view(x.shape)


class RotationForm(NamedTuple):
    """How a rotation reads cosines and sines [positions, size], which have each angle twice."""

    in_pairs: bool  # an angle's two elements are neighbours; else one is in each half
    interleaved: bool  # see RotaryTable

    def halved(self, table: Tensor) -> Tensor:
        """The columns of one element of each angle: [positions, size / 2]."""
        return table[:, ::2] if self.in_pairs else table[:, : table.shape[1] // 2]


ROTATION_FORMS = tuple(RotationForm(*each) for each in product((False, True), repeat=2))


class Rotary(nn.Module):
    """Stands for a rotary embedding: cosines and sines of all positions, made once.

    Where frequencies depend on the length, it is that of the longest sequence that is served (see
    layers/rotary.py).
    """

    def __init__(self, rotary: nn.Module, kinds: set[tuple[object, ...]], longest: int) -> None:
        """
        Args:
            rotary: with its frequencies on the CPU.
            kinds: what it is called with beside a tensor and positions.
            longest: how many positions there are.
        """
        super().__init__()
        for name, value in list(vars(rotary).items()):  # its settings, which models ask it for
            if isinstance(value, Tensor) and value.is_meta:
                delattr(rotary, name)  # frequencies that it kept when the model was recorded
            elif not name.startswith("_"):
                setattr(self, name, value)
        positions = torch.arange(longest).unsqueeze(0)
        rows = torch.empty(1, 1, 1).expand(1, longest, 1)  # for its dtype, device and length
        self._tables: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._halves: dict[tuple[tuple[object, ...], RotationForm], RotaryTable] = {}
        for kind in kinds:
            cos, sin = rotary(rows, positions, *kind)
            self._tables[kind] = cos[0], sin[0]

    def to_device(self, device: torch.device) -> None:
        """Move the tables."""
        self._tables = {
            kind: (cos.to(device), sin.to(device)) for kind, (cos, sin) in self._tables.items()
        }

    def table(self, kind: tuple[object, ...]) -> tuple[Tensor, Tensor]:
        """float32 [longest, size]: cosines and sines."""
        return self._tables[kind]

    def halves(self, kind: tuple[object, ...], form: RotationForm) -> RotaryTable:
        """The table with which a backend rotates, on the device of the others. Layers share it: for
        long sequences it takes tens of megabytes."""
        found = self._halves.get((kind, form))
        if found is None:
            cos, sin = (form.halved(each).contiguous() for each in self._tables[kind])
            found = self._halves[kind, form] = RotaryTable(cos, sin, form.interleaved)
        return found

    def forward(self, x: Tensor, position_ids: Tensor, *kind: object, **named: object) -> object:
        """Cosines and sines [1, num_tokens, size] of positions [1, num_tokens], in x's dtype."""
        cos, sin = self._tables[(*kind, *named.values())]
        return cos[position_ids].to(x.dtype), sin[position_ids].to(x.dtype)


def replace_modules(
    built: Built,
    dtype: torch.dtype,
    held: Mapping[str, Weight],
    head: LinearConfig,
    sums: RankSums,
) -> Owners:
    """Put octavo's layers into the model, which is on the meta device.

    Args:
        built: the model.
        dtype: that it is computed in.
        held: what the projections of its layers are, by names of modules; parts of them, where
            ranks share the model.
        head: the projection to logits, or this rank's part of it.
        sums: adds up the results of projections of which each rank has a part of the inputs.

    Returns:
        The layers that own weights.
    """
    owners: Owners = []
    _replace_norms(built, dtype, owners)
    _replace_feed_forward(built, held, sums, owners)
    _replace_linears(built, dtype, held, head, sums, owners)
    return owners


# ---------------------------------------------------------------- projections


def layer_number(path: str) -> int | None:
    """The number of the layer that a module is in, by its path; None: it is in none."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def linear_config(linears: Sequence[nn.Linear]) -> LinearConfig:
    """The shape of a projection, or of several with the same input that are merged."""
    first, sizes = linears[0], tuple(each.out_features for each in linears)
    return LinearConfig(first.in_features, sizes, first.bias is not None)


def merged_linears(built: Built) -> list[list[nn.Linear]]:
    """The projections of the model, those of one input together."""
    found, model = built.recording.linears, built.model
    parents = {child: module for module in model.modules() for child in module.children()}
    groups: dict[object, list[nn.Linear]] = {}
    shared = _shared(model)
    for linear, inputs in found.items():
        if any(each in shared for each in linear.parameters()):
            continue  # tied to another module's
        parent = parents[linear]
        is_list = isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        key = (parent, id(inputs[0]), linear.bias is None)
        groups.setdefault(linear if is_list or len(inputs) > 1 else key, []).append(linear)
    head = output_embeddings(model)
    if type(head) is nn.Linear:
        groups[head] = [head]
    return list(groups.values())


def _replace_linears(
    built: Built,
    dtype: torch.dtype,
    held: Mapping[str, Weight],
    of_head: LinearConfig,
    sums: RankSums,
    owners: Owners,
) -> None:
    paths, model = built.paths, built.model
    head = output_embeddings(model)
    for linears in merged_linears(built):
        names = tuple(paths[each] for each in linears)
        first = linears[0]
        described = of_head if first is head else _as_held(held, names, linears)
        if any(each.weight.dtype != dtype for each in linears):
            if described.is_part:
                raise ConfigError(
                    OPTION, f"{names[0]} stays {first.weight.dtype}, and so cannot be divided"
                )
            continue
        method = make_linear(described)
        owners.append((method, names))
        if described.in_shard.size > 1:
            _put(model, names[0], SummedProjection(method, first, sums))
            continue
        if len(linears) == 1:
            _put(model, names[0], Projection(method, first))
            continue
        whole = MergedProjections(method, described.out_sizes)
        for number, (name, linear) in enumerate(zip(names, linears, strict=True)):
            _put(model, name, ProjectionPart(whole, number, linear))
        # One place in the tree, so that it is found among the model's modules.
        parent, _, name = names[0].rpartition(".")
        model.get_submodule(parent).add_module(f"octavo_{name}", whole)


def _as_held(
    held: Mapping[str, Weight], names: Sequence[str], linears: Sequence[nn.Linear]
) -> LinearConfig:
    """Projections of those names as they are held, in that order; plain ones in no layer."""
    found = held.get(names[0])
    return found if isinstance(found, LinearConfig) else linear_config(linears)


def _shared(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that several modules have."""
    seen: set[nn.Parameter] = set()
    found: set[nn.Parameter] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (found if parameter in seen else seen).add(parameter)
    return found


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


# ---------------------------------------------------------------- feed-forward blocks


class Block(NamedTuple):
    """A feed-forward block that octavo's layers compute: by names of its projections."""

    path: str
    ups: tuple[str, ...]
    epilogue: Epilogue
    down: str


def feed_forward_blocks(built: Built) -> list[Block]:
    """Those of a model whose modules are transformers' own still."""
    found, shared = built.recording.linears, _shared(built.model)
    blocks = []
    for path, module in built.model.named_modules():
        linears = {n: c for n, c in module.named_children() if type(c) is nn.Linear}
        others = [c for c in module.children() if type(c) is not nn.Linear]
        if len(linears) not in (2, 3) or any(list(each.parameters()) for each in others):
            continue
        if module._parameters or not all(len(found.get(c, [])) == 1 for c in linears.values()):
            continue
        if any(each in shared for each in module.parameters()):
            continue
        matched = _as_feed_forward(module, linears)
        if matched is None:
            continue
        ups, epilogue, down = matched
        if len({linears[name].bias is not None for name in ups}) == 1:
            blocks.append(Block(path, ups, epilogue, down))
    return blocks


def _replace_feed_forward(
    built: Built, held: Mapping[str, Weight], sums: RankSums, owners: Owners
) -> None:
    for path, ups, epilogue, down in feed_forward_blocks(built):
        module = built.model.get_submodule(path)
        into = [cast(nn.Linear, module.get_submodule(name)) for name in ups]
        last = cast(nn.Linear, module.get_submodule(down))
        of_ups, of_down = tuple(f"{path}.{name}" for name in ups), (f"{path}.{down}",)
        of_up, described = _as_held(held, of_ups, into), _as_held(held, of_down, [last])
        if of_up.copy == "float12" and epilogue.is_gated and described.in_features % PIECE_ROWS:
            of_up = replace(of_up, copy=None)  # see MLPConfig.up
        up, down_method = make_linear(of_up), make_linear(described)
        owners.append((up, of_ups))
        owners.append((down_method, of_down))
        own_sums = sums if described.in_shard.size > 1 else None
        _put(built.model, path, FeedForward(up, epilogue, down_method, own_sums))
        for each in (*into, last):
            del built.recording.linears[each]


def _as_feed_forward(
    module: nn.Module, linears: dict[str, nn.Linear]
) -> tuple[tuple[str, ...], Epilogue, str] | None:
    """The projections into the block, its activation and the projection out of it, if the block is
    activation(first) * second, or activation(first), and nothing else."""
    size = next(iter(linears.values())).in_features
    for down, last in linears.items():
        ups = [name for name in linears if name != down]
        if any(linears[name].in_features != size for name in ups) or last.out_features != size:
            continue
        candidates: list[tuple[tuple[str, ...], Epilogue]]
        if len(ups) == 1 and linears[ups[0]].out_features == 2 * last.in_features:
            candidates = [((ups[0],), epilogue) for epilogue in GATED]
        elif any(linears[name].out_features != last.in_features for name in ups):
            continue
        elif len(ups) == 1:
            candidates = [((ups[0],), epilogue) for epilogue in PLAIN]
        else:
            orders = ((ups[0], ups[1]), (ups[1], ups[0]))
            candidates = [(order, epilogue) for order in orders for epilogue in GATED]
        inner = _inner_of(module, ups, down, linears)
        if inner is None:
            continue
        results, given = inner
        for order, epilogue in candidates:
            expected = apply_epilogue(torch.cat([results[name] for name in order], -1), epilogue)
            if are_rows_alike(given, expected):
                return order, epilogue, down
    return None


def _inner_of(
    module: nn.Module, ups: Sequence[str], down: str, linears: dict[str, nn.Linear]
) -> tuple[dict[str, Tensor], Tensor] | None:
    """What stubs in the place of `ups` return, and what reaches `down` of it; None if the block is
    not made so."""
    random = RandomNumbers()
    with torch.device("cpu"):
        size = linears[ups[0]].in_features
        x = random(1, PROBED_ROWS, size)
        scale = PROBED_SIZE / linears[down].in_features
        stubs = {
            name: Stub(
                of_all_sizes(random(1, PROBED_ROWS, round(linears[name].out_features * scale)))
            )
            for name in ups
        }
        last = Stub(random(1, PROBED_ROWS, size))
        probe = copied(module)
        probe._modules = {**module._modules, **stubs, down: last}
        result = called(probe, x)
    is_whole = all(len(each.given) == 1 and each.given[0] is x for each in stubs.values())
    if result is not last.result or not is_whole or len(last.given) != 1:
        return None
    return {name: stub.result for name, stub in stubs.items()}, last.given[0]


# ---------------------------------------------------------------- norms


def _replace_norms(built: Built, dtype: torch.dtype, owners: Owners) -> None:
    for norm, of_inputs in built.recording.norms.items():
        dtypes = {each.dtype for each in norm.parameters(recurse=False)}
        if of_inputs is None or of_inputs[0] != dtype or not dtypes <= {dtype}:
            continue
        config = _as_norm(norm, of_inputs[1])
        if config is not None:
            path = built.paths[norm]
            layer = RowNorm(config)
            if config.affine:
                owners.append((layer.norm, (path,)))
            _put(built.model, path, layer)


def _as_norm(norm: nn.Module, size: int) -> NormConfig | None:
    """The norm of `size` elements as octavo describes it, if it is one of those."""
    probe, random = copied(norm), RandomNumbers()
    with torch.device("cpu"):
        own = {
            name: None if each is None else nn.Parameter(random(*each.shape), requires_grad=False)
            for name, each in norm._parameters.items()
        }
        probe._parameters = dict(own)
        weight, bias = own.get("weight"), own.get("bias")
        rows = [random(1, PROBED_ROWS, size), SMALL * random(1, PROBED_ROWS, size)]
        results = [called(probe, each) for each in rows]
    for config in _candidates(norm, size, weight is not None, bias is not None):
        scale = None if weight is None else weight + config.offset
        if config.kind == "rms":
            expected = [F.rms_norm(x, (size,), scale, config.eps) for x in rows]
        else:
            expected = [F.layer_norm(x, (size,), scale, bias, config.eps) for x in rows]
        pairs = zip(expected, results, strict=True)
        if all(_equal(x, y) for x, y in pairs):
            return config
    return None


def _equal(expected: Tensor, result: object) -> bool:
    is_like = isinstance(result, Tensor) and result.shape == expected.shape
    return is_like and torch.allclose(expected, cast(Tensor, result), 1e-4, 1e-6)


def _candidates(
    norm: nn.Module, size: int, is_affine: bool, has_bias: bool
) -> Iterator[NormConfig]:
    epsilons = {float(v) for v in vars(norm).values() if isinstance(v, float) and 0 < v < 0.01}
    for eps in sorted(epsilons):
        if not is_affine:
            yield from (NormConfig(kind, size, eps, affine=False) for kind in ("rms", "layer"))
            continue
        layer = NormConfig("layer", size, eps, bias=has_bias)
        yield from (layer, replace(layer, offset=1.0))
        if not has_bias:
            rms = NormConfig("rms", size, eps)
            yield from (rms, replace(rms, offset=1.0))


# ---------------------------------------------------------------- rotary embeddings


def form_of(call: RotationCall, rotary: Rotary, head_dim: int) -> RotationForm | None:
    """The form in which a backend rotates as the model's own function does; None if it rotates in
    another way."""
    cos, sin = rotary.table(call.rotary.kind)
    if cos.shape != sin.shape or cos.shape[1] % 2 or cos.shape[1] > head_dim:
        return None
    num = min(PROBED_POSITIONS, len(cos))
    cos, sin = cos[:num].cpu(), sin[:num].cpu()  # where the function is tried out
    random = RandomNumbers()
    query, key = random(1, 2, num, head_dim), random(1, 1, num, head_dim)
    try:
        results = _rotated(call, query, key, cos.unsqueeze(0), sin.unsqueeze(0))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None  # of a form that it does not take on a CPU
    positions = torch.arange(num)
    for form in ROTATION_FORMS:
        table = RotaryTable(form.halved(cos), form.halved(sin), form.interleaved)
        pairs = zip((query, key), results, strict=True)
        if all(_rotates_as(table, x, y, positions) for x, y in pairs):
            return form
    return None


def _rotated(
    call: RotationCall, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """What the model's own function makes of queries and keys [1, heads, positions, elements]; one
    that takes either by itself takes them with the positions first."""
    if call.is_of_both:
        results: tuple[Tensor, Tensor] = call.function(query, key, cos, sin, **call.arguments)
        return results
    of_query, of_key = (
        call.function(each.transpose(1, 2), cos, sin, **call.arguments).transpose(1, 2)
        for each in (query, key)
    )
    return of_query, of_key


def _rotates_as(table: RotaryTable, x: Tensor, result: Tensor, positions: Tensor) -> bool:
    if result.shape != x.shape:
        return False
    rotated = table.apply(x[0].transpose(0, 1), positions).transpose(0, 1)
    return torch.allclose(rotated, result[0], 1e-4, 1e-5)
