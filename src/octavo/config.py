"""Engine options: nested, frozen, checked when they are created."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from os import PathLike, fspath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from octavo.errors import ConfigError, shown
from octavo.registry import ATTENTION_BACKENDS, EXECUTORS, MEMORY_POLICIES, POLICIES

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
QuantizationName = Literal["fp8", "int8", "int4"]
QuantizationChoice = Literal["auto", "fp8", "int8", "int4"]
ModelImpl = Literal["auto", "native", "transformers"]
PreemptionMode = Literal["auto", "swap", "recompute"]
KVCacheDType = Literal["auto", "fp8"]
DeviceName = Literal["auto", "cpu", "cuda"]
KernelTuning = Literal["auto", "off"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 1 << 30
LARGE_GPU = 70 * 10**9  # bytes: it has room for the activations and the KV of larger steps
MAX_BLOCK_SIZE = 256
MAX_INTEGER = (1 << 63) - 1  # what tensors and messages can hold
# Kinds of parallelism that other engines have, by their options.
UNSERVED_PARALLELISM = (
    "context_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "enable_expert_parallel",
    "expert_parallel_size",
    "pipeline_parallel_size",
    "sequence_parallel_size",
)
KINDS = {int: "an integer", bool: "true or false", str: "text"}


def _require(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise ConfigError(name, message)


def _check_least(options: Any, **limits: int) -> None:
    """Check that options, if they are set, are not below their limits."""
    for name, limit in limits.items():
        value = getattr(options, name)
        wrong = f"is less than {limit}" if limit else "is negative"
        _require(value is None or value >= limit, name, f"{value} {wrong}")


def _check_types(options: Any) -> None:
    """Check that every option has its declared type."""
    for name, hint in get_type_hints(type(options)).items():
        value = getattr(options, name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if value is None and type(None) in kinds:
            continue
        kind = kinds[0]
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            is_choice = isinstance(value, str) and value in choices
            _require(is_choice, name, f"{shown(value)} is not one of {', '.join(choices)}")
        elif kind is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_finite = is_number and abs(value) <= sys.float_info.max
            _require(is_finite, name, f"{shown(value)} is not a finite number")
        else:
            known = KINDS.get(kind, f"a {kind.__name__}")
            _require(type(value) is kind, name, f"{shown(value)} is not {known}")
            if kind is int:
                is_small = abs(value) <= MAX_INTEGER
                _require(is_small, name, f"{shown(value)} is beyond {MAX_INTEGER}")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: the size of a block, how many there are, and the swap tier.

    Raises:
        ConfigError: an option has a value that cannot be; `field` names it.

    Example:
        >>> LLM("demo", block_size=32, num_blocks=1024, swap_space=0)
    """

    block_size: int = 16
    """Tokens in a block, 1 to 256."""
    num_blocks: int | None = None
    """Blocks in the pool. None: as many as the memory allows."""
    kv_cache_memory: int | None = None
    """Bytes for the pool on each device (of each rank), instead of `num_blocks`."""
    gpu_memory_utilization: float = 0.9
    """Fraction of a GPU's memory that the engine may use, weights included."""
    swap_space: int = 1 * GIB
    """Bytes of host memory for swapped-out blocks, of all ranks on a host together; 0: preempted
    requests are computed again."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Type of cached keys and values: that of the model ("auto"), or 8-bit floats ("fp8", e4m3),
    so that a block takes half the bytes of bfloat16, with the scales of the checkpoint, if it has
    any. The loss is in docs/kv_cache.md."""
    enable_prefix_caching: bool = True
    """Reuse the KV of equal prefixes."""
    max_tails: int = 256
    """Last blocks of sequences that stay in the prefix cache although they are not full: of those
    that ended or were forked last; 0: none."""
    memory_policy: str = "paged"
    """Blocks on demand, or reserved ahead like the systems that the paper compares with."""

    def __post_init__(self) -> None:
        _check_types(self)
        MEMORY_POLICIES.check(self.memory_policy)
        _require(
            1 <= self.block_size <= MAX_BLOCK_SIZE,
            "block_size",
            f"{self.block_size} is not between 1 and {MAX_BLOCK_SIZE}",
        )
        _check_least(self, num_blocks=1, kv_cache_memory=1, swap_space=0, max_tails=0)
        _require(
            self.kv_cache_memory is None or self.num_blocks is None,
            "kv_cache_memory",
            "give either kv_cache_memory or num_blocks, not both",
        )
        _require(
            0 < self.gpu_memory_utilization <= 1,
            "gpu_memory_utilization",
            f"{self.gpu_memory_utilization} is not in the range (0, 1]",
        )
        _require(
            self.memory_policy == "paged" or not self.enable_prefix_caching,
            "enable_prefix_caching",
            f"memory_policy {self.memory_policy} shares no blocks; only paged can reuse prefixes",
        )

    def dtype_for(self, dtype: str) -> str:
        """The dtype, by torch's name, of cached elements of a model that computes in `dtype`."""
        return "float8_e4m3fn" if self.kv_cache_dtype == "fp8" else dtype

    def element_bytes(self, dtype: str) -> int:
        """Bytes of a cached element of a model that computes in `dtype`."""
        return 1 if self.kv_cache_dtype == "fp8" else DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Which requests run in a step, and how many of their tokens it computes.

    Raises:
        ConfigError: an option has a value that cannot be; `field` names it.

    Example:
        >>> LLM("demo", max_num_seqs=64, max_num_batched_tokens=1024, policy="priority")
    """

    max_num_seqs: int = 256
    """Sequences that run at once; each sample and each beam counts as one."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step; at least `max_num_seqs`. Where neither is given, a GPU of 70 GB
    or more computes up to 8192 tokens of up to 1024 sequences."""
    policy: str = "fcfs"
    """Who runs first: requests in order of arrival ("fcfs"), those with the smallest `priority`
    ("priority"), or those of the tenant that has received the least service ("fair")."""
    aging_seconds: float = 30.0
    """Priority policy: waiting this long raises a request one level."""
    preemption_mode: PreemptionMode = "auto"
    """How blocks are freed when they run out; "auto" takes the cheaper way."""
    enable_chunked_prefill: bool = True
    """Compute long prompts in chunks, in the same steps as running decodes."""
    max_passes: int = 16
    """Requests that may overtake a head of the queue that does not fit."""
    watermark: float = 0.01
    """Fraction of the pool that is kept free when a request is admitted."""

    def __post_init__(self) -> None:
        _check_types(self)
        POLICIES.check(self.policy)
        _check_least(self, max_num_seqs=1, max_passes=0)
        # Every running sequence must be able to decode in every step, or decodes would starve.
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            f"{self.max_num_batched_tokens} is less than max_num_seqs ({self.max_num_seqs})",
        )
        _require(self.aging_seconds > 0, "aging_seconds", f"{self.aging_seconds} is not positive")
        _require(
            0 <= self.watermark < 1, "watermark", f"{self.watermark} is not in the range [0, 1)"
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of an engine; `make_config` creates one.

    Raises:
        ConfigError: an option has a value that cannot be; `field` names it.

    Example:
        >>> LLM("Qwen/Qwen3-0.6B", dtype="bfloat16", max_model_len=4096, num_threads=4)
    """

    model: str
    """A directory in Hugging Face format, a GGUF file, "demo", or a hub id."""
    dtype: DTypeName = "auto"
    """Type of weights, activations and KV cache; "auto": that of the files."""
    model_impl: ModelImpl = "auto"
    """What computes the model: a family of octavo's own ("native"), or transformers' module with
    octavo's attention ("transformers"); "auto": the latter where there is no such family."""
    load_format: LoadFormat = "auto"
    """"dummy": random weights, made from config.json alone."""
    quantization: QuantizationChoice | None = None
    """Projections are quantized while the weights are loaded: to e4m3 with a scale per output
    ("fp8"), or to integers with a scale per output ("int8") or per 128 inputs ("int4"). "auto": to
    the most exact of those that the device computes with, if they would leave too little room for
    the KV cache as they are. None: they are as the files have them."""
    measure_quantization: bool = True
    """Where weights are quantized while they are loaded, the log says how far the model's
    next-token distributions are from those of the weights in the files, which takes a second
    reading of them."""
    weight_copies: bool = True
    """On a Hopper GPU a model has copies of weights, in as many layers as there is memory for
    beside a KV cache of `max_num_seqs` sequences of 1,024 tokens. A size of the KV cache that is
    asked for, and a `max_model_len`, come first. Other devices have none.

    Of weights in bfloat16 (the head's, projections', and then experts') they have 12 bits. Few
    tokens are multiplied by them, because they have three quarters of the bytes to read. Weights of
    at least 2^-14 of their row's largest are the same in them; smaller ones are off by 2^-22 of
    that at most. They may take an eighth of the memory beside the weights in any case.

    Of weights that are quantized to FP8 on load (large projections', and experts') they have 7
    bits, and are the same. Few tokens are multiplied by them.

    Quantized projections that kernels convert for each product (integers, and FP8 whose inputs are
    not rounded) have copies in the model's dtype, bfloat16 or float16, which many tokens are
    multiplied by; they may take that eighth if it is enough for all layers. Each weight is rounded
    to the dtype in them, as with more than 2,048 tokens in any case."""
    max_model_len: int | None = None
    """Longest sequence in tokens, prompt and output. None: the model's own limit."""
    device: DeviceName = "auto"
    """Where the model runs; "auto": on a GPU if there is one."""
    cuda_graphs: bool = True
    """On a GPU: steps are captured at the start and replayed."""
    tune_kernels: KernelTuning = "auto"
    """On a GPU: which kernels are the fastest for the shapes of the model is measured once for each
    card and kept in the user's cache ("auto"), or follows from rules ("off"). The first start takes
    up to a minute longer."""
    attention_backend: str = "auto"
    """Which attention implementation; "auto": the fast one of the device."""
    executor: str = "auto"
    """What computes the steps: one device in the engine's process ("local"), or a process for each
    of `tensor_parallel_size` devices, of this host ("sharded") or of the nodes of a Ray cluster
    ("ray"); "auto": local or sharded, by that number."""
    ray_address: str | None = None
    """HOST:PORT of the Ray cluster for the executor ray, of which this host must be a node. None:
    RAY_ADDRESS, or else the cluster that this host is a node of."""
    tensor_parallel_size: int = 1
    """Devices that share every layer of the model: so many GPUs of one kind, of this host or of a
    Ray cluster. Ranks on a CPU divide its threads."""
    rank_timeout: float = 60.0
    """Seconds that a step may take with several ranks, until they are killed as hanging; and that
    the start may be silent, if one of them was stopped."""
    seed: int = 0
    """Seed of requests without one, and of dummy weights."""
    max_logprobs: int = 20
    """Most log-probabilities per position that a request may ask for."""
    num_threads: int | None = None
    """Threads that a CPU computes with, at most as many as this process has CPUs. They apply while
    octavo computes; otherwise torch keeps the program's own number. With the executor ray, of each
    rank, for which so many CPUs are reserved. None: torch's own number, and one with ray."""
    overlap: bool | None = None
    """Plan the next step while the device computes this one. None: on a GPU."""
    owns_process: bool = False
    """Whether the process serves this engine alone, so that it may be tuned as a whole: malloc
    keeps freed memory, and the garbage collector ignores objects that exist when the engine is
    ready on a GPU. True for the commands and the server's engine process; other programs are not
    tuned unless they ask for it."""
    host_share: int = 1
    """Engines that divide the host's memory among them, each with ranks of its own."""
    has_usual_steps: bool = False
    """`max_num_seqs` and `max_num_batched_tokens` are defaults, and may depend on the device."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """The options of the KV cache."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The options of the scheduler."""

    def __post_init__(self) -> None:
        _check_types(self)
        _require(bool(self.model), "model", "is empty")
        ATTENTION_BACKENDS.check(self.attention_backend, "auto")
        EXECUTORS.check(self.executor, "auto")
        size = self.tensor_parallel_size
        _check_least(self, tensor_parallel_size=1, max_model_len=2, max_logprobs=0, num_threads=1)
        _check_least(self, host_share=1)
        _require(
            self.executor != "local" or size == 1,
            "executor",
            f"local computes on one device; tensor_parallel_size={size} needs sharded",
        )
        _require(self.ray_address != "", "ray_address", "is empty")
        _require(
            self.executor == "ray" or self.ray_address is None,
            "ray_address",
            f"{shown(self.ray_address)} is of use to the executor ray only, not to {self.executor}",
        )
        _require(
            0.1 <= self.rank_timeout <= 1e6,
            "rank_timeout",
            f"{self.rank_timeout} is not between 0.1 and 1,000,000",
        )
        _require(
            self.cache.memory_policy == "paged" or self.scheduler.policy == "fcfs",
            "policy",
            f"memory_policy {self.cache.memory_policy} admits requests in order of arrival, and "
            f"cannot preempt; {self.scheduler.policy} needs paged memory",
        )

    def for_gpu(self, memory: int) -> EngineConfig:
        """The options for a GPU with `memory` bytes: larger steps than usual on a large one."""
        if not self.has_usual_steps or memory < LARGE_GPU:
            return self
        steps = replace(self.scheduler, max_num_seqs=1024, max_num_batched_tokens=8192)
        return replace(self, scheduler=steps)

    def dtype_for(self, stored: str) -> str:
        """The dtype to compute a model in whose files are in `stored`: of float16, "auto" makes
        float32 on a CPU.

        Raises ConfigError if it is one that the device does not compute in.
        """
        if self.device == "cpu" and self.dtype == "float16":
            raise ConfigError("dtype", "float16 is not served on a CPU; use bfloat16 or float32")
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" and stored != "bfloat16" else stored


def make_config(model: str | PathLike[str], **options: Any) -> EngineConfig:
    """An EngineConfig from flat options. What LLM() takes.

    Args:
        model: a directory in Hugging Face format, a GGUF file, "demo", or a hub id.
        **options: fields of EngineConfig, CacheConfig and SchedulerConfig, which do not overlap. A
            memory policy that cannot reuse prefixes turns prefix caching off, unless it is asked
            for.

    Raises:
        ConfigError: an option does not exist (the message has its likely spelling), or has a value
            that cannot be; `field` names it.

    Example:
        >>> make_config("demo", block_size=32, policy="priority")
    """
    policy = options.get("memory_policy", "paged")
    if isinstance(policy, str) and policy != "paged":
        options = {"enable_prefix_caching": False, **options}
    given: dict[type, dict[str, Any]] = {EngineConfig: {}, CacheConfig: {}, SchedulerConfig: {}}
    homes = {field.name: kind for kind in given for field in fields(kind)}
    for name in ("model", "has_usual_steps", "cache", "scheduler"):
        del homes[name]
    for name, value in options.items():
        if name in UNSERVED_PARALLELISM:
            raise ConfigError(
                name,
                "is not served; of several GPUs, octavo has tensor parallelism "
                "(tensor_parallel_size) and, in its server, replicas (octavo serve --replicas)",
            )
        if name not in homes:
            close = get_close_matches(name, homes, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(name, f"there is no such option{hint}")
        given[homes[name]][name] = value
    return EngineConfig(
        fspath(model) if isinstance(model, PathLike) else model,
        **given[EngineConfig],
        has_usual_steps=options.keys().isdisjoint({"max_num_seqs", "max_num_batched_tokens"}),
        cache=CacheConfig(**given[CacheConfig]),
        scheduler=SchedulerConfig(**given[SchedulerConfig]),
    )
