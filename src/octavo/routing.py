"""How a token's router logits choose its experts, and weigh what they compute. Imports no torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import IntEnum


class Scoring(IntEnum):
    """From logits to scores; GPU kernels take its value as a compile-time constant."""

    SOFTMAX = 0
    SIGMOID = 1
    SPARSEMIXER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Which `top_k` of `num_experts` a token takes, and with what weights.

    scoring says what the weights are, before they are renormalised and scaled:
        SOFTMAX: the probabilities of all experts. Renormalised, they are the softmax of the chosen
            experts' logits alone, as Granite and gpt-oss have it.
        SIGMOID: each expert's own (DeepSeek-V3, arXiv:2412.19437).
        SPARSEMIXER: experts are chosen one after the other; each weight is the probability among
            the logits left that are within 2 * `jitter` of the largest, relative to it
            (Phi-3.5-MoE, arXiv:2409.12136).
    Experts are chosen by their scores, or by scores plus `correction`. With several groups of
    experts, only those of the `top_groups` groups are chosen whose two best add up to most.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    renormalised: bool = True  # weights are divided by their sum
    scale: float = 1.0  # multiplies weights
    num_groups: int = 1
    top_groups: int = 1
    jitter: float = 0.0
    bias: bool = False  # whether the logits have one, learned
    correction: bool = False  # whether there is one per expert, learned, float32
    expert_scales: bool = False  # whether each expert's weight is multiplied by a learned number

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k} of {self.num_experts} experts cannot be chosen")
        if self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts do not form {self.num_groups} groups")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"{self.top_groups} of {self.num_groups} groups cannot be chosen")
        group_size = self.num_experts // self.num_groups
        if self.num_groups > 1 and group_size < 2:
            raise ValueError(f"groups of {group_size} expert have no two best ones")
        if self.top_k > self.top_groups * group_size:
            raise ValueError(
                f"{self.top_groups} groups of {group_size} have no {self.top_k} experts to choose"
            )

    def expected_distinct(self, num_tokens: int) -> float:
        """How many experts that many tokens choose together if all choices are equally likely.

        Example:
            >>> round(RoutingConfig(num_experts=128, top_k=8).expected_distinct(8), 1)
            51.6
        """
        return expected_distinct(num_tokens, self.num_experts, self.top_k)


def expected_distinct(num_tokens: int, num_experts: int, top_k: int) -> float:
    """See RoutingConfig.expected_distinct."""
    missed: float = (1 - top_k / num_experts) ** num_tokens
    return num_experts * (1 - missed)


def tokens_of_many(
    num_experts: int, top_k: int, expert_weights: int, least: int, most_of_expert: int
) -> range:
    """Numbers of tokens that read much and compute little: of which the experts that they hit are
    expected to have `least` weights, and hardly any expert is taken by more than
    `most_of_expert`."""
    most = math.floor((math.sqrt(1 + most_of_expert) - 1) ** 2 * num_experts / top_k)

    def reads_many(num_tokens: int) -> bool:
        return expected_distinct(num_tokens, num_experts, top_k) * expert_weights >= least

    counts = range(1, most + 1)
    return counts[bisect_left(counts, True, key=reads_many) :]


def usual_most(num_tokens: int, num_experts: int, top_k: int) -> float:
    """More than so many of that many tokens hardly any expert is taken by: two standard deviations
    above the mean, if all choices are equally likely, so that numbers are Poisson distributed."""
    mean = num_tokens * top_k / num_experts
    return mean + 2 * math.sqrt(mean)
