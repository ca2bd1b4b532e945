"""The name of a full block: a link of the chain of all tokens up to its end."""

from __future__ import annotations

from array import array
from typing import TypeVar

FIRST_COMPARED = 16

Tokens = TypeVar("Tokens", bytes, list[int])


class PrefixNode:
    """A full block of tokens after a given prefix: one link of a chain that ends in a root."""

    __slots__ = ("key", "parent", "tokens")

    def __init__(self, parent: PrefixNode | None, tokens: bytes, key: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.key = key


def pack_tokens(token_ids: list[int]) -> bytes:
    """Token ids as 32-bit integers, the form in which they are hashed and compared."""
    return array("i", token_ids).tobytes()


TOKEN_BYTES = len(pack_tokens([0]))


def same_prefix(a: PrefixNode, b: PrefixNode) -> bool:
    """Whether two chains hold the same tokens under the same root.

    Chains found equal come to share their links, so that comparing their successors, block after
    block, takes constant time each.
    """
    top_a, top_b = a, b
    while a is not b:
        if a.key != b.key or a.tokens != b.tokens:
            return False
        if a.parent is None or b.parent is None:
            if a.parent is not b.parent:
                return False
            break
        a, b = a.parent, b.parent
    top_b.parent = top_a.parent
    return True


def first_difference(a: Tokens, b: Tokens, start: int, end: int, size: int = 1) -> int:
    """The first place from `start` on at which `a` and `b` differ; `end` if there is none. Place i
    is elements i * size to (i + 1) * size - 1 of both.

    Gallops, and then bisects: what is compared is proportional to what is equal.
    """
    num = FIRST_COMPARED
    while start < end:
        stop = min(start + num, end)
        if a[start * size : stop * size] == b[start * size : stop * size]:
            start = stop
            num *= 2
        else:
            end = stop - 1
            num = max(1, (stop - start) // 2)
    return start
