"""Triton's interpreter, in less time: kernels compute the same. And its programs may wait for
others of their grid, which it runs one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
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
    _call_directly()
    _leave_out_unheard_checks()
    _keep_types_of_numpy()
    _keep_shapes()
    _leave_out_needless_casts()
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
    """At the first launch of a kernel, and for good.

    The interpreter looks through all names of triton.language at each launch, and at each call of a
    function within a kernel, and replaces those that it computes itself: this takes a third of its
    time.
    """
    from triton import language
    from triton.runtime import interpreter

    replace_names: Callable[[Any], Any] = interpreter._patch_lang
    sees_all = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    nothing = interpreter._LangPatchScope()  # to restore

    @cache
    def replace_all() -> None:
        replace_names(sees_all)

    def replace_once(fn: Any) -> Any:
        replace_all()
        return nothing

    interpreter._patch_lang = replace_once


def _call_directly() -> None:
    """A name that was replaced calls a function that checks whether it got the interpreter, and
    then calls what computes."""
    from triton.runtime import interpreter

    def replace_name(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)
        fn = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return fn(*args, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = replace_name


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
    from triton.runtime import interpreter

    make_type: Callable[..., None] = core.block_type.__init__
    make_tensor: Callable[..., None] = core.tensor.__init__
    to_ir: Callable[..., Any] = core.block_type.to_ir
    types: dict[tuple[Any, ...], dict[str, Any]] = {}  # attributes, by the element's type and sizes
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}  # attributes that the sizes alone decide

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = (*_identity(element_ty), sizes)
        if key not in types:
            make_type(self, element_ty, shape)
            self.sizes = sizes
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            of_tensor = {"handle", "type", "dtype"}
            shapes[sizes] = {
                name: each for name, each in vars(self).items() if name not in of_tensor
            }
        self.handle, self.type, self.dtype = handle, type, type.scalar
        vars(self).update(shapes[sizes])

    def with_element_type(self: Any, element_ty: Any) -> Any:
        return _block_type(element_ty, self.sizes)

    def to_own_ir(self: Any, builder: Any) -> Any:
        return self if builder is interpreter.interpreter_builder else to_ir(self, builder)

    core.block_type.__init__ = init_type
    core.block_type.with_element_ty = with_element_type
    core.block_type.to_ir = to_own_ir
    core.tensor.__init__ = init_tensor


_block_types: dict[tuple[Any, ...], Any] = {}


def _block_type(element_ty: Any, sizes: tuple[int, ...]) -> Any:
    """One for all blocks of elements and sizes that are the same."""
    from triton.language import core

    key = (*_identity(element_ty), sizes)
    if key not in _block_types:
        _block_types[key] = core.block_type(element_ty, list(sizes))
    return _block_types[key]


def _identity(dtype: Any) -> tuple[Any, ...]:
    """What tells the type of an element from others; the name of a pointer's does not say all."""
    return dtype.name, getattr(dtype, "address_space", None), getattr(dtype, "const", None)


def _leave_out_needless_casts() -> None:
    """Operands of an operation are brought to one type and to one shape, which most of them have;
    and numbers in the source of a kernel become tensors each time."""
    from triton import language
    from triton.runtime import interpreter

    semantic = interpreter.TritonSemantic
    bring: Callable[..., tuple[Any, Any]] = semantic.binary_op_type_checking_impl
    broadcast: Callable[..., tuple[Any, Any]] = semantic.broadcast_impl_value
    plain = {id(each) for each in (language.int32, language.int64, language.float32)}
    numbers: dict[tuple[Any, ...], Any] = {}  # second operands
    common: dict[tuple[int, int], tuple[Any, tuple[int, ...]]] = {}  # shapes and sizes, of shapes

    def bring_together(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        if type(lhs) is language.tensor and id(lhs.dtype) in plain:
            if type(rhs) is language.tensor:
                if rhs.dtype is lhs.dtype:
                    return broadcast_other(self, lhs, rhs)
            elif type(rhs) in (int, float) and not named:
                key = (type(rhs), rhs, id(lhs.dtype), id(lhs.shape), options)
                if key not in numbers:
                    brought, number = bring(self, lhs, rhs, *options)
                    if brought is not lhs:
                        return brought, number
                    values = number.handle.data
                    number.handle.data = np.broadcast_to(values.flat[:1], values.shape)
                    numbers[key] = number
                return lhs, numbers[key]
        return bring(self, lhs, rhs, *options, **named)

    def broadcast_other(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        pair = id(lhs.shape), id(rhs.shape)
        if pair not in common:
            lhs, rhs = broadcast(self, lhs, rhs)
            common[pair] = lhs.shape, lhs.type.sizes
            return lhs, rhs
        return spread(self.builder, lhs, *common[pair]), spread(self.builder, rhs, *common[pair])

    def spread(builder: Any, tensor: Any, shape: Any, sizes: tuple[int, ...]) -> Any:
        if tensor.shape is shape:
            return tensor
        block = _block_type(tensor.dtype, sizes)
        if tensor.type.is_block():
            return language.tensor(builder.create_broadcast(tensor.handle, sizes), block)
        return language.tensor(builder.create_splat(block, tensor.handle), block)

    semantic.binary_op_type_checking_impl = bring_together
    semantic.broadcast_impl_value = broadcast_other


def _look_up_short_floats() -> None:
    """Numbers of 8 and 16 bits are converted bit by bit each time, but there are few of them.

    Those in float32 are converted so, too. But most are zeros, which stand for what is not loaded;
    or they become bfloat16, which has the first of their bits: the interpreter truncates all but
    subnormal ones."""
    from triton.runtime import interpreter

    convert: Callable[..., Any] = interpreter._convert_float
    tables: dict[tuple[str, str, Any], Any] = {}

    def look_up(given: Any, of: Any, to: Any, rounding: Any) -> Any:
        num_bits = of.primitive_bitwidth
        if num_bits > 16:
            words = np.ascontiguousarray(given).view(f"uint{num_bits}")
            if not words.any():
                return np.zeros(words.shape, f"uint{to.primitive_bitwidth}")
            if (of.name, to.name, rounding) == ("fp32", "bf16", None):
                size = words & 0x7FFFFFFF
                if not ((size > 0) & (size < 0x00800000)).any():
                    return (words >> 16).astype(np.uint16)
            return convert(given, of, to, rounding)
        key = of.name, to.name, rounding
        bits = np.dtype(f"uint{num_bits}")
        if key not in tables:
            tables[key] = convert(np.arange(2**num_bits).astype(bits), of, to, rounding)
        return tables[key][np.frombuffer(given.tobytes(), bits)].reshape(given.shape)

    interpreter._convert_float = look_up
