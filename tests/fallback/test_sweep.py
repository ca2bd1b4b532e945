"""Every causal language model of the installed transformers: served with its tokens, or refused."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from fallback.sweep import BEGIN, END, MODEL_TYPES, PAGE, sweep
from octavo.models.fallback.tested import read_tested
from octavo.models.registry import FAMILIES


def test_the_page_of_models_has_the_tables_of_the_last_sweep() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    tables, _, _ = rest.partition(END)
    assert tables.strip() == read_tested().tables()


def test_the_last_sweep_has_served_most_models() -> None:
    tested = read_tested()
    assert len(tested.served) >= 80
    assert not tested.served.keys() & tested.refused.keys()
    assert len(tested.served.keys() - set(FAMILIES)) >= 50
    assert all(tested.refused.values())


@pytest.mark.slow
def test_all_types_are_served_or_refused_as_recorded() -> None:
    tested, (found, failed) = read_tested(), sweep()
    assert not failed
    if version("transformers") == tested.transformers:
        assert found == tested
    else:
        known = set(MODEL_TYPES)
        assert tested.served.keys() & known <= found.served.keys()
