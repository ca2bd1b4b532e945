"""The replicas behind one server, and which of them computes a request.

What is open belongs to the journal. Each request is sent to one replica; if that one's process
dies, the request goes on at another, or at the next process of the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from octavo.config import EngineConfig
from octavo.engine.events import Admitted
from octavo.errors import EngineFailed, OctavoError, RequestFailed, Unavailable
from octavo.server.engine_process import messages as m
from octavo.server.engine_process.draining import Drainer, Then
from octavo.server.engine_process.exchange import Loss
from octavo.server.engine_process.journal import Journal, OpenRequest, Pin
from octavo.server.engine_process.placement import Replication, place_replicas
from octavo.server.engine_process.process import COMMAND, Death
from octavo.server.engine_process.quarantine import Quarantine
from octavo.server.engine_process.rebalancing import offers
from octavo.server.engine_process.replica import Replica
from octavo.server.engine_process.routing import Router
from octavo.server.engine_process.slices import Slices
from octavo.server.engine_process.supervision import Health, Supervision

logger = logging.getLogger(__name__)

RELIEF_SECONDS = 0.1  # between two times that a replica looks for requests that wait elsewhere
# The best one first.
STATES = ("ready", "draining", "restarting", "starting", "stopped", "failed", "closed")


class Audience(Protocol):
    """Callbacks for what becomes of requests and engines; those of `Delivery`."""

    def engine_ready(self, info: m.EngineInfo) -> None: ...

    def engine_died(self, cause: str) -> None: ...

    def accepted(self, entry: OpenRequest) -> None:
        """A request was accepted for the first time; a later engine may accept it again."""

    def admitted(self, entry: OpenRequest, admitted: Admitted) -> None:
        """A request got its first blocks; a later engine may admit it again."""

    def reported(self, number: int, report: m.StepReport) -> None:
        """A replica has taken a step."""

    def failed(self, entry: OpenRequest, error: OctavoError) -> None:
        """A request has failed; it is no longer in the journal."""


class Fleet:
    """Owns the replicas; sends each open request to one that may run it."""

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        supervision: Supervision,
        journal: Journal,
        audience: Audience,
        command: Sequence[str] = COMMAND,
        replication: Replication | None = None,
    ) -> None:
        """`path` is that of the model. `command` starts an engine process; see `EngineProcess`.
        Raises ConfigError."""
        replication = replication or Replication()
        places = place_replicas(config, replication.replicas)
        self.replicas = [
            Replica(number, own, path, supervision, self, command, environment)
            for number, (own, environment) in enumerate(places)
        ]
        self.info: m.EngineInfo | None = None  # what holds for all of them
        self._journal = journal
        self._audience = audience
        self.drainer = Drainer(self.replicas, self)
        self._quarantine = Quarantine(journal, self.replicas)
        self._router = Router(len(places), replication.routing)
        self._scheduling = config.scheduler
        self._chooses_quantization = config.quantization == "auto"  # the first one, for all
        self._unproven: set[int] = set()  # replicas that get their share once they have computed
        self._relief_times = [0.0] * len(places)  # before which none looks for waiting requests
        # Thousands of requests may have to be moved.
        self._slices = Slices()
        self._is_dispatching = False
        self._is_dispatch_due = False  # once more, when the present one has ended
        self._sharing: set[int] = set()  # replicas that are taking their share

    async def start(self) -> None:
        """Start all replicas; raises the error of the first that fails, and leaves none then."""
        starts: list[asyncio.Future[None]] = []
        others = list(self.replicas)
        try:
            if self._chooses_quantization:
                first = others.pop(0)
                starts.append(asyncio.ensure_future(first.start()))
                await starts[0]
                assert first.info is not None, "it is ready"
                for replica in others:
                    replica.keep_quantization(first.info)
            starts += [asyncio.ensure_future(replica.start()) for replica in others]
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await asyncio.gather(*(replica.close() for replica in self.replicas))
            raise

    async def close(self) -> None:
        """End all engine processes; what is open fails."""
        await self.drainer.close()
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        self._slices.close()
        for _ in self._giving_up(Unavailable("the server has closed")):
            pass

    # ---------------------------------------------------------------- how it is

    @property
    def is_closed(self) -> bool:
        return all(replica.state == "closed" for replica in self.replicas)

    @property
    def is_given_up(self) -> bool:
        """Whether no replica serves, or is about to."""
        return all(replica.state in ("failed", "stopped") for replica in self.replicas)

    @property
    def seconds_to_revival(self) -> float | None:
        """Seconds until a replica that was given up is started again; None if none will be."""
        times = [replica.seconds_to_revival for replica in self.replicas]
        return min((seconds for seconds in times if seconds is not None), default=None)

    def health(self, num_open: int, is_draining: bool) -> Health:
        """The server's present health, with `num_open` requests that have not ended."""
        troubles = [replica.trouble(num_open) for replica in self.replicas]
        reason = None
        if None not in troubles:
            reason = str(troubles[0])
            if len(troubles) > 1:
                named = (f"replica {i}: {trouble}" for i, trouble in enumerate(troubles))
                reason = "; ".join(named)
        elif is_draining:
            reason = "the server is shutting down"
        state = min((replica.state for replica in self.replicas), key=STATES.index)
        shown = "draining" if is_draining and state == "ready" else state
        return Health(reason is None, reason, shown, num_open)

    # ---------------------------------------------------------------- what the client asks for

    def open(self, entry: OpenRequest) -> asyncio.Future[None]:
        """Add a request to the journal; the future is done when an engine has accepted it."""
        entry.accepted = asyncio.get_running_loop().create_future()
        entry.chain = self._router.chain(entry.request)
        self._journal.add(entry)
        self._place(entry)
        return entry.accepted

    def drop(self, entry: OpenRequest) -> None:
        """A request has ended, or its client has left."""
        if not self._is_open(entry):
            return  # refused while its client was leaving
        self._journal.remove(entry)
        if entry.accepted is not None and not entry.accepted.done():
            # Ended by a caller other than the one that waits.
            error = Unavailable("the request was ended before it was accepted")
            entry.accepted.set_exception(error)
        self._leave(entry)
        self._release_from_quarantine()

    def fail(self, entry: OpenRequest, error: OctavoError) -> None:
        """Fail a request."""
        logger.error("request %s has failed: %s", entry.request_id, error)
        if entry.accepted is not None and not entry.accepted.done():
            entry.accepted.set_exception(error)
        self.drop(entry)
        self._audience.failed(entry, error)

    def tell(self, entry: OpenRequest, command: m.Abort | m.FinishSample | m.OfferTail) -> None:
        """Send a command to the engine that has a request; does nothing if there is none."""
        if entry.replica is not None:
            self.replicas[entry.replica].exchange.tell(entry, command)

    def pin(self, pin: Pin) -> None:
        """Pin a prefix in all engine processes, also later ones; sets `pin.computed` when done."""
        self._journal.pins[pin.name] = pin
        self._place_pin(pin)

    async def unpin(self, pin: Pin) -> None:
        """Unpin a prefix in all engine processes, also later ones."""
        del self._journal.pins[pin.name]
        # If an engine dies meanwhile, the prefix is no longer pinned there either.
        asked = [self.replicas[number].exchange.unpin(pin) for number in pin.holders]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, Unavailable):
                raise error

    # ---------------------------------------------------------------- what a drain asks for

    async def reset_prefix_caches(self) -> None:
        """Have all processes forget what they have cached, except pinned prefixes; a replica
        without a process has nothing cached."""
        with_process = [replica for replica in self.replicas if replica.is_serving]
        for replica in with_process:
            self._router.forget(replica.number)
        asked = [replica.exchange.ask(m.ResetPrefixCache) for replica in with_process]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            # A process that has died meanwhile has forgotten everything.
            if isinstance(answer, BaseException) and not isinstance(answer, Unavailable):
                raise answer

    async def vacate(self, replica: Replica) -> None:
        """See Mover.vacate."""
        done = asyncio.get_running_loop().create_future()
        self._slices.begin(self._vacating(replica, done))
        await done

    def _vacating(self, replica: Replica, done: asyncio.Future[None]) -> Iterator[int]:
        try:
            for entry in [*replica.exchange.open.values()]:
                if entry.replica == replica.number and self._is_open(entry):
                    self._take(entry)
                    self._place(entry)
                    yield entry.num_tokens
            self._quarantine.leave(replica.number)
            self._dispatch()
        finally:
            if not done.done():  # its caller may have left
                done.set_result(None)

    async def stop_replica(self, replica: Replica, then: Then) -> None:
        """See Mover.stop_replica."""
        # Between a stop and a restart requests wait; only what stays stopped may be given up.
        await replica.stop("stopped" if then == "stop" else "restarting")
        self._lose(replica, "the replica was stopped")
        self._quarantine.leave(replica.number)
        self._dispatch()

    # ---------------------------------------------------------------- where requests go

    def _place(self, entry: OpenRequest) -> None:
        """Send a request to a replica, if one may run it now."""
        allowed = self._quarantine.allowed(entry)
        if not allowed:
            return
        if entry.home in allowed:
            allowed = [entry.home]
        candidates = [self.replicas[number] for number in allowed]
        self._send(entry, *self._router.choose(entry.request, entry.chain, candidates))

    def _send(self, entry: OpenRequest, replica: Replica, load: int) -> None:
        """Send a request to a replica, where it is a load of so many tokens."""
        replica.load += load
        self._quarantine.placed(entry, replica.number)
        replica.exchange.send_request(entry, load)

    def _share_with(self, replica: Replica, at_most: int | None = None) -> None:
        """Let a replica that serves again take its share of what waits at the others."""
        if replica.number not in self._sharing:
            self._sharing.add(replica.number)
            self._slices.begin(self._moving_to(replica, at_most))

    def _moving_to(self, replica: Replica, at_most: int | None) -> Iterator[int]:
        """Move requests one after the other."""
        number, num_moved = replica.number, 0
        try:
            donors = [each for each in self.replicas if each.is_serving and each is not replica]
            for donor, entry in offers(donors, self._scheduling):
                if num_moved == at_most or not replica.is_serving:
                    break
                if self._quarantine.ward == number:
                    break
                if not (entry.is_movable and entry.replica == donor.number and donor.is_serving):
                    continue  # no more
                load = self._router.reconsider(
                    entry.request, entry.chain, entry.load, donor, replica
                )
                if load is not None:
                    self._take(entry)
                    self._send(entry, replica, load)
                    num_moved += 1
                    yield entry.num_tokens
                else:
                    yield 0
        finally:
            self._sharing.discard(number)
        if num_moved:
            logger.info("replica %d takes %d waiting requests", number, num_moved)

    def _relieve_others(self, replica: Replica) -> None:
        """Let a replica in which nothing waits take some of what waits at others, now and then."""
        now, number = asyncio.get_running_loop().time(), replica.number
        if now < self._relief_times[number] or not replica.is_serving or replica.has_waiting:
            return
        self._relief_times[number] = now + RELIEF_SECONDS
        others = (each for each in self.replicas if each is not replica)
        if number not in self._unproven and any(each.is_behind for each in others):
            self._share_with(replica)

    def _place_pin(self, pin: Pin) -> None:
        """Have one replica compute a prefix; once that has been done, all."""
        if pin.is_proven:
            serving = [replica.number for replica in self.replicas if replica.is_serving]
            chosen = [number for number in serving if number not in pin.holders]
        elif pin.holders:
            return
        else:
            chosen = self._quarantine.allowed_for_pin(pin)[:1]
        for number in chosen:
            self.replicas[number].exchange.send_pin(pin)

    def _dispatch(self) -> None:
        """Send out all requests and pins that wait for a replica."""
        for pin in [*self._journal.pins.values()]:
            if not pin.is_proven:
                self._place_pin(pin)
        # What is under way must get to its end, or the requests at the end would never be sent.
        self._is_dispatch_due = True
        if not self._is_dispatching:
            self._is_dispatching = True
            self._slices.begin(self._dispatching())

    def _dispatching(self) -> Iterator[int]:
        """Send out requests one after the other."""
        try:
            while self._is_dispatch_due:
                self._is_dispatch_due = False
                for entry in self._quarantine.in_the_way():
                    if self._quarantine.is_in_the_way(entry) and self._is_open(entry):
                        self._take(entry)
                        yield 0
                first = self._quarantine.first
                if first is not None and first.replica is None:
                    self._place(first)
                for entry in [e for e in self._journal.requests.values() if e.replica is None]:
                    if entry.replica is None and self._is_open(entry):
                        self._place(entry)
                        yield entry.num_tokens
        finally:
            self._is_dispatching = False

    def _release_from_quarantine(self) -> None:
        ward = self._quarantine.ward
        if self._quarantine.release():
            self._dispatch()
            if ward is not None and self.replicas[ward].is_serving:
                self._share_with(self.replicas[ward])

    def _is_open(self, entry: OpenRequest) -> bool:
        return self._journal.requests.get(entry.request_id) is entry

    def _leave(self, entry: OpenRequest) -> None:
        """A request is no longer computed where it was, or nothing more is to come of it."""
        if entry.replica is not None:
            replica = self.replicas[entry.replica]
            replica.load -= entry.load
            replica.exchange.forget(entry)

    # ---------------------------------------------------------------- what replicas say

    def replica_ready(self, replica: Replica) -> None:
        """See Owner.replica_ready."""
        infos = [each.info for each in self.replicas if each.info is not None]
        self.info = replace(
            infos[0],
            max_model_len=min(info.max_model_len for info in infos),
            max_num_seqs=min(info.max_num_seqs for info in infos),
        )
        assert replica.info is not None, "it is ready"
        self._router.begin(replica.number, replica.info.num_blocks, replica.info.block_size)
        self._audience.engine_ready(replica.info)
        for pin in self._journal.pins.values():
            if pin.is_proven:
                self._place_pin(pin)
        self._dispatch()
        # One whose process may die again at once must not get many requests, only to lose them.
        if replica.is_unproven:
            self._unproven.add(replica.number)
            self._share_with(replica, at_most=1)
        else:
            self._share_with(replica)

    def replica_died(self, replica: Replica, death: Death) -> bool:
        """See Owner.replica_died."""
        loss = replica.exchange.lose("the engine process died")
        self._audience.engine_died(death.cause)
        killer = self._quarantine.note_death(replica.number, death, loss)
        self._withdraw(replica, loss)
        for entry in loss.at_risk:
            if entry.is_risky and entry.replica is not None:  # it was moved away before
                self._take(entry)
        if killer is not None:
            self._fail_killer(killer, death)
        is_blamed = killer is not None
        for pin in loss.pins:
            if pin.is_proven:
                continue  # another engine has computed it without dying
            pin.num_deaths, pin.last_death = pin.num_deaths + 1, replica.number
            if pin.num_deaths >= 2:
                is_blamed = True
                message = f"the engine process died twice while it computed it ({death.cause})"
                self._drop_pin(pin, RequestFailed(message))
        self._dispatch()
        return is_blamed

    def replica_checked(self, replica: Replica) -> None:
        """See Owner.replica_checked."""
        self._relieve_others(replica)

    def replica_troubled(self, replica: Replica) -> None:
        """See Owner.replica_troubled."""
        self._dispatch()  # what had to wait for it waits no longer

    def replica_given_up(self, replica: Replica, error: EngineFailed) -> None:
        """See Owner.replica_given_up."""
        self._lose(replica, str(error))
        if self.is_given_up:
            self._slices.begin(self._giving_up(error))
        else:
            self._dispatch()

    def answered(self, entry: OpenRequest, error: OctavoError | None) -> None:
        """See Reader.answered."""
        assert entry.accepted is not None, "it was opened"
        if entry.accepted.done():
            if error is not None:  # an earlier engine had accepted it
                self.fail(entry, error)
        elif error is None:
            self._audience.accepted(entry)
            entry.accepted.set_result(None)
        else:
            entry.accepted.set_exception(error)
            self.drop(entry)

    def admitted(self, entry: OpenRequest, admitted: Admitted) -> None:
        """See Reader.admitted."""
        self._journal.note_start(entry)
        self._audience.admitted(entry, admitted)

    def reported(self, number: int, report: m.StepReport) -> None:
        """See Reader.reported."""
        replica = self.replicas[number]
        replica.take_report(report)
        self._audience.reported(number, report)
        self._release_from_quarantine()
        if number in self._unproven and not replica.is_unproven:
            self._unproven.discard(number)
            if replica.is_serving:
                self._share_with(replica)
        self._relieve_others(replica)

    def pinned(self, number: int, pin: Pin, error: OctavoError | None) -> None:
        """See Reader.pinned."""
        pin.computing.discard(number)
        if error is not None:
            pin.holders.discard(number)
            if pin.computed.done():  # an earlier engine had computed it
                logger.error("prefix %r could not be pinned again: %s", pin.name, error)
            self._drop_pin(pin, error)
            return
        pin.is_proven = True
        self._place_pin(pin)
        self._settle_pin(pin)
        self.let_go(number)

    def let_go(self, number: int) -> None:
        """See Reader.let_go."""
        if self._quarantine.is_waiting:
            self._dispatch()

    # ---------------------------------------------------------------- inside

    def _lose(self, replica: Replica, reason: str) -> None:
        """A replica has no process any more, for no fault of what it had."""
        self._withdraw(replica, replica.exchange.lose(reason))

    def _withdraw(self, replica: Replica, loss: Loss) -> None:
        """What a replica had is to go on elsewhere."""
        replica.load = 0
        for entry in loss.entries:
            entry.withdraw()
        for pin in self._journal.pins.values():
            pin.holders.discard(replica.number)
            pin.computing.discard(replica.number)
            if pin.is_proven:
                self._settle_pin(pin)

    def _take(self, entry: OpenRequest) -> None:
        """Take a request from the replica that has it, which runs."""
        self.tell(entry, m.Abort(entry.request_id))
        self._leave(entry)
        entry.withdraw()

    def _giving_up(self, error: OctavoError) -> Iterator[int]:
        """Fail all open requests and unfinished pins, since no other process will be started."""
        for entry in [*self._journal.requests.values()]:
            if self._is_open(entry):
                self.fail(entry, error)
                yield 0
        for pin in [pin for pin in self._journal.pins.values() if not pin.computed.done()]:
            self._drop_pin(pin, error)

    def _settle_pin(self, pin: Pin) -> None:
        """Tell who waits for a prefix that it is in all caches, if it is."""
        if not pin.computing and not pin.computed.done():
            pin.computed.set_result(None)

    def _drop_pin(self, pin: Pin, error: OctavoError) -> None:
        if self._journal.pins.get(pin.name) is pin:
            del self._journal.pins[pin.name]
        for number in pin.holders:
            self.replicas[number].exchange.release_pin(pin)
        if not pin.computed.done():
            pin.computed.set_exception(error)

    def _fail_killer(self, entry: OpenRequest, death: Death) -> None:
        error = RequestFailed(
            f"the engine process died {entry.num_deaths} times in the same place while it computed "
            f"request {entry.request_id!r} ({death.cause}); the request is not tried again"
        )
        self.fail(entry, error)
