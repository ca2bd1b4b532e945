"""Carries out PTX of 32-bit registers in NumPy, whose operations on few words take less time than
torch's, and whose sums and products of uint32 wrap as those of registers do."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]


class Instruction(NamedTuple):
    name: str
    target: str
    sources: tuple[str | Words, ...]  # registers, and plain numbers as arrays of one


def and_or(a: Words, b: Words, c: Words) -> Words:
    return (a & b) | c


def xor_and(a: Words, b: Words, c: Words) -> Words:
    return (a ^ b) & c


# Of lop3, by its table: what the operation makes of the tables of its three sources themselves.
THREE_SOURCES = np.array([[0xF0], [0xCC], [0xAA]], dtype=np.uint32)
KNOWN_TABLES: dict[int, Callable[[Words, Words, Words], Words]] = {
    int(known(*THREE_SOURCES)[0]): known for known in (and_or, xor_and)
}


@lru_cache
def instructions(text: str) -> list[Instruction]:
    found = []
    for line in re.sub(r"[{}]", "", text).split(";"):
        if line.strip() and ".reg" not in line:
            name, operands = line.split(maxsplit=1)
            target, *names = [each.strip() for each in operands.split(",")]
            sources = tuple(
                np.array([int(each, 0)], dtype=np.uint32) if each[0].isdigit() else each
                for each in names
            )
            found.append(Instruction(name, target, sources))
    return found


def carry_out(text: str, registers: dict[str, Words]) -> None:
    """Change and add registers, by name.

    text: of mov, shifts, and, or, xor, mad, prmt, lop3, and differences and products of two 16-bit
        numbers in each register.
    """
    for name, target, sources in instructions(text):
        given = [registers[each] if isinstance(each, str) else each for each in sources]
        registers[target] = result_of(name, *given)


def result_of(name: str, a: Words, *others: Words) -> Words:
    if name == "mov.b32":
        return a
    b = others[0]
    if name == "shr.u32":
        return a >> b
    if name == "shl.b32":
        return a << b
    if name == "shf.l.wrap.b32":
        shift = others[1] & 31
        return (b << shift) | (a >> (32 - shift))  # NumPy shifts all bits out of a word by 32
    if name == "and.b32":
        return a & b
    if name == "or.b32":
        return a | b
    if name == "xor.b32":
        return a ^ b
    if name == "mad.lo.u32":
        return a * b + others[1]
    if name == "prmt.b32":
        return permuted(a, b, others[1])
    if name == "lop3.b32":
        c, table = others[1:]
        return by_table(int(table[0]), a, b, c)
    operation, _, kind = name.partition(".")
    dtype = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[kind.removeprefix("rn.")]
    combine = {"sub": torch.sub, "mul": torch.mul}[operation]
    pairs = (torch.from_numpy(each.view(np.int32)).view(dtype) for each in whole(a, b))
    return combine(*pairs).view(torch.int32).numpy().view(np.uint32)


def permuted(a: Words, b: Words, selector: Words) -> Words:
    """Of the eight octets of a and b, those that the four lowest digits of the selector name."""
    assert not (selector & 0x8888).any(), "signs are not replicated"
    octets = a | (b.astype(np.uint64) << 32)
    places = selector.astype(np.uint64) << 3
    result = (octets >> (places & 0x38)) & 0xFF
    for i in range(1, 4):
        result = result | (((octets >> ((places >> (4 * i)) & 0x38)) & 0xFF) << (8 * i))
    return result.astype(np.uint32)


def by_table(table: int, a: Words, b: Words, c: Words) -> Words:
    if table in KNOWN_TABLES:
        return KNOWN_TABLES[table](a, b, c)
    result = np.zeros(1, dtype=np.uint32)
    pairs = [(~each, each) for each in (a, b, c)]
    for bits in range(8):  # of the three sources, for which the table has a 1
        if table >> bits & 1:
            result = result | (pairs[0][bits >> 2] & pairs[1][bits >> 1 & 1] & pairs[2][bits & 1])
    return result


def whole(*words: Words) -> list[Words]:
    """In memory of their own, of one shape."""
    return [each.copy() for each in np.broadcast_arrays(*words)]
