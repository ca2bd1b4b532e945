"""The offline API: prompts in, outputs back."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from itertools import count
from os import PathLike
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, cast

from octavo.config import EngineConfig, make_config
from octavo.engine.engine import Engine
from octavo.engine.interrupts import InterruptsAfter
from octavo.engine.local_client import LocalClient, LocalStream
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.validation import Prompt
from octavo.errors import InvalidRequest, shown
from octavo.models.hub import resolve_model
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.outputs import RequestOutput, SequenceDelta
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams

Message = Mapping[str, Any]
P = TypeVar("P", SamplingParams, BeamSearchParams, PoolingParams)


class LLM:
    """A model, its KV cache and an engine, in this process.

    Calls share the engine: a stream goes on while `generate` runs. Calls from several threads take
    turns, a stream's piece by piece; `engine` and `client` must be used from one thread at a time.
    Processes that use an LLM are spawned, not forked: torch's threads do not outlive a fork, and on
    a CPU the child would wait for them for good.

    Example:
        >>> with LLM("demo") as llm:
        ...     [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=40))
        ...     output.outputs[0].text
    """

    engine: Engine
    """Schedules requests in token ids; its `kv`, `scheduler` and `executor` show how it stands."""
    client: LocalClient
    """Requests and their text, for programs that run steps themselves."""

    def __init__(self, model: str | PathLike[str] = "demo", **options: Any) -> None:
        """Load a model.

        The program around it stays as it is, unless `owns_process` is set; see EngineConfig. If it
        has not loaded torch yet, OpenMP's idle threads sleep sooner than they do by default.

        Args:
            model: a directory in Hugging Face format, a GGUF file, "demo", or a hub id.
            **options: the fields of EngineConfig, CacheConfig and SchedulerConfig.

        Raises:
            ConfigError: an option does not exist, or has a value that cannot be; `field` names it.
            ModelError: the directory cannot be served; the message says why.
            OutOfMemory: the settings do not fit; the message names some that would.

        Example:
            >>> llm = LLM("Qwen/Qwen3-0.6B", dtype="bfloat16", max_model_len=4096)
        """
        config = make_config(model, **options)
        path = resolve_model(config.model)
        tokenizer = Tokenizer.find(path)
        self.engine = load_engine(config, path)
        self.client = LocalClient(self.engine, tokenizer)
        self._turn = _Turn(self.client)
        self._numbers = count()  # in the names of pinned prefixes

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer. None: it has none; prompts are token ids and outputs have no text.

        Example:
            >>> llm.tokenizer.encode("Once upon a time")
        """
        return self.client.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Continue prompts. All are checked before the first one runs.

        Args:
            prompts: one prompt (text or token ids) or a list of prompts. Of a model with an encoder
                a prompt is the encoder's input, and may be a mapping with what the decoder starts
                with: {"prompt": text or token ids, "decoder_input_ids": token ids}.
            params: how tokens are drawn: for all prompts, or a list with one for each. None: the
                defaults of SamplingParams.
            use_tqdm: show a progress bar on stderr.
            priority: with the "priority" policy, smaller runs first: for all prompts, or a list.
            tenant: with the "fair" policy, whose share of the service it counts against, up to 256
                characters: for all prompts, or a list.
            cache_salt: prompts reuse only what was cached under an equal salt; up to 4,096
                characters.

        Returns:
            One output for each prompt, in their order, with `n` samples each. If the model has no
            finite logits for a prompt, its output's `error` says so, and its samples end with what
            there was; the other prompts are as they would be without it.

        Raises:
            InvalidRequest: an argument has a value that cannot be; `field` names it, and of several
                prompts the message says which.
            RequestTooLong: a prompt leaves no room for output, or can never fit into the KV cache.
            EngineFailed, EngineClosed: there is no engine any more.
            KeyboardInterrupt: Ctrl-C, once the step is over; the requests are aborted, and the
                engine goes on.

        Example:
            >>> params = SamplingParams(n=2, temperature=0.8, max_tokens=40)
            >>> for output in llm.generate(["Once upon a time", "One morning"], params):
            ...     print(output.prompt, [sample.text for sample in output.outputs])
        """
        params = SamplingParams() if params is None else params
        with self._turn:
            streams = self._prepare(SamplingParams, prompts, params, priority, tenant, cache_salt)
            return self._finish(streams, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Find the best continuations of each prompt. All are checked before the first one runs.

        Args:
            prompts: one prompt or a list of prompts, as for `generate`.
            params: how to search: for all prompts, or a list with one for each.
            use_tqdm: show a progress bar on stderr.
            priority: with the "priority" policy, smaller runs first: for all prompts, or a list.
            tenant: with the "fair" policy, whose share of the service it counts against, up to 256
                characters: for all prompts, or a list.
            cache_salt: prompts reuse only what was cached under an equal salt.

        Returns:
            One output for each prompt, in their order, with its beams, best first; `score` is what
            they are ranked by.

        Raises:
            InvalidRequest, RequestTooLong, EngineFailed, EngineClosed: as `generate`.

        Example:
            >>> [output] = llm.beam_search("The king", BeamSearchParams(beam_width=4))
            >>> output.outputs[0].text, output.outputs[0].score
        """
        with self._turn:
            streams = self._prepare(BeamSearchParams, prompts, params, priority, tenant, cache_salt)
            return self._finish(streams, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Make one vector of each prompt, from the model's last hidden states.

        Args:
            prompts: one prompt or a list of prompts, as for `generate`; each may fill the context.
            params: which hidden states become the vector: for all prompts, or a list with one for
                each. None: the last one's, normalised.
            use_tqdm: show a progress bar on stderr.
            priority: with the "priority" policy, smaller runs first: for all prompts, or a list.
            tenant: with the "fair" policy, whose share of the service it counts against: for all
                prompts, or a list.
            cache_salt: prompts reuse only what was cached under an equal salt; a mean reuses
                nothing, because it needs the hidden states of all tokens.

        Returns:
            One output for each prompt, in their order, with its `embedding` and no samples.

        Raises:
            InvalidRequest, RequestTooLong, EngineFailed, EngineClosed: as `generate`;
                InvalidRequest also if the model has an encoder.

        Example:
            >>> cat, dog = llm.embed(["A cat is an animal.", "A dog is an animal."])
            >>> sum(x * y for x, y in zip(cat.embedding, dog.embedding))  # their cosine
        """
        params = PoolingParams() if params is None else params
        with self._turn:
            streams = self._prepare(PoolingParams, prompts, params, priority, tenant, cache_salt)
            return self._finish(streams, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        cache_salt: str = "",
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, by the model's chat template.

        Args:
            messages: one conversation (a list of messages with "role" and "content") or a list of
                conversations.
            params: how tokens are drawn: for all conversations, or a list with one for each. None:
                the defaults of SamplingParams.
            use_tqdm: show a progress bar on stderr.
            priority: with the "priority" policy, smaller runs first: for all, or a list.
            tenant: with the "fair" policy, whose share of the service it counts against: for all,
                or a list.
            cache_salt: conversations reuse only what was cached under an equal salt.
            **template_variables: handed to the template (`tools`, `enable_thinking`, ...).

        Returns:
            One output for each conversation, in their order.

        Raises:
            InvalidRequest: also if the model has no chat template, or its template refuses; of
                several conversations the message says which.
            RequestTooLong, EngineFailed, EngineClosed: as `generate`.

        Example:
            >>> [output] = llm.chat([{"role": "user", "content": "Hello"}])
            >>> output.outputs[0].text
        """
        if not isinstance(messages, list | tuple):
            raise InvalidRequest("messages", f"{shown(messages)} is not a list of messages")
        if not messages:
            raise InvalidRequest("messages", "there are none")
        single = isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        prompts: list[Prompt] = []
        for each in conversations:
            try:
                prompts.append(self.chat_prompt(each, **template_variables))
            except InvalidRequest as error:
                _name_one_of(error, "conversation", len(prompts), len(conversations))
                raise
        return self.generate(
            prompts,
            params,
            use_tqdm=use_tqdm,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
        )

    def chat_prompt(self, messages: Sequence[Message], **template_variables: Any) -> list[int]:
        """The token ids of a conversation that the assistant is to continue.

        Args:
            messages: one conversation: a list of messages with "role" and "content".
            **template_variables: handed to the template (`tools`, `enable_thinking`, ...).

        Returns:
            A prompt for `generate` or `stream`.

        Raises:
            InvalidRequest: `messages` is not a conversation, the model has no chat template, or its
                template refuses.

        Example:
            >>> prompt = llm.chat_prompt([{"role": "user", "content": "Hello"}])
            >>> for delta in llm.stream(prompt): print(delta.text, end="")
        """
        if self.engine.model_config.encoder is not None:
            raise InvalidRequest("messages", "a model with an encoder has no conversations")
        _check_conversation(messages)
        tokenizer = self.tokenizer
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
        tenant: str = "",
        cache_salt: str = "",
    ) -> Generator[SequenceDelta, None, None]:
        """Continue one prompt, piece by piece.

        The request is checked and queued when the first piece is asked for. Leaving the iterator
        early, or closing it, aborts the request; while another call uses the engine, that is before
        its next step.

        Args:
            prompt: as one of `generate`.
            params: how tokens are drawn. None: the defaults of SamplingParams. Beams are known only
                when all of them have ended, so there is no stream of them.
            priority: with the "priority" policy, smaller runs first.
            tenant: with the "fair" policy, whose share of the service it counts against.
            cache_salt: only what was cached under an equal salt is reused.

        Yields:
            What each step adds to each sample; `text` may be empty while a character is incomplete.

        Raises:
            InvalidRequest, RequestTooLong, EngineFailed, EngineClosed: as `generate`, when the
                first piece is asked for; InvalidRequest for BeamSearchParams at once.
            LogitsNotFinite: the model has no finite logits for what follows.

        Example:
            >>> for delta in llm.stream("Once upon a time", SamplingParams(max_tokens=40)):
            ...     print(delta.text, end="", flush=True)
        """
        [each] = _params_for_each(
            [SamplingParams() if params is None else params], 1, SamplingParams
        )
        return self._stream(prompt, each, priority, tenant, cache_salt)

    def pin_prefix(
        self, prefix: str | list[int], name: str | None = None, cache_salt: str = ""
    ) -> str:
        """Compute a prefix that many prompts will share, and keep it until `unpin_prefix`.

        Args:
            prefix: text or token ids; whole blocks of it are kept.
            name: for `unpin_prefix`. None: a new one.
            cache_salt: that of the prompts which are to find it.

        Returns:
            The name.

        Raises:
            InvalidRequest: the prefix is shorter than a block, the name is taken, or prefix
                caching is off.
            RequestTooLong: too few KV blocks would be left for other requests.
            LogitsNotFinite: the result is not finite; nothing is kept.
            EngineFailed, EngineClosed: there is no engine any more.

        Example:
            >>> name = llm.pin_prefix("Translate English to German. The sun is warm. => ...")
        """
        with self._turn:
            if name is None:
                names = (f"prefix-{number}" for number in self._numbers)
                name = next(each for each in names if each not in self.engine.kv.pins)
            self.client.pin_prefix(prefix, name, cache_salt)
        return name

    def unpin_prefix(self, name: str) -> None:
        """Let a pinned prefix be evicted again, like any other cached block.

        Args:
            name: what `pin_prefix` has returned.

        Raises:
            InvalidRequest: none of that name is pinned.
            EngineFailed, EngineClosed: there is no engine any more.

        Example:
            >>> llm.unpin_prefix(name)
        """
        with self._turn:
            self.engine.unpin_prefix(name)

    def reset_prefix_cache(self) -> None:
        """Forget what is cached for later prompts, except pinned prefixes.

        Requests that run go on with the blocks that they hold.

        Example:
            >>> llm.reset_prefix_cache()  # the next prompts are computed from their first token
        """
        with self._turn:
            self.engine.kv.reset_prefix_cache()

    def close(self) -> None:
        """Give the memory back; nothing can be generated after that. A second call does nothing.

        Example:
            >>> llm.close()  # or: with LLM("demo") as llm: ...
        """
        with self._turn:
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _prepare(
        self,
        kind: type[P],
        prompts: Prompt | Sequence[Prompt],
        params: object,
        priority: int | Sequence[int],
        tenant: str | Sequence[str],
        cache_salt: str,
    ) -> list[LocalStream]:
        """Check all requests before the first one runs."""
        many = _as_prompts(prompts)
        each_params = _params_for_each(params, len(many), kind)
        priorities = _for_each(priority, len(many), "priority")
        tenants = _for_each(tenant, len(many), "tenant")
        streams: list[LocalStream] = []
        try:
            for prompt, each, level, name in zip(
                many, each_params, priorities, tenants, strict=True
            ):
                streams.append(
                    self.client.make_request(
                        prompt, each, priority=level, cache_salt=cache_salt, tenant=name
                    )
                )
        except InvalidRequest as error:
            _name_one_of(error, "prompt", len(streams), len(many))
            raise
        return streams

    def _finish(self, streams: Sequence[LocalStream], use_tqdm: bool) -> list[RequestOutput]:
        """Queue requests, and run steps until all of them have ended."""
        from tqdm import tqdm

        num_tokens = 0
        try:
            for stream in streams:
                self.client.add_request(stream)
            waiting = {stream.request_id for stream in streams}
            bar = tqdm(total=len(streams), desc="requests", unit="req", disable=not use_tqdm)
            with bar, InterruptsAfter():
                while waiting:
                    self._turn.abort_left()
                    for output in self.client.step():
                        if output.request_id not in waiting:
                            continue  # a stream's, which goes on meanwhile
                        waiting.remove(output.request_id)
                        num_tokens += sum(len(each.token_ids) for each in output.outputs)
                        elapsed = bar.format_dict["elapsed"]
                        if elapsed:
                            bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tok/s", refresh=False)
                        bar.update()
        finally:
            # Those that have not come to their end.
            for stream in streams:
                self.client.abort_request(stream)
        return [stream.output for stream in streams if stream.output is not None]

    def _stream(
        self, prompt: Prompt, params: SamplingParams, priority: int, tenant: str, cache_salt: str
    ) -> Generator[SequenceDelta, None, None]:
        with self._turn:
            stream = self.client.make_request(
                prompt, params, priority=priority, cache_salt=cache_salt, tenant=tenant
            )
        deltas = stream.deltas = deque()
        try:
            with self._turn:
                self.client.add_request(stream)
            while deltas or stream.output is None:
                if deltas:
                    yield deltas.popleft()
                    continue
                with self._turn:
                    if not deltas and stream.output is None:  # no other thread's call was faster
                        self._turn.abort_left()
                        self.client.step()
            if stream.error is not None:
                raise stream.error
        finally:
            self._turn.leave(stream)


class _Turn:
    """The lock of the thread whose call uses the engine, and the streams that were left.

    The garbage collector closes a forgotten stream wherever it happens to run: in another thread,
    or within a step, in which an abort would leave the scheduler's lists and the plan at odds. So a
    stream that is left is aborted at once only if no call uses the engine, and otherwise by the
    thread whose call does: before its next step, or when its turn is over.
    """

    def __init__(self, client: LocalClient) -> None:
        self._client = client
        self._lock = RLock()
        self._depth = 0  # how often the thread that has the lock has entered
        self._left: deque[LocalStream] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        self._lock.release()
        self._abort_unless_used()

    def leave(self, stream: LocalStream) -> None:
        """Abort a stream's request, if it has not ended, as soon as that can be."""
        self._left.append(stream)
        self._abort_unless_used()

    def abort_left(self) -> None:
        """Abort what was left; for the thread whose turn it is, between two steps."""
        while self._left:
            self._client.abort_request(self._left.popleft())

    def _abort_unless_used(self) -> None:
        # Asked again when the lock is free: another thread may have left a stream meanwhile.
        while self._left and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return  # within a call of this thread
                self._depth = 1
                try:
                    self.abort_left()
                finally:
                    self._depth = 0
            finally:
                self._lock.release()


def load_engine(config: EngineConfig, path: Path | None = None) -> Engine:
    """An engine on this machine's device, in this process. Imports torch.

    Args:
        config: its options.
        path: where the model is. None: where its name says, which of a hub id is its latest
            revision.

    Raises:
        ConfigError, ModelError, OutOfMemory: as `LLM`.
    """
    from octavo.executor import make_executor

    model_config = read_model_config(path or resolve_model(config.model), config.model_impl)
    if config.max_model_len is not None:
        model_config = model_config.with_max_model_len(config.max_model_len)
    if config.quantization is not None and config.quantization != "auto":
        model_config = quantized_on_load(
            model_config, config.quantization, config.tensor_parallel_size
        )
    executor = make_executor(config, model_config)
    return Engine(executor.config, executor.model_config, executor)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt (a string, a list of token ids or a mapping) or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return [cast("Prompt", prompts)]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest("prompts", f"{shown(prompts)} is neither text, token ids nor a list")
    if prompts and isinstance(prompts[0], int):
        return [cast("list[int]", prompts)]
    return cast("Sequence[Prompt]", prompts)


def _name_one_of(error: InvalidRequest, kind: str, index: int, count: int) -> None:
    """Let an error about one of several say which."""
    if count > 1:
        error.args = (f"{kind} {index + 1} of {count}: {error}",)


def _for_each(value: Any, count: int, name: str) -> Sequence[Any]:
    """One value for all prompts, or a list with one for each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(name, f"{len(value)} for {count} prompts")
    return value


def _params_for_each(value: object, count: int, kind: type[P]) -> Sequence[P]:
    """Parameters of this kind for each prompt; those of the other are another method's."""
    for params in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(params, kind):
            method = _METHODS.get(type(params))
            hint = f"; call {method}()" if method else ""
            raise InvalidRequest("params", f"{shown(params)} is not a {kind.__name__}{hint}")
    return _for_each(value, count, "params")


_METHODS: dict[type, str] = {
    SamplingParams: "generate",
    BeamSearchParams: "beam_search",
    PoolingParams: "embed",
}


def _check_conversation(messages: object) -> None:
    """Templates are programs, and would render something even if it is not a conversation."""
    if not isinstance(messages, list | tuple):
        raise InvalidRequest("messages", f"{shown(messages)} is not a list of messages")
    if not messages:
        raise InvalidRequest("messages", "there are none")
    for number, message in enumerate(messages):
        field = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(field, f"{shown(message)} is not a message (role and content)")
        if not isinstance(role := message.get("role"), str):
            raise InvalidRequest(f"{field}.role", f"{shown(role)} is not text")
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else []
        is_text = content is None or isinstance(content, str | list | tuple)
        if not is_text or not all(isinstance(part, Mapping) for part in parts):
            raise InvalidRequest(f"{field}.content", f"{shown(content)} is neither text nor parts")
