"""Templates that would take all memory or all time are refused, and others render beside them."""

from __future__ import annotations

import threading
import time
import tracemalloc

import jinja2
import pytest

from octavo.engine import template_sandbox
from octavo.engine.chat_template import MAX_REASON, ChatTemplate
from octavo.engine.template_sandbox import MAX_CHARACTERS, TooMuch, weigh
from octavo.errors import InvalidRequest, ModelError

HI = [{"role": "user", "content": "hi"}]
MANY = "{% set r = range(100000) %}"
# Some millions of characters, in the variable s.
LONG = (
    "{% set ns = namespace(s='<xyz ab>\n\t') %}{% for i in range(18) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{% set s = ns.s %}"
)


def growing(value: str, grown: str) -> str:
    """`grown` again and again, from a value."""
    return (
        "{% set ns = namespace(s=" + value + ") %}"
        "{% for i in range(60) %}" + grown + "{% endfor %}{{ ns.s }}"
    )


TOO_LARGE = {
    "product": "{{ 'x' * 10 ** 10 }}",
    "product of a list": "{{ (10 ** 9 * [1])|length }}",
    "power": growing("3", "{% set ns.s = ns.s * ns.s %}"),
    "sum": growing("'x'", "{% set ns.s = ns.s + ns.s %}"),
    "sum of lists": growing("[1]", "{% set ns.s = ns.s + ns.s %}"),
    "concatenation": growing("'x'", "{% set ns.s = ns.s ~ ns.s %}"),
    "captured": growing("'x'", "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}"),
    "macro": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}"
    + growing("'x'", "{% set ns.s = m(ns.s) %}"),
    "join": growing("'x'", "{% set ns.s = [ns.s, ns.s]|join %}"),
    "method join": growing("'x'", "{% set ns.s = ''.join((ns.s, ns.s)) %}"),
    "separator": LONG + "{{ range(100000)|join(s) }}",
    "range": "{{ range(10 ** 9)|list }}",
    "center": "{{ 'x'.center(10 ** 10) }}",
    "constant": "{{ 'x'|center(10000000000) }}",
    "attr": "{{ ('x'|attr('ljust'))(10 ** 10) }}",
    "map": "{{ ['x']|map('center', 10 ** 10)|list }}",
    "tabs": LONG + "{{ s.expandtabs(100) }}",
    "replace": LONG + "{{ s.replace('x', s) }}",
    "filter replace": LONG + "{{ s|replace('', s) }}",
    "bytes": LONG + "{{ s.encode().replace('x'.encode(), s.encode()) }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent argument": "{{ '%*d' % (10 ** 9, 1) }}",
    "percent mapping": LONG + "{{ ('%(a)s' * 400) % {'a': s} }}",
    "filter format": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format field": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "format attribute": LONG + "{{ ('{0.s}' * 800).format(ns) }}",
    "list as text": LONG + "{{ [s] * 100000 }}",
    "list as JSON": LONG + "{{ ([s] * 100000)|tojson }}",
    "view as text": LONG + "{{ {'a': [s] * 100000}.items() }}",
    "kept": LONG + "{% set ns.l = [] %}"
    "{% for i in range(100000) %}{% set ns.l = ns.l + [s ~ i] %}{% endfor %}",
    "kept slices": LONG + "{% set ns.l = [] %}"
    "{% for i in range(100000) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    "sorted": LONG + "{{ ([s] * 100000)|sort|length }}",
    "mapped": LONG + "{{ ([s] * 100000)|map('upper')|list|length }}",
    "sum of many": "{{ ([[1]] * 90000)|sum(start=[]) }}",
    "batch": "{{ [1]|batch(10 ** 9, 1)|list }}",
    "slice": "{{ [1]|slice(10 ** 9)|list }}",
    "round": "{{ 1.5|round(10 ** 9, 'ceil') }}",
    "indent": "{{ [[1]]|tojson(indent=10 ** 9) }}",
    "strip": LONG + "{{ s.strip(s) }}",
    "escaped": LONG + "{{ ('<'|safe).join([s] * 2) }}",
    "equal lists": LONG + "{% set t = s ~ 'b' %}{{ ([s ~ 'b'] * 1000000) == ([t] * 1000000) }}",
    "found": LONG + "{{ ([s] * 1000000).index(s ~ 'b') }}",
    "wrapped": LONG + "{{ s|wordwrap(1, wrapstring=s) }}",
    "translated": LONG + "{{ s.translate({120: s}) }}",
    "written": MANY
    + "{% for i in r %}{% for j in r %}aaaaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
}

TOO_LONG = {
    "loops": MANY + "{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "empty loops": MANY + "{% for i in r %}{% for j in r if j < 0 %}{% endfor %}{% endfor %}",
    "recursive loops": MANY
    + "{% for i in r recursive %}{% if loop.depth < 4 %}{{ loop(r) }}{% endif %}{% endfor %}",
    "recursive macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(100) }}",
    "doubled lists": growing("[1]", "{% set ns.s = [ns.s, ns.s] %}"),
    "doubled dicts": growing("{}", "{% set ns.s = dict(a=ns.s, b=ns.s) %}"),
    "counted": LONG + "{% for i in range(100000) %}{{ s.count('q') }}{% endfor %}",
    "tested": LONG + "{{ range(100000)|map('string')|select('in', s ~ 'q')|list }}",
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.3)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_would_take_all_memory_is_refused(name: str) -> None:
    template = ChatTemplate(TOO_LARGE[name], {})
    began = time.thread_time()
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match="messages: the chat template refused them") as caught:
        template.render(HI, True, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(caught.value.__cause__, TooMuch | OverflowError)  # the latter of range
    assert peak < 300 << 20
    assert time.thread_time() - began < 10


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_would_take_all_time_is_refused(quick: None, name: str) -> None:
    template = ChatTemplate(TOO_LONG[name], {})
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"it takes more than 0\.3 s"):
        template.render(HI, True, {})
    assert time.thread_time() - began < 3


def test_what_takes_much_is_refused_when_it_is_compiled() -> None:
    for source in (
        "{% autoescape true %}{{ '<' }}{% endautoescape %}",
        "{{ " + "[" * 3000 + "]" * 3000 + " }}",
        "{{ 1" + "0" * 5000 + " }}",
    ):
        with pytest.raises(ModelError, match="the chat template"):
            ChatTemplate(source, {})


def test_a_templates_own_words_are_cut() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(LONG + "{{ raise_exception(s) }}", {}).render(HI, True, {})
    assert len(str(caught.value)) < 2 * MAX_REASON


def test_the_limits_grow_with_the_conversation(quick: None) -> None:
    """A text to which every message is added; a slice of all messages for each."""
    source = (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + m.content %}"
        "{% set rest = messages[loop.index0:] %}{% endfor %}{{ ns.s }}"
    )
    messages = [{"role": "user", "content": "x" * 1_000}] * 2_000
    assert ChatTemplate(source, {}).render(messages, True, {}) == "x" * 2_000_000


def test_renderings_in_other_threads_have_limits_of_their_own(quick: None) -> None:
    """One template, rendered by its bad and by its good users at once."""
    source = MANY + (
        "{% if bad %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}{% endif %}"
        "{{ messages[0].content }}"
    )
    template = ChatTemplate(source, {})
    ends: list[str] = []

    def spend() -> None:
        with pytest.raises(InvalidRequest, match="it takes more than"):
            template.render(HI, True, {"bad": True})
        ends.append("bad")

    threads = [threading.Thread(target=spend) for _ in range(2)]
    for thread in threads:
        thread.start()
    good = [template.render(HI, True, {"bad": False}) for _ in range(50)]
    for thread in threads:
        thread.join()
    assert good == ["hi"] * 50
    assert ends == ["bad"] * 2


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}", "a1None[1, 'b']"),
        ("{{ messages[::-1][:1][0].content[1:] }}{{ 'abc'[-2:] }}", "ibc"),
        ("{{ [1, 2] + [3] }}{{ (1,) * 2 }}{{ 2 ** 10 }}{{ '%s-%05.1f' % ('a', 2) }}", None),
        ("{{ '{0}, {a:>5}, {0}'.format(1, a='x') }}{{ '%s %s'|format(1, 2) }}", None),
        ("{{ [3, 1, 2]|sort|join(', ') }}{{ messages|map(attribute='role')|join }}", None),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
        ("{{ [[1], [2]]|sum(start=[]) }}{{ [1, 2]|sum }}{{ messages|sum(attribute='n') }}", None),
        ("{{ 'a\nb'|indent(2, true) }}{{ ' x '|trim }}{{ '-x-'.strip('-') }}", None),
        ("{{ 'aXbX'|replace('X', 'y', 1) }}{{ 'aXbX'.replace('X', 'y', 1) }}", None),
        ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{{ loop.last }}{% endfor %}", "x1True"),
        ("{% for i in [1, 2, 3] if i is in [1, 3] %}{{ i }}{{ loop.length }}{% endfor %}", "1232"),
        ("{{ [1] == [1] }}{{ 'a' in {'a': 1} }}{{ 3 not in (1, 2) }}{{ 1 < 2 < 3 }}", "True" * 4),
        (
            "{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}y{% endcall %}",
            None,
        ),
        ("{{ {'b': [1, {'c': none}]}|tojson(indent=1) }}{{ missing }}{{ 'x'|center(5) }}", None),
    ],
)
def test_the_rest_is_as_in_jinja(source: str, expected: str | None) -> None:
    messages = [{"role": "user", "content": "hi", "n": 2}]
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    found = ChatTemplate(source, {}).render(messages, True, {})
    assert found == (plain.render(messages=messages) if expected is None else expected)


def test_weights() -> None:
    assert weigh("abc") == 3
    assert weigh({"a": ["b" * 100, 2**64]}) > 100 + 19
    shared: list[object] = ["x" * 1000]
    for _ in range(10):
        shared = [shared, shared]
    assert weigh(shared) > 1000 << 10
    with pytest.raises(TooMuch):
        weigh(["x" * 1000] * (MAX_CHARACTERS // 1000))
