"""Where requests come from: real lengths and traces that ship with octavo, a fit, or a file.

Lengths are pairs (prompt tokens, output tokens). Licences are in data/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from octavo.bench.traces import TraceRequest, read_trace
from octavo.errors import ConfigError
from octavo.registry import Registry

DATA = Path(__file__).parent / "data"
CONTEXT = 2048  # positions of OPT; the paper's benchmark keeps pairs below it
NUM_FITTED = 20_000

ALPACA_MEANS = (19.31, 58.45)  # prompt, output: all 52,000 rows, the paper's figure 11
# Log-normal fit. Shape: 1,000 real rows; means: as above.
ALPACA_LOG_MEANS = (2.762, 3.637)  # prompt, output
ALPACA_LOG_DEVIATIONS = (0.648, 0.929)
ALPACA_CORRELATION = -0.265

# German sentences have about 0.7 times as many Llama tokens as Finnish ones have GPT-2 tokens:
# an estimate, for the English-German half of WMT16 is not at hand.
GERMAN_PER_FINNISH = 0.7


@cache
def shipped(name: str) -> tuple[TraceRequest, ...]:
    """The trace in this file of octavo's data."""
    return tuple(read_trace(DATA / name))


def fits_context(request: TraceRequest) -> bool:
    return request.num_tokens < CONTEXT


@cache
def sharegpt() -> tuple[TraceRequest, ...]:
    """First turns of ShareGPT, half of the paper's own pairs, below 2,048 tokens."""
    return tuple(filter(fits_context, sharegpt_unfiltered()))


def sharegpt_unfiltered() -> tuple[TraceRequest, ...]:
    return shipped("sharegpt_opt_lengths.csv.gz")


def alpaca_measured() -> tuple[TraceRequest, ...]:
    """1,000 real pairs of the cleaned Alpaca set."""
    return shipped("alpaca_opt_lengths_1000.csv.gz")


@cache
def alpaca() -> tuple[TraceRequest, ...]:
    """The 1,000 real pairs, scaled so that their means are those of the whole set."""
    pairs = alpaca_measured()
    prompt_scale = ALPACA_MEANS[0] * len(pairs) / sum(pair.prompt_tokens for pair in pairs)
    output_scale = ALPACA_MEANS[1] * len(pairs) / sum(pair.output_tokens for pair in pairs)
    return tuple(
        TraceRequest(
            max(1, round(prompt_scale * pair.prompt_tokens)),
            max(1, round(output_scale * pair.output_tokens)),
        )
        for pair in pairs
    )


@cache
def alpaca_lognormal() -> tuple[TraceRequest, ...]:
    """Pairs drawn from a fit, below 2,048 tokens; always the same ones.

    Its tail is too long: so many long outputs leave room for fewer requests than the paper counts
    in Orca's memory (figure 13), so `alpaca` stands for the set.
    """
    draw = np.random.default_rng(0)
    first, other = draw.standard_normal((2, NUM_FITTED))
    second = ALPACA_CORRELATION * first + math.sqrt(1 - ALPACA_CORRELATION**2) * other
    prompts, outputs = (
        np.maximum(1, np.rint(np.exp(mean + deviation * normal))).astype(int)
        for mean, deviation, normal in zip(
            ALPACA_LOG_MEANS, ALPACA_LOG_DEVIATIONS, (first, second), strict=True
        )
    )
    pairs = (TraceRequest(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True))
    return tuple(filter(fits_context, pairs))


@cache
def translation() -> tuple[TraceRequest, ...]:
    """Sentences of WMT16 news: English in, German out (a stand-in: see GERMAN_PER_FINNISH)."""
    return tuple(
        replace(pair, output_tokens=max(1, round(GERMAN_PER_FINNISH * pair.output_tokens)))
        for pair in shipped("wmt16_news_enfi_gpt2bpe.csv.gz")
    )


Source = Callable[[], Sequence[TraceRequest]]
SOURCES: Registry[Source] = Registry(
    "trace",
    {
        "sharegpt": sharegpt,
        "sharegpt-unfiltered": sharegpt_unfiltered,
        "alpaca": alpaca,
        "alpaca-measured": alpaca_measured,
        "alpaca-lognormal": alpaca_lognormal,
        "translation": translation,
        "azure-code": partial(shipped, "azure_2023_code.csv.gz"),
        "azure-conversation": partial(shipped, "azure_2023_conv.csv.gz"),
        # With `hash_ids`: each stands for 512 tokens.
        "mooncake-conversation": partial(shipped, "mooncake_conversation.jsonl.gz"),
    },
)


def read_source(name: str) -> tuple[TraceRequest, ...]:
    """A source by its name, or a trace file by its path.

    Raises ConfigError for a name that is neither, TraceError for a broken file.
    """
    if name in SOURCES:
        return tuple(SOURCES[name]())
    if Path(name).suffix or Path(name).exists():
        return tuple(read_trace(name))
    raise ConfigError(
        "trace", f"{name!r} is neither a file nor one of {', '.join(sorted(SOURCES))}"
    )
