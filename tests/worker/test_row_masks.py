"""Masks of rows: what they are made of, what gives way, and how they follow a row's tokens."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from threading import Event, Thread, Timer

import numpy as np
import pytest

from octavo.core.step import Grammar, SamplingSpec, ThinkingSpec
from octavo.structured.constraint import (
    MAX_NEW_TOKENS,
    clear_bits,
    num_words,
    set_bits,
    words_of,
)
from octavo.worker import mask_rules, row_masks
from octavo.worker.mask_rules import Int32s
from octavo.worker.row_masks import MaskedRows, Masks, PendingMasks, RowMasks
from worker.fake_constraints import Rising, RisingLibrary, no_grammars, rising_masks

SIZE = 70
RISING = SamplingSpec(grammar=Grammar("lark", "rising"), end_token_ids=(0, 40))


def fill(masks: RowMasks, texts: dict[int, tuple[Sequence[int], Sequence[int]]]) -> Masks:
    """Masks of rows, by their prompts and outputs."""
    lens = [(len(prompt) + len(output), len(prompt)) for prompt, output in texts.values()]
    rows = MaskedRows(np.arange(len(texts)), np.array(list(texts)), *np.array(lens).T)
    token_ids = np.zeros((1 + max(texts), rows.num_tokens.max()), np.int32)
    for row, (prompt, output) in texts.items():
        token_ids[row, : len(prompt) + len(output)] = [*prompt, *output]
    return masks.start(rows, token_ids, np.empty((len(rows), num_words(SIZE)), np.int32)).result()


def rows_with(num_tokens: int, rows: Sequence[int]) -> MaskedRows:
    """Rows with prompts of 2 tokens."""
    columns = range(len(rows)), rows, [num_tokens] * len(rows), [2] * len(rows)
    return MaskedRows(*map(np.array, columns))


def tokens_of(words: np.ndarray) -> list[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def mask_of(spec: SamplingSpec, output: Sequence[int], prompt: Sequence[int] = (1, 2)) -> list[int]:
    masks = rising_masks(4, SIZE)
    masks.open(1, spec)
    filled = fill(masks, {1: (prompt, output)})
    assert not filled.errors
    return tokens_of(filled.words[0])


def error_of(spec: SamplingSpec, output: Sequence[int]) -> str:
    masks = rising_masks(4, SIZE)
    masks.open(1, spec)
    masks.open(2, SamplingSpec(allowed_token_ids=(5,)))
    filled = fill(masks, {1: ((1, 2), output), 2: ((3,), ())})
    assert tokens_of(filled.words[1]) == [5]
    assert tokens_of(filled.words[0]) == list(range(SIZE))
    [(index, error)] = filled.errors.items()
    assert index == 0
    return str(error)


def test_bits() -> None:
    assert [num_words(size) for size in (1, 32, 33, 64, 70)] == [1, 1, 2, 2, 3]
    words = words_of([0, 31, 32, 31, 69], SIZE)
    assert tokens_of(words) == [0, 31, 32, 69]
    set_bits(words, [63, 0])
    clear_bits(words, [31, 31, 5])
    assert tokens_of(words) == [0, 32, 63, 69]


def test_a_grammar_may_begin_in_the_prompt() -> None:
    """Row 1 begins with the last two tokens of its prompt; row 2 is its copy."""
    masks = rising_masks(4, SIZE)
    masks.open(1, replace(RISING, num_begun=2))
    prompt = (30, 5, 9)
    assert tokens_of(fill(masks, {1: (prompt, [])}).words[0]) == list(range(10, SIZE))
    masks.copy(2, 1)
    filled = fill(masks, {1: (prompt, [20]), 2: (prompt, [11, 30])})
    assert [tokens_of(words)[:2] for words in filled.words] == [[0, 21], [0, 31]]
    masks.rewind(2, 1)
    assert tokens_of(fill(masks, {2: (prompt, [11, 15])}).words[0])[:2] == [0, 16]
    masks.open(2, replace(RISING, num_begun=2, end_token_ids=(9,)))  # which does not end there
    assert tokens_of(fill(masks, {2: (prompt, [])}).words[0]) == list(range(10, SIZE))
    masks.open(3, replace(RISING, num_begun=3))
    [error] = fill(masks, {3: (prompt, [])}).errors.values()
    assert "5 is not more than 30" in str(error)


def test_min_tokens_counts_output_tokens() -> None:
    spec = SamplingSpec(min_tokens=2, end_token_ids=(1,))
    for number, is_masked in ((0, True), (1, True), (2, False), (3, False)):
        assert (1 not in mask_of(spec, [0] * number, [0] * 4)) == is_masked


def test_no_step_goes_through_a_client_s_end_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be most of the vocabulary."""
    masks, ends = rising_masks(4, SIZE), tuple(range(9, SIZE))
    masks.open(1, SamplingSpec(min_tokens=4, end_token_ids=ends))
    masks.open(2, replace(RISING, end_token_ids=ends))
    listed: list[int] = []
    for module, name in ((mask_rules, "clear_bits"), (row_masks, "set_bits")):
        monkeypatch.setattr(module, name, lambda _, ids: listed.extend(ids), raising=False)
    for output in ([], [3], [3, 4], [3, 4, 5]):
        filled = fill(masks, {1: ((1, 2), output), 2: ((1, 2), output)})
        assert tokens_of(filled.words[0]) == list(range(9))
    assert tokens_of(filled.words[1])[-len(ends) :] == list(ends), "it may end here"
    assert not listed


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], [9]),
        ([4], [5, 9]),
        ([4, 5], [6, 9]),
        ([5, 4, 5], [6, 9]),
        ([4, 5, 6], [9]),
        ([4, 4], [5, 9]),
    ],
)
def test_a_bad_word_is_stopped_at_its_last_token(output: list[int], banned: list[int]) -> None:
    spec = SamplingSpec(bad_words=((9,), (4, 5), (4, 5, 6)))
    assert mask_of(spec, output) == [i for i in range(SIZE) if i not in banned]


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    assert mask_of(SamplingSpec(bad_words=((4, 5),)), [], [4]) == list(range(SIZE))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_no_ngram_is_written_twice(size: int) -> None:
    for text in np.random.default_rng(size).integers(0, 3, (200, 8)).astype(np.int32):
        for end in range(len(text) + 1):
            *before, _ = ngram = [*text[max(0, end - size + 1) : end].tolist(), 0]
            places = range(end - size + 1) if len(ngram) == size else ()
            found = [
                text[i + size - 1] for i in places if text[i : i + size - 1].tolist() == before
            ]
            assert mask_rules.repeating(text[:end], size) == found


def test_ngrams_are_looked_for_without_a_copy_of_all() -> None:
    text = np.arange(50_000, dtype=np.int32)
    tracemalloc.start()
    assert mask_rules.repeating(text, 1_000) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * text.nbytes


def test_bad_words_give_way_when_no_token_would_be_left() -> None:
    assert mask_of(SamplingSpec(bad_words=tuple((i,) for i in range(SIZE))), []) == [*range(SIZE)]
    assert mask_of(SamplingSpec(bad_words=((1,),), allowed_token_ids=(1,)), []) == [1]


@pytest.mark.parametrize(
    ("output", "forced"),
    [
        ([3, 7], None),
        ([3, 7, 7], 8),  # the limit
        ([3, 7, 7, 8], 9),
        ([3, 7, 7, 8, 9], None),
        ([3, 7, 7, 8, 9, 7, 7, 7], None),
        ([3, 8, 9, 7, 7, 7], None),  # ended by itself
        ([3, 7, 8], 9),  # about to end
        ([3, 7, 8, 8], 9),
        ([3, 8, 8], 9),
        ([7] * 9, None),  # no reasoning
        ([7] * 12 + [3, 7, 7], None),  # it is what an output begins with
    ],
)
def test_reasoning_ends_at_its_limit(output: list[int], forced: int | None) -> None:
    for begin, prompt_is_open in ((3, False), (5, True)):
        if prompt_is_open and output[0] != 3:
            continue
        thinking = ThinkingSpec(2, (begin,), (8, 9), prompt_is_open)
        said = output[1:] if prompt_is_open else output
        spec = SamplingSpec(thinking=thinking, end_token_ids=(0,))
        assert mask_of(spec, said, [3]) == (list(range(SIZE)) if forced is None else [forced])


def test_the_end_of_reasoning_is_not_looked_for_in_all_that_comes_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []
    original = mask_rules._end_of

    def counted(token_ids: Sequence[int], output: Int32s) -> int | None:
        lengths.append(len(output))
        return original(token_ids, output)

    monkeypatch.setattr(mask_rules, "_end_of", counted)
    limit = 1000
    spec = ThinkingSpec(limit, (3,), (8, 9), False)
    output = np.array([3, *[7] * limit, 8, 9, *[7] * 500], np.int32)
    ends = [mask_rules.end_of_thinking(spec, output[:n]) for n in range(1, len(output) + 1)]
    assert [(n, end) for n, end in enumerate(ends) if end is not None] == [(1000, 8), (1001, 9)]
    assert sum(length > limit for length in lengths) <= 4


def test_a_grammar_follows_the_output_and_ends_where_it_may() -> None:
    assert mask_of(RISING, []) == list(range(1, SIZE))
    assert mask_of(RISING, [5, 50]) == list(range(51, SIZE))
    assert mask_of(RISING, [5, 50, 60]) == [0, 40, *range(61, SIZE)]
    assert mask_of(RISING, [5, 50, SIZE - 1]) == [0, 40]


def test_other_settings_hold_beside_a_grammar_and_give_way_at_its_end() -> None:
    grammar, ends = RISING.grammar, RISING.end_token_ids
    early = SamplingSpec(grammar=grammar, end_token_ids=ends, min_tokens=9)
    assert mask_of(early, [5, 50, 60]) == list(range(61, SIZE))
    assert mask_of(early, [5, 50, SIZE - 1]) == [0, 40]
    few = SamplingSpec(grammar=grammar, end_token_ids=ends, allowed_token_ids=(0, 3, 66))
    assert mask_of(few, [1]) == [3, 66]
    assert mask_of(few, [1, 2, 60]) == [0, 66]
    bad = SamplingSpec(grammar=grammar, end_token_ids=ends, bad_words=((8, 69),))
    assert mask_of(bad, [7, 8]) == list(range(9, 69))


def test_a_row_for_which_nothing_is_left_fails_alone() -> None:
    grammar, ends = RISING.grammar, RISING.end_token_ids
    few = SamplingSpec(grammar=grammar, end_token_ids=ends, allowed_token_ids=(0, 3))
    assert error_of(few, [7]) == (
        "after 1 tokens, the grammar and allowed_token_ids and the vocabulary together leave no "
        "token to draw"
    )
    assert error_of(RISING, [7, 6]) == "the grammar cannot go on: 6 is not more than 7"
    bad = SamplingSpec(grammar=Grammar("lark", "bad"), end_token_ids=ends)
    assert error_of(bad, []) == "the grammar cannot go on: structured: it is bad"


def test_a_row_that_has_ended_may_draw_anything() -> None:
    """It is computed once too often, and what it draws is dropped."""
    assert mask_of(RISING, [5, 50, 60, 0]) == list(range(SIZE))


def test_copies_go_their_own_ways_and_rewritten_tokens_are_forgotten() -> None:
    masks = rising_masks(4, SIZE)
    masks.open(1, RISING)
    fill(masks, {1: ((9,), (5, 6))})
    masks.copy(2, 1)
    words = fill(masks, {1: ((9,), (5, 6, 7)), 2: ((9,), (5, 6, 45))}).words
    assert [tokens_of(each)[:3] for each in words] == [[0, 8, 9], [0, 40, 46]]
    masks.rewind(2, 1)
    filled = fill(masks, {1: ((9,), (5, 6, 7)), 2: ((9,), (5, 30))})
    assert not filled.errors
    assert tokens_of(filled.words[1]) == list(range(31, SIZE))
    masks.copy(3, 0)  # a row without a mask
    masks.close(2)


def test_masks_that_are_started_ahead_are_those_of_the_rows_as_they_are_in_the_end() -> None:
    """Rows 1 to 5 have the same text when their masks are started. Then row 2 is written again,
    row 3 makes way for another, row 4 grows, and row 5 becomes a copy of row 1."""
    masks, prompt = rising_masks(8, SIZE), (1, 2)
    for row in range(1, 6):
        masks.open(row, RISING)
    masks.open(6, SamplingSpec(allowed_token_ids=(5,)))
    fill(masks, {row: (prompt, [10]) for row in range(1, 6)})
    token_ids = np.zeros((8, 9), np.int32)
    token_ids[1:6, :4], token_ids[4, 4] = [*prompt, 10, 20], 30
    for rows in ([1, 5, 6], [2], [3], [4]):  # row 6 has no grammar
        masks.start_ahead(rows_with(4, rows), token_ids)
    masks.rewind(2, 1)
    masks.close(3)
    masks.open(3, RISING)
    masks.copy(5, 1)
    texts = [[10, 20], [10, 15], [10, 60], [10, 20, 30], [10, 20]]
    filled = fill(masks, {row + 1: (prompt, text) for row, text in enumerate(texts)})
    assert not filled.errors
    assert [tokens_of(words)[0] for words in filled.words] == [21, 16, 61, 0, 21]
    assert [tokens_of(words)[1] for words in filled.words] == [22, 17, 62, 31, 22]
    # What cannot be is known ahead, too; a row is not hurt by its neighbour.
    token_ids[1, 4:6], token_ids[2, 4:6] = [5, 0], [30, 0]
    masks.start_ahead(rows_with(5, [1, 2]), token_ids)
    filled = fill(masks, {2: (prompt, [10, 15, 30]), 1: (prompt, [10, 20, 5])})
    assert list(filled.errors) == [1]
    assert "5 is not more than 20" in str(filled.errors[1])
    assert tokens_of(filled.words[0])[:2] == [0, 31]


def test_a_row_whose_mask_is_late_sits_out_until_it_is_there() -> None:
    """Row 1 is slow, and row 2 is not. Row 1 gets a token that was not drawn, which is void."""
    library = RisingLibrary(SIZE)
    masks = RowMasks(5, SIZE, lambda: library)
    slow = replace(RISING, grammar=Grammar("lark", "slow"))

    def open_compiled(row: int, spec: SamplingSpec) -> None:
        masks.open(row, spec)
        state = masks._states[row]
        assert state is not None
        assert state.compiled is not None
        state.compiled.result()

    for row, spec in ((1, slow), (2, RISING), (3, slow)):
        open_compiled(row, spec)
    token_ids = np.zeros((5, 9), np.int32)
    token_ids[:, :3] = [1, 2, 10]

    def start(num_tokens: int, *rows: int) -> PendingMasks:
        masked = rows_with(num_tokens, rows)
        return masks.start(masked, token_ids, np.empty((len(rows), num_words(SIZE)), np.int32))

    pending = start(3, 1, 2, 3)
    assert pending.computes
    assert pending.late() == [0, 2]
    filled = pending.result([0, 2])
    assert [len(tokens_of(words)) for words in filled.words] == [SIZE, SIZE - 11, SIZE]
    assert masks.waiting() == {1, 3}
    # A step that continues the row cannot draw for it, and does not wait for it either.
    token_ids[:, 3] = 5
    pending = start(4, 1)
    assert pending.late() == [0]
    pending.wait_for_one()
    assert not pending.result([0]).errors
    # A copy does not wait, nor does the row when it is taken back to where it was.
    masks.copy(4, 1)
    masks.rewind(1, 1)
    masks.close(3)
    assert masks.waiting() == {1}
    assert start(3, 1).late() == [0]
    library.slow[0].set_result(None)
    assert masks.waiting() == set()
    pending = start(3, 1)
    assert pending.late() == []
    assert tokens_of(pending.result().words[0]) == list(range(11, SIZE))
    assert library.slow[1].cancelled()  # nobody needs it any more
    # What goes wrong is the row's own error.
    pending = start(3, 4)
    assert pending.late() == [0]
    library.slow[2].set_exception(ValueError("no mask"))
    assert pending.late() == []
    assert "ValueError: no mask" in str(pending.result().errors[0])
    # A mask that is late here is waited for if the first rank has it.
    open_compiled(3, slow)
    pending = start(3, 3)
    Timer(0.0, lambda: library.slow[-1].set_result(None)).start()
    assert tokens_of(pending.result().words[0]) == list(range(11, SIZE))


def test_nobody_waits_for_a_grammar_that_is_compiled_just_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it has been looked for, and before it is said which masks are late."""
    library, goes_on = RisingLibrary(SIZE), Event()

    def compile_later(grammar: Grammar) -> Rising:
        goes_on.wait()
        return Rising([], is_slow=True)

    monkeypatch.setattr(library, "compile", compile_later)
    masks = RowMasks(3, SIZE, lambda: library)
    masks.open(1, RISING)
    token_ids = np.zeros((3, 9), np.int32)
    token_ids[:, :3] = [1, 2, 10]
    words = np.empty((1, num_words(SIZE)), np.int32)
    pending = masks.start(rows_with(3, [1]), token_ids, words)
    begin = pending._begin_compiled

    def begin_too_early() -> None:
        begin()
        goes_on.set()
        state = masks._states[1]
        assert state is not None
        assert state.compiled is not None
        state.compiled.result()

    monkeypatch.setattr(pending, "_begin_compiled", begin_too_early)
    assert pending.late() == [0]
    assert not library.slow
    monkeypatch.setattr(pending, "_begin_compiled", begin)

    def compute() -> None:
        while not library.slow:
            time.sleep(0.001)
        library.slow[0].set_result(None)

    Thread(target=compute).start()
    pending.wait_for_one()
    assert pending.late() == []
    assert tokens_of(pending.result().words[0]) == list(range(11, SIZE))


def test_rows_without_masks_have_no_state() -> None:
    masks = no_grammars(2, SIZE)
    masks.open(1, SamplingSpec(temperature=0.5))
    masks.copy(0, 1)
    masks.rewind(1, 0)
    masks.close(1)


def test_many_tokens_are_accepted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an output that goes on after a preemption, or as a fork: no other row waits for it."""
    library = RisingLibrary(SIZE)
    filled: list[list[int]] = []
    plain_fill = library.fill

    def noted(constraints, token_ids, places, words):  # type: ignore[no-untyped-def]
        filled.append(list(map(len, token_ids)))
        return plain_fill(constraints, token_ids, places, words)

    monkeypatch.setattr(library, "fill", noted)
    masks = RowMasks(4, SIZE, lambda: library)
    for row in (1, 2, 3):
        masks.open(row, RISING)
        state = masks._states[row]
        assert state is not None
        assert state.compiled is not None
        state.compiled.result()
    long = list(range(1, MAX_NEW_TOKENS + 2))
    found = fill(masks, {1: ((1, 2), (3,)), 2: ((1, 2), long), 3: ((1, 2), (4,))})
    assert sorted(filled) == [[1, 1], [len(long)]]
    assert tokens_of(found.words[1]) == [0, *range(long[-1] + 1, SIZE)]
