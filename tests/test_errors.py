"""Errors cross from one process to another as they are."""

from __future__ import annotations

import copy
import pickle

import pytest

from octavo.errors import ConfigError, ModelError, OctavoError, Overloaded, RequestTooLong


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("num_blocks", "0 is less than 1"),
        RequestTooLong("prompt", "9 tokens"),
        Overloaded("too many wait", 2.5),
        ModelError("no weights"),
    ],
)
def test_errors_can_be_pickled(error: OctavoError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
