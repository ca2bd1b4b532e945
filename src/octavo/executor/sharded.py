"""Several devices that share every layer: one process each, and the same plans for all."""

from __future__ import annotations

import gc

from octavo.config import EngineConfig
from octavo.core.step import StepPlan, StepResult
from octavo.executor.launching import Launcher
from octavo.executor.messages import ASK, encode_plan
from octavo.executor.ranks import RankGroup
from octavo.models.config import ModelConfig
from octavo.parallel import Shard


class ShardedExecutor:
    """Owns a group of ranks (tensor parallelism, paper section 4.6).

    Each rank holds a shard of the model and of every KV block; blocks have the same numbers on all
    of them, so one plan serves all. A plan is encoded once. Rank 0 answers.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, launcher: Launcher | None = None
    ) -> None:
        """Start the ranks, which load the model and take the memory.

        Args:
            launcher: how the ranks come to be; see RankGroup.

        Raises:
            ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do.
            EngineFailed: a rank broke down.
        """
        model_config.sharded(Shard(0, config.tensor_parallel_size))  # before anything is started
        self._ranks = RankGroup(config, model_config, launcher)
        first = self._ranks.ready[0]
        self.config = first.config
        self.model_config = first.model_config
        self.is_asynchronous = first.is_asynchronous
        self.capacity = first.capacity
        if config.owns_process and first.is_asynchronous:
            gc.collect()
            gc.freeze()  # as CudaDevice.settle does: a collection would delay the next plan

    def submit(self, plan: StepPlan) -> ShardedStep:
        """See Executor.submit. Raises EngineFailed if a rank is gone."""
        self._ranks.send(encode_plan(plan))
        return ShardedStep(self._ranks)

    def check(self) -> None:
        """See Executor.check."""
        self._ranks.check()

    def shutdown(self) -> None:
        """See Executor.shutdown."""
        self._ranks.close()


class ShardedStep:
    """A step under way on all ranks."""

    __slots__ = ("_ranks", "_result")

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """See PendingStep.result."""
        if self._result is None:
            self._ranks.send(ASK)
            self._result = self._ranks.receive_result()
        return self._result
