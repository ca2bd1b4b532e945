from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from octavo.core.invariants import check_manager
from octavo.errors import InvalidRequest
from octavo.server.http import playpool
from octavo.server.http.bodies import decode_body
from octavo.server.http.errors import ApiError
from octavo.server.http.playpool import (
    BLOCK_SIZE,
    MAX_OPERATIONS,
    NUM_BLOCKS,
    TEXTBOOK,
    Operation,
    Play,
    PlayPool,
    textbook_case,
)


def read(operations: list[dict[str, Any]]) -> list[Operation]:
    return decode_body(msgspec.json.encode({"operations": operations}), Play).operations


def play(operations: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page gets for these operations."""
    return playpool.play(read(operations))


def run(pool: PlayPool, **operation: Any) -> None:
    pool.run(read([operation])[0])


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
        (
            [{"op": "steal"}],
            r"operations\[0\]: input tag 'steal' found using 'op'.*'new', 'append'",
        ),
        ([{}], r"operations\[0\]: unable to extract tag using discriminator 'op'"),
        ([{"op": "new", "tokens": 3}], r"operations\[0\].tokens: there is no such field"),
        ([{"op": "z" * 10_000}], r"input tag 'z{100,250}\.\.\.$"),
        ([{"op": "free", "sequence": "A"}], r"no sequence 'A'; alive: none"),
        ([{"op": "free", "sequence": ["A"]}], "sequence: input should be a valid string"),
        ([{"op": "x" * 100}], "input tag 'x{100}' found"),
        ([{"op": "new", "y" * 100: 1}], r"\.y{64}\.\.\.: there is no such field"),
        (
            [{"op": "new"}, {"op": "append", "sequence": "A", "tokens": 0}],
            "tokens: input should be greater than or equal to 1, not 0",
        ),
        (
            [{"op": "new"}, {"op": "append", "sequence": "A", "tokens": True}],
            "valid integer, not True",
        ),
        (
            [{"op": "new"}, {"op": "fork", "sequence": "A", "times": 65}],
            "less than or equal to 64, not 65",
        ),
        ([{"op": "new"}, {"op": "rewrite", "sequence": "A"}], "A has no token yet"),
        ([{"op": "new"}] * 65, r"operations\[64\].times: 64 sequences are alive"),
        ([{"op": "new"}] * (MAX_OPERATIONS + 1), "at most 1000 items after validation, not 1001"),
    ],
)
def test_mistakes_are_named(operations: list[dict[str, Any]], message: str) -> None:
    with pytest.raises((ApiError, InvalidRequest), match=message):
        play(operations)


def test_a_full_pool_refuses_and_changes_nothing() -> None:
    pool = PlayPool()
    run(pool, op="new")
    run(pool, op="append", sequence="A", tokens=NUM_BLOCKS * BLOCK_SIZE - 8)
    run(pool, op="fork", sequence="A", times=1)
    before = pool.state()
    # Room for the token there is, in a shared block that would have to be copied.
    with pytest.raises(InvalidRequest, match="B needs more than the 0 free blocks"):
        run(pool, op="append", sequence="B", tokens=1)
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
            run(pool, **operation)
        except InvalidRequest:
            num_refused += 1
        check_manager(pool.kv, [m.seq for m in pool.members.values() if m.seq.table is not None])
        state = pool.state()
        assert state["num_held"] == len(state["blocks"]) <= state["num_naive"]
        for block in state["blocks"]:
            assert block["ref_count"] == len(block["holders"])
    assert num_refused > 100
