"""Whether grammars can be enforced, found out in a process of its own.

The library's limits do not bound its time: a few lines of JSON schema can keep it busy for minutes,
or overflow its stack. A server does not compile what clients send before such a process has.

Run as `python -m octavo.structured.checker DIRECTORY VOCAB_SIZE EOS_ID...`: a grammar per line on
stdin, a verdict per line on stdout, both JSON. It ends with its stdin.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.core.step import Grammar
from octavo.errors import InvalidRequest, Unavailable
from octavo.structured.guidance import Guidance

MAX_SECONDS = 0.5  # of CPU time, to compile a grammar: on the worker, others may wait so long
MAX_WAIT_SECONDS = 10.0  # until the process is killed; it may have to share its core
MAX_START_SECONDS = 60.0
RETRY_SECONDS = 1.0  # after which a process that did not start may do so
MAX_VERDICTS = 1024  # that are remembered
MAX_REASON = 1_000  # characters; a reason may quote names of a schema
STACK_BYTES = 1 << 20  # less than the worker's threads have, which compile the same grammars

# The field at fault, "" for the grammar's own, and why it is refused, "" if it is not.
Verdict = tuple[str, str]


class GrammarChecker:
    """Owns processes that compile grammars, one for each thread that asks, and their verdicts."""

    def __init__(self, directory: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """See Guidance. Nothing is started before the first grammar comes."""
        arguments = [str(directory), str(vocab_size), *map(str, eos_ids)]
        self._command = [sys.executable, "-m", __spec__.name, *arguments]
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()  # by _digest
        self._idle: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def check(self, grammar: Grammar, begun: Sequence[int] = ()) -> None:
        """Raises InvalidRequest if a grammar cannot be enforced, takes too long to compile, or does
        not allow an output that begins with the tokens `begun`.

        Blocks while the grammar is compiled, unless it was checked before. Raises Unavailable if
        there is no process to compile it, which says nothing of the grammar.
        """
        key = _digest(grammar, begun)
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._ask(grammar, tuple(begun))
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        field, reason = verdict
        if reason:
            raise InvalidRequest(field or grammar.field, reason)

    def has_verdict(self, grammar: Grammar) -> bool:
        """Whether `check` knows about a grammar, for outputs without a beginning."""
        with self._lock:
            return _digest(grammar, ()) in self._verdicts

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _ask(self, grammar: Grammar, begun: Sequence[int]) -> Verdict:
        """What a process says of a grammar. One that ends without an answer may have been killed
        for another reason, while it was idle or by the system, so that a new one is asked, too."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        for _ in range(2):
            process = process or self._start()
            if process is None:
                raise Unavailable("the process that compiles grammars did not start", RETRY_SECONDS)
            with contextlib.suppress(EOFError):
                return self._answer(process, grammar, begun)
            _end(process)
            process = None
        return "", "it cannot be compiled: the library breaks down on it"

    def _start(self) -> subprocess.Popen[str] | None:
        """A new process; None if it does not come so far that it can be asked."""
        process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with contextlib.suppress(EOFError):
            if _read(process, MAX_START_SECONDS) is not None:
                return process
        _end(process)
        return None

    def _answer(
        self, process: subprocess.Popen[str], grammar: Grammar, begun: Sequence[int]
    ) -> Verdict:
        """What this process says, which is idle afterwards. Raises EOFError if it has ended."""
        assert process.stdin is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps([grammar.kind, grammar.source, begun]) + "\n")
            process.stdin.flush()
        verdict = _read(process, MAX_WAIT_SECONDS)
        if verdict is None:
            _end(process)
            return "", f"it cannot be compiled within {MAX_WAIT_SECONDS:g} s"
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            _end(process)
        field, reason = verdict
        return field, reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}..."


def _digest(grammar: Grammar, begun: Sequence[int]) -> bytes:
    """What a verdict is remembered by: a grammar and the beginning of an output have megabytes."""
    return hashlib.sha256(json.dumps([grammar.kind, grammar.source, *begun]).encode()).digest()


def _read(process: subprocess.Popen[str], seconds: float) -> Any:
    """The next line of a process; None if there is none in that time. Raises EOFError if it has
    ended."""
    assert process.stdout is not None, "it is a pipe"
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    if not ready:
        return None
    line = process.stdout.readline()
    if not line:
        raise EOFError
    return json.loads(line)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "both are pipes"
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def verdict_on(library: Guidance, grammar: Grammar, begun: Sequence[int] = ()) -> Verdict:
    """See Verdict."""
    began = time.process_time()
    try:
        library.compile(grammar)
        seconds = time.process_time() - began
        if seconds > MAX_SECONDS:
            return "", f"it takes {seconds:.1f} s to compile, more than {MAX_SECONDS} s"
        library.check(grammar, begun)
    except InvalidRequest as error:
        return error.field, error.reason
    return "", ""


def _serve(library: Guidance) -> None:
    with contextlib.suppress(InvalidRequest):  # which each grammar will raise
        library.load()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        kind, source, begun = json.loads(line)
        print(json.dumps(verdict_on(library, Grammar(kind, source, ""), begun)), flush=True)


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    directory, vocab_size, *eos_ids = arguments
    library = Guidance(Path(directory), int(vocab_size), [*map(int, eos_ids)])
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(library,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
