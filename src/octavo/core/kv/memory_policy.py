"""How memory for KV is given out: in blocks on demand, or reserved ahead as before the paper."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.config import CacheConfig
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.specs import KVSpec
from octavo.registry import MEMORY_POLICIES


def make_kv_cache_manager(
    config: CacheConfig,
    specs: Seq[KVSpec],
    num_blocks: int,
    num_swap_blocks: int,
    max_model_len: int,
) -> KVCacheManager:
    """The manager of `config.memory_policy`. No sequence will be longer than `max_model_len`."""
    policy = MEMORY_POLICIES[config.memory_policy]
    manager: KVCacheManager
    if policy is KVCacheManager:
        manager = policy(
            specs, config.block_size, num_blocks, num_swap_blocks, config.enable_prefix_caching
        )
    else:
        manager = policy(specs, config.block_size, num_blocks, num_swap_blocks, max_model_len)
    return manager
