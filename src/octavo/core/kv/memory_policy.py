"""How memory for KV is given out: in blocks on demand, or reserved ahead as before the paper."""

from __future__ import annotations

from octavo.config import CacheConfig
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.specs import KVLayout
from octavo.errors import ConfigError
from octavo.registry import MEMORY_POLICIES


def make_kv_cache_manager(
    config: CacheConfig,
    layout: KVLayout,
    num_blocks: int,
    num_swap_blocks: int,
    max_model_len: int,
) -> KVCacheManager:
    """The manager of `config.memory_policy`. No sequence will be longer than `max_model_len`.

    Raises:
        ConfigError: the policy does not know of encoder inputs, and the model has an encoder.
    """
    block_sizes = layout.block_sizes(config.block_size)
    policy = MEMORY_POLICIES[config.memory_policy]
    manager: KVCacheManager
    if policy is not KVCacheManager and any(spec.follows == "encoder" for spec in layout.specs):
        raise ConfigError(
            "memory_policy",
            f"{config.memory_policy} reserves memory for sequences alone, and the model has an "
            "encoder; use paged",
        )
    if policy is KVCacheManager:
        manager = policy(
            layout.specs,
            block_sizes,
            num_blocks,
            num_swap_blocks,
            config.enable_prefix_caching,
            max_tails=config.max_tails,
        )
    else:
        manager = policy(layout.specs, block_sizes, num_blocks, num_swap_blocks, max_model_len)
    return manager
