"""docs/extending.md, "A KV spec"."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.worlds import BLOCK_SIZE, World
from octavo.core.block_table import NULL_BLOCK
from octavo.core.kv.specs import FullAttention, group_layers

NUM_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Chunked:
    """The query at p reads its own chunk up to p, as in the local layers of Llama 4."""

    size: int

    def first_needed_token(self, position: int) -> int:
        return position // self.size * self.size

    def max_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        held = min(num_tokens, self.size - 1 + chunk)
        return min(math.ceil(num_tokens / block_size), math.ceil(held / block_size) + 1)


def make_world(num_blocks: int) -> World:
    specs = group_layers([Chunked(12), FullAttention(), Chunked(12)]).specs
    assert specs == (Chunked(12), Chunked(12), FullAttention())
    return World(num_blocks, num_swap_blocks=num_blocks, specs=specs, max_num_batched_tokens=16)


def add(world: World, number: int) -> None:
    """Requests with prompts of 5 to 33 tokens, of which some share beginnings."""
    prompt = [number % 2 + token % 5 for token in range(5 + 4 * number)]
    world.add(f"r{number}", prompt=prompt, num_output_tokens=30, n=1 + number % 2)


def outputs(world: World) -> dict[str, list[list[int]]]:
    """The executor checks what every query reads, and the world every block, at each step."""
    finished = world.run()
    return {
        request.request_id: [seq.token_ids for seq in sorted(request.finished, key=sample_index)]
        for request in finished
    }


def sample_index(seq: object) -> int:
    return seq.sample_index  # type: ignore[attr-defined, no-any-return]


def test_requests_under_pressure_get_the_tokens_that_they_get_alone() -> None:
    crowded = make_world(num_blocks=64)
    alone: dict[str, list[list[int]]] = {}
    for number in range(NUM_REQUESTS):
        add(crowded, number)
        world = make_world(num_blocks=200)
        add(world, number)
        alone |= outputs(world)
    assert outputs(crowded) == alone
    assert sum(crowded.scheduler.num_preemptions.values()) > 0


def test_blocks_before_the_chunk_are_freed() -> None:
    world = make_world(num_blocks=100)
    world.add("long", num_prompt_tokens=50, num_output_tokens=12)
    held: list[int] = []
    while world.scheduler.has_unfinished:
        world.step()
        for request in world.scheduler.running:
            table = request.sequences[0].table
            assert table is not None
            held = [sum(block != NULL_BLOCK for block in ids) for ids in table.block_ids]
            for spec, number in zip(world.kv.specs, held, strict=True):
                assert number <= spec.max_blocks(62, BLOCK_SIZE, 16)
    chunked, _, full = held
    assert full == 60 // BLOCK_SIZE
    assert chunked <= 12 // BLOCK_SIZE + 1
