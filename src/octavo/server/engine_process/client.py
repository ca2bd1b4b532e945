"""The engine as the API process sees it: prompts in, text out, even if its process dies."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.engine.events import Counters, Event, Gauges
from octavo.engine.snapshot import RequestView, Snapshot
from octavo.engine.tokenizer import Room, Tokenizer
from octavo.engine.validation import (
    Params,
    PreparedRequest,
    Prompt,
    RequestPreparer,
    parts_of,
)
from octavo.errors import InvalidRequest, Overloaded, RequestTooLong, Unavailable, shown
from octavo.models.hub import resolve_model
from octavo.models.registry import read_model_config
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams, valid_text
from octavo.server.engine_process import messages as m
from octavo.server.engine_process.delivery import Delivery
from octavo.server.engine_process.draining import Drainer
from octavo.server.engine_process.fleet import Fleet
from octavo.server.engine_process.journal import Journal, OpenRequest, Pin
from octavo.server.engine_process.listening import Listener, Subscription
from octavo.server.engine_process.messages import EngineInfo
from octavo.server.engine_process.placement import Replication
from octavo.server.engine_process.process import COMMAND
from octavo.server.engine_process.replica import Replica, add_counters, add_gauges, find_replica
from octavo.server.engine_process.stream import RequestStream
from octavo.server.engine_process.supervision import Health, Supervision
from octavo.server.offload import Offload
from octavo.structured.checker import GrammarChecker
from octavo.structured.output import StructuredOutput

MAX_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix that stays in the cache (paper section 4.4)."""

    name: str
    num_tokens: int  # whole blocks
    cache_salt: str


class EngineClient:
    """Owns the engine processes, through their fleet, and everything that is text.

    >>> client = EngineClient(make_config("demo"))
    >>> await client.start()
    >>> async with await client.generate("Once upon a time", SamplingParams()) as stream:
    ...     async for event in stream: ...
    >>> await client.close()
    """

    def __init__(
        self,
        config: EngineConfig,
        supervision: Supervision | None = None,
        listeners: Sequence[Listener] = (),
        command: Sequence[str] = COMMAND,
        replication: Replication | None = None,
    ) -> None:
        """Reads config.json and the tokenizer. Raises ModelError or ConfigError.

        `command` starts an engine process; see `EngineProcess`.
        """
        path = resolve_model(config.model)
        self.config = config
        self.model_config = read_model_config(path, config.model_impl)
        if config.max_model_len is not None:
            self.model_config = self.model_config.with_max_model_len(config.max_model_len)
        # None: the model has none; prompts are token ids.
        self.tokenizer = Tokenizer.find(path)
        self.offload = Offload()
        self._supervision = supervision or Supervision()
        self._journal = Journal()
        self._delivery = Delivery(listeners)
        self._fleet = self._delivery.fleet = Fleet(
            config, path, self._supervision, self._journal, self._delivery, command, replication
        )
        self._grammars = GrammarChecker(
            self.model_config.path,
            self.model_config.vocab_size,
            self.model_config.eos_token_ids,
        )
        self._preparer = RequestPreparer(
            self.model_config, self.tokenizer, config, self._grammars.check
        )
        self._is_draining = False

    async def start(self) -> None:
        """Start the engine processes and wait until all are ready.

        Raises what the engine raised: ConfigError, ModelError, OutOfMemory; EngineFailed if a
        process died.
        """
        await self._fleet.start()

    async def close(self) -> None:
        """End the engine processes; open requests end as aborted. A second call does nothing."""
        for stream in list(self._delivery.streams.values()):
            stream.abort()
        await self._fleet.close()
        self.offload.close()
        self._grammars.close()
        for subscription in self._delivery.subscriptions:
            subscription.close()

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, and wait for the open ones, at most this long. Returns how many are
        still open; `close` aborts them."""
        self._is_draining = True
        if self._delivery.streams:
            self._delivery.all_ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._delivery.all_ended.wait(), seconds)
        return len(self._delivery.streams)

    @property
    def info(self) -> EngineInfo:
        """What the engines that run, or ran last, are like. Only after `start`."""
        info = self._fleet.info
        assert info is not None, "start() has not returned"
        return info

    @property
    def health(self) -> Health:
        return self._fleet.health(len(self._delivery.streams), self._is_draining)

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engines behind this client; not to be changed."""
        return self._fleet.replicas

    def replica(self, number: int) -> Replica:
        """One of them. Raises InvalidRequest: there is no such replica."""
        return find_replica(self._fleet.replicas, number)

    @property
    def drainer(self) -> Drainer:
        """Restarts or stops replicas, one after the other."""
        return self._fleet.drainer

    @property
    def gauges(self) -> Gauges:
        """How things stood after the last steps, in all replicas together."""
        return add_gauges([replica.gauges for replica in self._fleet.replicas])

    @property
    def counters(self) -> Counters:
        """Totals over all engine processes."""
        return add_counters([replica.counters for replica in self._fleet.replicas])

    @property
    def open_requests(self) -> dict[str, OpenRequest]:
        """The open requests by id; callers must not change them."""
        return self._journal.requests

    # ---------------------------------------------------------------- requests

    async def generate(
        self,
        prompt: Prompt,
        params: Params,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        home: int | None = None,
    ) -> RequestStream:
        """Queue a request; returns when the engine has accepted it.

        `home`: the replica that is to have it, if it serves. None: the best one.

        Raises:
            InvalidRequest: a bad value (RequestTooLong: it can never fit); `field` names it.
                `request_id` must not be that of an open request.
            Overloaded: too many requests wait already; `retry_after` is an estimate in seconds.
            Unavailable: the server drains or has closed, or the engine is given up.
        """
        arrival_time = time.monotonic()
        try:
            self._check_open()
            self._check_room(tenant)
            given, decoder_input_ids = parts_of(prompt)
            is_output = not isinstance(params, PoolingParams)
            token_ids = await self._tokenize(given, "prompt", is_output)
            whole: Prompt = token_ids
            if decoder_input_ids is not None:
                whole = {"prompt": token_ids, "decoder_input_ids": decoder_input_ids}
            if not isinstance(params, PoolingParams) and params.structured is not None:
                begun = token_ids if decoder_input_ids is None else decoder_input_ids
                await self._check_structured(params, begun)
            self._check_open()  # both may have taken a while, in which others have come
            self._check_room(tenant)
            # The engine may hold less than the model could use.
            max_model_len = self.info.max_model_len
            prepared = self._preparer.prepare(
                whole, params, max_model_len, priority, cache_salt, tenant
            )
            self._check_width(prepared)
            if request_id is None:
                request_id = uuid.uuid4().hex
            valid_text("request_id", request_id)
            text = given if isinstance(given, str) else None
            entry = OpenRequest(request_id, prepared, text, arrival_time, home=home)
            stream = RequestStream(entry, params, self.tokenizer, self._delivery)
            await self._open(stream)
            return stream
        except (InvalidRequest, Overloaded, Unavailable) as error:
            self._delivery.notify("request_refused", error)
            raise

    def abort(self, request_id: str) -> None:
        """End an open request, if there is one of this id, as its stream's `abort` does."""
        stream = self._delivery.streams.get(request_id)
        if stream is not None:
            stream.abort()

    async def check_structured(self, structured: StructuredOutput) -> None:
        """Raises InvalidRequest if an output cannot be kept to a form; compiles its grammar, but
        not on the event loop."""
        await self._check_structured(SamplingParams(structured=structured))

    async def _check_structured(
        self, params: SamplingParams | BeamSearchParams, prompt: str | list[int] = ""
    ) -> None:
        """See RequestPreparer.check_structured. What is known of a grammar is said at once: the
        threads may be busy with others, which take seconds."""
        form = params.structured
        assert isinstance(form, StructuredOutput), "the parameters make it one"
        if not form.begun and self._grammars.has_verdict(form.to_grammar()):
            self._preparer.check_structured(params)
            return
        await self.offload.grammar(lambda: self._preparer.check_structured(params, prompt))

    def offer_tail(self, entry: OpenRequest, index: int) -> None:
        """Requests that go on where a sample of another one stands are about to come: let them find
        all of it in the cache. Nothing happens if it does not run."""
        if self._journal.requests.get(entry.request_id) is entry:
            self._fleet.tell(entry, m.OfferTail(entry.request_id, index))

    async def encode(
        self,
        texts: Sequence[str],
        field: str,
        add_special_tokens: bool = True,
        any_length: bool = False,
        before_output: bool = True,
    ) -> list[list[int]]:
        """Token ids of each text; long ones, or many, do not hold up the other requests.

        Raises InvalidRequest about `field`, or `field[i]` where there are several texts, and
        RequestTooLong unless `any_length` is allowed. `before_output`: with room for a token more.
        """
        try:
            return await self._encode(texts, field, add_special_tokens, any_length, before_output)
        except RequestTooLong as error:
            self._delivery.notify("request_refused", error)
            raise

    def check_prompts(self, prompts: Sequence[Prompt], field: str) -> None:
        """Raises InvalidRequest about `field[i]` if a prompt that is to be read whole cannot be."""
        room = Room.whole(self.info.max_model_len)
        for index, prompt in enumerate(prompts):
            name = field if len(prompts) == 1 else f"{field}[{index}]"
            self._preparer.tokenize(parts_of(prompt)[0], room, name)

    # ---------------------------------------------------------------- pinned prefixes

    async def pin_prefix(
        self, prompt: str | list[int], name: str | None = None, cache_salt: str = ""
    ) -> PinnedPrefix:
        """Compute a prefix and keep it in the cache, also after a restart of the engine.

        Raises InvalidRequest: it is shorter than a block or too long; the name is taken or no text.
        """
        self._check_open()
        if not self.info.enable_prefix_caching:
            raise InvalidRequest("prefix", "prefixes can be pinned only with prefix caching on")
        token_ids = await self._tokenize(prompt, "prefix")
        info = self.info
        token_ids = self._preparer.whole_blocks(token_ids, info.max_model_len, info.block_size)
        if name is None:
            name = f"prefix-{uuid.uuid4().hex[:8]}"
        valid_text("name", name)
        if name in self._journal.pins:
            raise InvalidRequest("name", f"a prefix {name!r} is pinned already")
        pin = Pin(name, token_ids, cache_salt, asyncio.get_running_loop().create_future())
        self._fleet.pin(pin)
        try:
            await asyncio.shield(pin.computed)
        except asyncio.CancelledError:
            pin.computed.cancel()
            if self._journal.pins.get(name) is pin:
                await self._fleet.unpin(pin)
            raise
        return _pinned(pin)

    async def unpin_prefix(self, name: str) -> PinnedPrefix:
        """Raises InvalidRequest if there is no such prefix."""
        self._check_open()
        pin = self._journal.pins.get(name)
        if pin is None or not pin.computed.done():
            number = sum(each.computed.done() for each in self._journal.pins.values())
            raise InvalidRequest(
                "name", f"no prefix {shown(name)} is pinned; number of pinned prefixes: {number}"
            )
        await self._fleet.unpin(pin)
        return _pinned(pin)

    def list_prefixes(self) -> list[PinnedPrefix]:
        return [_pinned(pin) for pin in self._journal.pins.values() if pin.computed.done()]

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, in all replicas, except pinned ones."""
        self._check_open()
        await self._fleet.reset_prefix_caches()

    # ---------------------------------------------------------------- looking inside

    async def snapshot(self, replica: int = 0) -> Snapshot:
        """A replica's blocks, queues and block tables between two steps. Raises Unavailable while
        it has no engine process to ask, InvalidRequest if there is no such replica."""
        return await self.replica(replica).exchange.picture()

    async def inspect(self, request_id: str) -> RequestView | None:
        """One open request with its tokens; None if no engine knows it. Raises Unavailable while
        there is no engine process to ask."""
        entry = self._journal.requests.get(request_id)
        if entry is None or entry.replica is None:
            return None
        exchange = self._fleet.replicas[entry.replica].exchange
        view: RequestView | None = await exchange.ask(m.Look, request_id=request_id)
        return view

    @contextlib.asynccontextmanager
    async def events(self, replica: int = 0) -> AsyncIterator[AsyncIterator[list[Event]]]:
        """A subscription to all events of a replica, batch by batch (one a step that had any).

        >>> async with client.events() as batches:
        ...     async for batch in batches: ...

        While there is no subscriber, the engine sends only admissions and preemptions. A subscriber
        that does not keep up loses the oldest batches. The iterator ends when the client is closed.
        """
        subscription = Subscription(replica)
        subscriptions, exchange = self._delivery.subscriptions, self.replica(replica).exchange
        subscriptions.append(subscription)
        exchange.watch(True)
        try:
            yield subscription
        finally:
            subscriptions.remove(subscription)
            exchange.watch(any(each.replica == replica for each in subscriptions))

    # ---------------------------------------------------------------- inside

    async def _open(self, stream: RequestStream) -> None:
        """Send a request to the engine; returns when it has been accepted."""
        streams, request_id = self._delivery.streams, stream.request_id
        if request_id in streams:
            raise InvalidRequest("request_id", f"{request_id!r} is in use")
        streams[request_id] = stream
        try:
            await self._fleet.open(stream.entry)
        except asyncio.CancelledError:
            stream.abort()
            raise
        except Exception:
            self._fleet.drop(stream.entry)
            if streams.get(request_id) is stream:
                self._delivery.forget(stream)
            raise

    async def _encode(
        self,
        texts: Sequence[str],
        field: str,
        add_special_tokens: bool = True,
        any_length: bool = False,
        before_output: bool = True,
    ) -> list[list[int]]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequest(field, "the model has no tokenizer; give token ids")
        room, limit = None, self.info.max_model_len
        if not any_length:
            room = self._preparer.room(limit) if before_output else Room.whole(limit)
        names = [field] if len(texts) == 1 else [f"{field}[{i}]" for i in range(len(texts))]
        named = list(zip(texts, names, strict=True))
        if room is not None:
            for text, name in named:  # what cannot fit waits for no thread
                tokenizer.check_length(text, name, room)

        def encode_all() -> list[list[int]]:
            return [
                tokenizer.encode(text, add_special_tokens, field=name, room=room)
                for text, name in named
            ]

        return await self.offload.text(sum(map(len, texts)), encode_all)

    async def _tokenize(
        self, prompt: str | list[int], field: str, before_output: bool = True
    ) -> str | list[int]:
        """Encode text as token ids; any other prompt is returned unchanged and checked later."""
        if not isinstance(prompt, str):
            return prompt
        [token_ids] = await self._encode([prompt], field, before_output=before_output)
        return token_ids

    def _check_open(self) -> None:
        if self._is_draining or self._fleet.is_closed:
            raise Unavailable("the server is shutting down")
        if self._fleet.is_given_up:
            raise Unavailable(str(self.health.reason), self._fleet.seconds_to_revival)

    def _check_width(self, prepared: PreparedRequest) -> None:
        limit = self.info.max_num_seqs
        if prepared.width > limit:
            field = "n" if prepared.beam is None else "beam_width"
            raise InvalidRequest(field, f"{prepared.width} sequences exceed max_num_seqs ({limit})")

    def _check_room(self, tenant: str) -> None:
        limit, num_waiting = self._supervision.max_waiting, self._journal.num_waiting
        if num_waiting < limit:
            return
        # One tenant must not fill the queue for all: the others may add their shares on top.
        is_fair = self.info.policy == "fair" and num_waiting < 2 * limit
        if is_fair and self._journal.is_below_share(tenant, limit):
            return
        seconds = num_waiting * self._delivery.seconds_per_request
        raise Overloaded(
            f"{num_waiting} requests wait already, and max_waiting is {limit}",
            min(MAX_RETRY_SECONDS, max(1.0, seconds)),
        )


def _pinned(pin: Pin) -> PinnedPrefix:
    return PinnedPrefix(pin.name, len(pin.token_ids), pin.cache_salt)
