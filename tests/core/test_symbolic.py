"""Random workloads on the symbolic KV cache; and proof that it notices broken rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.workloads import Workload
from octavo.core.block_table import NULL_BLOCK
from octavo.core.kv.block_pool import BlockPool
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import PrefixCache
from octavo.core.prefix_node import PrefixNode
from octavo.core.sequence import Sequence

FEW = 60  # workloads within which a broken rule must be noticed


def run_workloads(seeds: range) -> None:
    for seed in seeds:
        Workload(seed).run()


@pytest.mark.parametrize("batch", range(8))
def test_random_workloads(batch: int) -> None:
    run_workloads(range(50 * batch, 50 * (batch + 1)))


@pytest.mark.parametrize("batch", range(4))
def test_what_goes_wrong_ends_alone(batch: int) -> None:
    """Among prompts that cannot be computed the others get what they would get without them."""
    num_failed = 0
    for seed in range(50 * batch, 50 * (batch + 1)):
        workload = Workload(seed, is_harmful=True)
        workload.run()
        num_failed += len(workload.failed)
    assert num_failed > 20


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(100))
def test_random_workloads_nightly(batch: int) -> None:
    run_workloads(range(1000 + 100 * batch, 1000 + 100 * (batch + 1)))


def skip_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    """A shared tail block is written in place."""
    original = KVCacheManager.append

    def append(self: KVCacheManager, targets: list[tuple[Sequence, int]]) -> object:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "ref_count", lambda pool, block_id: 1)
            return original(self, targets)

    patch.setattr(KVCacheManager, "append", append)


def forget_a_release(patch: pytest.MonkeyPatch) -> None:
    """The first block of a freed sequence stays held."""
    original = KVCacheManager.free

    def free(self: KVCacheManager, seq: Sequence) -> None:
        if seq.table is not None and seq.num_tokens % 5 == 0:
            seq.table.block_ids[0][0] = NULL_BLOCK
        original(self, seq)

    patch.setattr(KVCacheManager, "free", free)


def register_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks enter the prefix cache when they are taken, before their KV is computed."""
    original = KVCacheManager.allocate

    def allocate(self: KVCacheManager, seq: Sequence, hit: object, num_tokens: int) -> object:
        changes = original(self, seq, hit, num_tokens)  # type: ignore[arg-type]
        if changes is not None:
            self.register(seq, num_tokens)
        return changes

    patch.setattr(KVCacheManager, "allocate", allocate)


def trust_the_digest(patch: pytest.MonkeyPatch) -> None:
    """A hit is not verified against the tokens."""

    def find(self: PrefixCache, node: PrefixNode) -> object:
        return self._entries.get(node.key)

    patch.setattr(PrefixCache, "find", find)


def swap_without_moving(patch: pytest.MonkeyPatch) -> None:
    """Swapped-out blocks are never copied."""
    original = KVCacheManager.swap_out

    def swap_out(self: KVCacheManager, seqs: list[Sequence]) -> list[tuple[int, int]] | None:
        pairs = original(self, seqs)
        return pairs[1:] if pairs else pairs

    patch.setattr(KVCacheManager, "swap_out", swap_out)


@pytest.mark.parametrize(
    "break_rule",
    [
        skip_copy_on_write,
        forget_a_release,
        register_early,
        trust_the_digest,
        swap_without_moving,
    ],
    ids=lambda rule: rule.__name__,
)
def test_broken_rules_are_noticed(
    break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_rule(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_workloads(range(FEW))
