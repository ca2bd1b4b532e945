"""What the package exports exists, and is described where editors look for it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

import pytest

import octavo
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig

EXPORTED = [getattr(octavo, name) for name in octavo.__all__ if name != "__version__"]
PLAIN_VALUES: list[Any] = [
    kind
    for kind in [*EXPORTED, CacheConfig, SchedulerConfig, EngineConfig]
    if dataclasses.is_dataclass(kind)
]
METHODS = [
    method
    for name, method in vars(octavo.LLM).items()
    if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_"))
]


def test_what_clients_get_is_exported() -> None:
    names = {kind.__name__ for kind in EXPORTED}
    assert {"RequestOutput", "SequenceOutput", "SequenceDelta", "TokenLogprobs"} <= names
    assert {kind.__name__ for kind in PLAIN_VALUES} > {"SamplingParams", "SequenceDelta"}


@pytest.mark.parametrize("kind", PLAIN_VALUES, ids=lambda kind: str(kind.__name__))
def test_every_field_has_a_docstring_under_it(kind: Any) -> None:
    [definition] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    body = definition.body
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            is_described = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            assert is_described, f"{kind.__name__}: {ast.unparse(node)}"
    assert "Example:" in inspect.cleandoc(kind.__doc__)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method.__name__))
def test_every_argument_of_the_offline_api_is_described(method: Any) -> None:
    text = inspect.cleandoc(method.__doc__)
    assert "Example:" in text
    parameters = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
    for parameter in parameters:
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        assert f"\n    {stars}{parameter.name}: " in text, parameter.name
