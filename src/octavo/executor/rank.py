"""One rank in its own process: plans in, results out.

Run as `python -m octavo.executor.rank FD`, FD being a connection to the engine's process. It makes
the calls that a LocalExecutor's engine makes, in their order; when the other side is gone it ends
at once, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import NoReturn

from octavo.channel import Channel
from octavo.child_process import forward_logs, open_connection
from octavo.core.step import PendingStep, StepPlan
from octavo.executor.base import KVCapacity
from octavo.executor.messages import (
    Failed,
    LogLine,
    Ready,
    Start,
    decode,
    decode_plan,
    encode,
)

Submit = Callable[[StepPlan], PendingStep]  # see Executor.submit

# Torch's monitor of NCCL looks once a second into the file where the ranks have met. The engine's
# process notices ranks that hang.
_ENVIRONMENT = {"TORCH_NCCL_ENABLE_MONITORING": "0"}


def serve(channel: Channel, submit: Submit, answers: bool) -> None:
    """Carry out plans until the other side is gone; `answers`: it is told the results."""
    steps: deque[tuple[PendingStep, float]] = deque()
    while (payloads := channel.receive(None)) is not None:
        for payload in payloads:
            if payload:
                began = time.perf_counter()
                step = submit(decode_plan(payload))
                steps.append((step, time.perf_counter() - began))
                continue
            step, seconds = steps.popleft()
            result = step.result()
            if answers:
                result.launch_seconds = seconds
                channel.send(encode(result))


def make_worker(start: Start) -> tuple[Ready, Submit]:
    """Join the group, load this rank's part of the model, and take the memory.

    Raises:
        ConfigError, ModelError, OutOfMemory: the settings, the files or the machine do not do.
    """
    from octavo.worker.device import find_device

    device = find_device(start.config, start.neighbours)
    from octavo.ops.connect import connect
    from octavo.worker.worker import Worker

    config = device.adapt(start.config)
    is_one_host = start.neighbours.size == start.shard.size
    communicator = connect(start.shard, start.address, device.torch_device, is_one_host)
    own = replace(config, owns_process=True)
    worker = Worker(own, start.model_config, device, communicator)
    capacity = KVCapacity.of(worker.budget, worker.layout, start.shard.size, device.name)
    config = replace(config, quantization=worker.config.quantization)
    ready = Ready(config, worker.model_config, device.is_asynchronous, capacity)
    return ready, worker.runner.submit


def end_with(connection: socket.socket) -> None:
    """Wait until the other side is gone, and end this process; also if it is stuck in a call."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0))
    poll.poll()
    os._exit(0)


def main(
    file_descriptor: int, make: Callable[[Start], tuple[Ready, Submit]] = make_worker
) -> NoReturn:
    """Take part in the group that the first message describes, and end this process."""
    status = run(file_descriptor, make)
    sys.stderr.flush()
    os._exit(status)  # threads of the process group may be stuck in calls


def run(file_descriptor: int, make: Callable[[Start], tuple[Ready, Submit]]) -> int:
    """See `main`. Returns the exit status."""
    connection = open_connection(file_descriptor)
    Thread(target=end_with, args=(connection,), daemon=True).start()
    channel = Channel(connection)
    first = channel.receive(None)
    if not first:
        return 0
    start: Start = decode(first[0])

    def send_log(record: logging.LogRecord, text: str) -> None:
        line = LogLine(record.created, record.levelno, record.name, text)
        channel.send(encode(line))

    forward_logs(start.log_level, send_log)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rank, serves = start.shard.rank, False
    try:
        ready, submit = make(start)
        channel.send(encode(ready))
        serves = start.config.owns_process
        serve(channel, submit, answers=rank == 0)
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the other side is gone
    except BaseException as error:
        with contextlib.suppress(OSError):  # the other side is gone, too
            channel.send(encode(Failed.of(rank, error, in_server=serves)))
        return 1
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
