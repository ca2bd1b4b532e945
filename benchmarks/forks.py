"""A fan-out of children from one long prompt: prompt tokens computed, blocks held, steps taken.

A parent of 8,192 prompt tokens is decoding when 64 requests come that go on where it stands, each
with a suffix of its own. Counted are forks, which find all that the parent has computed; one fork
with 64 samples, which have one suffix; independent requests with the prefix cache, which find full
blocks; and independent requests without one. The core runs alone, without a device: the counts do
not depend on it. Prints a table, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from octavo.config import SchedulerConfig
from octavo.core.decoding import Sampling
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.specs import FullAttention
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request
from octavo.core.step import SamplingSpec, StepResult

BLOCK_SIZE = 16
NUM_OUTPUT_TOKENS = 200  # of the parent
NUM_DRAWN = 105  # of these, when the children come: its last block is half full


@dataclass
class Count:
    """What the children took until each had its first token."""

    way: str
    prompt_tokens_computed: int
    tokens_computed: int  # those of the parent and of decodes, too
    blocks_held: int  # most at once, those of the parent included
    steps: int


class Device:
    """A scheduler whose tokens all are the same: what is drawn does not matter here."""

    def __init__(self, num_blocks: int, width: int, caching: bool, max_tails: int) -> None:
        specs = [FullAttention()]
        self.kv = KVCacheManager(
            specs,
            BLOCK_SIZE,
            num_blocks,
            enable_prefix_caching=caching,
            max_tails=max_tails,
        )
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs=width), self.kv)
        self.num_tokens = self.num_steps = self.most_held = 0
        self.widths: dict[int, int] = {}  # of rows that will draw for several samples

    def add(self, name: str, prompt: list[int], num_output_tokens: int, n: int = 1) -> Request:
        method = Sampling(n, len(prompt) + num_output_tokens, frozenset(), frozenset())
        request = Request(name, prompt, method, SamplingSpec())
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None, "there is work"
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        result = StepResult(plan.step_id, [7] * len(plan.sampled))
        for row in plan.opened:
            if row.num_draws > 1:
                self.widths[row.seq_id] = row.num_draws
        for seq_id in plan.sampled:
            if (width := self.widths.pop(seq_id, None)) is not None:
                result.draws[seq_id] = [7] * width
        self.scheduler.update(plan, result)
        self.most_held = max(self.most_held, self.kv.num_table_blocks)


def fan_out(
    way: str,
    num_children: int,
    num_prompt: int,
    num_suffix: int,
    caching: bool,
    max_tails: int,
    n: int = 1,
) -> Count:
    most = num_prompt + NUM_OUTPUT_TOKENS + num_suffix + BLOCK_SIZE
    num_blocks = (num_children + 1) * -(-most // BLOCK_SIZE)  # nobody is preempted
    device = Device(num_blocks, num_children + 1, caching, max_tails)
    parent = device.add("parent", [i % 50_000 for i in range(num_prompt)], NUM_OUTPUT_TOKENS)
    [seq] = parent.sequences
    while seq.num_output_tokens < NUM_DRAWN:
        device.step()
    device.num_tokens = device.num_steps = device.most_held = 0
    device.kv.offer_tail(seq)
    children = [
        device.add(f"child {i}", [*seq.token_ids, *([i + 10] * num_suffix)], NUM_OUTPUT_TOKENS, n)
        for i in range(num_children // n)
    ]
    alive = [child.sequences[0] for child in children]
    while not all(each.num_output_tokens for each in alive):
        device.step()
    computed = sum(child.num_prompt_tokens - child.num_cached_tokens for child in children)
    return Count(way, computed, device.num_tokens, device.most_held, device.num_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--children", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the parent's prompt")
    parser.add_argument("--suffix", type=int, default=8, help="tokens of each child's suffix")
    options = parser.parse_args()
    sizes = options.children, options.prompt, options.suffix
    counts = [
        fan_out("forks", *sizes, caching=True, max_tails=256),
        fan_out("one fork, n samples", *sizes, caching=True, max_tails=256, n=options.children),
        fan_out("independent, prefix cache", *sizes, caching=True, max_tails=0),
        fan_out("independent, no prefix cache", *sizes, caching=False, max_tails=0),
    ]
    print(f"{'':30}{'prompt tokens':>14}{'all tokens':>12}{'blocks':>9}{'steps':>7}")
    for count in counts:
        print(
            f"{count.way:30}{count.prompt_tokens_computed:>14,}{count.tokens_computed:>12,}"
            f"{count.blocks_held:>9,}{count.steps:>7}"
        )
    print(json.dumps([asdict(count) for count in counts]))


if __name__ == "__main__":
    main()
