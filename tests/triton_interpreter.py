"""Triton's interpreter, in less time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def prepare_the_language_once() -> None:
    """Once for each launch of a kernel, and each module whose functions it calls.

    The interpreter looks through all names of triton.language at each call of a function within a
    kernel and replaces those that it computes itself, though most calls find all of them replaced:
    this takes a third of its time.
    """
    from triton.runtime import interpreter

    prepare: Callable[[Any], Any] = interpreter._patch_lang
    prepared: set[int] = set()  # globals of functions

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            prepared.clear()
            super().restore()

    def prepare_once(fn: Any) -> Any:
        scope = Scope()
        if id(fn.__globals__) not in prepared:
            prepared.add(id(fn.__globals__))
            scope._changes = prepare(fn)._changes
        return scope

    interpreter._patch_lang = prepare_once
