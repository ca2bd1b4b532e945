"""docs/extending.md, "A scheduling policy"."""

from __future__ import annotations

from toys import Register

from octavo import LLM, SamplingParams
from octavo.core.policies import SchedulingPolicy
from octavo.core.sequence import Request
from octavo.registry import POLICIES

PROMPTS = [list(range(5, 5 + length)) for length in (60, 20, 40, 5)]


class ShortestFirst(SchedulingPolicy):
    """The shortest prompt runs first, and is preempted last."""

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.num_prompt_tokens, request.number)


def finish_order(policy: str) -> tuple[list[int], list[list[int]]]:
    """Lengths of the prompts in the order in which they finish, and all output tokens."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM("demo", num_blocks=64, max_num_seqs=1, policy=policy) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    outputs.sort(key=lambda output: output.finish_time)
    return [len(output.prompt_token_ids) for output in outputs], tokens


def test_a_policy_of_one_s_own_decides_who_runs_first(register: Register) -> None:
    register(POLICIES, "shortest-first", ShortestFirst)
    in_order, tokens = finish_order("fcfs")
    assert in_order == [60, 20, 40, 5]
    assert finish_order("shortest-first") == ([5, 20, 40, 60], tokens)
