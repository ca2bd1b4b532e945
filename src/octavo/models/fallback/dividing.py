"""Which parts of a model ranks can divide, found out by trying.

transformers' own plans (`base_model_tp_plan`) are no help: what they leave out, such as all layers
of gpt-oss and the attention of DeepSeek V3 (transformers 5.24), can be divided all the same.

Blocks are divided as in octavo/parallel.py: projections whose outputs are heads or intermediate
elements by outputs, and the one that closes the block by inputs. What comes between is code of
transformers', which may do anything. So it is run on random numbers, with stubs in the place of
projections: first on whole outputs, then on the parts of one rank. The block can be divided if what
it makes of parts are the parts of what it makes of the whole. Nothing depends on the names of
classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.models.fallback.build import Built, output_embeddings
from octavo.models.fallback.config import Division
from octavo.models.fallback.decoded import Decoded
from octavo.models.fallback.paged import PAGED_LAYER
from octavo.models.fallback.probing import RandomNumbers, Stub, copied
from octavo.models.fallback.recording import NUM_TOKENS, AttentionCall
from octavo.models.fallback.replacing import feed_forward_blocks
from octavo.parallel import Shard

Outputs = Mapping[nn.Linear, Tensor]


def find_divisions(built: Built, held: Set[nn.Linear]) -> dict[nn.Linear, Division]:
    """How projections can be divided; those that cannot are left out.

    Args:
        built: the model, with transformers' own modules.
        held: the projections that octavo's layers hold, among which blocks are looked for.
    """
    found: dict[nn.Linear, Division] = {}
    calls, widest = built.recording.calls, built.recording.hidden_size

    def add(divisions: dict[nn.Linear, Division] | None) -> None:
        """Those of a block, if octavo's layers hold all of them, and sums have room for rows."""
        if divisions is None or not divisions.keys() <= held:
            return
        if all(each.out_features <= widest for each, how in divisions.items() if how.inputs):
            found.update(divisions)

    shared = {call.kv_source for call in calls}
    for number, call in enumerate(calls):
        if call.kv_source is None and number not in shared:  # others hand keys to each other whole
            add(_attention_divisions(built, call))
    blocks = {block.path: block for block in feed_forward_blocks(built)}
    attending = {call.module for call in calls}
    for path, module in built.model.named_modules():
        linears = [each for each in module.children() if type(each) is nn.Linear]
        if path in blocks:
            block = blocks[path]
            children = cast(dict[str, nn.Linear], dict(module.named_children()))
            ups = [children[name] for name in block.ups]
            add(_block_divisions(ups, children[block.down]))
        elif len(linears) in (2, 3) and attending.isdisjoint(module.modules()):
            add(_odd_block_divisions(built, module, linears))
    return found


# ---------------------------------------------------------------- trials


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What was seen of one run."""

    inputs: dict[nn.Linear, Tensor]  # of projections
    heads: tuple[Tensor, ...]  # queries, keys and values, if the module attends


class _Heads:
    """Stands for a PagedLayer."""

    def __init__(self, result: Tensor) -> None:
        self.result = result
        self.given: list[tuple[Tensor, ...]] = []

    def attend(self, *heads: Tensor) -> Tensor:
        """Whatever they are."""
        self.given.append(heads)
        return self.result


class _Trial:
    """Runs a module of a recorded model on random numbers."""

    def __init__(self, built: Built, module: nn.Module, linears: Sequence[nn.Linear]) -> None:
        recording, self._module = built.recording, module
        self.linears = linears
        self.random = RandomNumbers()
        seen: dict[int, Tensor] = {}
        self._args, self._named = (
            _with_data(each, seen, self.random) for each in recording.given[module]
        )
        self.outputs = {
            each: self.random(*recording.linears[each][0].shape[:-1], each.out_features)
            for each in linears
        }

    def run(self, outputs: Outputs, attended: Tensor | None = None) -> _Outcome | None:
        """With those outputs of projections, and of the attention, if there is one; None if the
        module fails, or calls one of them another time or not at all."""
        stubs = {linear: Stub(outputs[linear]) for linear in self.linears}
        instead: dict[nn.Module, nn.Module] = dict(stubs.items())
        probe = _deeply_copied(self._module, instead, RandomNumbers())
        heads = None if attended is None else _Heads(attended)
        probe.__dict__[PAGED_LAYER] = heads
        try:
            with torch.device("cpu"), torch.no_grad():
                type(self._module).forward(probe, *self._args, **self._named)
        except Exception:  # whatever it raises for parts that it does not take
            return None
        given = [] if heads is None else heads.given
        if any(len(each.given) != 1 for each in stubs.values()) or len(given) != bool(heads):
            return None
        inputs = {linear: stub.given[0] for linear, stub in stubs.items()}
        return _Outcome(inputs, given[0] if given else ())

    def changed(self, linear: nn.Linear) -> dict[nn.Linear, Tensor]:
        """The outputs with others of one projection."""
        return {**self.outputs, linear: self.random(*self.outputs[linear].shape)}


def _with_data(value: Any, seen: dict[int, Tensor], random: RandomNumbers) -> Any:
    """Arguments of a module with random numbers in the place of tensors without data; each of these
    in the same place again."""
    if isinstance(value, Tensor):
        if id(value) not in seen:
            is_float = value.is_floating_point()
            seen[id(value)] = (
                random(*value.shape).to(value.dtype)
                if is_float
                else torch.zeros(value.shape, dtype=value.dtype, device="cpu")
            )
        return seen[id(value)]
    if isinstance(value, tuple | list):
        return tuple(_with_data(each, seen, random) for each in value)
    if isinstance(value, dict):
        return {name: _with_data(each, seen, random) for name, each in value.items()}
    return value


def _deeply_copied(
    module: nn.Module, instead: Mapping[nn.Module, nn.Module], random: RandomNumbers
) -> nn.Module:
    """A module and all in it, some of them replaced, with random numbers for parameters and
    buffers."""
    if module in instead:
        return instead[module]
    probe = copied(module)
    parameters, buffers = module._parameters, module._buffers
    probe._parameters = {
        name: None if each is None else nn.Parameter(random(*each.shape), requires_grad=False)
        for name, each in parameters.items()
    }
    probe._buffers = {name: _with_data(each, {}, random) for name, each in buffers.items()}
    probe._modules = {
        name: None if each is None else _deeply_copied(each, instead, random)
        for name, each in module._modules.items()
    }
    return probe


def _part(x: Tensor, shard: Shard, dim: int = -1) -> Tensor:
    """One of equal parts of a dimension."""
    size = x.shape[dim] // shard.size
    return x.narrow(dim, shard.rank * size, size)


def _are_alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        one.shape == other.shape and torch.allclose(one, other, 1e-4, 1e-6)
        for one, other in zip(found, expected, strict=True)
    )


# ---------------------------------------------------------------- attention


def _attention_divisions(built: Built, call: AttentionCall) -> dict[nn.Linear, Division] | None:
    """Of the projections in a module that attends."""
    module, of_all = call.module, built.recording.linears
    linears = [each for each in module.modules() if isinstance(each, nn.Linear) and each in of_all]
    if any(len(of_all[each]) != 1 for each in linears):
        return None
    trial = _Trial(built, module, linears)
    attended = trial.random(1, NUM_TOKENS, call.num_heads, call.value_dim)
    whole = trial.run(trial.outputs, attended)
    if whole is None:
        return None
    other = trial.run(trial.outputs, trial.random(*attended.shape))
    lasts = [] if other is None else _changed_inputs(whole, other)
    if len(lasts) != 1:
        return None
    [last] = lasts
    found: dict[nn.Linear, Division] = {}
    for linear in linears:
        units = 0
        if linear is not last:
            effects = trial.run(trial.changed(linear), attended)
            if effects is None:
                return None
            units = _units(call, whole, effects, last)
        if units and linear.out_features % units:
            return None
        if units:
            found[linear] = Division(outputs=(units,))
    found[last] = Division(inputs=call.num_heads)
    if last.in_features % call.num_heads:
        return None
    finest = {call.num_kv_heads, call.num_heads}
    shards = [Shard(rank, size) for size in finest for rank in {0, size - 1}]
    has_parts = all(_has_part(trial, whole, attended, found, call, each) for each in shards)
    return found if has_parts else None


def _units(call: AttentionCall, whole: _Outcome, effects: _Outcome, last: nn.Linear) -> int:
    """Of how many heads the outputs of a projection are; 0: all ranks need all of them, because
    another projection reads them.

    effects: of other outputs of that projection.
    """
    changed = _changed_inputs(whole, effects)
    if any(each is not last for each in changed):
        return 0
    _, *are_kv = (
        not torch.equal(one, two) for one, two in zip(whole.heads, effects.heads, strict=True)
    )
    return call.num_kv_heads if any(are_kv) else call.num_heads


def _changed_inputs(one: _Outcome, other: _Outcome) -> list[nn.Linear]:
    return [each for each, x in one.inputs.items() if not torch.equal(x, other.inputs[each])]


def _has_part(
    trial: _Trial,
    whole: _Outcome,
    attended: Tensor,
    divisions: Mapping[nn.Linear, Division],
    call: AttentionCall,
    shard: Shard,
) -> bool:
    """Whether a rank's part of all outputs makes its part of all heads, and of what is projected
    last."""
    of_kv = shard.of_kv_heads(call.num_kv_heads)

    def part_of(linear: nn.Linear, output: Tensor) -> Tensor:
        division = divisions.get(linear)
        if division is None or not division.outputs:
            return output
        return _part(output, of_kv if division.outputs[0] == call.num_kv_heads else shard)

    outputs = {linear: part_of(linear, each) for linear, each in trial.outputs.items()}
    run = trial.run(outputs, _part(attended, shard, dim=2))
    if run is None:
        return False
    found, expected = list(run.heads), []
    for heads, of in zip(whole.heads, (shard, of_kv, of_kv), strict=True):
        expected.append(_part(heads, of, dim=1))
    for linear, x in whole.inputs.items():
        is_last = linear in divisions and divisions[linear].inputs
        found.append(run.inputs[linear])
        expected.append(_part(x, shard) if is_last else x)
    return _are_alike(found, expected)


# ---------------------------------------------------------------- feed-forward blocks


def _block_divisions(ups: Sequence[nn.Linear], last: nn.Linear) -> dict[nn.Linear, Division]:
    """Of a block whose activation is known to take elements by themselves; gate and up may be one
    projection."""
    inner = last.in_features
    found = {each: Division(outputs=(inner,) * (each.out_features // inner)) for each in ups}
    return found | {last: Division(inputs=inner)}


def _odd_block_divisions(
    built: Built, module: nn.Module, linears: Sequence[nn.Linear]
) -> dict[nn.Linear, Division] | None:
    """Of a block with an activation that octavo's layers do not have."""
    of_all = built.recording.linears
    if module not in built.recording.given or any(
        len(of_all.get(each, [])) != 1 for each in linears
    ):
        return None
    trial = _Trial(built, module, linears)
    whole = trial.run(trial.outputs)
    if whole is None:
        return None
    runs = [trial.run(trial.changed(each)) for each in linears]
    changes = [[] if run is None else _changed_inputs(whole, run) for run in runs]
    lasts = {each for changed in changes for each in changed}
    if len(lasts) != 1:
        return None
    [last] = lasts
    inner, ups = last.in_features, [each for each in linears if each is not last]
    is_block = all(
        bool(changed) == (each is not last) for each, changed in zip(linears, changes, strict=True)
    )
    if not is_block or any(each.out_features != inner for each in ups):
        return None
    sizes = {inner, 2} if inner % 2 == 0 else {inner}
    for shard in [Shard(rank, size) for size in sizes for rank in {0, size - 1}]:
        outputs = {each: _part(trial.outputs[each], shard) for each in ups}
        run = trial.run({**outputs, last: trial.outputs[last]})
        if run is None or not _are_alike([run.inputs[last]], [_part(whole.inputs[last], shard)]):
            return None
    return _block_divisions(ups, last)


# ---------------------------------------------------------------- logits


def divides_head(built: Built) -> bool:
    """Whether a part of the projection to logits makes that part of the logits, and no other."""
    model, head = built.model, output_embeddings(built.model)
    if type(head) is not nn.Linear or head.in_features != built.recording.hidden_size:
        return False
    vocab_size = model.config.get_text_config().vocab_size
    is_shared = built.has_tied_embeddings and head.bias is not None
    if is_shared or head.out_features != vocab_size:
        return False
    random = RandomNumbers()
    rows = random(1, NUM_TOKENS, head.in_features)
    output = random(1, NUM_TOKENS, vocab_size)

    def logits(values: Tensor) -> Tensor | None:
        decoded = Decoded(built.base)
        decoded.hidden = rows
        stubs = {built.base: decoded, head: Stub(values)}
        probe = _deeply_copied(model, stubs, RandomNumbers())
        try:
            with torch.device("cpu"), torch.no_grad():
                found: Tensor = (
                    type(model).forward(probe, inputs_embeds=rows, use_cache=False).logits
                )
        except Exception:  # whatever it raises for a part
            return None
        return found

    whole = logits(output)
    if whole is None or whole.shape != output.shape:
        return False
    sizes = (2, vocab_size)
    for shard in [Shard(rank, size) for size in sizes for rank in (0, size - 1)]:
        found = logits(_part(output, shard))
        if found is None or not _are_alike([found], [_part(whole, shard)]):
            return False
    return True
