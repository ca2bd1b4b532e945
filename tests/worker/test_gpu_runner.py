"""The runner on a GPU, or on this CPU by Triton's interpreter: the same tokens as on a CPU.

Steps overlap, so a step is prepared before the tokens of the one before are known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from triton.runtime import JITFunction

import model_zoo
from fallback.sweep import write_reference
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.config import EngineConfig, make_config
from octavo.core.kv.specs import FullAttention
from octavo.core.step import BlockCopy, OpenedRow, StepPlan, TableWrite
from octavo.engine.engine import Engine
from octavo.engine.local_client import LocalClient
from octavo.errors import OutOfMemory
from octavo.executor.base import KVCapacity
from octavo.llm import load_engine
from octavo.models.config import ModelConfig
from octavo.models.loader import load_model
from octavo.models.registry import read_model_config
from octavo.ops import AttentionBatch, HostStaging, PaddedSizes, load_backend
from octavo.ops.communicator import SingleRank
from octavo.ops.cuda import attention as triton_backend
from octavo.ops.cuda import attention_cascade as attention_cascade
from octavo.ops.cuda import attention_decode, block_copy, sampling, sampling_candidates
from octavo.ops.cuda.attention_cascade import cascade_attention
from octavo.ops.cuda.logit_edits import EditRecords
from octavo.ops.cuda.sampling import FEW_DRAWS, FEW_LIMITED, SOME_DRAWS, DeviceDraws, sample
from octavo.ops.cuda.sampling_candidates import NUMBERS, best_tokens
from octavo.ops.cuda.sampling_scores import score
from octavo.ops.vocabulary import VocabularyShard
from octavo.outputs import RequestOutput
from octavo.worker import cascade, model_runner
from octavo.worker.device import cuda, cuda_sampling
from octavo.worker.device.cpu_sampling import CpuDrawer
from octavo.worker.device.cuda import CudaDevice
from octavo.worker.device.cuda_edits import CudaEdits
from octavo.worker.device.cuda_memory import largest_steps
from octavo.worker.graphs import Graphs
from octavo.worker.model_runner import Captured, ModelRunner
from octavo.worker.sampler import DrawMode, SamplingBatch
from octavo.worker.worker import _refused
from worker.fake_model import GREEDY, VOCAB_SIZE, Driver, FakeModel
from worker.late_masks import Gate

HAS_GPU = torch.cuda.is_available()
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3}
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
# The interpreter takes most of a minute, and other tests see each of its parts.
slow_if_interpreted = pytest.mark.gpu if HAS_GPU else pytest.mark.slow
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
MODES = ["recompute", "swap"]
# The interpreter takes seconds where a GPU takes milliseconds.
CASES = [(n, m) for n in model_zoo.NAMES for m in MODES] if HAS_GPU else [("llama3", "swap")]
THROUGH_TRANSFORMERS = (
    ["llama", "gpt_oss", "qwen3_moe", "deepseek_v3", "phimoe"] if HAS_GPU else ["llama"]
)
CONTINUED = ["llama3", "olmo3", "gpt_oss", "bloom"] if HAS_GPU else ["mistral"]
NUM_BLOCKS, NUM_SWAP_BLOCKS = 24, 24
MAX_LEN, BLOCK_SIZE, CHUNK = 80, 8, 24  # of the engines that are compared


class CudaExecutor:
    """An executor around a runner for GPUs, on a GPU or interpreted on this CPU."""

    is_asynchronous = True

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        graphs: Graphs | Literal["many"] | None = "many",
    ) -> None:
        has_fp8 = config.cache.kv_cache_dtype == "fp8"
        model = load_model(model_config, torch.float32, DEVICE, SingleRank(), fp8_kv_cache=has_fp8)
        if graphs == "many":
            most = config.scheduler.max_num_seqs
            mixed = [PaddedSizes(n, min(n, most), 16) for n in (4, 16, 24)]
            graphs = Graphs([1, 2, 4, most], mixed, DEVICE)
        num_blocks = (config.cache.num_blocks or NUM_BLOCKS, NUM_SWAP_BLOCKS)
        device, backend = CudaDevice(DEVICE), load_backend("triton")
        self.runner = ModelRunner(
            config, model_config, model, backend, num_blocks, device, SingleRank(), graphs
        )
        layout = model_config.kv_layout()
        self.capacity = KVCapacity(*num_blocks, layout, 0, None)  # type: ignore[arg-type]
        self.submit = self.runner.submit

    def shutdown(self) -> None:
        pass


def plain_sample(logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
    """What the sampler's kernels do, by the CPU's sampler."""
    batch = SamplingBatch(
        num_sampled=len(draws.rows),
        temperature=draws.temperature.numpy(),
        top_k=draws.top_k.numpy(),
        top_p=draws.top_p.numpy(),
        min_p=np.exp(draws.log_min_p.numpy()),
        seeds=draws.seeds.numpy(),
        sample_indices=draws.sample_indices.numpy(),
        positions=draws.positions.numpy(),
        num_draws=np.ones(len(draws.rows), np.int64),
        mask_places=draws.mask_places.numpy(),
    )
    drawer, vocabulary = CpuDrawer(), VocabularyShard.whole(logits.shape[1])
    drawer.take_masks(draws.masks.numpy())
    return drawer.draw(logits[draws.rows].float(), batch, vocabulary)


def plain_best(logits: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(logits.float().log_softmax(-1).topk(number))


def plain_score(
    logits: torch.Tensor, rows: torch.Tensor | None, token_ids: torch.Tensor, number: int
) -> tuple[torch.Tensor, ...]:
    """See sampling_scores.score."""
    own = logits[: len(token_ids)] if rows is None else logits[rows]
    picked = own.gather(1, token_ids.clamp(min=0).unsqueeze(1))
    logprobs = (picked - own.logsumexp(-1, keepdim=True)).squeeze(1)
    return logprobs, (own > picked).sum(-1) + 1, *plain_best(own, number)


@pytest.fixture(autouse=True)
def _plain_sampling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter would take minutes; tests/ops tests these kernels on their own.

    Programs that have nothing to do take as long there as others.
    """
    if not HAS_GPU:
        for module in (triton_backend, attention_decode, attention_cascade):
            monkeypatch.setattr(module, "MAX_PROGRAMS", 4)
        monkeypatch.setattr(triton_backend, "num_sms", lambda device: 4)
        monkeypatch.setattr(cuda_sampling, "sample", plain_sample)
        monkeypatch.setattr(cuda_sampling, "best_tokens", plain_best)
        monkeypatch.setattr(cuda_sampling, "score", plain_score)
    attention_decode.decode_config.cache_clear()
    attention_cascade.cascade_config.cache_clear()
    yield
    attention_decode.decode_config.cache_clear()
    attention_cascade.cascade_config.cache_clear()


@cache
def engines(name: str, num_blocks: int, mode: str) -> tuple[Engine, Engine]:
    """The device's, with steps that overlap, and the CPU's."""
    return engines_of(model_zoo.model_directory(name), num_blocks, mode)


def engines_of(
    directory: Path, num_blocks: int, mode: str, model_impl: str = "auto", **options: str
) -> tuple[Engine, Engine]:
    """Of a model in a directory."""
    config = make_config(
        directory,
        device="cpu",
        model_impl=model_impl,
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        preemption_mode=mode,
        watermark=0.0,
        **options,
    )
    plain = load_engine(config)
    overlapped = Engine(config, plain.model_config, CudaExecutor(config, plain.model_config))
    return overlapped, plain


def run(engine: Engine, asks: list) -> list[RequestOutput]:
    client = LocalClient(engine)
    streams = [client.make_request(prompt, params) for prompt, params in asks]
    finished: dict[str, RequestOutput] = {}
    for stream in streams:
        client.add_request(stream)
        for output in client.step():
            finished[output.request_id] = output
    while client.has_unfinished:
        for output in client.step():
            finished[output.request_id] = output
    return [finished[stream.request_id] for stream in streams]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def compare_logprobs(got: RequestOutput, wanted: RequestOutput) -> None:
    """Those of the first sample."""
    mine, theirs = got.outputs[0].logprobs, wanted.outputs[0].logprobs
    if wanted.outputs[0].logprobs is None:
        assert mine is None
        return
    assert mine is not None
    assert theirs is not None
    assert len(mine) == len(got.outputs[0].token_ids)
    for one, other in zip(mine, theirs, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, rel=1e-4)
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
        assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], rel=1e-4)


def prompt(length: int, seed: int) -> list[int]:
    return model_zoo.random_token_ids(length, seed=seed)


def small_pool(name: str) -> int:
    """A number of blocks for which requests compete: a little more than the longest may need."""
    layout = read_model_config(model_zoo.model_directory(name)).kv_layout()
    sizes = layout.block_sizes(BLOCK_SIZE)
    needed = sum(
        spec.max_blocks(MAX_LEN, size, CHUNK)
        for spec, size in zip(layout.specs, sizes, strict=True)
    )
    return max(13, 13 * needed // 10)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, which is NumPy
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_tokens_equal_the_cpus_while_requests_come_and_go(name: str, mode: str) -> None:
    """Greedy, seeded, several samples, beams, stops, penalties; blocks are short, and what they
    hold before they are written is of no account."""
    overlapped, plain = engines(name, small_pool(name), mode)
    kv_cache = overlapped.executor.runner.kv_cache  # type: ignore[attr-defined]
    kv_cache.blocks.fill_(torch.nan)
    kv_cache.swapped.fill_(torch.nan)
    asks = [
        (prompt(30, 1), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)),
        (prompt(5, 2), SamplingParams(temperature=1, seed=3, max_tokens=12)),
        (prompt(12, 3), SamplingParams(temperature=1, seed=4, n=2, max_tokens=6, top_p=0.9)),
        (prompt(7, 3), SamplingParams(temperature=2, seed=5, n=2, max_tokens=6, **PENALTIES)),
        (prompt(9, 4), BeamSearchParams(beam_width=2, max_tokens=5)),
        (prompt(3, 5), SamplingParams(temperature=0, max_tokens=7, repetition_penalty=1.5)),
        (prompt(4, 6), SamplingParams(temperature=0, max_tokens=6, logit_bias={5: 1.5, 6: -2.0})),
        (prompt(30, 1), SamplingParams(temperature=0, max_tokens=3, logprobs=2)),
    ]
    got, wanted = run(overlapped, asks), run(plain, asks)
    assert tokens(got) == tokens(wanted)
    assert [o.outputs[0].finish_reason for o in got] == [o.outputs[0].finish_reason for o in wanted]
    compare_logprobs(got[-1], wanted[-1])
    assert sum(overlapped.scheduler.num_preemptions.values()) > 0
    assert overlapped.kv.pool.num_held == 0


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", CONTINUED)
def test_steps_that_continue_are_not_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences pass the ends of blocks and of windows; one ends before the others, and one draws
    several samples."""
    overlapped, plain = engines_of(model_zoo.model_directory(name), 40, "recompute")
    planned = []
    stage = ModelRunner._stage

    def note(runner: ModelRunner, plan: StepPlan, wants_all: bool) -> object:
        planned.append(plan)
        return stage(runner, plan, wants_all)

    monkeypatch.setattr(ModelRunner, "_stage", note)
    asks = [
        (prompt(3, 1), SamplingParams(temperature=0, max_tokens=19, ignore_eos=True, logprobs=3)),
        (prompt(13, 2), SamplingParams(temperature=1, seed=3, max_tokens=9, ignore_eos=True)),
        (
            prompt(6, 3),
            SamplingParams(seed=4, n=2, max_tokens=5, ignore_eos=True, **PENALTIES),
        ),
    ]
    for ask in (*([each] for each in asks), asks) if HAS_GPU else [asks]:
        planned.clear()
        got, num_planned = run(overlapped, ask), len(planned)
        wanted = run(plain, ask)
        assert tokens(got) == tokens(wanted)
        compare_logprobs(got[0], wanted[0])
        # Prompts, and what comes after them, after a fork, an end, and 15 steps that continued.
        assert num_planned <= (4 if len(ask) == 1 and ask[0][1].n == 1 else 9)
    assert overlapped.kv.pool.num_held == 0


def test_a_backend_whose_work_cannot_go_on_plans_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_runner, "ContinuingBackend", CpuDrawer)  # which none is
    overlapped, plain = engines_of(model_zoo.model_directory("llama3"), 40, "recompute")
    planned = []
    monkeypatch.setattr(triton_backend.TritonBackend, "plan", watched(planned))
    ask = [(prompt(3, 1), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))]
    assert tokens(run(overlapped, ask)) == tokens(run(plain, ask))
    assert [int(lens[0]) for lens in planned] == [3, 1, 1, 1, 1]


def watched(planned: list[torch.Tensor]) -> Callable[..., Hashable]:
    """TritonBackend.plan, which notes the new tokens of the sequences."""
    plan = triton_backend.TritonBackend.plan

    def note(backend: triton_backend.TritonBackend, batch: AttentionBatch) -> Hashable:
        planned.append(batch.query_lens)
        return plan(backend, batch)

    return note


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_step_has_the_kernels_that_its_contexts_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of either kernel are there before the first request comes."""
    choose = triton_backend.TritonBackend._decode_config

    def config_of(
        backend: triton_backend.TritonBackend, shape: object, pairs: int, longest: int, *rest: bool
    ) -> object:
        config = choose(backend, shape, pairs, longest, *rest)
        return replace(config, tile=2 * config.tile) if longest > 20 else config

    prepared: list[Captured] = []
    computed: list[Captured] = []
    for name, keys in (("prepare", prepared), ("run", computed)):
        monkeypatch.setattr(Graphs, name, noted(getattr(Graphs, name), keys))
    monkeypatch.setattr(triton_backend.TritonBackend, "_decode_config", config_of)
    monkeypatch.setattr(triton_backend.TritonBackend, "context_limits", (20,))
    overlapped, plain = engines_of(model_zoo.model_directory("llama3"), 40, "recompute")
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for longer in (9, 21):
        asks = [(prompt(longer, 1), sampling), (prompt(5, 2), sampling)]
        assert tokens(run(overlapped, asks)) == tokens(run(plain, asks))
    assert set(computed) <= set(prepared)
    assert len({each for each in computed if each.mixed is None and each.size == 2}) == 2


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_backend_may_have_steps_that_no_graph_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Captured] = []
    asked: list[int] = []

    def captures(backend: triton_backend.TritonBackend, batch: AttentionBatch) -> bool:
        asked.append(int(batch.context_lens.max()))
        return asked[-1] <= 10

    monkeypatch.setattr(Graphs, "run", noted(Graphs.run, computed))
    monkeypatch.setattr(triton_backend.TritonBackend, "captures", captures)
    overlapped, plain = engines_of(model_zoo.model_directory("llama3"), 40, "recompute")
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for length in (9, 21):
        asks = [(prompt(length, 1), sampling)]
        assert tokens(run(overlapped, asks)) == tokens(run(plain, asks))
    assert asked == [9, 21], "of steps with prompts"
    assert [each.mixed is not None for each in computed].count(True) == 1


def noted(method: Callable[..., None], keys: list[Captured]) -> Callable[..., None]:
    """A method of Graphs, which notes the keys of steps."""

    def note(graphs: Graphs, key: Hashable, work: Callable[[], None], **options: bool) -> None:
        if isinstance(key, Captured):
            keys.append(key)
        method(graphs, key, work, **options)

    return note


@slow_if_interpreted
@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_fp8_kv_cache_is_swapped_copied_and_read_by_every_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts, decodes, samples and beams that share blocks, cascades; blocks hold NaN before."""
    monkeypatch.setattr(cascade, "MIN_KEYS", 16)
    monkeypatch.setattr(cascade, "MIN_BYTES", 0)
    directory = model_zoo.model_directory("llama3")
    overlapped, plain = engines_of(directory, 11, "swap", kv_cache_dtype="fp8")
    kv_cache = overlapped.executor.runner.kv_cache  # type: ignore[attr-defined]
    assert kv_cache.blocks.dtype == kv_cache.swapped.dtype == torch.float8_e4m3fn
    for tier in (kv_cache.blocks, kv_cache.swapped):
        tier.view(torch.uint8).fill_(0x7F)
    asks = [
        (prompt(30, 1), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)),
        (prompt(12, 3), SamplingParams(temperature=1, seed=4, n=2, max_tokens=6, top_p=0.9)),
        (prompt(19, 4), BeamSearchParams(beam_width=2, max_tokens=5)),
        (prompt(25, 5), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
    ]
    assert tokens(run(overlapped, asks)) == tokens(run(plain, asks))
    assert overlapped.scheduler.num_preemptions["swap"] > 0
    assert overlapped.kv.pool.num_held == 0


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", model_zoo.ENCODER_DECODER_NAMES if HAS_GPU else ["t5"])
def test_models_with_an_encoder(name: str) -> None:
    """Encoders run before captured steps, whose decodes read what these have written; blocks hold
    NaN before. A decode is alone for a step, so that there is padding."""
    config = make_config(
        str(model_zoo.model_directory(name)),
        **{"device": "cpu", "num_blocks": 24, "block_size": 16, "max_model_len": 40},
        **{"max_num_seqs": 2, "max_num_batched_tokens": 24},
    )
    plain = load_engine(config)
    executor = CudaExecutor(config, plain.model_config, Graphs([2], [], DEVICE))
    overlapped = Engine(config, plain.model_config, executor)
    executor.runner.kv_cache.blocks.fill_(torch.nan)
    decoder = {"prompt": prompt(3, 4), "decoder_input_ids": prompt(4, 5)}
    asks = [
        (prompt(17, 1), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)),
        (decoder, SamplingParams(temperature=0, max_tokens=2, repetition_penalty=1.5)),
    ]
    assert tokens(run(overlapped, asks)) == tokens(run(plain, asks))
    assert overlapped.kv.pool.num_held == 0


@slow_if_interpreted
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("model_type", THROUGH_TRANSFORMERS)
def test_models_through_transformers_compute_in_padded_and_captured_steps(
    model_type: str, tmp_path: Path
) -> None:
    write_reference(model_type, tmp_path)
    overlapped, plain = engines_of(tmp_path, 40, "recompute", "transformers")
    asks = [
        (prompt(30, 1), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)),
        (prompt(5, 2), SamplingParams(temperature=1, seed=3, n=2, max_tokens=5, ignore_eos=True)),
        (prompt(9, 4), BeamSearchParams(beam_width=2, max_tokens=3)),
    ]
    assert tokens(run(overlapped, asks)) == tokens(run(plain, asks))
    assert overlapped.kv.pool.num_held == 0


@slow_if_interpreted
@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_sampler_draws_by_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of each mode, an edited row, scores and candidates, in steps that overlap."""
    for kernel in (sample, best_tokens, score):
        monkeypatch.setattr(cuda_sampling, kernel.__name__, kernel)
    overlapped, plain = engines.__wrapped__("llama3", 24, "recompute")
    asks = [
        (prompt(5, 2), SamplingParams(temperature=1, seed=3, max_tokens=3)),
        (prompt(7, 3), SamplingParams(temperature=1, seed=4, n=2, max_tokens=2, top_p=0.9)),
        (prompt(3, 5), SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.5)),
        (prompt(6, 6), SamplingParams(temperature=0, max_tokens=2, logprobs=3)),
        (prompt(4, 4), BeamSearchParams(beam_width=2, max_tokens=2)),
    ]
    assert tokens(run(overlapped, asks)) == tokens(run(plain, asks))


def test_kernels_that_layers_do_not_launch_are_compiled_before_any_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the head, of the sampler and of copies of blocks."""
    overlapped, _ = engines.__wrapped__("llama3", 24, "recompute")
    launched = set[tuple[str, Any]]()

    def drawn(logits: torch.Tensor, draws: DeviceDraws) -> torch.Tensor:
        kind = "greedy" if draws.is_greedy else "limited" if draws.is_limited else "random"
        launched.add((kind, len(draws.rows)))
        assert logits.dtype == torch.float32
        return sample(logits, draws)

    def found(logits: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        launched.add(("best", number))
        return best_tokens(logits, number)

    def scored(
        logits: torch.Tensor, rows: torch.Tensor | None, token_ids: torch.Tensor, number: int
    ) -> None:
        launched.add(("score of all" if rows is None else "score of some", number))
        assert logits.shape[1] == runner._sampler.vocabulary.size

    monkeypatch.setattr(cuda_sampling, "sample", drawn)
    monkeypatch.setattr(cuda_sampling, "best_tokens", found)
    monkeypatch.setattr(cuda_sampling, "score", scored)
    monkeypatch.setattr(cuda, "copy_blocks", lambda *_: launched.add(("copy", 1)))
    for name in ("copy", "open", "count"):
        monkeypatch.setattr(EditRecords, name, lambda *_, name=name: launched.add(("record", name)))
    executor = overlapped.executor
    assert isinstance(executor, CudaExecutor)
    runner = executor.runner
    logits = runner._model.logits

    def headed(hidden: torch.Tensor) -> torch.Tensor:
        launched.add(("head", len(hidden)))
        return logits(hidden)

    monkeypatch.setattr(model_runner, "_FEW_ROWS", 3)
    monkeypatch.setattr(runner._model, "logits", headed)
    monkeypatch.setattr(runner, "_launch_steps", lambda sizes: launched.add(("sizes", sizes)))
    with torch.inference_mode():
        runner._launch_kernels((1, 2))
    counts = [1, FEW_DRAWS + 1, SOME_DRAWS + 1, FEW_LIMITED + 1]
    expected = {(mode, count) for mode in get_args(DrawMode) for count in counts}
    expected |= {("best", number) for number in NUMBERS}
    kinds = ("score of all", "score of some")
    expected |= {(kind, number) for kind in kinds for number in (0, *NUMBERS)}
    # Of prompts whose tokens are scored, the head has as many rows as a step has tokens.
    expected |= {("head", number) for number in (1, 2, 3, 4, 5, 8, 9, 16, 17, CHUNK)}
    expected |= {("record", name) for name in ("copy", "open", "count")}
    assert launched == expected | {("copy", 1), ("sizes", (1, 2))}


def test_kernels_of_all_steps_are_compiled_before_any_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of decodes, alone and beside prompts, with cascade attention and without; and of prompts of
    which all hidden states are asked for."""
    overlapped, _ = engines.__wrapped__("llama3", 24, "recompute")
    executor = overlapped.executor
    assert isinstance(executor, CudaExecutor)
    runner, choose = executor.runner, triton_backend.decode_config
    launched, whole = set[Any](), list[int]()

    def chosen(dtype: torch.dtype, head_dim: int, group: int, pairs: int, *rest: Any) -> Any:
        config = choose(dtype, head_dim, group, pairs, *rest)
        return replace(config, num_programs=1 if pairs <= 4 else 2)

    def forwarded(staged: model_runner.StagedStep) -> None:
        assert staged.captured is not None
        if staged.captured.mixed and staged.logits_indices is None:
            whole.append(len(staged.input_ids))
            return
        configs, has_cascades = staged.captured.kernels  # type: ignore[misc]
        assert has_cascades == configs[0].has_cascade
        programs = configs[0].num_programs
        launched.add((len(staged.rows), programs, has_cascades, staged.captured.mixed is not None))

    monkeypatch.setattr(triton_backend, "decode_config", chosen)
    drawn = set[Any]()
    monkeypatch.setattr(runner, "_forward", forwarded)
    monkeypatch.setattr(
        runner, "_draw_captured", lambda kind, rows: drawn.add((kind, (len(rows) - 1).bit_length()))
    )
    with torch.inference_mode():
        runner._launch_steps((1, 2, 3, 4))
    # Of three and four sequences, decodes have the same kernels; two that are mixed with a prompt
    # have as many tokens as three, for which others are chosen.
    assert {each for each in launched if not each[3]} == {
        (rows, 1 if rows <= 2 else 2, has_cascade, False)
        for rows in (1, 2, 3)
        for has_cascade in (False, True)
    }
    assert {each[1:3] for each in launched if each[3]} == {
        (programs, has_cascade) for programs in (1, 2) for has_cascade in (False, True)
    }
    assert whole == [1, 2, 3, 4, 5, 8, 9, 16, 17, CHUNK]
    kinds = product(get_args(DrawMode), (False, True), [()])
    assert drawn == set(product(kinds, range(3)))


def test_the_encoders_kernels_are_compiled_before_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By inputs of each size; what they write goes to the null block."""
    config = make_config(
        str(model_zoo.model_directory("t5")),
        **{"device": "cpu", "num_blocks": 24, "block_size": 16, "max_model_len": 40},
        **{"max_num_seqs": 2, "max_num_batched_tokens": 24},
    )
    model_config = read_model_config(config.model).with_max_model_len(40)
    executor = CudaExecutor(config, model_config, Graphs([2], [], DEVICE))
    runner, encoded = executor.runner, list[list[int]]()
    runner.kv_cache.blocks.zero_()
    encode = runner._model.encode

    def noted(ids: torch.Tensor, positions: torch.Tensor, lens: list[int], backend: Any) -> None:
        encoded.append(lens)
        encode(ids, positions, lens, backend)

    monkeypatch.setattr(runner._model, "encode", noted)
    monkeypatch.setattr(runner, "_launch_steps", lambda sizes: None)
    with torch.inference_mode():
        runner._launch_kernels((2,))
    assert encoded == [[n] for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 23)]
    assert not runner.kv_cache.blocks[1:].any()


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_no_kernel_of_the_sampler_is_compiled_while_requests_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = [
        *(sampling._peak_kernel, sampling._sum_kernel, sampling._draw_kernel),
        *(sampling_candidates._chunk_kernel, sampling_candidates._row_kernel),
        *(sampling.outline, sampling.gather, sampling.find_limits, block_copy._copy_kernel),
    ]
    for kernel in kernels:
        kernel.device_caches.clear()
    overlapped, _ = engines.__wrapped__("llama3", 24, "recompute")
    executor = overlapped.executor
    assert isinstance(executor, CudaExecutor)
    with torch.inference_mode():
        executor.runner._launch_kernels((1, 2, 4, 8))
    compiled, compile_kernel = list[Any](), JITFunction._do_compile

    def noted(kernel: JITFunction[Any], *args: Any, **options: Any) -> Any:
        compiled.append(kernel)
        return compile_kernel(kernel, *args, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    asks = [
        (prompt(7, 3), SamplingParams(temperature=1, seed=4, n=2, max_tokens=2, top_p=0.9)),
        (prompt(3, 5), SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.5)),
        (prompt(5, 6), SamplingParams(temperature=1, max_tokens=3, presence_penalty=1.0)),
        *((prompt(4, 4), BeamSearchParams(beam_width=n, max_tokens=2)) for n in (2, 3, 5, 8)),
    ]
    run(overlapped, asks)
    assert not set(kernels) & set(compiled)


@slow_if_interpreted
@pytest.mark.parametrize("name", model_zoo.NAMES if HAS_GPU else ["llama3"])
def test_keys_of_gangs_and_common_prefixes_are_read_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "MIN_KEYS", 64)
    monkeypatch.setattr(cascade, "MIN_BYTES", 0)
    overlapped, plain = engines(name, 56, "recompute")
    calls = 0

    def counted(*args: object) -> None:
        nonlocal calls
        calls += 1
        cascade_attention(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_backend, "cascade_attention", counted)
    asks = [
        (prompt(67, 8), BeamSearchParams(beam_width=3, max_tokens=8)),
        ([*prompt(67, 8)[:65], 7], SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)),
        (prompt(6, 9), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)),
    ]
    assert tokens(run(overlapped, asks)) == tokens(run(plain, asks))
    specs = overlapped.model_config.kv_specs()
    assert (calls > 0) == any(isinstance(spec, FullAttention) for spec in specs)


@slow_if_interpreted
def test_the_steps_that_memory_is_measured_with_are_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many tokens as a step may have, and as many draws, all from copies of their logits."""
    overlapped, _ = engines("llama3", 13, "recompute")
    model_config = overlapped.model_config
    copied = []

    def edit(edits: CudaEdits, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        copied.append(len(logits))
        return logits.float()

    monkeypatch.setattr(CudaEdits, "edit", edit)
    runner = CudaExecutor(overlapped.config, model_config).runner
    short, prompts, draws = largest_steps(overlapped.config, model_config, [8])
    assert len(short.seq_ids) == 1
    assert 1 < short.num_tokens < prompts.num_tokens
    for plan in (short, prompts, draws):
        result = runner.submit(plan).result()
        assert len(result.token_ids) == len(plan.sampled)
    scheduler = overlapped.config.scheduler
    assert prompts.num_tokens == scheduler.max_num_batched_tokens
    assert copied[-1] == scheduler.max_num_seqs


def test_memory_is_measured_with_the_largest_inputs_of_an_encoder() -> None:
    directory = str(model_zoo.model_directory("t5"))
    config = make_config(
        directory,
        **{"device": "cpu", "num_blocks": 24, "block_size": 8, "max_model_len": 40},
        **{"max_num_seqs": 2, "max_num_batched_tokens": CHUNK},
    )
    model_config = read_model_config(directory).with_max_model_len(40)
    runner = CudaExecutor(config, model_config, graphs=None).runner
    encoding, *others = largest_steps(config, model_config, [8, 8])
    assert sum(len(row.encoder_token_ids) for row in encoding.opened) == CHUNK - 1
    assert encoding.encoded == encoding.seq_ids
    for plan in (encoding, *others):
        assert len(runner.submit(plan).result().token_ids) == len(plan.sampled)


def test_a_device_without_room_is_an_error_of_ours() -> None:
    with (
        pytest.raises(OutOfMemory, match=r"the weights do not fit .*; use less, .* says: of 8 GiB"),
        _refused("the weights", "use less"),
    ):
        raise torch.cuda.OutOfMemoryError("of 8 GiB")


def test_prompt_logprobs() -> None:
    overlapped, plain = engines("llama3", 13, "recompute")
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    [mine], [theirs] = (run(engine, [(prompt(29, 7), params)]) for engine in (overlapped, plain))
    assert mine.prompt_logprobs is not None
    assert theirs.prompt_logprobs is not None
    assert [e.logprob for e in mine.prompt_logprobs[1:] if e] == pytest.approx(
        [e.logprob for e in theirs.prompt_logprobs[1:] if e], rel=1e-4
    )


BAD = 319  # its embedding is NaN


def without_bad(**fields: Any) -> SamplingParams:
    fields = {"max_tokens": 6, "ignore_eos": True, "seed": 3, "logit_bias": {BAD: -100.0}} | fields
    return SamplingParams(**fields)


HARMFUL = [  # with the number of tokens that come before the error
    ([5, BAD, 6], without_bad(temperature=0, logit_bias=None), 0),
    ([7, 5], without_bad(allowed_token_ids=[BAD], logit_bias=None), 1),
    ([8, BAD], without_bad(temperature=0, allowed_token_ids=[4, 5]), 0),
    ([9, BAD], without_bad(temperature=1, top_p=0.9, n=3, logit_bias=None), 0),
    ([9, 5, BAD], without_bad(temperature=0, repetition_penalty=1.5), 0),
    ([6, BAD, 4], without_bad(logprobs=2, prompt_logprobs=1), 0),
    ([BAD, 4], BeamSearchParams(beam_width=2, max_tokens=5), 0),
]


def check_that_they_fail(outputs: list[RequestOutput]) -> None:
    for (_, _, num_tokens), output in zip(HARMFUL, outputs, strict=True):
        assert output.error is not None
        assert "not finite" in output.error
        assert {each.finish_reason for each in output.outputs} == {"error"}
        assert {len(each.token_ids) for each in output.outputs} == {num_tokens}


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rows_without_finite_logits_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the next step is under way already when the host learns of it."""
    model_zoo.embed_as_nan(BAD, monkeypatch)
    overlapped, plain = engines.__wrapped__("llama3", 40, "recompute")
    innocent = [
        (prompt(5, 1), without_bad(temperature=0, max_tokens=4, logit_bias=None)),
        (prompt(4, 2), without_bad(temperature=1, max_tokens=3, n=2)),
        (prompt(3, 4), BeamSearchParams(beam_width=2, max_tokens=3)),
    ]
    wanted = tokens(run(plain, innocent))
    asks = [*HARMFUL[:3], innocent[0], *HARMFUL[3:5], innocent[1], *HARMFUL[5:], innocent[2]]
    outputs = run(overlapped, [(token_ids, params) for token_ids, params, *_ in asks])
    spared = [output for output, ask in zip(outputs, asks, strict=True) if ask in innocent]
    check_that_they_fail([each for each in outputs if each not in spared])
    assert [output.error for output in spared] == [None] * 3
    assert tokens(spared) == wanted
    assert overlapped.kv.pool.num_held == 0


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("overlap", [True, False])
def test_of_64_rows_on_a_gpu_those_without_finite_logits_end_alone(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_zoo.embed_as_nan(BAD, monkeypatch)
    llm = LLM(
        str(model_zoo.model_directory("llama3")),
        device="cuda",
        dtype="float32",
        max_model_len=80,
        max_num_seqs=64,
        kv_cache_memory=1 << 26,
        overlap=overlap,
    )
    kinds = [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 9}, {"n": 2}, {"logprobs": 1}]
    innocent = [
        (
            [5 if token_id == BAD else token_id for token_id in prompt(1 + i % 30, i)],
            without_bad(**kinds[i % len(kinds)], logit_bias=None),
        )
        for i in range(63)
    ]
    innocent.append((prompt(9, 4), BeamSearchParams(beam_width=2, max_tokens=5)))
    wanted = run(llm.engine, innocent)
    # A token that is never drawn: what has one row of NaN is what was computed before.
    assert all(BAD not in each.token_ids for output in wanted for each in output.outputs)
    assert [output.error for output in wanted] == [None] * len(innocent)
    llm.reset_prefix_cache()
    asks = [(token_ids, params) for token_ids, params, _ in HARMFUL]
    outputs = run(llm.engine, [*innocent[:30], *asks, *innocent[30:]])
    check_that_they_fail(outputs[30 : 30 + len(asks)])
    del outputs[30 : 30 + len(asks)]
    assert tokens(outputs) == tokens(wanted)
    assert [output.error for output in outputs] == [None] * len(innocent)
    assert llm.engine.kv.pool.num_held == 0


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_a_gpu_serves_as_the_cpu_does(name: str) -> None:
    """The whole way: memory measured, graphs captured, steps overlapped."""
    options = {
        "dtype": "float32",
        "max_model_len": 80,
        "max_num_seqs": 8,
        "kv_cache_memory": 1 << 26,
    }
    directory = str(model_zoo.model_directory(name))
    asks = [prompt(n, n) for n in (3, 16, 33, 50)]
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    outputs = {}
    for device in ("cuda", "cpu"):
        llm = LLM(directory, device=device, **options)
        outputs[device] = [o.outputs[0].token_ids for o in llm.generate(asks, params)]
    assert outputs["cuda"] == outputs["cpu"]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("windows", "heads", "sizes"),
    [
        # One layer with full attention beside nine with windows: blocks of three times the length.
        ([None, *[6] * 9], None, (12, 4, 4, 4)),
        # Layers with 64 elements of a token, and with 16.
        ([6, 6, 6, None], [(2, 2, 16)] * 3 + [(4, 1, 8)], (4, 4, 4, 16)),
        # Layers with as many elements of a token in other heads: one of 16, or two of 8.
        ([6, 6, None, None], [(2, 1, 16)] * 2 + [(4, 2, 8)] * 2, (4, 4)),
    ],
)
def test_groups_may_have_blocks_of_different_lengths(
    windows: list[int | None], heads: list[tuple[int, int, int]] | None, sizes: tuple[int, ...]
) -> None:
    """Prompts, decodes, and a block that is copied before it is written."""
    model = FakeModel(windows, device=DEVICE, heads=heads)
    config = make_config("fake", block_size=4, max_num_seqs=4)
    device, backend = CudaDevice(DEVICE), load_backend("triton")
    parts: tuple[Any, ...] = (config, model.config, model, backend)
    runner = ModelRunner(*parts, (100, 9), device, SingleRank())
    runner.kv_cache.blocks.fill_(torch.nan)
    block_sizes = model.config.kv_layout().block_sizes(4)
    assert block_sizes == sizes
    driver = Driver(runner, block_sizes)
    prompts = [prompt(13, 1), prompt(3, 2)]
    prompts = [[token % VOCAB_SIZE for token in tokens] for tokens in prompts]
    texts = [list(tokens) for tokens in prompts]
    scheduled = {0: 13, 1: 3}
    opened = [driver.opened(i, tokens) for i, tokens in enumerate(prompts)]
    for _ in range(3):
        result = driver.step(scheduled, opened)
        for text, token_id in zip(texts, result.token_ids, strict=True):
            text.append(token_id)
        scheduled, opened = {0: 1, 1: 1}, []
    for tokens, text in zip(prompts, texts, strict=True):
        for end in range(len(tokens), len(text)):
            assert text[end] == int(model.expected_logits(text[:end])[-1].argmax())
    # All of a block is copied: which tokens are in it depends on its group.
    copies = runner.kv_cache.stage([BlockCopy(1, 90, 1)], HostStaging())
    before = runner.kv_cache.blocks[1].clone()
    runner.kv_cache._device.copy_blocks(runner.kv_cache.blocks, copies[0].to(DEVICE))
    assert torch.equal(runner.kv_cache.blocks[90].nan_to_num(), before.nan_to_num())


@pytest.mark.filterwarnings("ignore:invalid value")
def test_shared_keys_are_read_once_in_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers with full attention in two groups, beside six with windows."""
    monkeypatch.setattr(cascade, "MIN_KEYS", 32)
    monkeypatch.setattr(cascade, "MIN_BYTES", 0)
    calls = 0

    def counted(*args: object) -> None:
        nonlocal calls
        calls += 1
        cascade_attention(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_backend, "cascade_attention", counted)
    model = FakeModel([*[None] * 4, *[6] * 6], device=DEVICE)
    layout = model.config.kv_layout()
    assert [len(group.layer_ids) for group in layout.groups] == [2] * 5
    config = make_config("fake", block_size=16, max_num_seqs=4)
    device, backend = CudaDevice(DEVICE), load_backend("triton")
    parts: tuple[Any, ...] = (config, model.config, model, backend)
    runner = ModelRunner(*parts, (100, 9), device, SingleRank())
    text = [token % VOCAB_SIZE for token in prompt(40, 3)]
    texts = [[*text, token] for token in (1, 2, 3)]
    rows, writes = [], []
    for i, tokens in enumerate(texts):
        rows.append(OpenedRow(i, tuple(tokens), 41, 40 if i else 0, GREEDY, 0, 0))
        for group in range(5):  # two blocks in common, and one of its own
            common = (1 + 2 * group, 2 + 2 * group)
            writes.append(TableWrite(i, group, 0, (*common, 20 + 5 * i + group)))
    copies = [BlockCopy(20 + group, 20 + 5 * i + group, 8) for i in (1, 2) for group in range(5)]
    first = StepPlan(0, [0], [41], [0], [], opened=rows[:1], table_writes=writes[:5])
    [token] = runner.submit(first).result().token_ids
    assert token == int(model.expected_logits(texts[0])[-1].argmax())
    texts[0].append(token)
    together = StepPlan(
        1,
        [0, 1, 2],
        [1] * 3,
        [0, 1, 2],
        [],
        opened=rows[1:],
        table_writes=writes[5:],
        copies=copies,
    )
    drawn = runner.submit(together).result().token_ids
    assert drawn == [int(model.expected_logits(tokens)[-1].argmax()) for tokens in texts]
    assert calls == 4  # once in each layer with full attention


def test_groups_that_share_other_blocks_have_no_cascade_attention() -> None:
    tables = np.zeros((2, 3, 40), np.int32)
    tables[:, :, :30] = np.arange(1, 31)
    rows, ones = np.arange(3), np.ones(3, np.int64)
    finder = cascade.SegmentFinder([16, 16, 16], [False, False, True], least_saved=0)
    found = finder.find(np.stack([*tables, tables[0]]), rows, ones, np.full(3, 470))
    assert found[0] is not None
    assert found[2] is None
    tables[1, 0, 3:] += 50
    finder.invalidate()
    assert finder.find(np.stack([*tables, tables[0]]), rows, ones, np.full(3, 470)) == []


@slow_if_interpreted
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("mode", MODES if HAS_GPU else ["recompute"])
@pytest.mark.parametrize("are_late", [False, True], ids=["in_time", "late"])
def test_masks_follow_texts_while_steps_overlap(mode: str, are_late: bool) -> None:
    """Grammars, bad words and what needs no text, beside rows without masks; the same tokens as on
    a CPU, where each step knows the tokens before it."""
    pytest.importorskip("llguidance")
    overlapped, plain = engines("llama3", small_pool("llama3"), mode)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": [1, 22, 333]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    json_schema = {"json_schema": schema}
    asks = [
        (prompt(30, 1), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)),
        (prompt(5, 2), SamplingParams(seed=3, max_tokens=30, structured=json_schema)),
        (prompt(9, 3), SamplingParams(seed=4, n=2, max_tokens=9, structured={"regex": "[a-f]{6}"})),
        (prompt(4, 4), SamplingParams(temperature=0, max_tokens=8, structured=json_schema)),
        (prompt(6, 5), SamplingParams(seed=5, max_tokens=6, structured={"choice": ["yes", "no"]})),
        (
            prompt(7, 6),
            SamplingParams(
                seed=6, max_tokens=8, structured=json_schema, presence_penalty=1.0, logprobs=1
            ),
        ),
        (prompt(8, 7), SamplingParams(seed=7, max_tokens=6, allowed_token_ids=[9, 10, 11])),
        (prompt(8, 8), SamplingParams(seed=8, max_tokens=6, min_tokens=4, top_p=0.9)),
        (prompt(3, 9), BeamSearchParams(3, max_tokens=5, structured={"regex": "[xyz]{2,9}"})),
    ]
    wanted = run(plain, asks)
    rng = random.Random(mode)
    gate = Gate(lambda grammar: are_late, lambda: rng.choice([0, 0, 1, 4]))
    gate.attach(overlapped)
    with gate.in_place():
        got = run(overlapped, asks)
    assert [output.error for output in got] == [None] * len(asks)
    assert tokens(got) == tokens(wanted)
    ends = [[each.finish_reason for each in output.outputs] for output in got]
    assert ends == [[each.finish_reason for each in output.outputs] for output in wanted]
    assert overlapped.kv.pool.num_held == 0
