"""The paper's servers (table 1): models, GPUs, and how many KV slots their memory leaves.

The arithmetic is octavo's own memory budget (`memory_budget.py`), one device at a time, with the
authors' artifact's settings: 95% of a device, less its share of the weights, two copies of the
largest step's logits, and a workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import DTYPE_BYTES, GIB, CacheConfig, DTypeName
from octavo.memory_budget import FixedMemory, KVShape, MemoryBudget, plan_memory
from octavo.models.config import ModelConfig, dense_token_size
from octavo.simulation.models import find_model

BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 2560  # artifact
MAX_REQUESTS = 256  # artifact; it calls them sequences, and counts requests
SWAP_SPACE_PER_GPU = 20 * GIB  # artifact
DTYPE: DTypeName = "float16"
MEMORY_SHARE = 0.95  # artifact
WORKSPACE = 1 * GIB  # artifact
# What CUDA reports for the two cards.
DEVICE_MEMORY = {"a100-40gb": int(39.39 * GIB), "a100-80gb": int(79.15 * GIB)}


@dataclass(frozen=True, slots=True)
class Server:
    """One column of table 1."""

    model: str
    gpu: str
    num_gpus: int

    @property
    def config(self) -> ModelConfig:
        return find_model(self.model)

    def shape(self, block_size: int = BLOCK_SIZE) -> KVShape:
        """The KV of one device: its share of the heads."""
        config = self.config
        layout = config.kv_layout(
            lambda heads, size: dense_token_size(heads // self.num_gpus, size)
        )
        return KVShape(layout, block_size, DTYPE_BYTES[DTYPE])

    def budget(self, block_size: int = BLOCK_SIZE) -> MemoryBudget:
        """How one device's memory is divided."""
        config = self.config
        logits = 2 * MAX_BATCHED_TOKENS * config.vocab_size * DTYPE_BYTES[DTYPE]
        fixed = FixedMemory(
            weights=config.num_parameters() * DTYPE_BYTES[DTYPE] // self.num_gpus,
            activations=logits + WORKSPACE,
        )
        total = int(MEMORY_SHARE * DEVICE_MEMORY[self.gpu])
        cache_config = CacheConfig(block_size=block_size, swap_space=SWAP_SPACE_PER_GPU)
        return plan_memory(
            cache_config,
            self.shape(block_size),
            fixed,
            total,
            total - fixed.total,
            SWAP_SPACE_PER_GPU,
        )

    def num_blocks(self, block_size: int = BLOCK_SIZE) -> int:
        return self.budget(block_size).num_blocks

    def num_slots(self) -> int:
        return self.num_blocks() * BLOCK_SIZE


SERVERS = {
    "opt-13b": Server("opt-13b", "a100-40gb", 1),
    "opt-66b": Server("opt-66b", "a100-40gb", 4),
    "opt-175b": Server("opt-175b", "a100-80gb", 8),
    "llama-13b": Server("llama-13b", "a100-40gb", 1),
}
