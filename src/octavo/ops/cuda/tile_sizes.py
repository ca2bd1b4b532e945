"""Sizes of tiles: Triton's are powers of 2, and what they hold has to find room."""

from __future__ import annotations

MUCH_SHARED_MEMORY = 160 << 10  # A100, H100 and later of their kind; others have 99 KB
SM_REGISTERS = 65536
MOST_REGISTERS = 255  # of a thread


def power_of_2(n: int) -> int:
    """The smallest one that is at least n; Triton's own takes 10 us a call."""
    return 1 << max(n - 1, 0).bit_length()


def registers_for(num_warps: int, per_sm: int = 1) -> int:
    """Registers of each thread with which so many programs of so many warps fit on an SM."""
    return min(MOST_REGISTERS, SM_REGISTERS // (32 * num_warps * per_sm) // 8 * 8)
