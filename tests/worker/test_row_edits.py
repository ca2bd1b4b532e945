"""A GPU edits logits by its records of texts, as the host does by the texts themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.step import LogitBias, SamplingSpec
from octavo.ops.communicator import Communicator
from octavo.ops.cuda import logit_edits
from octavo.ops.cuda.logit_edits import MAX_BIASES, MAX_COUNT
from octavo.ops.cuda.pending_tokens import keep_tokens
from octavo.ops.vocabulary import VocabularyShard
from octavo.parallel import Shard
from octavo.worker.device.cuda_edits import CudaEdits
from octavo.worker.logit_edits import EditedRow, edit_logits
from octavo.worker.row_edits import RowEdits

HAS_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
VOCAB_SIZE = 77  # not a multiple of anything
NUM_ROWS = 9
SPECS = {
    1: SamplingSpec(repetition_penalty=1.3),
    2: SamplingSpec(frequency_penalty=0.7, presence_penalty=-0.4),
    3: SamplingSpec(logit_bias=LogitBias.of({0: 2.5, 40: -3.25, 76: 1e-3})),
    4: SamplingSpec(
        repetition_penalty=0.8,
        presence_penalty=1.1,
        logit_bias=LogitBias.of({token: 0.01 * token for token in range(5, 70)}),
    ),
    5: SamplingSpec(frequency_penalty=-1.9, repetition_penalty=1e-40),
    6: SamplingSpec(),
}


class Ranks(Communicator):
    """One of several ranks, which exchanges nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.shard = Shard(rank, size)


class Device:
    """Texts that rows of a GPU and the host have alike."""

    def __init__(self, num_records: int = 8, rank: int = 0, num_ranks: int = 1) -> None:
        self.vocabulary = VocabularyShard(VOCAB_SIZE, Ranks(rank, num_ranks))
        self.edits = CudaEdits(NUM_ROWS, num_records, self.vocabulary, DEVICE)
        self.rows = RowEdits(self.edits)
        self.texts: dict[int, list[int]] = {}
        self.num_prompt: dict[int, int] = {}
        self.specs: dict[int, SamplingSpec] = {}
        self._last = torch.zeros(NUM_ROWS, dtype=torch.int64, device=DEVICE)

    def open(self, row: int, text: list[int], num_prompt: int, spec: SamplingSpec) -> bool:
        self.texts[row], self.num_prompt[row], self.specs[row] = list(text), num_prompt, spec
        return self.rows.open(row, spec, np.array(text, np.int32), num_prompt)

    def copy(self, child: int, parent: int) -> list[int]:
        self.texts[child], self.specs[child] = list(self.texts[parent]), self.specs[parent]
        self.num_prompt[child] = self.num_prompt[parent]
        return self.rows.copy([child], [parent])

    def draw(self, tokens: dict[int, int]) -> None:
        """Count drawn tokens; those of rows whose logits are not finite are negative."""
        rows = torch.tensor([*tokens, 0, 0], dtype=torch.int32, device=DEVICE)
        drawn = torch.tensor([*tokens.values(), 3, 3], device=DEVICE)
        records, first = self.edits.records, self.edits.first_token
        keep_tokens(drawn, rows, self._last, records=records, first_token=first)
        for row, token in tokens.items():
            self.texts[row].append(max(token, 0))

    def check(self, rows: list[int], dtype: torch.dtype = torch.float32) -> None:
        """The device edits the logits of rows as the host does, to the last bit."""
        self.rows.carry_out()
        rng = torch.Generator().manual_seed(1)
        logits = 4 * torch.randn(len(rows), VOCAB_SIZE + 3, generator=rng)
        if dtype == torch.float32:
            logits[0, :6] = torch.tensor([0.0, -0.0, np.inf, -np.inf, np.nan, 1e7])
        logits = logits.to(dtype)
        expected = logits[:, :VOCAB_SIZE].float().clone()
        edit_logits(
            expected,
            [
                EditedRow(
                    i, self.specs[row], np.array(self.texts[row], np.int32), self.num_prompt[row]
                )
                for i, row in enumerate(rows)
                if row in self.specs
            ],
        )
        start, end = self.vocabulary.start, self.vocabulary.start + self.vocabulary.num_rows
        own = logits[:, start : min(end, VOCAB_SIZE)].to(DEVICE)  # rows are longer than that
        before = own.clone()
        edited = self.edits.edit(own, torch.tensor(rows, dtype=torch.int32, device=DEVICE))
        assert edited.dtype == torch.float32
        torch.testing.assert_close(
            edited.cpu(), expected[:, start:end], rtol=0, atol=0, equal_nan=True
        )
        torch.testing.assert_close(own, before, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and biases take several programs, or rounds of one."""
    monkeypatch.setattr(logit_edits, "_CHUNK", 32)
    monkeypatch.setattr(logit_edits, "_BLOCK", 16)


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_rows_are_edited_as_the_host_does(rank: int, num_ranks: int) -> None:
    device, rng = Device(rank=rank, num_ranks=num_ranks), np.random.default_rng(rank)
    for row, spec in SPECS.items():
        num_prompt = int(rng.integers(1, 30))
        text = rng.integers(0, VOCAB_SIZE, num_prompt + int(rng.integers(0, 30))).tolist()
        assert device.open(row, text, num_prompt, spec) == (row != 6)
    rows = [5, 3, 0, 6, 1, 4, 2]
    for dtype in (torch.float32, torch.bfloat16):
        device.check(rows, dtype)
    for _ in range(3):
        device.draw({row: int(rng.integers(0, VOCAB_SIZE)) for row in (2, 5, 1, 6, 4)})
        device.check(rows)
    device.draw({2: -1, 4: 0})
    device.check(rows)


def test_rows_fork_end_and_are_written_anew() -> None:
    device = Device()
    device.open(1, [5, 6, 7, 6, 5, 5], 3, SPECS[2])
    device.open(2, [1, 1, 2], 3, SPECS[4])
    device.rows.carry_out()
    device.draw({1: 9, 2: 9})
    # What has no record has no copy of one; and copies may be copied on in the same step.
    device.open(6, [1, 2], 1, SPECS[6])
    assert device.copy(7, 6) == []
    assert device.copy(3, 1) == []
    assert device.copy(4, 3) == []
    # Of the children, the last token is another one; of one, a prompt's token is written again.
    for row, old, new in ((3, [9], [5]), (4, [9], [76])):
        assert device.rows.rewrite(row, np.array(old, np.int32), new)
        device.texts[row][-1:] = new
    assert device.rows.rewrite(2, np.array([9], np.int32), [])
    device.texts[2].pop()
    device.rows.close(6)  # without a record
    device.check([1, 2, 3, 4, 7])
    device.draw({1: 3, 2: 4, 3: 3, 4: 76})
    device.check([1, 2, 3, 4, 7])
    # Another row has the record of one that ended, and nothing of its text.
    device.rows.close(1)
    device.open(5, [70, 71], 2, SPECS[1])
    del device.specs[1]
    device.check([5, 2, 3, 4, 1])


def test_the_host_edits_what_has_no_record() -> None:
    device = Device(num_records=2)
    biases = LogitBias.of({token: 1.0 for token in range(MAX_BIASES + 1)})
    for spec in (
        SamplingSpec(logit_bias=biases),
        SamplingSpec(presence_penalty=1.0, forced_tokens=((0, (1,)),)),
        SamplingSpec(presence_penalty=1.0, num_candidates=4),
        SamplingSpec(top_k=4),
    ):
        assert not device.open(1, [1], 1, spec)
    assert device.open(1, [1], 1, SPECS[1])
    assert device.open(2, [1], 1, SPECS[2])
    assert not device.open(3, [1], 1, SPECS[1])
    assert device.copy(4, 1) == [4]
    device.rows.close(2)
    assert device.copy(4, 1) == []
    # The host does not know yet what the device has counted for it.
    assert not device.rows.rewrite(4, np.array([3, -1], np.int32), [3])
    device.rows.carry_out()
    assert device.edits.records.places.tolist()[1:5] != [-1] * 4
    assert device.edits.records.places.tolist()[2:5] == [-1] * 3
    assert not RowEdits(None).open(1, SPECS[1], np.array([1], np.int32), 1)


def test_counts_have_a_limit() -> None:
    device = Device()
    device.open(1, [7] * (MAX_COUNT + 9), 3, SPECS[2])
    device.open(2, [7] * (MAX_COUNT + 2), 3, SPECS[2])
    device.rows.carry_out()
    for _ in range(3):
        device.draw({1: 7, 2: 7})
    for row in (1, 2):
        device.texts[row] = [7] * (MAX_COUNT + 3)
    device.check([1, 2])
