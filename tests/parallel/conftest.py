from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Groups by their size, which all tests share."""
    groups: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        if size not in groups or groups[size].is_closed:
            groups[size] = Ranks(size)
        return groups[size]

    yield of_size
    for group in groups.values():
        group.close()
