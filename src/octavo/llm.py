"""The offline API: prompts in, finished outputs back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any, cast

from octavo.config import EngineConfig, make_config
from octavo.core.sequence import Request
from octavo.engine.engine import Engine
from octavo.engine.interrupts import InterruptsAfter
from octavo.engine.prepared import Params, Prompt
from octavo.errors import InvalidRequest
from octavo.outputs import RequestOutput, SequenceDelta
from octavo.sampling_params import BeamSearchParams, SamplingParams

Message = Mapping[str, Any]


class LLM:
    """A model, its KV cache and an engine, in this process.

    >>> llm = LLM("demo")
    >>> [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=40))
    >>> output.outputs[0].text
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        """Load a model: a directory in Hugging Face format, "demo", or a hub id.

        `options` are the fields of EngineConfig, CacheConfig and SchedulerConfig. Raises
        ConfigError for a bad option, ModelError for a directory that cannot be served, and
        OutOfMemory with settings that would fit.
        """
        self.engine = load_engine(make_config(model, **options))
        # Calls may be interleaved (two streams, say), so each step's output is kept for whom it
        # concerns.
        self._streams: dict[str, deque[SequenceDelta]] = {}
        self._awaited: dict[str, list[RequestOutput]] = {}  # where a request's output goes

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue prompts (text or token ids); the outputs are in the order of the prompts."""
        many = _as_prompts(prompts)
        return self._run(
            many,
            _for_each(SamplingParams() if params is None else params, len(many), "params"),
            _for_each(priority, len(many), "priority"),
            cache_salt,
            use_tqdm,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """The best continuations of each prompt, best first."""
        many = _as_prompts(prompts)
        return self._run(
            many,
            _for_each(params, len(many), "params"),
            _for_each(priority, len(many), "priority"),
            cache_salt,
            use_tqdm,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        cache_salt: str = "",
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the model's chat template."""
        if not messages:
            raise InvalidRequest("messages", "there are none")
        single = isinstance(messages[0], Mapping)
        conversations = cast(
            "Sequence[Sequence[Message]]", [messages] if single else list(messages)
        )
        prompts = [self.chat_prompt(each, **template_variables) for each in conversations]
        return self.generate(
            prompts, params, use_tqdm=use_tqdm, priority=priority, cache_salt=cache_salt
        )

    def chat_prompt(self, messages: Sequence[Message], **template_variables: Any) -> list[int]:
        """The token ids of a conversation that the assistant is to continue."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise InvalidRequest("messages", "the model has no tokenizer")
        text = tokenizer.render_chat(messages, **template_variables)
        return tokenizer.encode(text, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Iterator[SequenceDelta]:
        """Continue one prompt, piece by piece. Leaving the iterator early aborts the request."""
        request = self.engine.make_request(
            prompt, params or SamplingParams(), priority=priority, cache_salt=cache_salt
        )
        deltas = self._streams[request.request_id] = deque()
        try:
            self.engine.add_request(request)
            while deltas or not request.is_finished:
                if deltas:
                    yield deltas.popleft()
                else:
                    self._step()
        finally:
            del self._streams[request.request_id]
            self._drop(request)

    def pin_prefix(self, prefix: Prompt, name: str | None = None, cache_salt: str = "") -> str:
        """Compute a prefix that many prompts will share, and keep it in the cache for good.

        Returns its name, for `unpin_prefix`.
        """
        if name is None:
            names = (f"prefix-{number}" for number in count())
            name = next(each for each in names if each not in self.engine.kv.pins)
        request = self.engine.make_pin(name, prefix, cache_salt)
        try:
            self.engine.add_request(request)
            while not request.is_finished:
                self._step()
        finally:
            self._drop(request)
        return name

    def unpin_prefix(self, name: str) -> None:
        self.engine.unpin_prefix(name)

    def reset_prefix_cache(self) -> None:
        """Forget what is cached for later prompts, except pinned prefixes."""
        self.engine.kv.reset_prefix_cache()

    def close(self) -> None:
        """Give the memory back."""
        self.engine.executor.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Params],
        priorities: Sequence[int],
        cache_salt: str,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        requests = self._prepare(prompts, params, priorities, cache_salt)
        outputs: dict[str, RequestOutput] = {}
        arrived: list[RequestOutput] = []
        try:
            for request in requests:
                self._awaited[request.request_id] = arrived
                self.engine.add_request(request)
            for output in self._finish_all(len(requests), arrived, use_tqdm):
                outputs[output.request_id] = output
        finally:
            for request in requests:
                self._awaited.pop(request.request_id, None)
                self._drop(request)
        return [outputs[request.request_id] for request in requests]

    def _step(self) -> None:
        """One step of the engine; what it brought is kept for those who wait for it."""
        with InterruptsAfter():  # or others would miss what this step has brought them
            output = self.engine.step()
            for delta in output.deltas:
                if delta.request_id in self._streams:
                    self._streams[delta.request_id].append(delta)
            for finished in output.finished:
                if finished.request_id in self._awaited:
                    self._awaited[finished.request_id].append(finished)

    def _drop(self, request: Request) -> None:
        """Leave nothing behind of a request that may not have come to its end."""
        self.engine.abort_request(request.request_id)
        self.engine.discard_request(request)

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Params],
        priorities: Sequence[int],
        cache_salt: str,
    ) -> list[Request]:
        """Check all requests before the first one runs."""
        requests: list[Request] = []
        try:
            for prompt, each, priority in zip(prompts, params, priorities, strict=True):
                request = self.engine.make_request(
                    prompt, each, priority=priority, cache_salt=cache_salt
                )
                requests.append(request)
        except BaseException as error:
            for request in requests:
                self.engine.discard_request(request)
            if isinstance(error, InvalidRequest) and len(prompts) > 1:
                error.args = (f"prompt {len(requests) + 1} of {len(prompts)}: {error}",)
            raise
        return requests

    def _finish_all(
        self, total: int, arrived: list[RequestOutput], use_tqdm: bool
    ) -> Iterator[RequestOutput]:
        """Run steps until `total` outputs have arrived."""
        from tqdm import tqdm

        num_tokens = num_finished = 0
        with tqdm(total=total, desc="requests", unit="req", disable=not use_tqdm) as bar:
            while num_finished < total:
                self._step()
                num_finished += len(arrived)
                for output in arrived:
                    num_tokens += sum(len(o.token_ids) for o in output.outputs)
                    elapsed = bar.format_dict["elapsed"]
                    if elapsed:
                        bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tok/s", refresh=False)
                    bar.update()
                    yield output
                arrived.clear()


def load_engine(config: EngineConfig) -> Engine:
    """Everything that stands behind an `LLM`. Imports torch."""
    from octavo.engine.tokenizer import Tokenizer
    from octavo.executor.local import LocalExecutor
    from octavo.model_config import ModelConfig, resolve_model

    directory = resolve_model(config.model)
    model_config = ModelConfig.from_directory(directory)
    if config.max_model_len is not None:
        model_config = model_config.with_max_model_len(config.max_model_len)
    tokenizer = None
    if (directory / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_directory(directory)
    executor = LocalExecutor(config, model_config)
    return Engine(executor.config, model_config, executor, tokenizer)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt (a string or a list of token ids) or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest("prompts", f"{prompts!r} is neither text, token ids nor a list")
    if prompts and isinstance(prompts[0], int):
        return [cast("list[int]", prompts)]
    return cast("Sequence[Prompt]", prompts)


def _for_each(value: Any, count: int, name: str) -> Sequence[Any]:
    """One value for all prompts, or a list with one for each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(name, f"{len(value)} for {count} prompts")
    return value
