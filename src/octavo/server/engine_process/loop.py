"""The engine in its own process: commands in, steps, reports out.

Run as `python -m octavo.server.engine_process.loop FD`, FD being one end of a socket pair.
When nothing is to be computed it sleeps until a command comes; when the other side is gone it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.channel import Channel
from octavo.child_process import forward_logs, open_connection
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.recorder import Recorder
from octavo.engine.results import Finished, StepResults, report_of
from octavo.engine.snapshot import take_snapshot, view_request
from octavo.errors import (
    OctavoError,
    ProcessKilled,
    RequestFailed,
    lines_of_code,
    without_values,
)
from octavo.llm import load_engine
from octavo.server.engine_process import messages as m
from octavo.simulation.prediction import find_predictor

logger = logging.getLogger("octavo.server.engine_process.loop")  # the module may be run as __main__

IDLE_SECONDS = 1.0  # between checks of an executor that has nothing to do
ENDING = m.Abort | m.FinishSample | m.Unpin  # commands after which something is computed no longer


class EngineLoop:
    """Owns the engine's turn-taking: all commands that have come, then a step."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        predictor = find_predictor(engine)
        self._predicts_steps = predictor is not None
        self._recorder = Recorder(
            engine,
            lambda admitted: self._send(m.Admission(admitted)),
            None if predictor is None else predictor.seconds,
        )
        self._pins: dict[str, m.Pin] = {}  # being computed, by request id
        self._num_commands = 0  # taken in
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.Add: self._add,
            m.Abort: self._abort,
            m.FinishSample: self._finish_sample,
            m.OfferTail: self._offer_tail,
            m.Pin: self._pin,
            m.Unpin: self._unpin,
            m.ResetPrefixCache: self._reset_prefix_cache,
            m.Look: self._look,
            m.Watch: self._watch,
        }
        self._is_over = False
        engine.intake = self._take_in

    def info(self) -> m.EngineInfo:
        """What the other side needs to know of the engine, which is ready."""
        engine = self._engine
        config, capacity = engine.config, engine.executor.capacity
        assert config.quantization != "auto", "the executor has chosen"
        stored = engine.model_config.quantization
        max_encoder_len = engine.model_config.longest_encoder_input(
            config.scheduler.max_num_batched_tokens
        )
        return m.EngineInfo(
            model=config.model,
            pid=os.getpid(),
            max_model_len=engine.max_model_len,
            max_encoder_len=max_encoder_len or None,
            vocab_size=engine.model_config.vocab_size,
            block_size=engine.kv.block_size,
            num_blocks=engine.kv.pool.num_blocks,
            num_swap_blocks=engine.kv.swap_pool.num_blocks,
            kv_groups=str(capacity.layout),
            kv_group_names=tuple(map(str, capacity.layout.specs)),
            max_num_seqs=config.scheduler.max_num_seqs,
            enable_prefix_caching=engine.kv.enable_prefix_caching,
            policy=config.scheduler.policy,
            dtype=config.dtype_for(engine.model_config.dtype),
            stored_quantization=None if config.quantization or stored is None else stored.method,
            load_quantization=config.quantization,
            weight_copy_bytes=engine.model_config.copy_bytes_of(capacity.num_ranks),
            kv_cache_dtype=config.cache.dtype_for(config.dtype_for(engine.model_config.dtype)),
            device=config.device,
            num_ranks=capacity.num_ranks,
            budget=capacity.budget,
            predicts_steps=self._predicts_steps,
        )

    def run(self) -> None:
        """Until the other side is gone."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Do what was asked for, then a step if there is anything to compute. False if the other
        side is gone."""
        has_changed = self._take_in(wait=not self._engine.has_unfinished)
        if self._is_over:
            return False
        self._recorder.forget_step()  # which has been reported; there may be no other
        if self._engine.has_unfinished:
            self._report(m.pack_results(self._engine.step()))
        elif has_changed:  # the last request was aborted, say: tell how things stand now
            self._report(StepResults.none())
        else:
            self._engine.executor.check()
        return True

    def _take_in(self, wait: bool = False) -> bool:
        """Do what was asked for meanwhile. True if requests came or went."""
        commands = self._channel.receive(IDLE_SECONDS if wait else 0)
        if commands is None:
            self._is_over = True
            return False
        has_changed = has_ended = False
        for command in commands:
            decoded = m.decode_command(command)
            self._handlers[type(decoded)](decoded)
            self._num_commands += 1
            has_changed = has_changed or not isinstance(decoded, m.Look | m.Watch)
            has_ended = has_ended or isinstance(decoded, ENDING)
        # All that a step under way computes was planned before: its report is the acknowledgement.
        if has_ended and not self._engine.is_computing:
            self._send(m.Acknowledged(self._num_commands))
        return has_changed

    def _send(self, message: m.Message) -> None:
        self._channel.send(m.encode(message))

    # ---------------------------------------------------------------- commands

    def _add(self, add: m.Add) -> None:
        def queue() -> None:
            with _failing_alone(add.request_id):
                # On a device a wrong id would take all that is computed with it down.
                add.request.check_vocabulary(self._engine.model_config.vocab_size)
                request = self._engine.make_request(add.request, add.request_id)
                outputs = {sample.index: sample.token_ids for sample in add.samples}
                try:
                    self._engine.add_request(request, outputs, add.arrival_time)
                except Exception:
                    self._engine.abort_request(add.request_id)
                    raise

        self._answer(add.ticket, queue)

    def _abort(self, abort: m.Abort) -> None:
        self._engine.abort_request(abort.request_id)

    def _finish_sample(self, finish: m.FinishSample) -> None:
        self._engine.finish_sample(finish.request_id, finish.index, finish.stop)

    def _offer_tail(self, offer: m.OfferTail) -> None:
        self._engine.offer_tail(offer.request_id, offer.index)

    def _pin(self, pin: m.Pin) -> None:
        try:
            request = self._engine.pin_prefix(pin.name, pin.token_ids, pin.cache_salt)
        except OctavoError as error:
            self._send(m.Reply(pin.ticket, report_of(error)))
        else:
            self._pins[request.request_id] = pin  # answered when it is computed

    def _unpin(self, unpin: m.Unpin) -> None:
        for request_id, pin in list(self._pins.items()):
            if pin.name == unpin.name:
                self._engine.abort_request(request_id)
                del self._pins[request_id]
                self._send(m.Reply(unpin.ticket))
                return
        self._answer(unpin.ticket, lambda: self._engine.unpin_prefix(unpin.name))

    def _reset_prefix_cache(self, reset: m.ResetPrefixCache) -> None:
        self._answer(reset.ticket, self._engine.kv.reset_prefix_cache)

    def _look(self, look: m.Look) -> None:
        if look.request_id is None:
            snapshot = take_snapshot(self._engine, self._recorder.counters.num_steps)
            self._send(m.Seen(look.ticket, snapshot))
            return
        request = self._engine.scheduler.requests.get(look.request_id)
        view = None if request is None else view_request(request, with_tokens=True)
        self._send(m.Seen(look.ticket, None, view))

    def _watch(self, watch: m.Watch) -> None:
        self._recorder.watching = watch.on

    def _answer(self, ticket: int, action: Callable[[], None]) -> None:
        try:
            action()
        except OctavoError as error:
            self._send(m.Reply(ticket, report_of(error)))
        else:
            self._send(m.Reply(ticket))

    # ---------------------------------------------------------------- reports

    def _report(self, results: StepResults[bytes]) -> None:
        """Send the results of a step, even if there are none."""
        if self._pins:
            ends = [end for end in results.finished if not self._answer_pin(end)]
            results = results._replace(finished=ends)
        self._send(
            m.StepReport(
                self._engine.clock(),
                self._num_commands,
                self._engine.is_computing,
                self._recorder.counters,
                self._recorder.gauges(),
                results,
                preempted=self._recorder.preempted,
                watched=self._recorder.watched,
            )
        )
        self._recorder.clear()

    def _answer_pin(self, end: Finished) -> bool:
        """Answer the command to pin a prefix, if that is the request which has ended."""
        pin = self._pins.pop(end.request_id, None)
        if pin is None:
            return False
        self._send(m.Reply(pin.ticket, end.error))
        return True


@contextlib.contextmanager
def _failing_alone(request_id: str) -> Iterator[None]:
    """A bug of ours that one request meets before it is queued is that request's failure alone."""
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        # Without the message: it may hold a piece of the prompt.
        kind, where = type(error).__name__, lines_of_code(error)
        logger.error("request %s could not be queued: %s\n%s", request_id, kind, where)
        raise RequestFailed(f"the engine could not queue the request ({kind})") from error


def main(file_descriptor: int, load: Callable[[EngineConfig, Path], Engine] = load_engine) -> int:
    """Make the engine that the first message asks for, and serve it. Returns the exit status."""
    channel = Channel(open_connection(file_descriptor))
    first = channel.receive(None)
    if not first:
        return 0
    start = m.decode_command(first[0])

    def send_log(record: logging.LogRecord, text: str) -> None:
        channel.send(m.encode(m.LogLine(record.created, record.levelno, record.name, text)))

    forward_logs(start.log_level, send_log)
    try:
        engine = load(replace(start.config, owns_process=True), Path(start.path))
    except Exception as error:
        channel.send(m.encode(m.StartFailed(report_of(error), traceback.format_exc())))
        return 1
    try:
        loop = EngineLoop(engine, channel)
        channel.send(m.encode(loop.info()))
        loop.run()
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the other side is gone
    except Exception as error:
        was_killed = isinstance(error, ProcessKilled)
        crashed = m.Crashed(without_values(error), lines_of_code(error), was_killed)
        channel.send(m.encode(crashed))
        return 1
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
