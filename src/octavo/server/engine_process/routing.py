"""Which replica gets a request: the one that has most of its prompt cached, unless it is busy.

The API process knows what it has sent where. It notes the full blocks of each prompt, as hashes of
a chain that begins with the request's cache salt, in an index for each replica; the index holds as
many blocks as the replica's cache, and forgets the least recently used ones first. So it tells
roughly what is cached where, and asks no engine.

The rule: a replica's price is its load less the value of what it has cached of the prompt, and the
lowest price wins. Loads are counted in tokens: of each request that a replica has, those of the
prompt that were not expected in its cache, and those that are likely to be generated. A cached
token is worth CACHED_WORTH tokens of load, because a miss costs more than its own computation: the
prefix takes blocks twice, and evicts others. What a whole prefix is worth is bounded: beyond
MAX_IMBALANCE tokens (64 requests of usual length), a request leaves its prefix behind, which then
is cached twice, unless to wait costs less than to compute it again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Literal, Protocol, TypeVar

from octavo.engine.validation import PreparedRequest

Routing = Literal["prefix", "load", "round-robin"]
Chain = Sequence[int]  # 64-bit hashes of the blocks of a prompt

CACHED_WORTH = 16
MAX_IMBALANCE = 16_384
USUAL_OUTPUT = 256  # tokens that a sample is expected to come to, unless its limit is lower
MAX_BLOCKS = 1 << 17  # in an index; one takes about 180 bytes
# Blocks of a prompt that are hashed. A prompt of a million tokens must not hold up the others, and
# prompts that are equal for so long seldom differ in where they should go.
MAX_DEPTH = 2048


class Candidate(Protocol):
    """A replica, as far as routing goes."""

    number: int
    load: int


C = TypeVar("C", bound=Candidate)


class PrefixIndex:
    """The blocks that one replica's cache is likely to hold, as hashes; the least recently used
    ones are forgotten."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, chain: Chain) -> int:
        """How many leading blocks of a chain are known."""
        known = self._blocks
        return next((i for i, block in enumerate(chain) if block not in known), len(chain))

    def add(self, chain: Chain) -> None:
        """Note a chain as used now. Its end is forgotten before its beginning."""
        blocks = self._blocks
        move_to_end = blocks.move_to_end
        for block in reversed(chain):
            if block in blocks:
                move_to_end(block)
            else:
                blocks[block] = None
        while len(blocks) > self.max_blocks:
            blocks.popitem(last=False)

    def clear(self) -> None:
        """The cache is empty: the process was replaced."""
        self._blocks.clear()


class Router:
    """Owns an index for each replica; chooses replicas."""

    def __init__(self, num_replicas: int, routing: Routing = "prefix") -> None:
        self._indexes = [PrefixIndex() for _ in range(num_replicas)]
        self._routing = routing
        self._block_size = 1  # tokens
        self._turns = count()

    def begin(self, number: int, num_blocks: int, block_size: int) -> None:
        """A replica has a new process, whose cache is empty."""
        self._indexes[number].clear()
        self._indexes[number].max_blocks = min(num_blocks, MAX_BLOCKS)
        self._block_size = block_size

    def forget(self, number: int) -> None:
        """A replica's cache is empty."""
        self._indexes[number].clear()

    def chain(self, request: PreparedRequest) -> Chain:
        """What the indexes know a prompt by; empty if it does not matter. Takes about as long as
        all else here together, and stays the same: it is kept with the request."""
        if self._routing != "prefix" or len(self._indexes) == 1:
            return ()
        return block_chain(request, self._block_size)

    def choose(
        self, request: PreparedRequest, chain: Chain, candidates: Sequence[C]
    ) -> tuple[C, int]:
        """Choose one of the candidates, of which there is at least one, and note what it gets.

        Returns it, and the load of the request there.
        """
        matches = {each.number: self._num_matched(each, chain) for each in candidates}
        if self._routing == "round-robin":
            chosen = candidates[next(self._turns) % len(candidates)]
        else:
            chosen = min(candidates, key=lambda each: self._price(each, matches[each.number]))
        self._indexes[chosen.number].add(chain)
        return chosen, _whole_load(request) - matches[chosen.number]

    def reconsider(
        self,
        request: PreparedRequest,
        chain: Chain,
        load: int,
        here: Candidate,
        there: Candidate,
    ) -> int | None:
        """Whether a request that waits `here`, where its load is `load`, should move.

        It should if it is better off: `there` has less to do even with it than `here` without it,
        prefixes weighed as ever. Then it would not move back unless the loads had changed by twice
        its own, so requests do not wander. As much to do is enough if `there` has nothing else,
        since it begins at once. Returns its load there, which is noted, or None.
        """
        whole = _whole_load(request)
        price_here = here.load - load - _worth(whole - load) + (there.load == 0)
        num_prompt_tokens = len(request.input_token_ids)
        lowest = there.load + whole - num_prompt_tokens - _worth(num_prompt_tokens)
        if lowest >= price_here:
            return None  # however much of its prefix is there, which takes longer to find out
        num_matched = self._num_matched(there, chain)
        load_there = whole - num_matched
        if there.load + load_there - _worth(num_matched) >= price_here:
            return None
        self._indexes[there.number].add(chain)
        return load_there

    def _num_matched(self, candidate: Candidate, chain: Chain) -> int:
        """Tokens of a prompt that a replica is likely to have cached."""
        return self._indexes[candidate.number].match(chain) * self._block_size

    def _price(self, candidate: Candidate, num_matched: int) -> tuple[int, int, int]:
        """The lowest wins; equal ones by load, then by what their caches hold already."""
        load = candidate.load
        return load - _worth(num_matched), load, len(self._indexes[candidate.number])


def _worth(num_matched: int) -> int:
    """How much more load a replica may have that has this many tokens of a prompt cached."""
    return max(num_matched, min(CACHED_WORTH * num_matched, MAX_IMBALANCE))


def _whole_load(request: PreparedRequest) -> int:
    """The load of a request of which nothing is cached."""
    num_to_come = request.max_length - len(request.prompt_token_ids)
    return len(request.input_token_ids) + min(USUAL_OUTPUT, num_to_come) * request.width


def block_chain(request: PreparedRequest, block_size: int) -> Chain:
    """Hashes of the full blocks of a prompt, each with all before it; at most MAX_DEPTH.

    Python's hashes of bytes are keyed with a secret of the process, so a client cannot make two
    prompts look alike; if it could, they would be computed in the wrong place, no more.
    """
    num_blocks = min(len(request.input_token_ids) // block_size, MAX_DEPTH)
    tokens = array("i", request.input_token_ids[: num_blocks * block_size])
    packed, size = tokens.tobytes(), block_size * tokens.itemsize
    chain, link = array("q"), hash(request.cache_salt)
    for start in range(0, len(packed), size):
        link = hash((link, packed[start : start + size]))
        chain.append(link)
    return chain
