"""In which order a step plans, computes and tells."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import model_zoo
from octavo import BeamSearchParams, SamplingParams
from octavo.config import make_config
from octavo.core.sequence import Request, Sequence
from octavo.core.step import PendingStep, StepPlan
from octavo.engine.local_client import LocalClient, LocalStream
from octavo.errors import EngineFailed
from octavo.llm import load_engine


@pytest.mark.parametrize("overlap", [True, False])
def test_a_device_that_waits_for_decisions_computes_again_before_clients_are_told(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(model_zoo.model_directory("llama3"))
    engine = load_engine(make_config(directory, device="cpu", num_blocks=20, overlap=overlap))
    client = LocalClient(engine)
    events: list[str] = []

    def noted(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            events.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    noted(engine.executor, "submit")
    noted(engine, "_results")
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    client.add_request(client.make_request([1, 2, 3], params))
    while client.has_unfinished:
        client.step()
    ahead = ["submit", *["submit", "_results"] * 2, "_results"]
    assert events == (ahead if overlap else ["submit", "_results"] * 3)


def test_no_garbage_is_collected_while_the_device_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = str(model_zoo.model_directory("llama3"))
    engine = load_engine(make_config(directory, device="cpu", num_blocks=20, overlap=True))
    client = LocalClient(engine)
    submit, is_collecting = engine.executor.submit, []

    def note(plan: StepPlan) -> PendingStep:
        is_collecting.append(gc.isenabled())
        return submit(plan)

    monkeypatch.setattr(engine.executor, "submit", note)
    client.add_request(client.make_request([1, 2, 3], BeamSearchParams(2, max_tokens=3)))
    while client.has_unfinished:
        client.step()
        assert gc.isenabled()
    assert is_collecting == [True, False, False]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=2, temperature=1.0, max_tokens=4, detokenize=False),
        BeamSearchParams(beam_width=2, max_tokens=4, detokenize=False),
    ],
)
def test_what_has_ended_leaves_no_garbage(params: SamplingParams | BeamSearchParams) -> None:
    """Else the collector would have to look through everything while requests are served."""
    engine = load_engine(make_config(str(model_zoo.model_directory("llama3")), num_blocks=40))
    client = LocalClient(engine)
    names = "gone-1", "gone-2"
    streams: dict[str, LocalStream] = {}

    def start(name: str) -> None:
        streams[name] = client.make_request([1, 2, 3], params, request_id=name)
        client.add_request(streams[name])
        client.step()

    gc.disable()
    try:
        for name in names:
            start(name)
        client.abort_request(streams[names[0]])
        while client.has_unfinished:
            client.step()
        streams.clear()
        start("later")  # what the last step brought is remembered until the next one
        things = gc.get_objects()
        requests = [thing for thing in things if type(thing) is Request]
        requests += [thing.request for thing in things if type(thing) is Sequence]
        assert not [request for request in requests if request.request_id in names]
    finally:
        gc.enable()


def test_whom_the_intake_ends_between_two_steps_is_not_reported_on() -> None:
    directory = str(model_zoo.model_directory("llama3"))
    engine = load_engine(make_config(directory, device="cpu", num_blocks=20, overlap=True))
    client = LocalClient(engine)
    params = BeamSearchParams(beam_width=2, max_tokens=8)
    streams = [client.make_request([1, 2, 3], params, name) for name in ("first", "second")]
    for stream in streams:
        client.add_request(stream)
    calls = iter(range(100))
    ended = []

    def intake() -> None:
        if next(calls) == 4:
            ended.append(client.abort_request(streams[0]))

    engine.intake = intake
    finished = []
    while client.has_unfinished:
        finished += [output.request_id for output in client.step()]
    assert [output.request_id for output in ended if output is not None] == ["first"]
    assert finished == ["second"]


def test_an_error_in_the_middle_of_a_step_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = str(model_zoo.model_directory("llama3"))
    engine = load_engine(make_config(directory, device="cpu", num_blocks=20))
    client = LocalClient(engine)

    def update(*args: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.scheduler, "update", update)
    client.add_request(client.make_request([1, 2, 3], BeamSearchParams(beam_width=2)))
    with pytest.raises(RuntimeError, match="a bug"):
        engine.step()
    with pytest.raises(EngineFailed, match="RuntimeError: a bug"):
        engine.step()
