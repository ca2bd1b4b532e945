from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from toys import Register

from octavo.registry import Registry


@pytest.fixture
def register() -> Iterator[Register]:
    added: list[tuple[Registry[Any], str]] = []

    def register(registry: Registry[Any], name: str, implementation: Any) -> None:
        registry.register(name, implementation)
        added.append((registry, name))

    yield register
    for registry, name in added:
        del registry._entries[name]
