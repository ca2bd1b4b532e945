"""The memory budget, which is known before anything is allocated. Plain Python, no torch.

The worker allocates by these numbers, and `octavo memory` prints them on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.config import GIB, CacheConfig, EngineConfig, SchedulerConfig
from octavo.core.kv.specs import KVLayout, KVSpec, num_read_tokens
from octavo.errors import OutOfMemory
from octavo.models.config import LayerConfig, ModelConfig, map_distinct

CPU_CACHE_SHARE = 0.4  # of the memory left after weights and activations
CPU_CACHE_LIMIT = 4 * GIB  # by default on a CPU, where other programs need memory too


def format_bytes(num_bytes: int) -> str:
    """`1536` -> `1.50 KiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{int(size)} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size of one model's KV."""

    layout: KVLayout
    block_size: int  # tokens
    element_bytes: int
    encoder_len: int = 0  # tokens of encoder input that a sequence holds beside its own

    @property
    def block_bytes(self) -> int:
        """Keys and values of `block_size` tokens, in as many layers as a block has room for."""
        return self.layout.token_size * self.block_size * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in all layers, without padding layers."""
        return sum(group.token_size for group in self.layout.groups) * self.element_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token while all groups hold it, padding layers included."""
        return sum(self.block_bytes // size for size in self.block_sizes)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per block, by KV group."""
        return self.layout.block_sizes(self.block_size)

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that one sequence of `num_tokens`, computed by chunks, ever holds, with
        those of its encoder input."""
        return sum(
            spec.max_blocks(self.followed(spec, num_tokens), size, chunk)
            for spec, size in zip(self.layout.specs, self.block_sizes, strict=True)
        )

    def held_bytes(self, num_tokens: int) -> int:
        """The most that one sequence takes while it decodes up to `num_tokens`."""
        return self.blocks_for(num_tokens, chunk=1) * self.block_bytes

    def read_bytes(self, num_tokens: int) -> int:
        """What the last query of a sequence of `num_tokens` reads: the least it could take."""
        read = sum(
            group.token_size * num_read_tokens(group.spec, self.followed(group.spec, num_tokens))
            for group in self.layout.groups
        )
        return read * self.element_bytes

    def followed(self, spec: KVSpec, num_tokens: int) -> int:
        """The length of what a group's blocks hold for a sequence of `num_tokens`."""
        return num_tokens if spec.follows == "sequence" else self.encoder_len

    def longest_sequence(self, num_blocks: int, chunk: int, limit: int) -> int:
        """The longest sequence, up to `limit` tokens, that fits into `num_blocks`; 0 if none."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_for(middle, chunk) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """Memory taken before the KV cache; bytes."""

    weights: int
    activations: int
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.graphs


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of each component; bytes, except the counts of blocks."""

    total: int  # all that this process may take on the device
    weights: int
    activations: int
    graphs: int
    kv_cache: int  # num_blocks + 1 blocks: one is the null block
    block_bytes: int
    block_size: int  # tokens
    num_blocks: int
    swap: int  # host memory
    num_swap_blocks: int

    @property
    def unused(self) -> int:
        return self.total - self.weights - self.activations - self.graphs - self.kv_cache

    def limited_to(self, num_blocks: int, num_swap_blocks: int) -> MemoryBudget:
        """The budget with no more blocks than these, null block not counted."""
        num_blocks = min(self.num_blocks, num_blocks)
        num_swap_blocks = min(self.num_swap_blocks, num_swap_blocks)
        return replace(
            self,
            num_blocks=num_blocks,
            kv_cache=(num_blocks + 1) * self.block_bytes,
            num_swap_blocks=num_swap_blocks,
            swap=num_swap_blocks * self.block_bytes,
        )

    def __str__(self) -> str:
        rows = [
            ("total", self.total, "that this process may take"),
            ("weights", self.weights, ""),
            ("activations", self.activations, "largest step"),
            ("graphs", self.graphs, "CUDA graphs"),
            ("KV cache", self.kv_cache, self._describe_blocks(self.num_blocks)),
            ("unused", self.unused, ""),
            ("swap tier", self.swap, f"host, {self._describe_blocks(self.num_swap_blocks)}"),
        ]
        lines = [
            f"{name:<12}{format_bytes(size):>12}  {note}".rstrip() for name, size, note in rows
        ]
        return "\n".join(lines)

    def _describe_blocks(self, num_blocks: int) -> str:
        return (
            f"{num_blocks:,} blocks of {self.block_size} tokens ({format_bytes(self.block_bytes)})"
        )


def plan_memory(
    cache: CacheConfig,
    shape: KVShape,
    fixed: FixedMemory,
    total: int,
    default_kv_cache: int,
    swap_limit: int | None = None,
) -> MemoryBudget:
    """Divide `total` bytes.

    Args:
        cache: the user's settings; block counts round down, and the null block is included.
        shape: the size of the model's KV.
        fixed: memory taken before the KV cache.
        total: what this process may take on the device.
        default_kv_cache: bytes for the KV cache if the settings give no size.
        swap_limit: host memory available to the swap tier; None: what is left of `total`,
            because host and device are the same (a CPU).

    Raises:
        OutOfMemory: not even one block fits, or not the requested ones; names what would fit.
    """
    block_bytes = shape.block_bytes
    room = total - fixed.total
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
    else:
        asked = cache.kv_cache_memory
        num_blocks = (min(default_kv_cache, room) if asked is None else asked) // block_bytes - 1
    kv_cache = (num_blocks + 1) * block_bytes
    if num_blocks < 1 or kv_cache > room:
        raise OutOfMemory(_no_room(cache, shape, fixed, total))
    if swap_limit is None:
        swap_limit = room - kv_cache
    # I8: the swap tier never needs more blocks than the device has.
    num_swap_blocks = min(min(cache.swap_space, swap_limit) // block_bytes, num_blocks)
    return MemoryBudget(
        total=total,
        weights=fixed.weights,
        activations=fixed.activations,
        graphs=fixed.graphs,
        kv_cache=kv_cache,
        block_bytes=block_bytes,
        block_size=shape.block_size,
        num_blocks=num_blocks,
        swap=num_swap_blocks * block_bytes,
        num_swap_blocks=num_swap_blocks,
    )


def cpu_cache(total: int, fixed: FixedMemory, num_ranks: int) -> int:
    """Bytes for the KV cache of each of `num_ranks` ranks of a CPU, if the settings give no size;
    `total` is what each rank may take."""
    return min(CPU_CACHE_LIMIT // num_ranks, int(CPU_CACHE_SHARE * (total - fixed.total)))


def _no_room(cache: CacheConfig, shape: KVShape, fixed: FixedMemory, total: int) -> str:
    """Why the KV cache does not fit, and which settings would."""
    block_bytes = shape.block_bytes
    room = total - fixed.total
    most = room // block_bytes - 1
    if cache.num_blocks is not None:
        asked = f"num_blocks={cache.num_blocks}"
    elif cache.kv_cache_memory is not None:
        asked = f"kv_cache_memory={cache.kv_cache_memory}"
    else:
        asked = "a KV cache of one block"
    message = (
        f"{asked} does not fit: of {format_bytes(total)}, weights take "
        f"{format_bytes(fixed.weights)}, activations {format_bytes(fixed.activations)} and graphs "
        f"{format_bytes(fixed.graphs)}, which leaves {format_bytes(max(room, 0))}; a block of "
        f"{shape.block_size} tokens takes {format_bytes(block_bytes)}, and there is a null block"
    )
    if most >= 1:
        return (
            f"{message}. What fits: num_blocks from 1 to {most}, or kv_cache_memory from "
            f"{2 * block_bytes} to {room}"
        )
    return (
        f"{message}. Lower max_num_batched_tokens or block_size, use a smaller dtype or model, or "
        f"free {format_bytes(fixed.total + 2 * block_bytes - total)}"
    )


def check_model_len(budget: MemoryBudget, shape: KVShape, max_model_len: int, chunk: int) -> None:
    """Check that one sequence of `max_model_len`, computed by chunks of `chunk`, fits.

    Raises:
        OutOfMemory: it does not; names the largest max_model_len and the memory it would take.
    """
    needed = shape.blocks_for(max_model_len, chunk)
    if needed <= budget.num_blocks:
        return
    largest = shape.longest_sequence(budget.num_blocks, chunk, max_model_len)
    beside, advice = "", f"Give kv_cache_memory={(needed + 1) * budget.block_bytes}"
    if shape.encoder_len:
        beside = f" beside {shape.encoder_len} tokens of encoder input"
        advice += ", or lower max_num_batched_tokens, which limits that input"
    if largest > 1:
        advice += f", or set max_model_len to {largest} or less"
    raise OutOfMemory(
        f"one sequence of max_model_len={max_model_len}{beside} needs {needed} KV blocks, but "
        f"there are {budget.num_blocks}. {advice}"
    )


def check_asked_length(budget: MemoryBudget, shape: KVShape, config: EngineConfig) -> None:
    """`check_model_len` for the configured max_model_len, if there is one.

    If the model's own limit is more than fits, longer requests are refused individually.
    """
    asked, scheduler = config.max_model_len, config.scheduler
    if asked is not None:
        chunk = scheduler.max_num_batched_tokens if scheduler.enable_chunked_prefill else asked
        check_model_len(budget, shape, asked, chunk)


def activation_bytes(
    num_tokens: int, num_rows: int, layer_width: int, vocab_size: int, dtype_bytes: int
) -> int:
    """An estimate of the largest step: `num_tokens` through the layers, `num_rows` of logits.

    `layer_width` counts the elements a token has at once inside a layer (its inputs, outputs and
    the widest projections). Logits are held in the model's dtype and once more in float32.
    """
    return num_tokens * layer_width * dtype_bytes + num_rows * vocab_size * (dtype_bytes + 4)


def estimate_activations(
    model_config: ModelConfig, scheduler: SchedulerConfig, dtype_bytes: int
) -> int:
    """`activation_bytes` of the largest step that these settings allow."""
    encoder = model_config.encoder
    layers = (*model_config.layers, *(() if encoder is None else encoder.layers))
    layer_width = 4 * model_config.hidden_size + max(map_distinct(_projected_width, layers))
    if model_config.token_inputs is not None:  # and what they are made of
        layer_width += 2 * model_config.token_inputs.width
    return activation_bytes(
        scheduler.max_num_batched_tokens,
        scheduler.max_num_seqs,
        layer_width,
        model_config.vocab_size,
        dtype_bytes,
    )


def _projected_width(layer: LayerConfig) -> int:
    """The elements a token has at once in a layer's projections."""
    attention = layer.attention
    beside = attention.qkv.out_features + attention.output.in_features
    return beside + layer.mlp.activation_width
