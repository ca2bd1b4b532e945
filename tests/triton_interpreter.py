"""Triton's interpreter, in less time: kernels compute the same. And its programs may wait for
others of their grid, which it runs one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

EMPTY = -(2**31)  # as in announcing.py


@cache
def prepare_the_interpreter() -> None:
    """It leaves out what it would do again and again, or for nothing, and lets programs wait. A
    second call does nothing.

    TRITON_INTERPRET must be 1 before triton is imported.
    """
    _let_programs_wait()
    _replace_names_once()
    _leave_out_unheard_checks()
    _keep_types_of_numpy()
    _keep_shapes()
    _look_up_short_floats()


class _Programs:
    """A kernel's function as a launch calls it: once for each program, in the order of the grid.

    While a program waits, the next one that has not begun runs within it.
    """

    def __init__(self, fn: Any, builder: Any) -> None:
        self._fn = fn
        self._builder = builder
        self._begun: set[tuple[int, ...]] = set()
        self.__name__, self.__globals__ = fn.__name__, fn.__globals__
        self.__signature__ = inspect.signature(fn)

    def __call__(self, **args: Any) -> None:
        index = tuple(self._builder.grid_idx)
        if index in self._begun:  # within one that waited
            return
        self._begun.add(index)
        outer, self._builder.run_next = getattr(self._builder, "run_next", None), self._run_next
        self._args = args
        try:
            self._fn(**args)
        finally:
            self._builder.run_next = outer

    def _run_next(self) -> None:
        own = tuple(self._builder.grid_idx)
        following = (
            each for each in product(*map(range, self._builder.grid_dim)) if each not in self._begun
        )
        index = next(following, None)
        if index is None:
            raise AssertionError(f"{self.__name__}: {own} waits for what no program leaves")
        self._builder.set_grid_idx(*index)
        self(**self._args)
        self._builder.set_grid_idx(*own)


def _let_programs_wait() -> None:
    """A program waits by volatile loads of integers, until none of them is EMPTY (announcing.py).

    If there is no program left that might leave what it waits for, the launch fails.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    load: Callable[..., Any] = builder.create_masked_load
    init: Callable[..., None] = interpreter.GridExecutor.__init__

    def load_announced(
        ptrs: Any,
        mask: Any,
        other: Any,
        cache_modifier: Any,
        eviction_policy: Any,
        is_volatile: Any,
    ) -> Any:
        found = load(ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)
        if is_volatile and found.data.dtype == np.int32 and (found.data == EMPTY).any():
            builder.run_next()
        return found

    def init_executor(self: Any, fn: Any, *args: Any) -> None:
        init(self, fn, *args)
        self.fn = _Programs(fn, builder)

    builder.create_masked_load = load_announced
    interpreter.GridExecutor.__init__ = init_executor


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


def _look_up_short_floats() -> None:
    """Numbers of 8 and 16 bits are converted bit by bit each time, but there are few of them."""
    from triton.runtime import interpreter

    convert: Callable[..., Any] = interpreter._convert_float
    tables: dict[tuple[str, str, Any], Any] = {}

    def look_up(given: Any, of: Any, to: Any, rounding: Any) -> Any:
        num_bits = of.primitive_bitwidth
        if num_bits > 16:
            return convert(given, of, to, rounding)
        key = of.name, to.name, rounding
        bits = np.dtype(f"uint{num_bits}")
        if key not in tables:
            tables[key] = convert(np.arange(2**num_bits).astype(bits), of, to, rounding)
        return tables[key][np.frombuffer(given.tobytes(), bits)].reshape(given.shape)

    interpreter._convert_float = look_up
