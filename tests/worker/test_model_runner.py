"""The runner against a dense computation without a cache."""

from __future__ import annotations

import pytest
import torch

from worker.fake_model import VOCAB_SIZE, Driver, FakeModel, make_runner


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def greedy_reference(model: FakeModel, token_ids: list[int], num_tokens: int) -> list[int]:
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(model.expected_logits(tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


@pytest.mark.parametrize("windows", [(None, None), (5, 5), (None, 3), (None, 6, 6)])
@pytest.mark.parametrize("chunk", [3, 7, 100])
def test_greedy_tokens_equal_a_dense_computation(windows: tuple, chunk: int) -> None:
    model = FakeModel(windows)
    num_groups = len(set(windows)) if len(windows) < 3 else 3
    runner, _ = make_runner(model)
    driver = Driver(runner, num_groups=num_groups)
    prompts = {7: prompt(13, 1), 3: prompt(1, 2), 5: prompt(30, 3)}
    outputs: dict[int, list[int]] = {seq_id: [] for seq_id in prompts}
    opened = [driver.opened(seq_id, tokens) for seq_id, tokens in prompts.items()]
    while any(len(tokens) < 8 for tokens in outputs.values()):
        scheduled = {
            seq_id: min(chunk, driver.lengths[seq_id] - driver.computed[seq_id])
            for seq_id in prompts
        }
        ending = [s for s, n in scheduled.items() if driver.computed[s] + n == driver.lengths[s]]
        result = driver.step(scheduled, opened)
        opened = []
        for seq_id, token_id in zip(ending, result.token_ids, strict=True):
            outputs[seq_id].append(token_id)
    for seq_id, tokens in prompts.items():
        assert outputs[seq_id][:8] == greedy_reference(model, tokens, 8)
