"""What a chat template may do: jinja2's sandbox, which bounds what a template can reach, with
limits on what it makes and on how long it runs.

A template is a program. Without limits a few characters of one take all memory (`'x' * 10 ** 10`, a
string doubled forty times) or all time (three nested loops over `range(100000)`). Here every
operation whose result may be larger than what it is made of is checked before it is done, and what
it has made is counted: operators, filters, methods, and texts that are captured. What jinja2 leaves
to Python (`~`, slices, comparisons, literals, loops) is made a call of a filter when a template is
compiled. The time is looked at between operations, each of which is short because of its limits.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from itertools import islice
from types import NoneType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 1 << 24  # that one operation makes or looks at, and of the prompt
# Of all that one rendering makes, and for each message besides: a template may add every message to
# a text that it has collected.
MAX_BYTES, MESSAGE_BYTES = 1 << 27, 1 << 20
MAX_SECONDS, MESSAGE_SECONDS = 2.0, 1e-3  # of CPU time for a rendering, and for each message
MAX_BITS = 1 << 14  # of an integer
MAX_FORMAT = 4096  # characters of a format, as of `%`
MAX_STRIPPED = 256  # different characters to strip
MAX_INDENT = 64
MAX_PRECISION = 64
ELEMENT_WEIGHT = 8  # characters that an element is worth, beside its text
ESCAPED = 6  # characters that one may become in HTML
STRING_BYTES = 64  # of a short string, beside its place in a list
SHORT = 128  # characters; sums that are no longer are not counted, because most are
PARTS = 256  # that are joined before their size is looked at
CHECK_SECONDS = 0.01  # between two looks at the CPU time, which take longer than steps

# Filters that only make sense of HTML, or for people, and may write or take any amount.
REFUSED_FILTERS = "pprint", "striptags", "urlize", "wordwrap", "xmlattr"
WEIGHED_FILTERS = "dictsort", "groupby", "max", "min", "sort", "string", "unique", "urlencode"
COMPARING_TESTS = frozenset(
    {"==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan"}
    | {"<=", "le", "in"}
)
PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
STRIPPING = frozenset({"strip", "lstrip", "rstrip"})
ATOMS = frozenset({str, int, float, bool, NoneType})
TEXTS = str, bytes
SEQUENCES = str, bytes, list, tuple
COUNTED = str, bytes, list, tuple, dict, set
SIMPLE = str, int, float, type(None), jinja2.Undefined
OWNERS = str, bytes, int, list, tuple, Mapping
CONTAINERS = list, tuple, set, frozenset, Mapping, KeysView, ItemsView, ValuesView
PLAIN = str, bytes, int, float, type(None), *CONTAINERS, jinja2.Undefined, Namespace
# Filters that templates cannot name.
JOINED, SLICED, MADE, WEIGHED, STEP = " joined", " sliced", " made", " weighed", " step"

_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?")
_DIGITS = re.compile(r"\d+")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")

Filter = Callable[..., Any]
# Called with a filter's arguments; may return others to call it with.
Check = Callable[..., tuple[Any, ...] | None]


class TooMuch(jinja2.TemplateError):
    """A template would make more than it may, or takes too long."""


class _Spent(threading.local):
    """What the rendering in this thread has used. Compiling, which computes constants, is one."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, num_messages: int) -> None:
        """Another rendering, of so many messages."""
        self.num_bytes = 0
        self._max_bytes = MAX_BYTES + MESSAGE_BYTES * num_messages
        self._seconds = MAX_SECONDS + MESSAGE_SECONDS * num_messages
        self._end = time.thread_time() + self._seconds
        self._next_check = 0.0

    def note(self, made: Any) -> None:
        """Something was made, or perhaps only found."""
        if isinstance(made, COUNTED):
            self.num_bytes += sys.getsizeof(made)
            if self.num_bytes > self._max_bytes:
                raise TooMuch(f"it makes more than {self._max_bytes:,} bytes in all")
        self.note_step()

    def note_step(self) -> None:
        """A loop goes on, or something else is done that can be done very often."""
        now = time.monotonic()
        if now > self._next_check:
            self._next_check = now + CHECK_SECONDS
            if time.thread_time() > self._end:
                raise TooMuch(f"it takes more than {self._seconds:.1f} s")


_SPENT = _Spent()


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one template, which may be rendered in several threads at once."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *extensions: type[Extension]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        del self.globals["lipsum"]
        checks: dict[str, Check] = {
            "batch": _check_batch,
            "center": _check_center,
            "format": _check_percent,
            "indent": _check_indent,
            "join": self._check_join_filter,
            "replace": _check_replace_filter,
            "round": _check_round,
            "slice": _check_slice,
            "sum": self._check_sum,
            "trim": _check_trim,
            **dict.fromkeys(WEIGHED_FILTERS, self._check_weight),
        }
        for name, made in self.filters.items():
            self.filters[name] = self._bounded(made, checks.get(name))
        for name in REFUSED_FILTERS:
            self.filters[name] = functools.partial(_refuse, name)
        own = {JOINED: self._joined, SLICED: self._sliced, MADE: self._made, WEIGHED: _weighed}
        self.filters |= own | {STEP: self._stepped}
        for name in COMPARING_TESTS:
            self.tests[name] = self._bounded_test(self.tests[name])
        self.finalize = self._finalized

    def begin(self, num_messages: int) -> None:
        """What follows in this thread is one rendering, or the compilation."""
        _SPENT.begin(num_messages)

    # ---------------------------------------------------------------- what jinja2 calls

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """jinja2's hook between parsing and generating code."""
        return super()._generate(_Bounding(self).visit(source), *args, **kwargs)

    def concat(self, parts: Iterable[str]) -> str:
        """The text of a block that is captured, or of all."""
        kept: list[str] = []
        size, left = 0, iter(parts)
        while some := list(islice(left, PARTS)):
            size += sum(map(len, some))
            if size > MAX_CHARACTERS:
                raise TooMuch(f"it writes more than {MAX_CHARACTERS:,} characters")
            kept += some
        text = "".join(kept)
        _SPENT.note(text)
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See SandboxedEnvironment.call_binop."""
        if operator == "+":
            if type(left) is type(right) is str and len(left) + len(right) <= SHORT:
                return left + right
            if isinstance(left, SEQUENCES) and hasattr(right, "__len__"):
                _check_size((len(left) + len(right)) * _worth(left) * _factor(left, right))
        elif operator == "%":
            if isinstance(left, TEXTS):
                _check_percent(left, right)
        else:
            _check_product(operator, left, right)
        made = super().call_binop(context, operator, left, right)
        _SPENT.note(made)
        return made

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """See SandboxedEnvironment.call."""
        owner = getattr(called, "__self__", None)
        if owner is not None and isinstance(owner, OWNERS):
            args = self._check_method(owner, called.__name__, args, kwargs)
        made = super().call(context, called, *args, **kwargs)
        _SPENT.note(made)
        if isinstance(made, dict):
            weigh(made)
        elif isinstance(owner, TEXTS) and isinstance(made, list):  # new strings
            _SPENT.num_bytes += STRING_BYTES * len(made)
        return made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See SandboxedEnvironment.wrap_str_format."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return checked

    def _finalized(self, value: Any) -> Any:
        """What is written, before it becomes a text."""
        return value if isinstance(value, SIMPLE) else self._as_text(value)

    # ---------------------------------------------------------------- filters and tests

    def _bounded(self, made: Filter, check: Check | None) -> Filter:
        """A filter whose arguments are checked before, and whose result is counted."""

        @functools.wraps(made)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            others = None if check is None else check(*args, **kwargs)
            result = made(*args, **kwargs) if others is None else made(*others)
            _SPENT.note(result)
            return result

        return bounded

    def _bounded_test(self, test: Any) -> Filter:
        """A test that counts as a step, of values that do not take long to compare."""

        @functools.wraps(test)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            _SPENT.note_step()
            for each in (*args, *kwargs.values()):
                _weighed(each)
            return test(*args, **kwargs)

        return bounded

    def _joined(self, parts: list[Any]) -> str:
        """`~`"""
        texts = [each if isinstance(each, str) else self._as_text(each) for each in parts]
        _check_size(sum(map(len, texts)))
        text = "".join(map(str, texts))
        _SPENT.note(text)
        return text

    def _as_text(self, value: Any) -> str:
        weigh(value)
        text = str(value)
        _SPENT.note(text)
        return text

    def _sliced(self, value: Any, *limits: Any) -> Any:
        result = value[slice(*limits)]
        _SPENT.note(result)
        return result

    def _made(self, value: Any) -> Any:
        """A literal, whose parts may be long themselves, or the same ones many times."""
        weigh(value)
        _SPENT.note(value)
        return value

    @jinja2.pass_context
    def _stepped(self, context: Context, value: Any) -> Any:
        _SPENT.note_step()
        return value

    # ---------------------------------------------------------------- checks

    def _check_method(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Of a value of Python's own. Returns the arguments."""
        if name == "translate":
            raise TooMuch("the method translate is not there for chat templates")
        if name in PADDING:
            times = 1 + owner.count("\t") if isinstance(owner, str) else 1
            given = (*args, *kwargs.values())
            width = sum(abs(each) for each in given if isinstance(each, int))
            _check_size(times * max(width, 8) if name == "expandtabs" else width)
        elif name in STRIPPING:
            _check_stripped(*args)
        elif name == "replace":
            _check_replace(owner, *args, **kwargs)
        elif name == "join" and args:
            return self._check_join(owner, args[0]), *args[1:]
        elif name in ("count", "index") and not isinstance(owner, TEXTS):
            weigh(owner)
        return args

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            _SPENT.note_step()
            yield value

    def _check_join(self, separator: Any, parts: Iterable[Any]) -> list[Any]:
        kept, size = [], 0
        for part in self._each(parts):
            size += weigh(part) + len(separator)
            _check_size(size * _factor(separator, part))
            kept.append(part)
        return kept

    def _check_join_filter(
        self, eval_ctx: nodes.EvalContext, value: Any, d: Any = "", attribute: Any = None
    ) -> tuple[Any, ...]:
        return eval_ctx, self._check_join(str(d), value), d, attribute

    def _check_weight(self, *args: Any, **kwargs: Any) -> None:
        for each in (*args, *kwargs.values()):
            if not isinstance(each, jinja2.Environment):
                _weighed(each)

    def _check_sum(
        self, environment: Any, iterable: Any, attribute: Any = None, start: Any = 0
    ) -> tuple[Any, ...]:
        kept = list(self._each(iterable))
        if attribute is not None:
            kept = list(map(make_attrgetter(environment, attribute), kept))
        if not isinstance(start, int | float):  # lists, say, each of whose sums is another list
            sizes = [len(value) for value in kept if hasattr(value, "__len__")]
            _check_size(sum(sizes) * len(sizes))
        return environment, kept, None, start


def weigh(value: Any, indent: int = 0) -> int:
    """About the characters of a value as a text, whose levels are indented by `indent`.

    Raises TooMuch: there are more than a template may make. So something that holds the same value
    again and again, at every level, takes no longer than so many characters do.
    """
    if type(value) is str:
        _check_size(len(value))
        return len(value)
    size, num_seen = 0, 0
    stack: list[tuple[Any, int]] = [((value,), 1)]
    while stack:
        held, depth = stack.pop()
        size += (ELEMENT_WEIGHT + indent * depth) * len(held)
        _check_size(size)
        for each in held:
            kind = type(each)
            if kind is str:
                size += len(each)
            elif kind is int:
                size += each.bit_length() // 3
            elif kind is dict:
                stack += (each.values(), depth + 1), (each, depth + 1)
            elif kind is list or kind is tuple:
                stack.append((each, depth + 1))
            elif kind not in ATOMS:
                if isinstance(each, Mapping):
                    stack += (each.values(), depth + 1), (each, depth + 1)
                elif isinstance(each, Namespace):
                    stack.append(((_attributes(each),), depth + 1))
                elif isinstance(each, CONTAINERS):
                    stack.append((each, depth + 1))
                elif isinstance(each, TEXTS):
                    size += len(each)
        _check_size(size)
        num_seen += 1
        if num_seen % PARTS == 0:
            _SPENT.note_step()
    return size


def check_json(value: Any, indent: object) -> None:
    """Check what is to become JSON."""
    if isinstance(indent, str):
        indent = len(indent)
    if indent is None:
        indent = 0
    elif not isinstance(indent, int) or not 0 <= indent <= MAX_INDENT:
        raise TooMuch(f"an indentation has at most {MAX_INDENT} characters")
    weigh(value, indent)


def _attributes(namespace: Namespace) -> Mapping[str, Any]:
    """Templates cannot name it."""
    return namespace._Namespace__attrs  # type: ignore[no-any-return]


def _weighed(value: Any) -> Any:
    """A value that is compared."""
    if type(value) not in ATOMS and isinstance(value, CONTAINERS):
        weigh(value)
    return value


def _factor(*values: Any) -> int:
    """How many characters may come of one: where one text is HTML, the others are escaped."""
    return ESCAPED if any(hasattr(each, "__html__") for each in values) else 1


def _worth(value: Any) -> int:
    """How many characters an element of it counts as."""
    return ELEMENT_WEIGHT if isinstance(value, (list, tuple)) else 1


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TooMuch(f"it would make or compare more than {MAX_CHARACTERS:,} characters at once")


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * right
        if bits > MAX_BITS:
            raise TooMuch(f"it would make an integer of more than {MAX_BITS} bits")
    elif operator == "*":
        for repeated, count in ((left, right), (right, left)):
            if isinstance(repeated, SEQUENCES) and isinstance(count, int):
                _check_size(len(repeated) * _worth(repeated) * max(count, 0))


def _check_percent(text: Any, *args: Any, **kwargs: Any) -> None:
    """`text % args`"""
    values = kwargs or (args[0] if len(args) == 1 else args)
    factor = _factor(text)
    text = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    _check_format_length(text)
    size, num_fields = len(text), 0
    for field in _PERCENT.finditer(text):
        num_fields += 1
        size += sum(map(_width, filter(None, field.groups())))
    # A mapping's values may be written any number of times, those of a tuple once.
    weight = weigh(values) * (num_fields if isinstance(values, Mapping) else 1)
    _check_size(size + weight * factor)


def _check_format(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """`text.format(*args, **kwargs)`"""
    _check_format_length(text)
    if _NESTED_FIELD.search(text):
        raise TooMuch("a field in a format has a width that is another field")
    if not all(isinstance(each, PLAIN) for each in (*args, *kwargs.values())):
        raise TooMuch("a format has a value that is neither text nor a number nor holds them")
    widths = sum(map(_width, _DIGITS.findall(text)))
    weight = weigh((args, kwargs)) * text.count("{")
    _check_size(len(text) + widths + weight * _factor(text))


def _check_format_length(text: str) -> None:
    if len(text) > MAX_FORMAT:
        raise TooMuch(f"a format has at most {MAX_FORMAT} characters")


def _width(digits: str) -> int:
    """Of a field in a format."""
    if not digits.isdecimal() or len(digits) > len(str(MAX_CHARACTERS)):
        raise TooMuch(f"a field in a format has the width {digits[:16]}")
    return int(digits)


def _check_replace(text: Any, old: Any = None, new: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(old, TEXTS) and isinstance(new, TEXTS):
        _check_size(len(text) + text.count(old) * len(new) * _factor(text))


def _check_replace_filter(
    eval_ctx: nodes.EvalContext, s: Any, old: Any, new: Any, count: Any = None
) -> None:
    for each in (s, old, new):
        weigh(each)
    _check_replace(str(s), str(old), str(new))


def _check_stripped(characters: Any = None, *_: Any) -> None:
    if isinstance(characters, TEXTS) and len(characters) > MAX_STRIPPED:
        raise TooMuch(f"at most {MAX_STRIPPED} different characters can be stripped")


def _check_trim(value: Any, chars: Any = None) -> None:
    weigh(value)
    _check_stripped(chars)


def _check_center(value: Any, width: Any = 80) -> None:
    _check_size(abs(width) if isinstance(width, int) else 0)


def _check_indent(s: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    size = len(width) if isinstance(width, str) else width
    if not isinstance(size, int) or not 0 <= size <= MAX_INDENT:
        raise TooMuch(f"an indentation has at most {MAX_INDENT} characters")
    weigh(s)
    text = str(s)
    _check_size(len(text) + (1 + text.count("\n")) * size)


def _check_batch(value: Any, linecount: Any, fill_with: Any = None) -> None:
    if not isinstance(linecount, int) or not 0 < linecount <= MAX_RANGE:
        raise TooMuch(f"a batch has 1 to {MAX_RANGE} elements")


def _check_slice(value: Any, slices: Any, fill_with: Any = None) -> None:
    if not isinstance(slices, int) or not 0 < slices <= MAX_RANGE:
        raise TooMuch(f"there are 1 to {MAX_RANGE} slices")


def _check_round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if not isinstance(precision, int) or not -MAX_PRECISION <= precision <= MAX_PRECISION:
        raise TooMuch(f"a number is rounded to at most {MAX_PRECISION} digits")


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise TooMuch(f"the filter {name} is not there for chat templates")


class _Bounding(NodeTransformer):
    """Has filters called where jinja2 calls nothing that could be replaced."""

    def __init__(self, environment: TemplateSandbox) -> None:
        self._environment = environment

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        """Escaping makes six characters of one."""
        message = "the tag autoescape is not there for chat templates"
        raise jinja2.TemplateSyntaxError(message, node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), JOINED)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        limits = node.arg.start, node.arg.stop, node.arg.step
        return self._filter(node.node, SLICED, [each or nodes.Const(None) for each in limits])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        compared: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        if not any(isinstance(each.expr, nodes.Const) for each in compared):  # which is quick
            for each in compared:
                each.expr = self._filter(each.expr, WEIGHED)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" else self._filter(node, MADE)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:  # the body may never be reached
            node.test = nodes.And(self._step(node), node.test, lineno=node.lineno)
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        return self._with_step(node)

    def _with_step(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(self._step(node), lineno=node.lineno))
        return node

    def _step(self, node: nodes.Node) -> nodes.Filter:
        return self._filter(nodes.Const(True, lineno=node.lineno), STEP)

    def _filter(
        self, node: nodes.Expr, name: str, args: list[nodes.Expr] | None = None
    ) -> nodes.Filter:
        made = nodes.Filter(node, name, args or [], [], None, None, lineno=node.lineno)
        made.set_environment(self._environment)
        return made
