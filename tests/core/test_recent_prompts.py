"""Prompts that begin like one hashed a moment ago take its prefix nodes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.worlds import BLOCK_SIZE, World, compute, make_manager, make_sequence
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import Digest, PrefixCache, sha256_128
from octavo.core.kv.prefix_matcher import MIN_TO_REUSE, REUSED_PER_HASH
from octavo.core.kv.recent_prompts import MAX_RECENT
from octavo.core.prefix_node import PrefixNode, pack_tokens
from octavo.core.sequence import Sequence

TRUNK = [3] * 20 * BLOCK_SIZE


def one_byte(content: bytes) -> bytes:
    return sha256_128(content)[:1]


def chain(seq: Sequence, digest: Digest) -> list[tuple[bytes, bytes]]:
    """Key and tokens of each of the sequence's nodes, as they must be."""
    salt = seq.request.cache_salt.encode()
    key, expected = digest(b"octavo " + salt), []
    for start in range(0, len(seq.prefix_nodes) * BLOCK_SIZE, BLOCK_SIZE):
        tokens = pack_tokens(seq.token_ids[start : start + BLOCK_SIZE])
        key = digest(key + tokens)
        expected.append((key, tokens))
    return expected


def chained(seq: Sequence) -> list[tuple[bytes, bytes]]:
    """The same, as they are, walked from the last one to the root."""
    found, node = [], seq.prefix_nodes[-1] if seq.prefix_nodes else None
    while node is not None and node.parent is not None:
        found.append((node.key, node.tokens))
        node = node.parent
    assert node is None or node.tokens == seq.request.cache_salt.encode()
    return found[::-1]


@pytest.mark.parametrize("digest", [sha256_128, one_byte])
@settings(max_examples=150, derandomize=True)
@given(seed=st.integers(0, 1 << 30))
def test_nodes_are_those_of_the_tokens(digest: Digest, seed: int) -> None:
    """Prompts made of few different runs of blocks, looked up in parts, computed, grown, freed."""
    rng = random.Random(seed)
    kv = make_manager(num_blocks=400, digest=digest)
    live: list[Sequence] = []
    for number in range(30):
        prompt = [
            token
            for _ in range(rng.randint(1, 6))
            for token in [rng.randint(0, 1)] * rng.choice([3, BLOCK_SIZE, 6 * BLOCK_SIZE])
        ]
        seq = make_sequence(number, prompt, cache_salt=rng.choice(["", "tenant"]))
        while kv.lookup(seq, max_hashes=rng.choice([1, 3, 100])).is_unfinished:
            pass
        assert [(node.key, node.tokens) for node in seq.prefix_nodes] == chain(seq, digest)
        assert chained(seq) == chain(seq, digest)
        compute(kv, seq)
        live.append(seq)
        if rng.random() < 0.5:
            seq.token_ids += [rng.randint(0, 1)] * 2 * BLOCK_SIZE
            assert kv.append([(seq, seq.num_tokens)]) is not None
            seq.num_computed_tokens = seq.num_tokens
            kv.register(seq, seq.num_tokens)
        if rng.random() < 0.4:
            kv.free(live.pop(rng.randrange(len(live))))
        assert set(kv.recent_prompts()) <= set(live)
        assert len(kv.recent_prompts()) <= MAX_RECENT


class Hashed:
    """Counts blocks that are hashed, or found among the cached ones, which takes as long."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.number = 0
        original = PrefixCache.node

        def node(cache: PrefixCache, parent: PrefixNode, tokens: bytes) -> PrefixNode:
            self.number += 1
            return original(cache, parent, tokens)

        patch.setattr(PrefixCache, "node", node)

    def in_lookup(self, kv: KVCacheManager, seq: Sequence) -> int:
        before = self.number
        kv.lookup(seq)
        return self.number - before


def cached_manager(*prompts: list[int], salts: tuple[str, ...] = ("",)) -> KVCacheManager:
    """A manager with these prompts in the prefix cache, which are no longer recent."""
    kv = make_manager(num_blocks=2000)
    for salt in salts:
        for prompt in prompts:
            seq = make_sequence(-1, prompt, cache_salt=salt)
            compute(kv, seq)
            kv.free(seq)
    assert not kv.recent_prompts()
    return kv


def test_a_prompt_like_the_one_before_is_hardly_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, hashed = cached_manager(TRUNK), Hashed(monkeypatch)
    for number in range(5):
        seq = make_sequence(number, [*TRUNK, *range(100 * number, 100 * number + 9)])
        num_hashed = hashed.in_lookup(kv, seq)
        assert num_hashed == (22 if number == 0 else 2)
        assert kv.lookup(seq).num_tokens == len(TRUNK)


def test_more_than_one_beginning_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many system prompts as are remembered, in any order, two of which begin alike."""
    trunks = [[number] * 20 * BLOCK_SIZE for number in range(MAX_RECENT - 1)]
    trunks.append([*trunks[0][: 10 * BLOCK_SIZE], *TRUNK])
    kv, hashed = cached_manager(*trunks), Hashed(monkeypatch)
    rng, seen = random.Random(0), set()
    for number in range(200):
        which = rng.randrange(len(trunks))
        seq = make_sequence(number, [*trunks[which], number, 1, 2, 3, 4])
        num_hashed = hashed.in_lookup(kv, seq)
        assert num_hashed <= 2 or which not in seen
        seen.add(which)
        assert kv.lookup(seq).num_tokens == len(trunks[which])
    assert seen == set(range(len(trunks)))
    assert len(kv.recent_prompts()) == MAX_RECENT


def test_tenants_share_no_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, hashed = cached_manager(TRUNK, salts=("one", "two")), Hashed(monkeypatch)
    counts = []
    for number in range(4):
        seq = make_sequence(number, [*TRUNK, 1], cache_salt="one" if number % 2 else "two")
        counts.append(hashed.in_lookup(kv, seq))
        assert chained(seq) == chain(seq, sha256_128)
    assert counts == [20, 20, 1, 1]


@pytest.mark.parametrize("changed", [0, BLOCK_SIZE - 1])
def test_prompts_that_differ_in_their_first_block_share_no_hashes(
    monkeypatch: pytest.MonkeyPatch, changed: int
) -> None:
    prompts = []
    for number in range(20):
        prompts.append(list(TRUNK))
        prompts[-1][changed] = 100 + number
    kv, hashed = cached_manager(*prompts), Hashed(monkeypatch)
    for number, prompt in enumerate(prompts):
        seq = make_sequence(number, [*prompt, 1])
        assert hashed.in_lookup(kv, seq) == 20
        assert chained(seq) == chain(seq, sha256_128)


def test_a_prompt_that_nothing_is_cached_of_is_compared_with_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv, hashed = cached_manager(TRUNK), Hashed(monkeypatch)
    kv.lookup(make_sequence(0, [*TRUNK, 1]))
    monkeypatch.setattr(type(kv._prefixes.recent), "extend", None)  # calling it would fail
    assert hashed.in_lookup(kv, make_sequence(1, [8, *TRUNK])) == 1


def test_reused_blocks_count_a_fraction_of_a_hash() -> None:
    kv = cached_manager(TRUNK)
    first = make_sequence(0, [*TRUNK, 1])
    assert kv.lookup(first, max_hashes=20).num_hashes == 20
    seq = make_sequence(1, [*TRUNK, 1])
    hit = kv.lookup(seq, max_hashes=3)
    assert (hit.is_unfinished, hit.num_hashes) == (True, 3)
    assert len(seq.prefix_nodes) == 1 + 2 * REUSED_PER_HASH
    hit = kv.lookup(seq, max_hashes=100)
    left = 20 - 1 - 2 * REUSED_PER_HASH
    assert (hit.is_unfinished, hit.num_hashes) == (False, -(-left // REUSED_PER_HASH))
    assert hit.num_tokens == len(TRUNK)


def test_hashes_of_few_blocks_are_not_worth_comparing() -> None:
    kv = cached_manager(TRUNK)
    kv.lookup(make_sequence(0, [*TRUNK[: (MIN_TO_REUSE - 1) * BLOCK_SIZE], 1]))
    assert not kv.recent_prompts()


def crowd() -> World:
    """Prompts of one cached trunk wait while another request decodes."""
    world = World(num_blocks=60, max_num_seqs=4)
    world.add("first", prompt=TRUNK, num_output_tokens=1)
    world.run()
    world.add("decoding", 2, 60)
    world.step()
    for number in range(8):
        world.add(f"r{number}", prompt=[*TRUNK, number], num_output_tokens=3)
    world.step()
    assert world.kv.recent_prompts()
    return world


def test_no_request_is_kept_alive_by_its_hashes() -> None:
    """The invariants, checked after each step, say so of those that end in between."""
    world = crowd()
    world.run()
    assert not world.kv.recent_prompts()


def test_an_aborted_request_is_not_kept_alive_by_its_hashes() -> None:
    world = crowd()
    for request_id in list(world.scheduler.requests):
        world.scheduler.abort(request_id)
    assert not world.kv.recent_prompts()


def test_a_waiting_request_that_is_aborted_is_not_kept_alive_by_its_hashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.core.plan_builder.MAX_HASHES", MIN_TO_REUSE)
    world = crowd()
    [seq] = world.kv.recent_prompts()
    assert seq.request in world.scheduler.waiting
    world.scheduler.abort(seq.request.request_id)
    assert not world.kv.recent_prompts()
