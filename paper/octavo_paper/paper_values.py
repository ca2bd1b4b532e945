"""The numbers of the paper (arXiv 2309.06180, SOSP 2023), as data, and where each comes from.

Sources, which every block of numbers names:
    text      the paper's text
    label     numbers printed in a table or a figure
    read      coordinates of a figure's vector lines, mapped through its ticks: exact to about
              0.002 s/token and 0.01 requests/s
    artifact  the authors' artifact (sosp-ae-39/sosp-ae-astra)

A system is named as octavo's memory policies are; vllm is paged memory.
"""

from __future__ import annotations

from typing import Literal

SystemName = Literal["vllm", "orca-oracle", "orca-pow2", "orca-max", "fastertransformer"]
ORCAS: tuple[SystemName, ...] = ("orca-oracle", "orca-pow2", "orca-max")

# Table 1 (label). GB as printed; slots in thousands of tokens.
TABLE_1 = {
    "opt-13b": {"gpu_memory": 40, "parameters": 26, "kv_cache": 12, "kv_slots": 15.7},
    "opt-66b": {"gpu_memory": 160, "parameters": 132, "kv_cache": 21, "kv_slots": 9.7},
    "opt-175b": {"gpu_memory": 640, "parameters": 346, "kv_cache": 264, "kv_slots": 60.1},
}

# Figure 2 (label), percent of the KV cache: token states, reservation, internal, external & others.
# For vLLM only two parts are printed.
FIGURE_2: dict[SystemName, tuple[float, float, float, float]] = {
    "orca-max": (20.4, 13.3, 57.3, 8.9),
    "orca-pow2": (26.8, 17.9, 13.6, 41.6),
    "orca-oracle": (38.2, 25.2, 0.0, 36.6),
    "vllm": (96.3, 0.0, 0.0, 3.7),
}
FIGURE_2_RATE = (
    4.0  # requests/s, OPT-13B, ShareGPT; mean over iterations from 300 to 900 s (artifact)
)

# Figure 11 (label): mean input and output tokens.
FIGURE_11 = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}

# Figure 12 (read): request rate, in 1/s, at 0.2 and at 0.5 s/token. None: not read.
# (model, data set) -> system -> rates
FIGURE_12_THRESHOLDS = (0.2, 0.5)
FIGURE_12: dict[tuple[str, str], dict[SystemName, tuple[float | None, float | None]]] = {
    ("opt-13b", "sharegpt"): {
        "vllm": (1.86, 1.93),
        "orca-oracle": (1.00, 1.10),
        "orca-pow2": (0.76, 0.77),
        "orca-max": (0.51, 0.53),
        "fastertransformer": (0.13, 0.23),
    },
    ("opt-66b", "sharegpt"): {
        "vllm": (0.89, 0.94),
        "orca-oracle": (0.33, 0.40),
        "orca-pow2": (0.24, 0.27),
        "orca-max": (0.17, 0.20),
        "fastertransformer": (0.06, 0.10),
    },
    ("opt-175b", "sharegpt"): {
        "vllm": (2.14, 2.38),
        "orca-oracle": (1.29, 1.62),
        "orca-pow2": (1.08, 1.28),
        "orca-max": (0.79, 0.92),
        "fastertransformer": (0.06, 0.12),
    },
    ("opt-13b", "alpaca"): {
        "vllm": (27.96, 28.06),
        "orca-oracle": (21.01, 21.08),
        "orca-pow2": (16.01, 16.11),
        "orca-max": (3.29, 3.85),
        "fastertransformer": (None, 2.6),
    },
    ("opt-66b", "alpaca"): {
        "vllm": (18.48, 18.72),
        "orca-oracle": (10.10, 10.50),
        "orca-pow2": (6.08, 6.29),
        "orca-max": (1.05, 1.25),
        "fastertransformer": (None, 1.2),
    },
    ("opt-175b", "alpaca"): {
        "vllm": (18.1, 20.2),
        "orca-oracle": (17.9, 19.2),
        "orca-pow2": (16.0, 17.1),
        "orca-max": (4.77, 5.11),
        "fastertransformer": (0.29, 0.87),
    },
}
# Some of the plotted points (read): (rate, s/token).
FIGURE_12_POINTS: dict[tuple[str, str], dict[SystemName, list[tuple[float, float]]]] = {
    ("opt-13b", "sharegpt"): {
        "vllm": [
            (1, 0.037),
            (1.25, 0.040),
            (1.5, 0.042),
            (1.75, 0.113),
            (1.8, 0.131),
            (1.9, 0.240),
            (2, 1.125),
        ],
        "orca-oracle": [
            (0.25, 0.030),
            (0.5, 0.033),
            (0.75, 0.041),
            (0.9, 0.085),
            (1, 0.192),
            (1.1, 0.502),
        ],
        "orca-pow2": [(0.25, 0.030), (0.5, 0.040), (0.6, 0.040), (0.75, 0.117)],
        "orca-max": [(0.2, 0.030), (0.3, 0.031), (0.4, 0.060), (0.5, 0.082)],
        "fastertransformer": [
            (0.01, 0.024),
            (0.05, 0.043),
            (0.1, 0.127),
            (0.15, 0.255),
            (0.2, 0.280),
            (0.25, 0.637),
        ],
    },
    ("opt-66b", "sharegpt"): {
        "vllm": [(0.4, 0.058), (0.6, 0.058), (0.8, 0.103), (0.9, 0.211), (1, 0.948)],
        "orca-oracle": [(0.2, 0.061), (0.3, 0.131), (0.4, 0.386)],
    },
    ("opt-175b", "sharegpt"): {
        "vllm": [(1.5, 0.113), (2, 0.136), (2.25, 0.253), (2.5, 0.738), (2.6, 0.967)],
        "orca-oracle": [(0.8, 0.091), (1.2, 0.102), (1.4, 0.319), (1.6, 0.383)],
    },
    ("opt-13b", "alpaca"): {
        "vllm": [(20, 0.052), (25, 0.072), (27.5, 0.104), (28, 0.208)],
        "orca-oracle": [(15, 0.042), (20, 0.066), (21, 0.158)],
    },
}
# Largest batch that FasterTransformer is given (artifact).
FASTER_TRANSFORMER_BATCH = {
    ("opt-13b", "sharegpt"): 5,
    ("opt-13b", "alpaca"): 14,
    ("opt-66b", "sharegpt"): 2,
    ("opt-66b", "alpaca"): 8,
    ("opt-175b", "sharegpt"): 24,
    ("opt-175b", "alpaca"): 80,
}

# Figure 13 (label): mean batched requests, OPT-13B; and the request rates.
FIGURE_13: dict[str, dict[SystemName, float]] = {
    "sharegpt": {"orca-max": 7.00, "orca-pow2": 9.81, "orca-oracle": 13.62, "vllm": 30.42},
    "alpaca": {"orca-max": 7.00, "orca-pow2": 43.24, "orca-oracle": 72.75, "vllm": 132.44},
}
FIGURE_13_RATES = {"sharegpt": 2.0, "alpaca": 30.0}

# Figure 14 (artifact): rates that the authors swept, from the first to one past the knee; OPT-13B,
# Alpaca. The lines themselves were not read. (kind, width) -> system -> (lowest, highest)
FIGURE_14_SWEPT: dict[tuple[str, int], dict[SystemName, tuple[float, float]]] = {
    ("parallel", 2): {
        "vllm": (12.5, 20),
        "orca-oracle": (10, 14),
        "orca-pow2": (6, 12),
        "orca-max": (1, 2.5),
    },
    ("parallel", 4): {
        "vllm": (6, 12),
        "orca-oracle": (4, 9),
        "orca-pow2": (2, 6),
        "orca-max": (0.1, 1),
    },
    ("parallel", 6): {
        "vllm": (4, 9),
        "orca-oracle": (2, 6),
        "orca-pow2": (1, 4.5),
        "orca-max": (0.1, 1),
    },
    ("beam", 2): {
        "vllm": (10, 19),
        "orca-oracle": (6, 11),
        "orca-pow2": (3, 9),
        "orca-max": (0.5, 2),
    },
    ("beam", 4): {
        "vllm": (6, 11),
        "orca-oracle": (3, 6),
        "orca-pow2": (1, 4.5),
        "orca-max": (0.1, 1),
    },
    ("beam", 6): {
        "vllm": (4, 8.5),
        "orca-oracle": (1, 4.5),
        "orca-pow2": (0.5, 3),
        "orca-max": (0.1, 1),
    },
}
FIGURE_14_OVER_ORACLE = {("basic", 1): 1.3, ("beam", 6): 2.3}  # text

# Figure 15 (label): memory saved by sharing, percent; OPT-13B, Alpaca, 20 requests/s (artifact).
FIGURE_15 = {
    "parallel": {2: 6.09, 4: 8.53, 6: 9.79},
    "beam": {2: 37.56, 4: 53.13, 6: 55.16},
}
FIGURE_15_SHAREGPT = {"parallel": (16.2, 30.5), "beam": (44.3, 66.3)}  # text
FIGURE_15_RATE = 20.0

# Figure 16: LLaMA-13B, WMT16; rate at 0.5 s/token. vLLM and (b) read; Oracle in (a) from the
# text's 1.67x. Prefix tokens -> system -> rate
FIGURE_16: dict[int, dict[SystemName, float]] = {
    80: {"vllm": 50.9, "orca-oracle": 30.5},
    341: {"vllm": 42.7, "orca-oracle": 12.05},
}
FIGURE_16_TEXT = {80: 1.67, 341: 3.58}
FIGURE_16_POINTS: dict[int, dict[SystemName, list[tuple[float, float]]]] = {
    80: {"vllm": [(48, 0.105), (50, 0.227), (51, 0.530), (52, 1.214)]}
}

# Figure 17 (read): rate at 0.5 s/token; the text says 2x over all three baselines, the figure
# shows 1.5x. Max: "the same" by the text.
FIGURE_17: dict[SystemName, float] = {
    "vllm": 0.853,
    "orca-oracle": 0.572,
    "orca-pow2": 0.566,
    "orca-max": 0.57,
}
FIGURE_17_POINTS: dict[SystemName, list[tuple[float, float]]] = {
    "vllm": [(0.1, 0.031), (0.4, 0.036), (0.6, 0.071), (0.7, 0.108), (0.8, 0.200), (0.85, 0.428)],
    "orca-oracle": [(0.4, 0.044), (0.45, 0.069), (0.55, 0.241), (0.6, 0.837)],
}

# Figure 18a (read): attention kernel, microseconds. Batch size -> contexts -> latency.
FIGURE_18A_CONTEXTS = (64, 128, 256)
FIGURE_18A: dict[int, dict[SystemName, tuple[float, float, float]]] = {
    8: {"vllm": (31.5, 43.6, 84.3), "fastertransformer": (21.9, 34.9, 62.3)},
    32: {"vllm": (77.1, 127.1, 235.3), "fastertransformer": (61.4, 106.7, 194.5)},
}
# Figures 18b, 19 (read): by block size.
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIGURE_18B = {  # s/token
    "sharegpt": (2.30, 1.95, 1.98, 0.57, 0.085, 0.069, 0.086, 0.159, 1.36),
    "alpaca": (3.62, 1.90, 2.12, 0.73, 0.59, 0.53, 1.90, 4.80, 18.2),
}
FIGURE_18B_RATES = {"sharegpt": 2.01, "alpaca": 30.1}  # artifact
# Figure 19a: 256 tokens of OPT-13B, milliseconds. Recompute is 36 to 39 at every size; swap is out
# and in together, and at block size 1 only the way in was read (82).
FIGURE_19A_RECOMPUTE = (36.0, 39.0)
FIGURE_19A_SWAP = {
    2: 89.3,
    4: 61.0,
    8: 47.1,
    16: 40.1,
    32: 36.6,
    64: 34.9,
    128: 33.9,
    256: 33.4,
}
FIGURE_19B = {  # s/token; ShareGPT at 2.01 requests/s
    "recompute": (2.01, 1.64, 1.62, 0.51, 0.073, 0.063, 0.067, 0.169, 1.12),
    "swap": (2.56, 1.97, 1.79, 0.55, 0.072, 0.059, 0.064, 0.119, 0.66),
}
