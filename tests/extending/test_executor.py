"""docs/extending.md, "An executor"."""

from __future__ import annotations

from toys import Register

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.core.kv.specs import FullAttention, group_layers
from octavo.core.step import FinishedStep, PendingStep, StepPlan, StepResult
from octavo.executor.base import KVCapacity
from octavo.memory_budget import MemoryBudget
from octavo.models.config import ModelConfig
from octavo.registry import EXECUTORS

NUM_BLOCKS = 20


class CountingExecutor:
    """Computes nothing: the token after n is n + 1."""

    is_asynchronous = False

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self.config, self.model_config = config, model_config
        self._vocab_size = model_config.vocab_size
        self._last: dict[int, int] = {}  # sequence -> its last token
        block_size = config.cache.block_size
        budget = MemoryBudget(0, 0, 0, 0, 0, 1, block_size, NUM_BLOCKS, 0, NUM_BLOCKS)
        layout = group_layers([FullAttention()])
        self.capacity = KVCapacity(NUM_BLOCKS, 0, layout, block_bytes=1, budget=budget)

    def submit(self, plan: StepPlan) -> PendingStep:
        for fork in plan.forks:
            self._last[fork.child_id] = self._last[fork.parent_id]
        for seq_id in plan.closed:
            del self._last[seq_id]
        for row in plan.opened:
            self._last[row.seq_id] = row.token_ids[-1]
        for seq_id, _, token_id in zip(*plan.token_writes, strict=True):
            self._last[seq_id] = token_id
        for seq_id in plan.sampled:
            self._last[seq_id] = (self._last[seq_id] + 1) % self._vocab_size
        return FinishedStep(StepResult(plan.step_id, [self._last[each] for each in plan.sampled]))

    def check(self) -> None:
        """It cannot fail."""

    def shutdown(self) -> None:
        self._last.clear()


def test_an_executor_of_one_s_own_computes_the_tokens(register: Register) -> None:
    register(EXECUTORS, "counting", CountingExecutor)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    prompts = [[7, 100 * number] for number in range(1, 13)]  # more than fit: some are preempted
    with LLM("demo", executor="counting", block_size=4) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        num_preemptions = sum(llm.engine.scheduler.num_preemptions.values())
    for prompt, output in zip(prompts, outputs, strict=True):
        start = prompt[-1] + 1
        assert output.outputs[0].token_ids == list(range(start, start + 50))
    assert num_preemptions > 0
