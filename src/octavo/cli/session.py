"""What the commands that run a model share: the log, defaults, and a summary."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import click

from octavo.bench.memory_use import MemoryUse
from octavo.engine.engine import Engine
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams


def show_log(quiet: bool, verbose: bool) -> None:
    """Send octavo's log to stderr: the memory budget and what quantizing has cost, unless `quiet`,
    and with `verbose` each preemption."""
    logger = logging.getLogger("octavo")
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    for name in ("octavo.models", "octavo.worker"):
        logging.getLogger(name).setLevel(logging.WARNING if quiet else logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers = [handler]
    logger.propagate = False


def make_sampling_params(llm: LLM, given: Mapping[str, Any]) -> SamplingParams:
    """The given options; the others come from the model, then from SamplingParams."""
    return SamplingParams(**{**llm.engine.model_config.sampling_defaults, **given})


def summary(engine: Engine, memory: MemoryUse, num_tokens: int, seconds: float) -> str:
    """One line: speed, blocks, preemptions, prefix cache."""
    preemptions = engine.scheduler.num_preemptions
    kv = engine.kv
    return (
        f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / max(seconds, 1e-9):.0f} tok/s) | "
        f"KV blocks: {memory.peak_blocks} of {kv.pool.num_blocks} at most, "
        f"{kv.num_cow_copies} copied on write | preemptions: {preemptions['swap']} by swap, "
        f"{preemptions['recompute']} by recompute | prefix cache: {kv.num_hit_tokens} of "
        f"{kv.num_lookup_tokens} prompt tokens"
    )


def dim(text: str) -> str:
    return click.style(text, dim=True)
