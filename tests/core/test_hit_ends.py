"""Why a lookup in the prefix cache gave no more."""

from __future__ import annotations

from core.worlds import BLOCK_SIZE, compute, make_manager, make_sequence
from octavo.core.kv.specs import FullAttention, SlidingWindow

PROMPT = [5, 6, 7, 8, 1, 2, 3, 4, 9, 9]


def test_why_a_hit_ends() -> None:
    kv = make_manager(num_blocks=4)
    first = make_sequence(0, PROMPT)
    assert kv.lookup(first).ended_by == "unknown"
    compute(kv, first)
    kv.free(first)
    again = kv.lookup(make_sequence(1, PROMPT[:8]))
    assert (again.num_tokens, again.ended_by) == (7, "complete")
    other = kv.lookup(make_sequence(2, [*PROMPT[:6], 0, 0, 0]))
    assert (other.num_tokens, other.ended_by) == (6, "differs")
    longer = kv.lookup(make_sequence(3, [*PROMPT[:8], 0, 0, 0, 0, 0]))
    assert (longer.num_tokens, longer.ended_by) == (8, "unknown")
    stranger = kv.lookup(make_sequence(4, PROMPT, cache_salt="somebody else"))
    assert (stranger.num_tokens, stranger.ended_by) == (0, "unknown")
    greedy = make_sequence(5, [0] * 4 * BLOCK_SIZE)
    compute(kv, greedy)
    kv.free(greedy)
    assert kv.num_evicted_blocks == 2
    gone = kv.lookup(make_sequence(6, PROMPT))
    assert (gone.num_tokens, gone.ended_by) == (0, "evicted")


def test_without_a_cache_nothing_is_asked() -> None:
    kv = make_manager(enable_prefix_caching=False)
    assert kv.lookup(make_sequence(0, PROMPT)).ended_by == "not_asked"


def test_a_window_that_has_moved_on() -> None:
    """All full-attention blocks are there, but the window has given its first ones back."""
    kv = make_manager(num_blocks=9, specs=[FullAttention(), SlidingWindow(BLOCK_SIZE)])
    seq = make_sequence(0, [*PROMPT, *PROMPT, *PROMPT])
    for end in range(BLOCK_SIZE, 29, BLOCK_SIZE):
        if seq.table is None:
            changes = kv.allocate(seq, kv.lookup(seq), end)
        else:
            changes = kv.append([(seq, end)])
        assert changes is not None
        seq.num_computed_tokens = end
        kv.register(seq, end)
    shorter = kv.lookup(make_sequence(1, [*PROMPT, 0]))
    assert (shorter.num_tokens, shorter.ended_by) == (0, "window")
