"""Penalties, bias and bans against values worked out by hand and by transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.step import LogitBias, SamplingSpec
from octavo.worker.logit_edits import EditedRow, TokenCounts, edit_logits, has_edits

INF = float("inf")


def edited(
    spec: SamplingSpec, tokens: list[int], num_prompt: int, logits: list[float]
) -> list[float]:
    values = torch.tensor([logits])
    edit_logits(values, [EditedRow(0, spec, np.array(tokens, np.int32), num_prompt)])
    return values[0].tolist()


def test_presence_and_frequency_count_output_tokens_only() -> None:
    spec = SamplingSpec(presence_penalty=0.5, frequency_penalty=0.25)
    # Prompt 0 1 1; output 1 2 2 2.
    got = edited(spec, [0, 1, 1, 1, 2, 2, 2], 3, [1.0, 1.0, 1.0, 1.0])
    assert got == pytest.approx([1.0, 1.0 - 0.75, 1.0 - 0.5 - 0.75, 1.0])


def test_negative_penalties_reward() -> None:
    spec = SamplingSpec(presence_penalty=-2.0)
    assert edited(spec, [0, 1], 1, [0.0, 0.0]) == [0.0, 2.0]


def test_repetition_counts_prompt_and_output() -> None:
    spec = SamplingSpec(repetition_penalty=2.0)
    got = edited(spec, [0, 0, 1, 3], 2, [3.0, -3.0, 5.0, 0.0])
    assert got == [1.5, -6.0, 5.0, 0.0]


@pytest.mark.filterwarnings("error")
def test_repetition_penalties_beyond_float32() -> None:
    for penalty, tokens in ((1e-300, [1]), (1e300, [0, 2])):
        got = edited(SamplingSpec(repetition_penalty=penalty), [0, 1, 2], 2, [3.0, 0.0, -3.0, 1.0])
        assert np.isfinite(got).all()
        assert got[1] == 0.0
        kept = [token for token in range(3) if got[token] != 0]
        assert sorted(kept, key=lambda token: -got[token]) == kept, tokens


def test_repetition_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(200, (1, 90), generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(tokens, logits.clone())[0].tolist()
    spec = SamplingSpec(repetition_penalty=1.3)
    assert edited(spec, tokens[0].tolist(), 40, logits[0].tolist()) == expected


def test_order_is_repetition_then_counts_then_bias() -> None:
    spec = SamplingSpec(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias=LogitBias.of({0: 10.0, 1: -1.0}),
    )
    assert edited(spec, [5, 0, 0], 1, [4.0, 4.0, 4.0, 0.0, 0.0, 4.0]) == [
        4.0 / 2 - 1.0 - 2 * 0.5 + 10.0,
        3.0,
        4.0,
        0.0,
        0.0,
        2.0,
    ]


def test_rows_are_edited_apart() -> None:
    logits = torch.zeros(4, 6)
    plain = SamplingSpec(presence_penalty=1.0)
    biased = SamplingSpec(logit_bias=LogitBias.of({5: 2.0}), frequency_penalty=1.0)
    edit_logits(
        logits,
        [
            EditedRow(1, plain, np.array([0, 1, 2], np.int32), 1),
            EditedRow(3, biased, np.array([2, 4, 4], np.int32), 0),
        ],
    )
    assert logits.tolist() == [
        [0.0] * 6,
        [0.0, -1.0, -1.0, 0.0, 0.0, 0.0],
        [0.0] * 6,
        [0.0, 0.0, -1.0, 0.0, -2.0, 2.0],
    ]


def test_what_was_counted_in_an_earlier_step_is_not_looked_at_again() -> None:
    spec = SamplingSpec(presence_penalty=1.0, repetition_penalty=2.0)
    text, counts = np.array([0, 1, 2, 2, 3], np.int32), TokenCounts()
    for end, expected in ((4, [2.0, 2.0, 1.0, 4.0]), (5, [2.0, 2.0, 1.0, 1.0])):
        logits = torch.full((1, 4), 4.0)
        edit_logits(logits, [EditedRow(0, spec, text[:end], 2, counts)])
        assert logits.tolist() == [expected]
        text[:4] = 1


def test_an_empty_output_has_no_penalty() -> None:
    spec = SamplingSpec(presence_penalty=1.0, frequency_penalty=1.0)
    assert edited(spec, [0, 1], 2, [1.0, 1.0]) == [1.0, 1.0]


def test_has_edits() -> None:
    assert not has_edits(SamplingSpec(top_k=3, top_p=0.5, min_tokens=2))
    assert has_edits(SamplingSpec(presence_penalty=0.1))
    assert has_edits(SamplingSpec(repetition_penalty=1.1))
    assert has_edits(SamplingSpec(logit_bias=LogitBias.of({1: 2.0})))
    assert not has_edits(SamplingSpec(bad_words=((1,),)))  # they are masks
