"""How the layers of models form KV groups."""

from __future__ import annotations

import pytest

from octavo.core.kv.specs import (
    GROUP_COST,
    MAX_GROUPS,
    FullAttention,
    KVGroup,
    KVLayout,
    KVSpec,
    SlidingWindow,
    group_layers,
)
from octavo.memory_budget import KVShape


def layout_of(*counts: tuple[int | None, int]) -> KVLayout:
    """`counts`: windows (None: full attention), and how many layers have them."""
    specs: list[KVSpec] = []
    for window, num_layers in counts:
        specs += [FullAttention() if window is None else SlidingWindow(window)] * num_layers
    return group_layers(specs)


def groups_of(layout: KVLayout) -> list[tuple[KVSpec, int]]:
    return [(group.spec, len(group.layer_ids)) for group in layout.groups]


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "window", "num_groups", "bytes_used"),
    [
        (32, 0, 1, 1, 1.01),  # Llama
        (0, 32, 4096, 1, 1.01),  # Mistral 7B
        (21, 21, 4096, 2, 1.01),  # Gemma 2 9B
        (23, 23, 4096, 2, 1.01),  # Gemma 2 27B
        (4, 22, 512, 7, 1.04),  # Gemma 3 1B
        (5, 29, 1024, 7, 1.03),  # Gemma 3 4B
        (8, 40, 1024, 6, 1.01),  # Gemma 3 12B
        (10, 52, 1024, 7, 1.08),  # Gemma 3 27B
        (12, 12, 128, 2, 1.01),  # gpt-oss-20b
        (18, 18, 128, 2, 1.01),  # gpt-oss-120b
        (8, 24, 4096, 4, 1.01),  # OLMo 3 7B, Command R7B
        (16, 48, 4096, 4, 1.01),  # OLMo 3 32B, EXAONE 4 32B
        (9, 27, 32_768, 4, 1.01),  # Ministral 8B
        (9, 39, 128, 6, 1.05),
    ],
)
def test_little_of_the_blocks_of_real_models_is_padding(
    num_full: int, num_sliding: int, window: int, num_groups: int, bytes_used: float
) -> None:
    layout = layout_of((None, num_full), (window, num_sliding))
    assert len(layout.groups) == num_groups
    assert layout.relative_bytes() <= bytes_used


@pytest.mark.parametrize("num_layers", [1, 7, 31, 127, 200])
def test_layers_that_keep_the_same_tokens_are_one_group(num_layers: int) -> None:
    assert groups_of(layout_of((None, num_layers))) == [(FullAttention(), num_layers)]


def test_every_layer_has_a_place_of_its_own() -> None:
    full, near, far = FullAttention(), SlidingWindow(7), SlidingWindow(100)
    specs = [full, near, near, far, near] * 7 + [near] * 3
    layout = group_layers(specs)
    places = layout.places()
    assert sorted(places) == list(range(len(specs)))
    assert len(set(places.values())) == len(specs)
    for layer_id, (group, index, span) in places.items():
        assert layout.groups[group].spec == specs[layer_id]
        assert (index + 1) * span <= layout.token_size


def test_the_number_of_groups_is_bounded_unless_more_specs_differ() -> None:
    for num_full in range(1, 12):
        for num_sliding in range(1, 60, 7):
            assert len(layout_of((None, num_full), (64, num_sliding)).groups) <= MAX_GROUPS
    windows = [(window, 2) for window in range(1, 2 * MAX_GROUPS)]
    assert len(layout_of(*windows).groups) == len(windows)


def test_padding_is_put_where_it_costs_least() -> None:
    """Long sequences pay for padding in full attention, and hardly for padding behind windows."""
    layout = layout_of((None, 10), (1024, 52))
    assert groups_of(layout)[0] == (FullAttention(), layout.token_size)
    assert layout.relative_bytes([32_768]) < 1.03


def vllm_s_layout(num_full: int, num_sliding: int, window: int) -> KVLayout:
    """Groups by the rule of vLLM's kv_cache_utils.py: of as many layers as the rarest kind has, or,
    if the most frequent kind has less than 1.5 times as many, of that many."""
    fewest, most = sorted((num_full, num_sliding))
    size = most if most < 1.5 * fewest else fewest
    groups: list[KVGroup] = []
    for spec, number in ((FullAttention(), num_full), (SlidingWindow(window), num_sliding)):
        num_groups = -(-number // size)
        groups += [KVGroup(spec, tuple(range(i, number, num_groups))) for i in range(num_groups)]
    return KVLayout(tuple(groups))


@pytest.mark.parametrize("num_tokens", [1024, 8192, 32_768, 131_072])
def test_gemma_3_27b_takes_little_more_than_its_windows_need(num_tokens: int) -> None:
    """At 32k, 1.024 times what its layers read. vLLM forms the same groups."""
    layout = layout_of((None, 10), (1024, 52))
    shape = KVShape(layout, 16, element_bytes=2 * 16 * 128 * 2)  # sizes of layers are 1
    assert shape.held_bytes(num_tokens) <= 1.13 * shape.read_bytes(num_tokens)
    if num_tokens == 32_768:
        assert shape.read_bytes(num_tokens) == (10 * 32_768 + 52 * 1024) * 2 * 16 * 128 * 2
        assert shape.held_bytes(num_tokens) <= 1.025 * shape.read_bytes(num_tokens)
    theirs = vllm_s_layout(10, 52, 1024)
    assert theirs.relative_bytes() == layout.relative_bytes()


def test_no_layout_takes_more_than_vllm_s_with_as_few_groups() -> None:
    for num_full in range(1, 21):
        for num_sliding in range(1, 61, 3):
            theirs = vllm_s_layout(num_full, num_sliding, 1024)
            ours = layout_of((None, num_full), (1024, num_sliding))
            if len(theirs.groups) <= MAX_GROUPS:
                cost = GROUP_COST * len(theirs.groups)
                assert ours.relative_bytes() <= theirs.relative_bytes() + cost


def test_a_layout_names_its_groups() -> None:
    assert str(layout_of((None, 10), (1024, 52))) == (
        "10 x full attention, 52 x window of 1,024 in 6 groups"
    )
    assert str(layout_of((None, 3))) == "3 x full attention"


def test_few_layers_of_a_kind_are_stored_in_longer_blocks() -> None:
    """Not in 26 groups of one layer, and not in blocks that are padding for the most part."""
    layout = layout_of((None, 1), (1024, 25))
    assert [(len(group.layer_ids), group.span) for group in layout.groups] == [
        (1, 5),
        *[(5, 1)] * 5,
    ]
    assert layout.block_sizes(16) == (80, 16, 16, 16, 16, 16)
    assert layout.token_size == 5
    for num_full in range(1, 6):
        for num_sliding in range(10 * num_full, 60):
            layout = layout_of((None, num_full), (1024, num_sliding))
            assert len(layout.groups) <= MAX_GROUPS
            assert layout.relative_bytes() <= 1.16


@pytest.mark.parametrize(
    ("name", "window", "sliding", "full", "num_groups", "used"),
    [  # layers, and elements of a token in each
        ("Gemma 4 E2B", 512, (12, 512), (3, 1024), 3, 1.01),
        ("Gemma 4 E4B", 512, (20, 1024), (4, 2048), 7, 1.01),
        ("Gemma 4 26B-A4B", 1024, (25, 4096), (5, 2048), 6, 1.01),
        ("Gemma 4 31B", 1024, (50, 8192), (10, 4096), 3, 1.01),
        ("MiMo-V2-Flash", 128, (39, 3072), (9, 1536), 4, 1.05),
        ("sizes that divide nothing", 128, (39, 3079), (9, 1537), 4, 1.05),
    ],
)
def test_layers_of_different_sizes_share_one_pool(
    name: str,
    window: int,
    sliding: tuple[int, int],
    full: tuple[int, int],
    num_groups: int,
    used: float,
) -> None:
    specs = [SlidingWindow(window)] * sliding[0] + [FullAttention()] * full[0]
    layout = group_layers(specs, [sliding[1]] * sliding[0] + [full[1]] * full[0])
    assert len(layout.groups) == num_groups
    assert layout.relative_bytes() <= used
    places = layout.places()
    assert sorted(places) == list(range(len(specs)))
    for layer_id, (group, index, span) in places.items():
        size = layout.groups[group].layer_size
        assert size == (full[1] if layer_id >= sliding[0] else sliding[1])
        assert (index + 1) * size * span <= layout.token_size


def test_layers_that_read_another_layer_s_kv_have_no_place() -> None:
    full, near = FullAttention(), SlidingWindow(8)
    layout = group_layers([near, full, None, None, near], [4, 8, 8, 4, 4])
    assert groups_of(layout) == [(near, 2), (full, 1)]
    assert sorted(layout.places()) == [0, 1, 4]
    with pytest.raises(ValueError, match="a model without attention layers has no KV"):
        group_layers([None, None])


def test_a_model_without_layers_has_no_layout() -> None:
    with pytest.raises(ValueError, match="a model without attention layers has no KV"):
        group_layers([])
