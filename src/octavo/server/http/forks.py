"""The children of forks: what has come of them, for any number of readers at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from octavo.outputs import RequestOutput, SequenceDelta
from octavo.server.engine_process.stream import RequestStream, StreamEvent
from octavo.server.http.errors import ApiError
from octavo.server.http.keys import Tenant
from octavo.server.http.responses import tokens_of_grammars
from octavo.server.http.shares import Shares
from octavo.server.offload import Offload

BodyT = TypeVar("BodyT")
MAX_TOKENS = 1 << 21  # of all ended forks together


@dataclass(slots=True)
class Child:
    """What has come of one child."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: SequenceDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Fork(Generic[BodyT]):
    """One fork: takes in what its requests bring, and lets readers follow from the beginning.

    Each prompt has `num_samples` children, which are counted through all prompts. Those of a beam
    search are known when it has ended.
    """

    def __init__(
        self,
        head: dict[str, Any],
        body: BodyT,
        tenant: Tenant,
        streams: Sequence[RequestStream],
        num_samples: int,
        offload: Offload,
    ) -> None:
        """Begins at once; the streams are this object's from now on.

        `head`: what every reply begins with, such as its id. `body`: what was asked for.
        """
        self.key = (tenant.name, str(head["id"]))
        self.head = head
        self.body = body
        self.streams = streams
        self.num_samples = num_samples
        self.children = [Child() for _ in range(len(streams) * num_samples)]
        self._outputs: list[RequestOutput | None] = [None] * len(streams)
        self._offload = offload
        self._error: BaseException | None = None
        self._news = asyncio.Event()  # set, and replaced, when something has come
        self.ended = asyncio.gather(*map(self._take_in, range(len(streams))))
        self.ended.add_done_callback(self._note_end)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and outputs, and those that take as much memory as the grammars; each
        log-probability counts as ten."""
        grammars = (stream.entry.request.sampling.grammar for stream in self.streams)
        return tokens_of_grammars(grammars) + sum(
            len(stream.prompt_token_ids)
            + sum(len(sample.token_ids) + 10 * len(sample.logprobs) for sample in stream.samples)
            for stream in self.streams
        )

    # ---------------------------------------------------------------- for readers

    async def items(self, index: int | None = None) -> AsyncIterator[tuple[int, StreamEvent]]:
        """What has come and comes of all children, or of one: deltas, and at the end the whole
        outputs, each with the number of its prompt. Raises what a request has raised."""
        wanted = range(len(self.children)) if index is None else [index]
        num_read = {each: (0, 0) for each in wanted}
        while True:
            news = self._news
            is_over = self.ended.done()
            for each, (num_texts, num_tokens) in list(num_read.items()):
                child = self.children[each]
                seen = len(child.texts), len(child.token_ids)
                if seen == (num_texts, num_tokens) and child.finish_reason is None:
                    continue
                prompt, sample_index = divmod(each, self.num_samples)
                stream = self.streams[prompt]
                delta = SequenceDelta(
                    stream.request_id,
                    sample_index,
                    "".join(child.texts[num_texts:]),
                    child.token_ids[num_tokens:],
                    [],
                    child.finish_reason,
                    child.stop_reason,
                )
                num_read[each] = seen
                if child.finish_reason is not None:
                    del num_read[each]
                # All of a child that has ended, for those who come late.
                unpack = partial(stream.logprobs, sample_index, num_tokens, seen[1])
                delta.logprobs = await self._offload.reply(len(delta.token_ids), unpack)
                yield prompt, delta
            if index is not None and not num_read:
                return
            if is_over:
                break
            await news.wait()
        if self._error is not None:
            raise self._error
        for prompt, output in enumerate(self._outputs):
            assert output is not None, "it has ended without an error"
            if output.outputs:  # else it was a search, and cancelled
                yield prompt, output

    async def results(self) -> list[RequestOutput]:
        """The whole outputs, as `RequestStream.unscored` has them, when all children have ended.
        Raises what a request has raised."""
        while not self.ended.done():
            await self._news.wait()
        if self._error is not None:
            raise self._error
        return [await stream.unscored() for stream in self.streams]

    async def result(self, index: int) -> tuple[int, SequenceDelta]:
        """All that has come of one child, when it has ended, with the number of its prompt. Raises
        what a request has raised."""
        child = self.children[index]
        while child.finish_reason is None and not self.ended.done():
            await self._news.wait()
        if child.finish_reason is None and self._error is not None:
            raise self._error
        prompt, delta = await anext(self.items(index))
        assert isinstance(delta, SequenceDelta), "it has ended"
        return prompt, delta

    def cancel(self, index: int | None = None) -> int:
        """End one child, or all of them, now. Returns how many had not ended."""
        if index is not None:
            stream = self.streams[index // self.num_samples]
            sample = stream.samples[index % self.num_samples]
            is_open = sample.finish_reason is None
            stream.cancel(sample.index)
            return int(is_open)
        num_open = 0
        for stream in self.streams:
            reasons = [sample.finish_reason for sample in stream.samples]
            if not reasons and stream.output is None:  # a search
                num_open += self.num_samples
            num_open += reasons.count(None)
            stream.cancel()
        return num_open

    # ---------------------------------------------------------------- inside

    async def _take_in(self, prompt: int) -> None:
        async for item in self.streams[prompt]:
            if isinstance(item, SequenceDelta):
                self.children[prompt * self.num_samples + item.index].add(item)
            else:
                self._outputs[prompt] = item
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _note_end(self, ended: asyncio.Future[list[None]]) -> None:
        self._error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
        if self._error is not None:  # no child goes on without its siblings
            for stream in self.streams:
                stream.abort()
        self._tell()


class Forks:
    """Owns the forks that can be joined or cancelled by their ids. An id is its tenant's own."""

    def __init__(self, max_ended: int) -> None:
        """`max_ended`: how many of each tenant are remembered after their end, those that ended or
        were asked for last."""
        self._open: dict[tuple[str, str], Fork[Any]] = {}
        self._ended: Shares[tuple[str, str], Fork[Any]] = Shares(max_ended, MAX_TOKENS)

    def add(self, fork: Fork[Any], is_kept: bool) -> None:
        """`is_kept`: remember it after its end; otherwise the caller will `remove` it."""
        self._open[fork.key] = fork
        if is_kept:
            fork.ended.add_done_callback(lambda _: self._keep(fork))

    def remove(self, fork: Fork[Any]) -> None:
        """Nobody can join it any more."""
        if self._open.get(fork.key) is fork:
            del self._open[fork.key]
        if self._ended.get(fork.key) is fork:
            self._ended.remove(fork.key)

    def find(self, fork_id: str, tenant: Tenant, index: int | None = None) -> Fork[Any]:
        """Raises ApiError 404 if the tenant has no such fork, or it has no such child: beams are
        none, because they are known together."""
        key = (tenant.name, fork_id)
        fork = self._open.get(key) or self._ended.get(key)
        if fork is None:
            raise ApiError(
                404, f"fork_id: there is no fork {fork_id[:160]!r}", "fork_id", "fork_not_found"
            )
        if index is not None:
            num_children = sum(len(stream.samples) for stream in fork.streams)
            if not 0 <= index < num_children:
                message = f"index: {index} is not one of the fork's {num_children} children"
                raise ApiError(404, message, "index", "child_not_found")
        return fork

    def _keep(self, fork: Fork[Any]) -> None:
        if self._open.get(fork.key) is not fork:
            return
        del self._open[fork.key]
        self._ended.put(fork.key[0], fork.key, fork, fork.num_tokens)
