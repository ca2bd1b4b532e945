"""Which replica gets a request, and what the indexes remember."""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice

from octavo.core.step import SamplingSpec
from octavo.engine.validation import PreparedRequest
from octavo.server.engine_process.routing import (
    CACHED_WORTH,
    MAX_BLOCKS,
    MAX_DEPTH,
    MAX_IMBALANCE,
    USUAL_OUTPUT,
    PrefixIndex,
    Router,
    Routing,
    block_chain,
)

SIZE = 16


@dataclass
class Place:
    number: int
    load: int = 0


def request(
    prompt: list[int], salt: str = "", max_tokens: int = 100, n: int = 1
) -> PreparedRequest:
    length = len(prompt) + max_tokens
    return PreparedRequest(prompt, SamplingSpec(), length, n, 0, (), (), cache_salt=salt)


def router(num_replicas: int, routing: Routing = "prefix", num_blocks: int = 1000) -> Router:
    made = Router(num_replicas, routing)
    for number in range(num_replicas):
        made.begin(number, num_blocks, SIZE)
    return made


def choose(made: Router, asked: PreparedRequest, places: list[Place]) -> tuple[Place, int]:
    return made.choose(asked, made.chain(asked), places)


def test_the_longest_prefix_wins_and_ties_go_to_the_least_loaded() -> None:
    places = [Place(0), Place(1), Place(2)]
    made = router(3)
    conversation = [*range(200)]
    assert choose(made, request(conversation[:40]), places[1:2])[0].number == 1
    assert choose(made, request(conversation[:100]), places[2:])[0].number == 2
    assert choose(made, request(conversation), places)[0].number == 2
    assert choose(made, request([7] * 100), places)[0].number == 0, "it has the emptiest index"
    places[0].load = 1
    assert choose(made, request([8] * 100), places)[0].number == 1
    assert choose(made, request(conversation, salt="another tenant's"), places)[0].number == 1


def test_a_busy_replica_keeps_its_prefix_up_to_a_bound() -> None:
    places = [Place(0), Place(1)]
    for num_tokens in (SIZE, 10 * SIZE, 2000 * SIZE):
        prompt = [*range(num_tokens)]
        worth = max(num_tokens, min(CACHED_WORTH * num_tokens, MAX_IMBALANCE))
        for load, expected in ((worth - 1, 0), (worth + 1, 1)):
            made = router(2, num_blocks=MAX_BLOCKS)
            choose(made, request(prompt), places[:1])
            places[0].load = load
            assert choose(made, request(prompt), places)[0].number == expected
            places[0].load = 0


def test_the_load_of_a_request_is_what_it_makes_the_replica_compute() -> None:
    places = [Place(0), Place(1)]
    made = router(2)
    prompt = [*range(100)]
    assert choose(made, request(prompt, max_tokens=50), places)[1] == 100 + 50
    assert choose(made, request(prompt, max_tokens=50, n=3), places)[1] == 4 + 3 * 50
    assert choose(made, request(prompt, max_tokens=9999), places)[1] == 4 + USUAL_OUTPUT


def test_a_new_process_has_nothing_cached() -> None:
    places = [Place(0), Place(1)]
    made = router(2)
    choose(made, request([*range(100)]), places[1:])
    assert choose(made, request([*range(100)]), places)[0].number == 1
    made.begin(1, 1000, SIZE)
    assert choose(made, request([*range(100)]), places)[1] == 100 + 100


def test_one_after_the_other() -> None:
    places = [Place(0, 5), Place(1), Place(2, 7)]
    made = router(3, "round-robin")
    assert [choose(made, request([1] * 50), places)[0].number for _ in range(5)] == [0, 1, 2, 0, 1]
    made = router(3, "load")
    assert [choose(made, request([1] * 50), places)[0].number for _ in range(3)] == [1, 1, 1]


def test_the_end_of_a_prompt_is_forgotten_first() -> None:
    index = PrefixIndex(max_blocks=4)
    index.add([1, 2, 3])
    index.add([10, 11])
    assert (index.match([1, 2, 3]), index.match([10, 11, 12]), len(index)) == (2, 2, 4)
    index.add([1])
    index.add([20, 21])
    assert (index.match([1, 2]), index.match([10, 11])) == (1, 1)
    index.clear()
    assert index.match([1]) == 0


def test_many_prompts_take_bounded_memory() -> None:
    """Prompts of two blocks each."""
    index = PrefixIndex()
    tracemalloc.start()
    for i in range(MAX_BLOCKS // 2 + 20):
        index.add([i << 40, i << 40 | 1])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == MAX_BLOCKS
    assert peak < 64 << 20
    small, numbers = PrefixIndex(max_blocks=100), count()
    seconds = [cpu_seconds(partial(add_many, each, numbers)) for each in (index, small)]
    assert seconds[0] < 50 * seconds[1]


def test_a_prompt_of_a_million_tokens_takes_no_longer_than_what_is_known_of_it() -> None:
    long, enough = request([*range(1_000_000)]), request([*range(MAX_DEPTH * SIZE)])
    chain = block_chain(long, SIZE)
    assert (len(chain), sys.getsizeof(chain) < 10 * MAX_DEPTH) == (MAX_DEPTH, True)
    needed = cpu_seconds(lambda: block_chain(enough, SIZE))
    assert cpu_seconds(lambda: block_chain(long, SIZE)) < 10 * needed


def add_many(index: PrefixIndex, numbers: Iterator[int]) -> None:
    for number in islice(numbers, 100):
        index.add([-number])


def cpu_seconds(work: Callable[[], object]) -> float:
    """How long some work takes at best: compared with that of other work alone."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)
