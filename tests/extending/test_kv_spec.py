"""docs/extending.md, "A KV spec"."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from toys import Register

from core.worlds import BLOCK_SIZE, World
from model_zoo import SLIDING_WINDOW, model_directory, random_token_ids
from octavo import LLM, SamplingParams
from octavo.core.block_table import NULL_BLOCK
from octavo.core.kv.specs import FullAttention, KVSpec, SlidingWindow, Source, group_layers
from octavo.errors import ModelError
from octavo.json_fields import Fields
from octavo.models.config import ModelDescription
from octavo.models.families import mistral
from octavo.models.family import Family
from octavo.models.registry import FAMILIES, read_model_config

NUM_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Chunked:
    """The query at p reads its own chunk up to p, as in the local layers of Llama 4."""

    follows: ClassVar[Source] = "sequence"
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


@dataclass(frozen=True, slots=True)
class WholePages:
    """Keeps the window's tokens and those before them down to a multiple of `page`."""

    follows: ClassVar[Source] = "sequence"
    window: int
    page: int

    def first_needed_token(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.page * self.page

    def max_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        held = min(num_tokens, self.window + self.page - 2 + chunk)
        return min(math.ceil(num_tokens / block_size), math.ceil(held / block_size) + 1)


def family_with(spec: KVSpec) -> Family:
    """Mistral, but its even layers name their own KV spec."""

    def read(config: Fields) -> ModelDescription:
        description = mistral.read(config)
        layers = tuple(
            layer if i % 2 else replace(layer, kv_spec=spec)
            for i, layer in enumerate(description.layers)
        )
        return replace(description, layers=layers)

    return replace(mistral.FAMILY, model_type="paged", architecture="PagedForCausalLM", read=read)


def write_model(directory: Path) -> Path:
    """The zoo's Mistral under another model type."""
    original = model_directory("mistral")
    fields = json.loads((original / "config.json").read_text())
    fields |= {"model_type": "paged", "architectures": ["PagedForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "model.safetensors").symlink_to(original / "model.safetensors")
    return directory


def generate(directory: Path) -> tuple[tuple[KVSpec, ...], list[list[int]], int]:
    """The engine's specs, greedy tokens, and preemptions, in a pool too small for full attention:
    a sequence of 140 tokens would take 35 blocks in each of the three layers."""
    prompts = [random_token_ids(length, seed=length) for length in (3, 40, 60, 60)]
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    options = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with LLM(directory, dtype="float32", **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        num_preemptions = sum(llm.engine.scheduler.num_preemptions.values())
        return llm.engine.kv.specs, [out.outputs[0].token_ids for out in outputs], num_preemptions


@pytest.mark.parametrize("page", [1, 12])  # 1: the same tokens as SlidingWindow keeps
def test_a_family_s_own_spec_gives_the_tokens_of_its_window(
    tmp_path: Path, register: Register, page: int
) -> None:
    spec = WholePages(SLIDING_WINDOW, page)
    register(FAMILIES, "paged", family_with(spec))
    specs, tokens, num_preemptions = generate(write_model(tmp_path))
    windows, expected, _ = generate(model_directory("mistral"))
    assert specs == (spec, spec, SlidingWindow(SLIDING_WINDOW))
    assert windows == (SlidingWindow(SLIDING_WINDOW),)
    assert num_preemptions > 0
    assert tokens == expected


@pytest.mark.parametrize("spec", [WholePages(SLIDING_WINDOW - 1, 1), Chunked(12)])
def test_a_spec_that_frees_what_the_window_reads_is_refused(
    tmp_path: Path, register: Register, spec: KVSpec
) -> None:
    register(FAMILIES, "paged", family_with(spec))
    with pytest.raises(ModelError, match=r"kv_spec of layer 0: .* keeps no token before"):
        read_model_config(write_model(tmp_path))
