"""Standard output that cannot be written: its disk is full, or the pipe has no reader."""

from __future__ import annotations

import errno
import os
import sys

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE})


def flush() -> None:
    """Write what is in the buffer. Raises OSError. There is no stdout if it was closed before the
    command began."""
    if sys.stdout is not None:
        sys.stdout.flush()


def leave() -> None:
    """Write nothing more: Python would try again at its end, and complain."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the end)
