"""`make mutants`: does tests/core notice when octavo.core is wrong?

mutmut changes the core's functions in thousands of small ways. A sample of these mutants, the same
one each time, is tested in a copy of the sources, and so are a few defects that were once missed.
The bar is on the sample; each of the few must be noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.utils.format_utils import get_mutant_name

ROOT = Path(__file__).resolve().parent.parent
CORE = Path("src/octavo/core")
TESTS = ["tests/core/test_scheduler.py", "tests/core"]  # the quick and telling ones first
MUTMUT = [sys.executable, "-m", "mutmut"]
SEED = 14
SAMPLE_SIZE = 300
BAR = 0.92  # of the sample must be noticed
NOTICED = ("killed", "timeout", "segfault")  # the last is what the kernel stops
NOT_TESTED = "not checked"


@dataclass(frozen=True)
class Defect:
    """A change of the core that mutmut does not make, and that tests must notice."""

    what: str
    file: str  # below octavo.core
    code: str
    changed: str


DEFECTS = (
    Defect(
        "a late step indexes the blocks that a preempted sequence holds by then",
        "scheduler.py",
        "if seq.table is table:",
        "if seq.table is not None:",
    ),
    Defect(
        "blocks that come back from the swap tier are not offered to the prefix cache",
        "block_table.py",
        "        self.num_registered = 0\n        self.has_new_input = bool",
        "        self.has_new_input = bool",
    ),
    Defect(
        "a swapped request comes back without room to grow",
        "scheduler.py",
        "needed += len(held) * len(self.kv.specs) + self._num_reserved_blocks",
        "pass",
    ),
    Defect(
        "the watermark is ignored",
        "scheduler.py",
        "return 0 if self.queues.is_idle else self._watermark",
        "return 0",
    ),
    Defect(
        "what a preempted request finds in the cache counts as cached before it came",
        "scheduler.py",
        "if request.avoids_cache or not request.was_admitted:",
        "if True:",
    ),
    Defect(
        "a tenant that comes back is served for all the time that it sent nothing",
        "policies.py",
        "tenant.counter = max(tenant.counter, self._floor)",
        "pass",
    ),
    Defect(
        "requests of the least served tenant wait until all swapped ones are back",
        "policies.py",
        "return tenants[waiting.tenant].counter < tenants[swapped.tenant].counter",
        "return False",
    ),
    Defect(
        "a recomputed request does not run the encoder again",
        "scheduler.py",
        "if hit.num_to_encode > 0:",
        "if hit.num_to_encode > 0 and not request.num_preemptions:",
    ),
    Defect(
        "decoder prefixes are shared between different encoder inputs",
        "kv/prefix_matcher.py",
        "if seq.request.encoder_token_ids:",
        "if False:",
    ),
    Defect(
        "an encoder input is found although a block of it was overwritten",
        "kv/manager.py",
        "evicted = self.encoder_inputs.forget(node)",
        "evicted = [block_id]",
    ),
    Defect(
        "samples do not hold the encoder input that they share",
        "kv/manager.py",
        "for block_id in child.table.held():",
        "for block_id in [b for ids in child.table.block_ids for b in ids if b]:",
    ),
    Defect(
        "a tail has the newest token, too, which is not computed yet",
        "kv/manager.py",
        "num_known = seq.num_tokens - 1  # the newest",
        "num_known = seq.num_tokens  # the newest",
    ),
    Defect(
        "a tail stays in the index when its block has become full",
        "kv/manager.py",
        "self._forget_block(block_id)  # it has become full",
        "continue",
    ),
    Defect(
        "a sequence that is still to compute known tokens offers them",
        "kv/manager.py",
        "table.is_decoding = table.is_decoding or num_computed_tokens == seq.num_tokens",
        "table.is_decoding = True",
    ),
    Defect(
        "what a failed request has left in a tail is found",
        "kv/manager.py",
        "for node in [*seq.prefix_nodes, *self._prefixes.tails_of(seq)]:",
        "for node in seq.prefix_nodes:",
    ),
    Defect(
        "the encoder's tokens do not count against the step's budget",
        "plan_builder.py",
        "self.budget -= num_tokens\n        self._encoded",
        "self._encoded",
    ),
)


def main() -> int:
    options = _parse_arguments()
    with tempfile.TemporaryDirectory(prefix="octavo-mutants-") as name:
        copy = Path(name)
        for path in (CORE.parent, Path("tests/core")):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / path, copy / path, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copy)
        with chdir(copy):
            names = options.mutants or sample(options.seed, options.number)
            if options.list:
                print("\n".join(names))
                return 0
            statuses = run_mutants(names, options.jobs)  # whose tests pass without a change
            missed = [] if options.mutants else missed_defects()
            return report(statuses, missed)


def sample(seed: int, number: int) -> list[str]:
    """Names of mutants, in order. A change of the core replaces few of them, unlike a draw by
    position."""
    names = [
        get_mutant_name(path, name)
        for path in sorted(CORE.rglob("*.py"))
        for name in mutate_file_contents(str(path), path.read_text(encoding="utf-8")).mutant_names
    ]
    print(f"{min(number, len(names))} of {len(names)} mutants, seed {seed}", file=sys.stderr)
    drawn = sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    return sorted(drawn[:number])


def missed_defects() -> list[Defect]:
    """Those of DEFECTS with which all tests pass."""
    missed = []
    for defect in DEFECTS:
        path = CORE / defect.file
        text = path.read_text(encoding="utf-8")
        if text.count(defect.code) != 1:
            raise SystemExit(f"{path} has changed, adapt {Path(__file__).name}: {defect.what}")
        path.write_text(text.replace(defect.code, defect.changed), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
        run = subprocess.run(
            [*command, "-m", "not slow", *TESTS],
            env=_environment(copy=Path("src")),
            capture_output=True,
            text=True,
        )
        path.write_text(text, encoding="utf-8")
        if run.returncode not in (0, 1):
            raise SystemExit(f"pytest failed with {defect}:\n{run.stdout}{run.stderr}")
        print(f"{'killed' if run.returncode else 'SURVIVED'}: {defect.what}", flush=True)
        if run.returncode == 0:
            missed.append(defect)
    return missed


def run_mutants(names: list[str], jobs: int) -> dict[str, str]:
    """The status that mutmut gives each mutant."""
    command = [*MUTMUT, "run", "--max-children", str(jobs), *names]
    # Its progress is a line that is printed over and over again.
    log = Path("mutmut.log")
    with log.open("w") as file:
        output = None if sys.stdout.isatty() else file
        subprocess.run(command, env=_environment(), stdout=output, stderr=output)
    statuses = dict(line.strip().rsplit(": ", 1) for line in _mutmut("results", "--all", "true"))
    tested = {name: statuses.get(name, NOT_TESTED) for name in names}
    if NOT_TESTED in tested.values():  # as where a test fails without any change
        raise SystemExit(log.read_text()[-4000:] + "\nmutmut has failed")
    return tested


def report(statuses: dict[str, str], missed: list[Defect]) -> int:
    """Print survivors and the summary; returns the exit status."""
    survivors = [name for name, status in statuses.items() if status not in NOTICED]
    for name in survivors:
        print("\n".join(["", *_mutmut("show", name)]))
    noticed = len(statuses) - len(survivors)
    counts = ", ".join(f"{n} {status}" for status, n in Counter(statuses.values()).most_common())
    print(f"\n{len(statuses)} mutants: {counts}")
    print(f"{noticed / len(statuses):.1%} noticed (at least {BAR:.0%} must be)")
    for defect in missed:
        print(f"SURVIVED: {defect.what}")
    return int(bool(missed) or noticed < BAR * len(statuses))


def _mutmut(*arguments: str) -> list[str]:
    command = [*MUTMUT, *arguments]
    run = subprocess.run(command, env=_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return run.stdout.splitlines()


def _environment(copy: Path | None = None) -> dict[str, str]:
    """For pytest: the plugin can be found, and sets have the same order each time."""
    paths = [Path(__file__).parent, *([copy.resolve()] if copy else [])]
    return {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(map(str, paths))}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mutants", nargs="*", help="names of those to test, instead of a sample")
    parser.add_argument("--list", action="store_true", help="print the sample, and test nothing")
    parser.add_argument("--number", type=int, default=SAMPLE_SIZE, help="of mutants in the sample")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tested at once")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
