"""Takes replicas out of service one after the other, without losing a request: to restart them
(an update of a driver, a leak, another file behind the model's name) or to stop them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from octavo.errors import InvalidRequest, Unavailable
from octavo.server.engine_process.replica import Replica, find_replica

logger = logging.getLogger(__name__)

Requests = Literal["move", "finish"]
Then = Literal["restart", "stop"]
POLL_SECONDS = 0.05


class DrainRunning(Unavailable):
    """Replicas are being drained already."""


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """What to do with which replicas."""

    replicas: Sequence[int]  # one after the other
    requests: Requests = "move"  # to other replicas at once, or let them finish
    then: Then = "restart"
    seconds: float = 300.0  # how long requests may take to finish; then they are moved


class Mover(Protocol):
    """What a drain asks of the fleet."""

    async def vacate(self, replica: Replica) -> None:
        """Send all requests of a replica to others; those that none may run wait."""

    async def stop_replica(self, replica: Replica, then: Then) -> None:
        """End a replica's process; what it still had goes elsewhere. The caller restarts it."""


class Drainer:
    """Owns the drain that is under way, if there is one."""

    def __init__(self, replicas: Sequence[Replica], mover: Mover) -> None:
        self.order: DrainOrder | None = None  # the present one, or the last
        self.error: str | None = None  # why it did not get to its end
        self._replicas = replicas
        self._mover = mover
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the last order is still being carried out."""
        return self._task is not None and not self._task.done()

    def begin(self, order: DrainOrder) -> None:
        """Drain the replicas of an order, in the background.

        Raises InvalidRequest: there is no such replica, or none would be left to serve.
        DrainRunning: the order before is not carried out yet.
        """
        if self.is_running:
            raise DrainRunning("replicas are being drained already")
        for number in order.replicas:
            find_replica(self._replicas, number)
        serving = {replica.number for replica in self._replicas if replica.is_serving}
        if order.then == "stop" and serving <= set(order.replicas):
            raise InvalidRequest("then", "stop would leave no replica that serves")
        self.order, self.error = order, None
        self._task = asyncio.create_task(self._carry_out(order))

    async def close(self) -> None:
        """Stop draining."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _carry_out(self, order: DrainOrder) -> None:
        try:
            for number in order.replicas:
                await self._drain(self._replicas[number], order)
        except _NotServing as error:
            self.error = str(error)
            logger.error("the drain has ended: %s", error)
        except Exception:
            self.error = "the server has a bug; its log has more"
            logger.exception("the drain has failed")

    async def _drain(self, replica: Replica, order: DrainOrder) -> None:
        number, state = replica.number, replica.state
        logger.info("draining replica %d, %s after that", number, order.then)
        if state == "ready":
            replica.drain()
            if order.requests == "finish":
                await self._wait_for_ends(replica, order.seconds)
            await self._mover.vacate(replica)
        if replica.state != "stopped":
            await self._mover.stop_replica(replica, order.then)
        if order.then == "restart":
            replica.restart()
            while replica.state == "restarting":
                await asyncio.sleep(POLL_SECONDS)
            if not replica.is_serving:
                raise _NotServing(f"replica {number} did not come back: it is {replica.state}")
        logger.info("replica %d was drained; it is %s", number, replica.state)

    async def _wait_for_ends(self, replica: Replica, seconds: float) -> None:
        """Wait until a replica has no requests; the process may also die meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while replica.exchange.open and replica.state == "draining":
                    await asyncio.sleep(POLL_SECONDS)


class _NotServing(Exception):
    """A replica that was restarted is given up."""
