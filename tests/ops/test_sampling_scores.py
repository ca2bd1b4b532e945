"""Scores of drawn tokens, and the likeliest beside them, are those of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.ops.cuda import sampling_candidates as candidates
from octavo.ops.cuda.sampling_scores import SCORE_WORDS, deliver_scores, score
from octavo.worker.device import cuda_sampling
from octavo.worker.device.cuda_pending import DeliveredScores
from octavo.worker.device.cuda_sampling import CudaDrawer
from octavo.worker.logprobs import largest_of, score_tokens
from octavo.worker.staging import UploadStaging

pytestmark = pytest.mark.usefixtures("poisoned")
VOCABULARIES = {"cpu": [100], "cuda": [70, 50_257, 151_936]}


@pytest.fixture(autouse=True)
def small_chunks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter rows are short; they should still take several programs."""
    if device.type == "cpu":
        monkeypatch.setattr(candidates, "CHUNK", 64)


@pytest.fixture
def drawer(device: torch.device) -> CudaDrawer:
    return CudaDrawer(UploadStaging(device, 8, 8), 100)


def check(logits: Tensor, rows: Tensor | None, token_ids: Tensor, number: int) -> None:
    """The scores are those that torch finds in float64."""
    before = logits.clone()
    found = score(logits, rows, token_ids, number)
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8))
    own = (logits[: len(token_ids)] if rows is None else logits[rows]).float()
    wanted = own.double().log_softmax(dim=-1)
    tokens = token_ids.clamp(min=0).unsqueeze(1)
    top_values, top_ids = largest_of(own, number) if number else (own[:, :0], own[:, :0])
    close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(found[0], wanted.gather(1, tokens).squeeze(1), **close)
    assert torch.equal(found[1], (own > own.gather(1, tokens)).sum(dim=1) + 1)
    normaliser = own.double().logsumexp(dim=-1, keepdim=True)
    normaliser = normaliser.where(normaliser.isfinite(), torch.nan)
    torch.testing.assert_close(found[2], top_values - normaliser, **close)
    assert found[3].dtype == torch.int32
    is_finite = normaliser.isfinite().squeeze(1)
    assert torch.equal(found[3][is_finite].long(), top_ids[is_finite].long())


def some_logits(vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[5, vocab_size], with many ties and a stride; of a row most are -inf."""
    generator = torch.Generator().manual_seed(vocab_size)
    values = torch.randn(5, vocab_size + 8, generator=generator) * 3
    values[1] = (values[1] * 2).round()
    values[2, 5:60] = -torch.inf
    values[3, 3:] = -torch.inf
    return values.to(device, dtype)[:, :vocab_size]


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *((torch.float32, 0), (torch.float16, 1), (torch.bfloat16, 5), (torch.float32, 5)),
        *((torch.bfloat16, 20), (torch.float16, 64)),
    ],
)
def test_scores_are_those_of_torch(device: torch.device, dtype: torch.dtype, number: int) -> None:
    for vocab_size in VOCABULARIES[device.type]:
        logits = some_logits(vocab_size, dtype, device)
        rows = torch.tensor([1, 1, 3, 0, 2, 2, 4], device=device)
        drawn = torch.tensor([2, vocab_size - 1, 40, 7, 6, 63, -1], device=device)
        if device.type == "cpu" and number > candidates.FEW:  # sorting takes the interpreter long
            rows, drawn = rows[:3], drawn[:3]
        check(logits, rows, drawn, number)


def test_draws_of_the_first_rows_in_order(device: torch.device) -> None:
    """And arrays that are parts of others, and none at all."""
    logits = some_logits(90, torch.bfloat16, device)
    token_ids = torch.tensor([99, 3, 50, 89, 0], device=device)[1:]
    check(logits, None, token_ids, 4)
    check(logits, torch.tensor([99, 4, 3, 1, 1], device=device)[1:], token_ids, 4)
    assert [each.shape for each in score(logits, None, token_ids[:0], 3)] == [
        *((0,), (0,), (0, 3), (0, 3))
    ]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")
def test_rows_that_are_not_finite_have_no_log_probabilities(device: torch.device) -> None:
    logits = torch.randn(6, 90, generator=torch.Generator().manual_seed(3))
    logits[1] = torch.nan
    logits[2, 70] = torch.nan
    logits[3, 89] = torch.inf
    logits[4] = -torch.inf
    logits[5, :89] = -torch.inf
    token_ids = torch.full((6,), 5, device=device)
    logprobs, _, top_logprobs, _ = score(logits.to(device), None, token_ids, 3)
    is_finite = [True, False, False, False, False, True]
    assert (~logprobs.isnan()).tolist() == is_finite
    assert (~top_logprobs.isnan()).tolist() == [[each] * 3 for each in is_finite]
    assert logprobs[5] == -torch.inf
    assert top_logprobs[5].tolist() == [0.0, -torch.inf, -torch.inf]


def test_the_drawer_scores_rows_that_ask_for_as_many_by_one_launch(
    device: torch.device, drawer: CudaDrawer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever others ask for; and for more than kernels find, too."""
    launched: list[tuple[int, int]] = []

    def counted(*args: Any) -> tuple[Tensor, ...]:
        launched.append((len(args[2]), args[3]))
        return score(*args)

    monkeypatch.setattr(cuda_sampling, "score", counted)
    logits = some_logits(100, torch.bfloat16, device).repeat(2, 1)
    rows = np.array([0, 1, 2, 4, 5, 6, 7, 9])
    num_tokens, num_top = [1, 3, 1, 1, 1, 2, 1, 1], [3, 70, 18, 0, 1, 20, 100, 0]
    token_ids = torch.arange(11, device=device) * 9
    asked = (logits, rows, token_ids, num_tokens, num_top)
    found = drawer.score_tokens(*asked).entries()
    for mine, others in zip(found, score_tokens(*asked).entries(), strict=True):
        assert [(each.token_id, each.rank) for each in mine] == [
            (each.token_id, each.rank) for each in others
        ]
        for each, other in zip(mine, others, strict=True):
            assert each.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in each.top] == [token for token, _ in other.top]
            assert [value for _, value in each.top] == pytest.approx(
                [value for _, value in other.top], abs=1e-5
            )
    # Tokens, and how many likely ones: none; up to 4; up to 32; and more than kernels find.
    assert launched == [(2, 0), (2, 3), (3, 20), (4, 0)]


def test_the_drawer_uploads_nothing_where_each_row_is_scored(
    device: torch.device, drawer: CudaDrawer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_sampling, "upload", None)
    logits = some_logits(100, torch.float32, device)
    token_ids = torch.arange(5, device=device)
    scores = drawer.score_tokens(logits, np.arange(5), token_ids, [1] * 5, [2, 1, 4, 3, 2])
    assert [len(entry.top) for [entry] in scores.entries()] == [2, 1, 4, 3, 2]
    assert scores.token_ids is token_ids


def test_a_captured_score_follows_its_inputs(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a CUDA device")
    logits = torch.empty(6, 32_000, device=device, dtype=torch.bfloat16)
    token_ids = torch.arange(6, device=device)
    score(logits.normal_(), None, token_ids, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = score(logits, None, token_ids, 5)
    for _ in range(3):
        logits.normal_()
        token_ids += 7
        graph.replay()
        for each, wanted in zip(found, score(logits, None, token_ids, 5), strict=True):
            assert torch.equal(each, wanted)


def test_scores_are_delivered_where_results_go(device: torch.device, drawer: CudaDrawer) -> None:
    """Those of the rows that ask for them, each kind by a launch of its own."""
    logits = some_logits(VOCABULARIES[device.type][0], torch.bfloat16, device)
    drawn = torch.tensor([2, 60, 40, -1, 9], device=device)
    steps, size = 3, 7
    room = torch.full((steps, size, SCORE_WORDS), -7, dtype=torch.int32)
    room = room.pin_memory() if device.type == "cuda" else room
    place = torch.tensor([0, 1, room.data_ptr()], device=device)
    rows, num_top = [0, 1, 3, 4], [3, 4, 0, 9]
    numbers = torch.tensor([4, 4, -1, 0, 12], dtype=torch.int32, device=device)
    for number in (0, 4, 12):
        deliver_scores(logits, drawn, numbers, number, place, size)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert (room[[0, 2]] == -7).all()
    assert (room[1, [2, 5, 6]] == -7).all()
    assert (room[1, 3, 2:] == -7).all()
    found = DeliveredScores(rows, num_top, drawn.cpu(), room[1])
    assert found.read_back(torch.clone) is found
    wanted = drawer.score_tokens(logits, np.array(rows), drawn[rows], [1] * 4, num_top)
    assert found.entries() == wanted.read_back(Tensor.cpu).entries()
