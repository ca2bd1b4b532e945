"""What the tests of docs/extending.md share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.registry import Registry

Register = Callable[[Registry[Any], str, Any], None]
"""`registry.register(name, implementation)` that ends with the test."""
