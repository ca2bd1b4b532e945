"""The step times that the paper's figure 12 implies, to which its software's cost is fitted.

By Little's law, running requests = rate x output tokens x step time, so a system at the highest
rate that it sustains shows how long its steps take:

    step = running requests / (sustained rate x mean output tokens)

How many requests run depends on memory and lengths, not on speed: BATCHES, simulated.
`benchmarks/fit_paper_software.py` fits five coefficients to the 24 steps implied by figure 12; they
are `simulation.cost_model.ONE_SEQUENCE`. So the fit has seen figure 12, while figures 2, 13, 15, 16
and 17, and beam search in figure 14, are predictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.simulation.cost_model import Coefficients, CostModel, ModelSize
from octavo.simulation.gpus import find_gpu
from octavo.simulation.step_shape import StepShape
from octavo_paper.paper_values import FIGURE_11, FIGURE_12, SystemName
from octavo_paper.servers import BLOCK_SIZE, DTYPE, SERVERS

# In the fit, `seq_overhead` is the cost of a sequence and its request together.
FITTED = ("step_overhead", "seq_overhead", "kv_efficiency", "reduce_latency", "reduce_efficiency")

# (model, data set, system) -> requests that run where latency reaches 0.5 s/token, on average, once
# the system has filled up. Simulated (`fit_paper_software.py --count`).
BATCHES: dict[tuple[str, str, SystemName], float] = {
    ("opt-13b", "sharegpt", "vllm"): 33.0,
    ("opt-13b", "sharegpt", "orca-oracle"): 13.3,
    ("opt-13b", "sharegpt", "orca-pow2"): 9.7,
    ("opt-13b", "sharegpt", "orca-max"): 6.7,
    ("opt-13b", "alpaca", "vllm"): 192.0,
    ("opt-13b", "alpaca", "orca-oracle"): 75.9,
    ("opt-13b", "alpaca", "orca-pow2"): 43.1,
    ("opt-13b", "alpaca", "orca-max"): 6.8,
    ("opt-66b", "sharegpt", "vllm"): 20.3,
    ("opt-66b", "sharegpt", "orca-oracle"): 7.6,
    ("opt-66b", "sharegpt", "orca-pow2"): 4.8,
    ("opt-66b", "sharegpt", "orca-max"): 3.7,
    ("opt-66b", "alpaca", "vllm"): 117.8,
    ("opt-66b", "alpaca", "orca-oracle"): 47.3,
    ("opt-66b", "alpaca", "orca-pow2"): 26.2,
    ("opt-66b", "alpaca", "orca-max"): 3.6,
    ("opt-175b", "sharegpt", "vllm"): 130.8,
    ("opt-175b", "sharegpt", "orca-oracle"): 52.2,
    ("opt-175b", "sharegpt", "orca-pow2"): 37.3,
    ("opt-175b", "sharegpt", "orca-max"): 29.0,
    ("opt-175b", "alpaca", "vllm"): 256.0,
    ("opt-175b", "alpaca", "orca-oracle"): 256.0,
    ("opt-175b", "alpaca", "orca-pow2"): 169.4,
    ("opt-175b", "alpaca", "orca-max"): 28.7,
}
KV_TOKENS = {"sharegpt": 455.0, "alpaca": 74.5}  # of a running request, on average; simulated


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
            num_requests=round(self.batch),
        )


def implied_steps() -> Iterator[ImpliedStep]:
    """One for each system and panel of figure 12, FasterTransformer apart: it is never full."""
    for (model, source), rates in FIGURE_12.items():
        for system, (_, rate) in rates.items():
            if system == "fastertransformer" or rate is None:
                continue
            batch = BATCHES[model, source, system]
            seconds = batch / (rate * FIGURE_11[source][1])
            yield ImpliedStep(model, source, system, batch, seconds)
