"""docs/extending.md, "A memory policy"."""

from __future__ import annotations

from toys import Register

from octavo import LLM, SamplingParams
from octavo.core.kv.reserving import OrcaMax
from octavo.registry import MEMORY_POLICIES

BLOCK_SIZE = 16
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class RoomForFour(OrcaMax):
    """Every sequence gets room for four times its greatest length."""

    def reserved_tokens(self, num_prompt_tokens: int, max_length: int) -> int:
        return 4 * max_length


def test_a_reservation_of_one_s_own(register: Register) -> None:
    register(MEMORY_POLICIES, "room-for-four", RoomForFour)
    prompt = list(range(5, 17))
    with LLM("demo", num_blocks=64, block_size=BLOCK_SIZE) as llm:
        [expected] = llm.generate(prompt, PARAMS, use_tqdm=False)
    with LLM("demo", num_blocks=64, block_size=BLOCK_SIZE, memory_policy="room-for-four") as llm:
        held = []
        llm.engine.observers.append(lambda *_: held.append(llm.engine.kv.pool.num_referenced))
        [output] = llm.generate(prompt, PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert held[0] == 4 * (len(prompt) + 4) // BLOCK_SIZE
