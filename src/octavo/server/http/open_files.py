"""How many files the process may have open. Each connection is one."""

from __future__ import annotations

import resource


def raise_file_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard one, which needs no privileges.

    The soft limit is often 1,024 for the sake of programs that call `select`. Returns the soft
    limit before and after.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard
