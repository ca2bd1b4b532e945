"""Recomputing a preempted request whose sequences had shared their blocks.

Samples and beams of one request have long prefixes in common. Recomputed one by one they would
hold each prefix several times, and might not even fit where they fitted before. So they regrow as
they grew: one sequence leads, and the others fork off where their tokens part from it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.core.sequence import Request, Sequence


def num_common(a: Sequence, b: Sequence) -> int:
    """Tokens from which `b` can fork off `a`: the common prefix, leaving each one to compute."""
    limit = min(a.num_tokens, b.num_tokens) - 1
    for i in range(limit):
        if a.token_ids[i] != b.token_ids[i]:
            return i
    return limit


def prepare(request: Request) -> None:
    """Let the first sequence lead, and all others wait for it."""
    first, *others = request.sequences
    first.leader = None
    request.catching_up = bool(others)
    for seq in others:
        seq.leader = first
        seq.branch_at = num_common(first, seq)


def goal(seq: Sequence, sequences: Seq[Sequence]) -> int:
    """How far a leading sequence may be computed now: to its last token, which waits for the
    other sequences, or to the point where a follower forks off."""
    branches = [other.branch_at for other in sequences if other.leader is seq]
    return min([seq.num_tokens - 1, *branches])


def leads(seq: Sequence, sequences: Seq[Sequence]) -> bool:
    """Whether another sequence is still to fork off it."""
    return any(other.leader is seq for other in sequences)


def take_ready(sequences: Seq[Sequence]) -> list[tuple[Sequence, Sequence]]:
    """(leader, follower) pairs that part now. Followers that part together share what they can."""
    ready = []
    for seq in sequences:
        leader = seq.leader
        if leader is None or leader.table is None or leader.num_computed_tokens < seq.branch_at:
            continue
        ready.append((leader, seq))
        seq.leader = None
        for other in sequences:
            if other.leader is leader and other.branch_at == seq.branch_at:
                common = num_common(seq, other)
                if common > seq.branch_at:
                    other.leader = seq
                    other.branch_at = common
    return ready
