from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.core.kv.invariants import check_manager
from octavo.errors import InvalidRequest
from octavo.server.http.playpool import (
    BLOCK_SIZE,
    MAX_OPERATIONS,
    NUM_BLOCKS,
    TEXTBOOK,
    PlayPool,
    play,
    textbook_case,
)


def tables(state: dict[str, Any]) -> dict[str, list[int]]:
    return {each["name"]: each["block_ids"] for each in state["sequences"]}


def test_textbook_case_as_it_is_counted_and_as_it_is() -> None:
    lesson = textbook_case()
    assert (lesson["paged"], lesson["naive"]) == (12, 16)
    state = play(lesson["operations"])
    # 64 tokens are 4 blocks, which 4 beams share; 10 tokens more fill one block of each.
    assert (state["num_held"], state["num_naive"]) == (4 + 4 * 1, 4 * 5)
    assert [block["ref_count"] for block in state["blocks"]] == [4, 4, 4, 4, 1, 1, 1, 1]
    assert all(ids[:4] == tables(state)["A"][:4] for ids in tables(state).values())
    # The lesson's 12 is what the pool holds once each beam has filled its second block.
    more = [{"op": "append", "sequence": name, "tokens": 10} for name in "ABCD"]
    state = play([*TEXTBOOK, *more])
    assert (state["num_held"], state["num_naive"]) == (12, 24)
    # Its 16 is the naive count right after the fork.
    assert [(c["held"], c["naive"]) for c in state["history"]][2] == (4, 16)


def test_the_textbook_case_leads_on_to_a_copy_on_write() -> None:
    lesson = textbook_case()
    more = [{"op": "append", "sequence": name, "tokens": 10} for name in "ABCD"]
    for start in (lesson["operations"], [*lesson["operations"], *more]):
        state = play([*start, *lesson["fork"]])
        assert state["num_copies"] == 0
        last = tables(state)["A"][-1]
        assert tables(state)["E"] == tables(state)["A"]
        [block] = [each for each in state["blocks"] if each["id"] == last]
        assert (block["holders"], block["filled"] < BLOCK_SIZE) == (["A", "E"], True)
        state = play([*start, *lesson["fork"], *lesson["write"]])
        [event] = state["events"]
        assert (event["kind"], event["sequence"], event["source"]) == ("copy", "E", last)
        assert (tables(state)["A"][-1], tables(state)["E"][-1]) == (last, event["block"])
        assert state["num_copies"] == 1


def test_write_to_a_shared_last_block_copies_it() -> None:
    start = [{"op": "new"}, {"op": "append", "sequence": "A", "tokens": 20}]
    forked = [*start, {"op": "fork", "sequence": "A", "times": 1}]
    write_b, write_a = ({"op": "rewrite", "sequence": name} for name in "BA")
    state = play([*forked, write_b])
    assert state["events"] == [{"kind": "copy", "sequence": "B", "block": 3, "source": 2}]
    assert tables(state) == {"A": [1, 2], "B": [1, 3]}
    assert [each["num_tokens"] for each in state["sequences"]] == [20, 20]  # nothing is appended
    # The other one now holds its block alone, and writes without a copy.
    state = play([*forked, write_b, write_a])
    assert (state["events"], state["num_copies"], state["num_held"]) == ([], 1, 3)
    # A full last block is rewritten, so it is copied, too.
    full = [{"op": "new"}, {"op": "append", "sequence": "A", "tokens": 32}]
    state = play([*full, {"op": "fork", "sequence": "A", "times": 1}, write_b])
    assert tables(state) == {"A": [1, 2], "B": [1, 3]}
    assert [each["num_tokens"] for each in state["sequences"]] == [32, 32]


def test_freeing_one_keeps_what_others_hold() -> None:
    shared = [*TEXTBOOK[:3], {"op": "free", "sequence": "A"}]
    state = play(shared)
    assert {event["kind"] for event in state["events"]} == {"release"}
    assert state["num_held"] == 4
    state = play([*shared, *({"op": "free", "sequence": name} for name in "BCD")])
    assert (state["num_held"], state["num_free"], state["num_naive"]) == (0, NUM_BLOCKS, 0)
    assert {event["kind"] for event in state["events"]} == {"free"}


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([{"op": "steal"}], r"operations\[0\].op: 'steal' is not one of new, append"),
        ([{}], r"op: None is not one of"),
        ([{"op": "new", "tokens": 3}], r"tokens: new has no such field"),
        ([{"op": "free", "sequence": "A"}], r"no sequence 'A'; alive: none"),
        ([{"op": "free", "sequence": ["A"]}], "no sequence a list; alive: none"),
        ([{"op": "x" * 100}], "op: 'x{64}' is not one of"),
        ([{"op": "new", "y" * 100: 1}], r"\.y{64}: new has no such field"),
        ([{"op": "new"}, {"op": "append", "sequence": "A", "tokens": 0}], "0 is not a whole"),
        ([{"op": "new"}, {"op": "append", "sequence": "A", "tokens": True}], "True is not a"),
        ([{"op": "new"}, {"op": "fork", "sequence": "A", "times": 65}], "from 1 to 64"),
        ([{"op": "new"}, {"op": "rewrite", "sequence": "A"}], "A has no token yet"),
        ([{"op": "new"}] * 65, r"operations\[64\].times: 64 sequences are alive"),
        ([{"op": "new"}] * (MAX_OPERATIONS + 1), "1001 are more than the 1000 allowed"),
    ],
)
def test_mistakes_are_named(operations: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        play(operations)


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    pool = PlayPool()
    pool.run({"op": "new"})
    pool.run({"op": "append", "sequence": "A", "tokens": NUM_BLOCKS * BLOCK_SIZE - 8})
    pool.run({"op": "fork", "sequence": "A", "times": 1})
    before = pool.state()
    # Room for the token there is, in a shared block that would have to be copied.
    with pytest.raises(InvalidRequest, match="B needs more than the 0 free blocks"):
        pool.run({"op": "append", "sequence": "B", "tokens": 1})
    assert pool.state() | {"events": []} == before | {"events": []}


def test_random_operations_keep_the_invariants() -> None:
    draw = random.Random(5)
    pool = PlayPool()
    num_refused = 0
    for _ in range(1500):
        alive = list(pool.members)
        name = draw.choice(alive) if alive else "A"
        verb = draw.choice(["new", "append", "append", "append", "fork", "rewrite", "free"])
        operation: dict[str, Any] = {"op": verb}
        if verb != "new":
            operation["sequence"] = name
        if verb == "append":
            operation["tokens"] = draw.randint(1, 120)
        if verb == "fork":
            operation["times"] = draw.randint(1, 3)
        try:
            pool.run(operation)
        except InvalidRequest:
            num_refused += 1
        check_manager(pool.kv, [m.seq for m in pool.members.values() if m.seq.table is not None])
        state = pool.state()
        assert state["num_held"] == len(state["blocks"]) <= state["num_naive"]
        for block in state["blocks"]:
            assert block["ref_count"] == len(block["holders"])
    assert num_refused > 100
