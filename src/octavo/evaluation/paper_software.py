"""How fast the paper's software was: the one cost model of all simulated figures.

A system at its knee is full, so its step time follows from three printed or counted numbers:

    step = mean batch / (sustained rate x mean output tokens)

Batches are those of figure 13 for OPT-13B, and for the larger models what the systems' memory
policies hold under overload, whatever a step takes (BATCHES, simulated). Five coefficients were
fitted to the 24 steps that figure 12 implies, by `benchmarks/fit_paper_software.py`; the others
are those of `PAPER_2023`. So the fit has seen figure 12, while figures 2, 13, 14, 15, 16 and 17
are predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.evaluation.paper_values import FIGURE_11, FIGURE_12, FIGURE_13, SystemName
from octavo.evaluation.servers import BLOCK_SIZE, DTYPE, SERVERS
from octavo.simulation.cost_model import PAPER_2023, Coefficients, CostModel, ModelSize
from octavo.simulation.gpus import find_gpu
from octavo.simulation.step_shape import StepShape

FITTED = ("step_overhead", "seq_overhead", "kv_efficiency", "reduce_latency", "reduce_efficiency")

PAPER_SOFTWARE = replace(
    PAPER_2023,
    step_overhead=7.8e-3,
    seq_overhead=3.3e-4,
    kv_efficiency=1.0,  # as far as it may go; looking blocks up still takes a quarter on top
    reduce_latency=1.6e-4,
    reduce_efficiency=0.36,
)

# (model, data set, system) -> requests that run under overload. Simulated.
BATCHES: dict[tuple[str, str, SystemName], float] = {
    ("opt-66b", "sharegpt", "vllm"): 17.9,
    ("opt-66b", "sharegpt", "orca-oracle"): 8.0,
    ("opt-66b", "sharegpt", "orca-pow2"): 5.5,
    ("opt-66b", "sharegpt", "orca-max"): 4.0,
    ("opt-66b", "alpaca", "vllm"): 117.1,
    ("opt-66b", "alpaca", "orca-oracle"): 46.5,
    ("opt-66b", "alpaca", "orca-pow2"): 25.9,
    ("opt-66b", "alpaca", "orca-max"): 4.0,
    ("opt-175b", "sharegpt", "vllm"): 131.7,
    ("opt-175b", "sharegpt", "orca-oracle"): 52.7,
    ("opt-175b", "sharegpt", "orca-pow2"): 39.2,
    ("opt-175b", "sharegpt", "orca-max"): 29.0,
    ("opt-175b", "alpaca", "vllm"): 256.0,
    ("opt-175b", "alpaca", "orca-oracle"): 256.0,
    ("opt-175b", "alpaca", "orca-pow2"): 158.2,
    ("opt-175b", "alpaca", "orca-max"): 29.0,
}
KV_TOKENS = {"sharegpt": 475.0, "alpaca": 75.0}  # of a running request, on average; simulated


@dataclass(frozen=True, slots=True)
class ImpliedStep:
    """A system at its knee."""

    model: str
    source: str
    system: SystemName
    batch: float
    seconds: float  # a step, by the paper's numbers

    def priced(self, coefficients: Coefficients) -> float:
        """The same by the cost model; prompts come in as often as requests end."""
        server = SERVERS[self.model]
        size = ModelSize.of(server.config, DTYPE)
        gpu = find_gpu(server.gpu)
        model = CostModel(size, gpu, server.num_gpus, BLOCK_SIZE, coefficients)
        prompt, output = FIGURE_11[self.source]
        prompts_per_step = self.batch / output
        # Less than one: some steps have one, the others none.
        share = min(1.0, prompts_per_step)
        with_prompt = model.seconds(self._shape(prompt * max(1.0, prompts_per_step)))
        return share * with_prompt + (1 - share) * model.seconds(self._shape(0.0))

    def _shape(self, prompt_tokens: float) -> StepShape:
        return StepShape(
            num_seqs=round(self.batch),
            num_tokens=round(self.batch + prompt_tokens),
            num_sampled=round(self.batch),
            kv_tokens=self.batch * KV_TOKENS[self.source],
            attention_pairs=0,
        )


def implied_steps() -> Iterator[ImpliedStep]:
    """One for each system and panel of figure 12, FasterTransformer apart: it is never full."""
    for (model, source), rates in FIGURE_12.items():
        for system, (_, rate) in rates.items():
            if system == "fastertransformer" or rate is None:
                continue
            if model == "opt-13b":
                batch = FIGURE_13[source][system]
            else:
                batch = BATCHES[model, source, system]
            seconds = batch / (rate * FIGURE_11[source][1])
            yield ImpliedStep(model, source, system, batch, seconds)
