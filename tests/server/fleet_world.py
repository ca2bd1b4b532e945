"""A whole fleet in one process and without waiting: real client, real engine loops, symbolic
executors, and a world that decides what happens next.

Sockets are queues here, and engine processes are objects. What is in a queue arrives when the world
says so, in its order, so that every race between messages can happen; the clock of the event loop
jumps to the next thing that is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn

import pytest

from octavo.config import make_config
from octavo.errors import EngineFailed
from octavo.models.hub import resolve_model
from octavo.models.registry import read_model_config
from octavo.server.engine_process import loop as engine_loop
from octavo.server.engine_process import messages as m
from octavo.server.engine_process import replica as replicas
from octavo.server.engine_process import slices
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.listening import Listener
from octavo.server.engine_process.placement import Replication
from octavo.server.engine_process.process import Death
from octavo.server.engine_process.replica import Replica
from octavo.server.engine_process.supervision import Supervision
from server.symbolic_engine import FragileEngine, HarmfulExecutor

BLOCK_SIZE = 4
CRASH = "it has crashed: "


class JumpingLoop(asyncio.SelectorEventLoop):
    """Waits for nothing: where there is nothing to do, its time goes on to the next timer."""

    def __init__(self) -> None:
        self._now = 0.0
        self.num_turns = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.num_turns += 1
        if timeout is not None:
            self._loop.advance(timeout)
        return super().select(0 if timeout is not None else None)


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(test)


class Inbox:
    """The engine's end of the socket."""

    def __init__(self, process: WorldProcess) -> None:
        self._process = process

    def receive(self, timeout: float | None) -> list[bytes]:
        commands, self._process.arrived = self._process.arrived, []
        return commands

    def send(self, payload: bytes) -> None:
        self._process.outbox.append(payload)


class Died(BaseException):
    """An engine process has ended at once."""


class WorldEngine(FragileEngine):
    def die(self) -> NoReturn:
        raise Died


class WorldProcess:
    """In place of `EngineProcess`, with the same methods."""

    def __init__(self, world: World, on_message: Callable[[m.Message], None]) -> None:
        self.pid = next(world.pids)
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent: deque[bytes] = deque()  # commands that have not arrived
        self.arrived: list[bytes] = []  # those that have, and were not looked at
        self.outbox: deque[bytes] = deque()  # what the engine has said
        self.pace = world.draw.choice((1.0, 1.0, 1.0, 0.03))  # some answer slowly
        self.engine: WorldEngine
        self._world = world
        self._on_message = on_message
        self._loop: engine_loop.EngineLoop
        self._death = Death("it was ended", is_kill_from_outside=False)

    async def start(self, start: m.Start, seconds: float) -> m.EngineInfo:
        await asyncio.sleep(1.0)
        if self._world.num_bad_starts:
            self._world.num_bad_starts -= 1
            raise EngineFailed("it did not start")
        overlap = bool(start.config.overlap)
        executor = HarmfulExecutor(BLOCK_SIZE, self._world.num_blocks, 0.0, overlap)
        self.engine = WorldEngine(start.config, self._world.model_config, executor)
        self._loop = engine_loop.EngineLoop(self.engine, Inbox(self))  # type: ignore[arg-type]
        self._world.processes.append(self)
        return self._loop.info()

    def send(self, command: m.Command) -> None:
        if not self.gone.done():
            self.sent.append(m.encode(command))

    def kill(self) -> None:
        self.die(Death("it was killed", is_kill_from_outside=False))

    async def death(self) -> Death:
        if self._world.ends_late:
            await asyncio.sleep(self._world.draw.choice((0.0, 0.0, 1.0)))  # until that is known
        return self._death

    async def ends(self) -> bool:
        if not self._world.ends_late:
            return True
        await asyncio.sleep(1.0)
        return self._world.draw.random() < 0.8  # a device may keep it from ending

    async def end(self) -> None:
        self.die(self._death)

    # ---------------------------------------------------------------- what the world does

    def die(self, death: Death) -> None:
        """What it has said is still read."""
        if self not in self._world.processes:
            return
        self._world.processes.remove(self)
        self._death = death
        self.say(len(self.outbox))
        self.gone.set_result(None)

    def hear(self, count: int) -> None:
        """Some commands arrive."""
        for _ in range(min(count, len(self.sent))):
            self.arrived.append(self.sent.popleft())

    def say(self, count: int) -> None:
        """Some of what the engine has said arrives."""
        for _ in range(min(count, len(self.outbox))):
            self._on_message(m.decode_message(self.outbox.popleft()))

    def accept(self) -> None:
        """It takes in all that was sent to it and says so, but computes nothing."""
        self.hear(len(self.sent))
        self._loop._take_in()
        self.say(len(self.outbox))

    def step(self) -> None:
        """One turn of the engine's loop; an error ends the process."""
        try:
            self._loop.turn()
        except (RuntimeError, Died) as error:
            self.die(Death(f"{CRASH}{error!r}", is_kill_from_outside=False))


class World(Listener):
    """Owns the processes, and draws what happens."""

    def __init__(self, seed: int = 0, num_blocks: int = 60, slice_units: int = 64) -> None:
        self.draw = random.Random(seed)
        self.slice_units = slice_units
        self.num_blocks = num_blocks
        self.num_bad_starts = 0
        self.ends_late = False  # whether processes that have died may take long to end
        self.num_crashes = 0
        self.model_config = read_model_config(resolve_model("demo"))
        self.processes: list[WorldProcess] = []
        self.pids = iter(range(1, 1 << 30))
        self.client: EngineClient

    @contextlib.asynccontextmanager
    async def serve(
        self, num_replicas: int, supervision: Supervision | None = None, **options: Any
    ) -> AsyncIterator[EngineClient]:
        """A client in this world."""
        config = make_config("demo", block_size=BLOCK_SIZE, **options)

        def make_process(
            command: Sequence[str],
            on_message: Callable[[m.Message], None],
            environment: Mapping[str, str] | None = None,
        ) -> WorldProcess:
            return WorldProcess(self, on_message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replicas, "EngineProcess", make_process)
            # So that much can happen while requests are being moved.
            patch.setattr(slices, "SLICE_UNITS", self.slice_units)
            replication = Replication(num_replicas)
            self.client = EngineClient(config, supervision, (self,), replication=replication)
            await self.client.start()
            try:
                yield self.client
            finally:
                await self.client.close()

    def engine_died(self, reason: str) -> None:
        """Counts crashes, but not those of processes that were about to be stopped."""
        self.num_crashes += reason.startswith(CRASH)

    def process_of(self, replica: Replica) -> WorldProcess | None:
        """The process that a replica has, if it runs."""
        return next((each for each in self.processes if each.pid == replica.pid), None)

    async def turn(self, replica: Replica) -> None:
        """All that was sent to a replica arrives, it takes a step, and all that it says arrives."""
        process = self.process_of(replica)
        if process is not None:
            process.hear(len(process.sent))
            process.step()
            process.say(len(process.outbox))
        await asyncio.sleep(0)

    async def finish(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Everything goes on until these are done."""
        while not all(task.done() for task in tasks):
            for replica in self.client.replicas:
                await self.turn(replica)
            await asyncio.sleep(0.01)

    async def happen(self) -> None:
        """One thing happens to one process."""
        if self.processes:
            paces = [process.pace for process in self.processes]
            [process] = self.draw.choices(self.processes, paces)
            what = self.draw.random()
            if what < 0.3:
                process.hear(self.draw.randrange(4))
            elif what < 0.6:
                process.say(self.draw.randrange(4))
            else:
                process.step()
        for _ in range(self.draw.randrange(3)):
            await asyncio.sleep(0)
        if self.draw.random() < 0.02:
            await asyncio.sleep(0.5)

    # ---------------------------------------------------------------- what holds at any time

    def check(self) -> None:
        """Each request is at one replica or at none, loads are right, at most one replica is to run
        requests that may kill it, and a quarantined request is in an engine without others."""
        client = self.client
        held = [entry for each in client.replicas for entry in each.exchange.open.values()]
        assert len(held) == len(set(held))
        for entry in client.open_requests.values():
            if entry.replica is None:
                assert entry not in held
            else:
                assert client.replicas[entry.replica].exchange.open[entry.request_id] is entry
        assert set(held) <= set(client.open_requests.values())
        for replica in client.replicas:
            assert replica.load == sum(each.load for each in replica.exchange.open.values())
        risky = {entry.replica for entry in held if entry.is_suspect or entry.is_quarantined}
        assert len(risky) <= 1, risky
        quarantined = [entry for entry in held if entry.is_quarantined]
        assert len(quarantined) <= 1
        for entry in quarantined:
            process = self.process_of(client.replicas[entry.replica or 0])
            if process is not None:
                assert {*process.engine.scheduler.requests} <= {entry.request_id}

    async def check_nothing_is_left(self) -> None:
        """No engine holds a request or a block."""
        for _ in range(4):
            for replica in self.client.replicas:
                await self.turn(replica)
        assert self.client.open_requests == {}
        self.check()
        for process in self.processes:
            assert not process.engine.has_unfinished
            assert process.engine.kv.pool.num_free == process.engine.kv.pool.num_blocks
