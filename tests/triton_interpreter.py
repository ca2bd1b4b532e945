"""Triton's interpreter, in less time: kernels compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any


@cache
def prepare_the_interpreter() -> None:
    """It leaves out what it would do again and again, or for nothing. A second call does nothing.

    TRITON_INTERPRET must be 1 before triton is imported.
    """
    _replace_names_once()
    _leave_out_unheard_checks()
    _keep_types_of_numpy()
    _keep_shapes()


def _replace_names_once() -> None:
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


def _leave_out_unheard_checks() -> None:
    """Of each sum, difference and product of integers, the interpreter computes in 64 bits whether
    it overflows, and asserts that it does not; but assertions look at what they are given only in a
    mode for debugging, which tests do not use."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _keep_types_of_numpy() -> None:
    """The interpreter builds a table of all types each time it looks for one of them."""
    from triton.language import pointer_type
    from triton.runtime import interpreter

    look_up: Callable[[Any], Any] = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def type_of_numpy(dtype: Any) -> Any:
        scalar = dtype.scalar
        if isinstance(scalar, pointer_type):
            return look_up(scalar)
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = type_of_numpy


def _keep_shapes() -> None:
    """Each type of a block checks its shape, and each tensor wraps the sizes that it has; but there
    are few shapes, and nothing changes them."""
    from triton.language import core

    make_type: Callable[..., None] = core.block_type.__init__
    make_tensor: Callable[..., None] = core.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}  # attributes, by the element's type and sizes
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}  # attributes that the sizes alone decide

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype:  # the name of a pointer's does not say all of it
            make_type(self, element_ty, shape)
            return
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            of_tensor = {"handle", "type", "dtype"}
            shapes[sizes] = {
                name: each for name, each in vars(self).items() if name not in of_tensor
            }
        self.handle, self.type, self.dtype = handle, type, type.scalar
        vars(self).update(shapes[sizes])

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
