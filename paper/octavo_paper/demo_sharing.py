"""How many blocks sharing saves in the real engine, running the demo model on the CPU."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.simulation.sources import alpaca
from octavo.simulation.workloads import shuffled
from octavo_paper.jobs import COMPUTED

NUM_BLOCKS = 400  # few enough that requests wait all the time
MAX_SEQS = 96


@dataclass(frozen=True, slots=True)
class DemoSharing:
    """Prompts and outputs of Alpaca's lengths; prompts are beginnings of held-out stories.

    Real log-probabilities decide which beams survive.
    """

    DEPENDS_ON: ClassVar[tuple[str, ...]] = COMPUTED

    n: int = 1
    beam_width: int | None = None
    num_requests: int = 160
    seed: int = 0

    @property
    def seconds(self) -> float:
        return 0.03 * self.num_requests * (self.beam_width or self.n)

    def run(self) -> dict[str, Any]:
        from octavo.bench.memory_use import MemoryUse, sharing_saves
        from octavo.bench.throughput import Decoding
        from octavo.llm import LLM

        logging.getLogger("octavo").setLevel(logging.WARNING)
        options = {
            "num_blocks": NUM_BLOCKS,
            "max_num_seqs": MAX_SEQS,
            "enable_prefix_caching": False,
            "num_threads": 1,
        }
        decoding = Decoding(n=self.n, beam_width=self.beam_width)
        with LLM("demo", **options) as llm:
            lengths = shuffled(alpaca(), self.num_requests, self.seed)
            prompts = self._prompts(llm, [pair.prompt_tokens for pair in lengths])
            memory = MemoryUse.watch(llm.engine)
            for index, (prompt, pair) in enumerate(zip(prompts, lengths, strict=True)):
                params = decoding.params(pair.output_tokens, index)
                llm.client.add_request(llm.client.make_request(prompt, params))
            while llm.client.has_unfinished:
                llm.client.step()
        saturated = [step for step in memory.steps if step.is_saturated]
        return {"sharing_saves": sharing_saves(saturated), "num_steps": len(saturated)}

    def _prompts(self, llm: Any, lengths: list[int]) -> list[list[int]]:
        from octavo_demo.stories import story

        draw = random.Random(f"figure 15 {self.seed}")
        prompts = []
        for length in lengths:
            token_ids: list[int] = []
            while len(token_ids) < length:
                token_ids += llm.tokenizer.encode(story(draw, held_out=True).text)
            prompts.append(token_ids[:length])
        return prompts
