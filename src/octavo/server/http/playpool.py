"""The block pool driven by hand: the backend of the page at /pool.

Nothing here imitates the engine: the operations call the KVCacheManager that serves requests, on
a pool of 64 blocks of 16 tokens. A visitor's state is the list of the operations so far, which
the page sends whole; the server keeps nothing, and undoing is leaving out the last one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.core.decoding import Sampling
from octavo.core.kv.manager import Changes, KVCacheManager
from octavo.core.kv.specs import FullAttention
from octavo.core.sequence import Request, Sequence
from octavo.core.step import SamplingSpec
from octavo.errors import InvalidRequest, shown
from octavo.server.http.bodies import FAIL_FAST, Body, Integer

BLOCK_SIZE = 16  # tokens
NUM_BLOCKS = 64
MAX_OPERATIONS = 1000
MAX_TOKENS = NUM_BLOCKS * BLOCK_SIZE  # in one append
MAX_SEQUENCES = 64  # alive at a time
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

TEXTBOOK_PROMPT_TOKENS, TEXTBOOK_BEAMS, TEXTBOOK_TOKENS = 64, 4, 10
# The textbook sets two fresh blocks aside for each beam, although ten tokens fill one.
TEXTBOOK_BLOCKS_PER_BEAM = 2


class New(Body):
    """Start an empty sequence."""

    op: Literal["new"]


class Append(Body):
    """Append tokens to a sequence."""

    op: Literal["append"]
    sequence: str
    tokens: Annotated[int, Integer(1, MAX_TOKENS)]


class Fork(Body):
    """Make copies of a sequence that share its blocks."""

    op: Literal["fork"]
    sequence: str
    times: Annotated[int, Integer(1, MAX_SEQUENCES)]


class Rewrite(Body):
    """Write the last token once more, in its place."""

    op: Literal["rewrite"]
    sequence: str


class Free(Body):
    """End a sequence."""

    op: Literal["free"]
    sequence: str


Operation = Annotated[New | Append | Fork | Rewrite | Free, Field(discriminator="op")]


class Play(Body):
    """POST /pool/play"""

    operations: Annotated[list[Operation], Field(max_length=MAX_OPERATIONS), FAIL_FAST]


TEXTBOOK: list[dict[str, Any]] = [
    {"op": "new"},
    {"op": "append", "sequence": "A", "tokens": TEXTBOOK_PROMPT_TOKENS},
    {"op": "fork", "sequence": "A", "times": TEXTBOOK_BEAMS - 1},
    *({"op": "append", "sequence": name, "tokens": TEXTBOOK_TOKENS} for name in "ABCD"),
]
# It goes on as beam search does: the worst beam is dropped and the best one goes on twice, which
# then share a block that is not full yet. The first to append to it gets a copy of its own.
TEXTBOOK_FORK: list[dict[str, Any]] = [
    {"op": "free", "sequence": "D"},
    {"op": "fork", "sequence": "A", "times": 1},
]
TEXTBOOK_WRITE: list[dict[str, Any]] = [{"op": "append", "sequence": "E", "tokens": 1}]


@dataclass(frozen=True, slots=True)
class Count:
    """Blocks in use after an operation, and what they would be without sharing."""

    label: str
    held: int  # physical blocks
    naive: int  # if every sequence had blocks of its own for all its tokens


@dataclass(slots=True)
class _Member:
    """A sequence of the visitor's, and where it was forked off."""

    seq: Sequence
    parent: str | None
    shared_tokens: int = 0  # tokens it had in common with its parent when it was forked


@dataclass(slots=True)
class PlayPool:
    """Owns one small KV cache and the sequences in it."""

    kv: KVCacheManager = field(
        default_factory=lambda: KVCacheManager(
            [FullAttention()], BLOCK_SIZE, NUM_BLOCKS, enable_prefix_caching=False
        )
    )
    members: dict[str, _Member] = field(default_factory=dict)
    history: list[Count] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)  # of the latest operation
    _num_named: int = 0

    def run(self, operation: Operation) -> None:
        """Carry out one operation.

        Raises:
            InvalidRequest: it names a sequence that does not exist, or needs more free blocks than
                there are. The pool is as it was.
        """
        self.events = []
        match operation:
            case New():
                label = self._new()
            case Append(sequence=name, tokens=num_tokens):
                label = self._append(name, num_tokens)
            case Fork(sequence=name, times=times):
                label = self._fork(name, times)
            case Rewrite(sequence=name):
                label = self._rewrite(name)
            case Free(sequence=name):
                label = self._free(name)
        self.history.append(Count(label, self.kv.pool.num_held, self.num_naive_blocks))

    @property
    def num_naive_blocks(self) -> int:
        """Blocks, if every sequence kept all its tokens for itself."""
        return sum(-(-member.seq.num_tokens // BLOCK_SIZE) for member in self.members.values())

    # ---------------------------------------------------------------- the operations

    def _new(self) -> str:
        self._check_room_for(1)
        name = self._next_name()
        self.members[name] = _Member(self._sequence([]), None)
        return f"new sequence {name}"

    def _append(self, name: str, num_tokens: int) -> str:
        member = self._member(name)
        self._write(name, member, member.seq.num_tokens, num_tokens)
        return f"append {num_tokens} to {name}"

    def _fork(self, name: str, times: int) -> str:
        parent = self._member(name).seq
        self._check_room_for(times)
        for _ in range(times):
            child_name = self._next_name()
            child = self._sequence(parent.token_ids)
            if parent.table is not None:
                self.kv.fork(parent, child)
            self.members[child_name] = _Member(child, name, parent.num_tokens)
            self.events.append({"kind": "fork", "sequence": child_name, "parent": name})
        return f"fork {name}" + (f" {times} times" if times > 1 else "")

    def _rewrite(self, name: str) -> str:
        member = self._member(name)
        num_tokens = member.seq.num_tokens
        if num_tokens == 0:
            raise InvalidRequest("sequence", f"{name} has no token yet; append some first")
        self._write(name, member, num_tokens - 1, 1)
        return f"rewrite the last token of {name}"

    def _free(self, name: str) -> str:
        member = self._member(name)
        held = [] if member.seq.table is None else member.seq.table.held()
        self.kv.free(member.seq)
        del self.members[name]
        for block_id in reversed(held):
            kind = "free" if self.kv.pool.ref_count(block_id) == 0 else "release"
            self.events.append({"kind": kind, "sequence": name, "block": block_id})
        return f"free {name}"

    # ---------------------------------------------------------------- inside

    def _write(self, name: str, member: _Member, position: int, num_tokens: int) -> None:
        """Store `num_tokens` tokens from `position` on: the manager takes or copies blocks."""
        seq, end = member.seq, position + num_tokens
        before = [] if seq.table is None else seq.table.held()
        num_computed, seq.num_computed_tokens = seq.num_computed_tokens, position
        changes: Changes | None
        if seq.table is None:
            changes = self.kv.allocate(seq, self.kv.no_hit(seq), end)
        else:
            changes = self.kv.append([(seq, end)])
        if changes is None:
            seq.num_computed_tokens = num_computed
            free = self.kv.pool.num_free
            raise InvalidRequest(
                "tokens",
                f"{name} needs more than the {free} free block{'s' * (free != 1)} of "
                f"{BLOCK_SIZE} tokens; nothing was changed",
            )
        seq.token_ids.extend([0] * (end - seq.num_tokens))
        seq.num_computed_tokens = end
        self._tell_of(name, seq, before, changes)

    def _tell_of(self, name: str, seq: Sequence, before: list[int], changes: Changes) -> None:
        for copy in changes.copies:
            self.events.append(
                {"kind": "copy", "sequence": name, "block": copy.target, "source": copy.source}
            )
        copied = {copy.target for copy in changes.copies}
        assert seq.table is not None, "it has just been written"
        for block_id in seq.table.held():
            if block_id not in before and block_id not in copied:
                self.events.append({"kind": "take", "sequence": name, "block": block_id})

    def _sequence(self, token_ids: list[int]) -> Sequence:
        number = self._num_named
        method = Sampling(1, MAX_TOKENS * MAX_SEQUENCES, frozenset(), frozenset())
        request = Request(str(number), list(token_ids), method, SamplingSpec())
        return Sequence(number, request, list(token_ids))

    def _next_name(self) -> str:
        """A, B, ... Z, A2, B2, ..."""
        cycle, letter = divmod(self._num_named, len(NAMES))
        self._num_named += 1
        return NAMES[letter] + (str(cycle + 1) if cycle else "")

    def _member(self, name: str) -> _Member:
        if name not in self.members:
            alive = ", ".join(self.members) or "none"
            raise InvalidRequest("sequence", f"there is no sequence {shown(name)}; alive: {alive}")
        return self.members[name]

    def _check_room_for(self, num_new: int) -> None:
        if len(self.members) + num_new > MAX_SEQUENCES:
            raise InvalidRequest(
                "times",
                f"{len(self.members)} sequences are alive, and at most {MAX_SEQUENCES} can be",
            )

    # ---------------------------------------------------------------- what the page shows

    def state(self) -> dict[str, Any]:
        """Everything that the page draws, as plain values."""
        pool = self.kv.pool
        blocks: dict[int, dict[str, Any]] = {}
        for name, member in self.members.items():
            held = [] if member.seq.table is None else member.seq.table.held()
            for index, block_id in enumerate(held):
                filled = min(BLOCK_SIZE, member.seq.num_tokens - index * BLOCK_SIZE)
                block = blocks.setdefault(block_id, {"id": block_id, "holders": [], "filled": 0})
                block["holders"].append(name)
                block["filled"] = max(block["filled"], filled)
        for block_id, block in blocks.items():
            block["ref_count"] = pool.ref_count(block_id)
        return {
            "block_size": BLOCK_SIZE,
            "num_blocks": pool.num_blocks,
            "num_held": pool.num_held,
            "num_free": pool.num_free,
            "num_naive": self.num_naive_blocks,
            "num_copies": self.kv.num_cow_copies,
            "blocks": [blocks[block_id] for block_id in sorted(blocks)],
            "sequences": [
                {
                    "name": name,
                    "parent": member.parent,
                    "shared_tokens": member.shared_tokens,
                    "num_tokens": member.seq.num_tokens,
                    "block_ids": [] if member.seq.table is None else member.seq.table.held(),
                }
                for name, member in self.members.items()
            ],
            "history": [asdict(count) for count in self.history],
            "events": self.events,
        }


def play(operations: Seq[Operation]) -> dict[str, Any]:
    """The state after `operations` on a fresh pool.

    Raises:
        InvalidRequest: one cannot be carried out; the message says which.
    """
    pool = PlayPool()
    for number, operation in enumerate(operations):
        try:
            pool.run(operation)
        except InvalidRequest as error:
            raise InvalidRequest(f"operations[{number}].{error.field}", error.reason) from error
    return pool.state()


def textbook_case() -> dict[str, Any]:
    """The lesson's example: what the pool really does, and how the lesson counts.

    A prompt of 64 tokens and 4 beams of 10 tokens each. Really 4 shared blocks and one more for
    each beam, 8, against 4 x 5 = 20 without sharing. The lesson arrives at 12 against 16: it sets
    two blocks aside for each beam (4 + 4 x 2) and compares with four copies of the prompt alone.
    `fork` and `write` go on from there, to a copy on write.
    """
    prompt_blocks = -(-TEXTBOOK_PROMPT_TOKENS // BLOCK_SIZE)
    return {
        "operations": TEXTBOOK,
        "fork": TEXTBOOK_FORK,
        "write": TEXTBOOK_WRITE,
        "prompt_tokens": TEXTBOOK_PROMPT_TOKENS,
        "num_beams": TEXTBOOK_BEAMS,
        "tokens_per_beam": TEXTBOOK_TOKENS,
        "prompt_blocks": prompt_blocks,
        "blocks_per_beam": TEXTBOOK_BLOCKS_PER_BEAM,
        "paged": prompt_blocks + TEXTBOOK_BEAMS * TEXTBOOK_BLOCKS_PER_BEAM,
        "naive": TEXTBOOK_BEAMS * prompt_blocks,
    }
