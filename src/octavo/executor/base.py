"""The interface between the engine and what computes its steps; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.config import EngineConfig
from octavo.core.kv.specs import KVLayout
from octavo.core.step import PendingStep, StepPlan
from octavo.memory_budget import MemoryBudget
from octavo.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """The KV memory that an executor offers: a result, given to the core, never a setting.

    The core hands out blocks 1 .. num_blocks. Block 0 is the null block: the executor keeps it in
    addition, zeroed, for padding and for entries that a sliding window has left behind; no sequence
    is ever written to it. The swap tier's blocks are 1 .. num_swap_blocks.
    """

    num_blocks: int
    num_swap_blocks: int
    layout: KVLayout
    block_bytes: int  # of all devices together
    budget: MemoryBudget  # of one device
    num_ranks: int = 1  # devices that share each block
    device_name: str = ""  # of each of them, as its driver has it; "" where there is none

    @classmethod
    def of(
        cls, budget: MemoryBudget, layout: KVLayout, num_ranks: int = 1, device_name: str = ""
    ) -> KVCapacity:
        """What `num_ranks` devices of that name, with this budget each, offer."""
        return cls(
            budget.num_blocks,
            budget.num_swap_blocks,
            layout,
            budget.block_bytes * num_ranks,
            budget,
            num_ranks,
            device_name,
        )


class Executor(Protocol):
    """Owns the devices, and carries out plans."""

    @property
    def capacity(self) -> KVCapacity: ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether `submit` returns before the step is computed."""
        ...

    def submit(self, plan: StepPlan, /) -> PendingStep:
        """Carry out one step: row changes, block moves, then the computation.

        Steps run in the order in which they are submitted. The next one may be submitted before
        this one's result is asked for; results are asked for in the same order.
        """
        ...

    def check(self) -> None:
        """Raise EngineFailed if no further step can be computed. Called now and then while there is
        nothing to compute; a failure in a step is raised by the step."""
        ...

    def shutdown(self) -> None:
        """Release the devices and their memory. A second call does nothing."""
        ...


class DeviceExecutor(Executor, Protocol):
    """An executor that owns devices."""

    @property
    def config(self) -> EngineConfig:
        """The settings, with those that follow from the devices."""
        ...

    @property
    def model_config(self) -> ModelConfig:
        """The whole model, as the devices have its weights."""
        ...
