"""How memory for KV is given out: in blocks on demand, or reserved ahead as before the paper."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.config import CacheConfig
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.reserving import FasterTransformer, OrcaMax, OrcaOracle, OrcaPow2
from octavo.core.kv.specs import KVSpec

# Extend here: one class that reserves differently, and one line.
RESERVING: dict[str, type[OrcaMax] | type[FasterTransformer]] = {
    "orca-max": OrcaMax,
    "orca-pow2": OrcaPow2,
    "orca-oracle": OrcaOracle,
    "fastertransformer": FasterTransformer,
}


def make_kv_cache_manager(
    config: CacheConfig,
    specs: Seq[KVSpec],
    num_blocks: int,
    num_swap_blocks: int,
    max_model_len: int,
) -> KVCacheManager:
    """The manager of `config.memory_policy`. No sequence will be longer than `max_model_len`."""
    if config.memory_policy == "paged":
        return KVCacheManager(
            specs, config.block_size, num_blocks, num_swap_blocks, config.enable_prefix_caching
        )
    reserving = RESERVING[config.memory_policy]
    return reserving(specs, config.block_size, num_blocks, num_swap_blocks, max_model_len)
