"""Implementations by name, and the plugins that add some."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.errors import ConfigError
from octavo.registry import Registry

BUILTIN = {"ordered": "collections:OrderedDict", "plain": "builtins:dict"}


def test_an_entry_is_imported_when_it_is_used() -> None:
    registry: Registry[type] = Registry("kind", {**BUILTIN, "broken": "no.such.module:Thing"})
    assert list(registry) == ["ordered", "plain", "broken"]
    assert registry["ordered"] is OrderedDict


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("no.such.module:Thing", "ModuleNotFoundError: No module named 'no'"),
        ("collections:Thing", "AttributeError: module 'collections' has no attribute 'Thing'"),
        (":Thing", "ValueError: Empty module name"),
    ],
)
def test_an_entry_that_cannot_be_imported_is_named(place: str, reason: str) -> None:
    registry: Registry[type] = Registry("kind", BUILTIN)
    registry.register("broken", place)
    with pytest.raises(
        ConfigError, match=f"kind: 'broken' is registered as {place}, which fails: {reason}"
    ):
        registry["broken"]


def test_what_is_registered_is_found() -> None:
    registry: Registry[type] = Registry("kind", BUILTIN)
    registry.register("mine", list)
    registry.register("late", "collections:deque")
    assert registry["mine"] is list
    assert registry["late"].__name__ == "deque"
    assert len(registry) == 4
    assert registry.builtin == ("ordered", "plain")


def test_mistakes() -> None:
    registry: Registry[type] = Registry("kind", BUILTIN)
    with pytest.raises(ConfigError, match="kind: 'plain' is registered already"):
        registry.register("plain", dict)
    with pytest.raises(ConfigError, match="kind: 'none' is not one of ordered, plain"):
        registry.check("none")
    with pytest.raises(ConfigError, match=r"kind: \[\] is not one of"):
        registry.check([])
    with pytest.raises(KeyError):
        registry["none"]


def test_options_are_checked_when_they_are_made() -> None:
    with pytest.raises(ConfigError, match="policy: 'x' is not one of fcfs, priority"):
        SchedulerConfig(policy="x")
    with pytest.raises(ConfigError, match="memory_policy: 'x' is not one of paged, orca-max"):
        CacheConfig(memory_policy="x")


PLUGIN = """
from octavo.registry import POLICIES

def register():
    print("registered")
    POLICIES.register("mine", "toy_plugin:Mine")
"""


def run_with_plugin(tmp_path: Path, module: str, program: str) -> subprocess.CompletedProcess[str]:
    """In an environment where a distribution with a plugin is installed."""
    (tmp_path / "toy_plugin.py").write_text(module)
    metadata = tmp_path / "toy_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[octavo.plugins]\ntoy = toy_plugin:register\n")
    paths = [str(tmp_path), str(Path(__file__).parent.parent / "src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_plugin_is_loaded_once_and_only_when_a_name_is_not_known(tmp_path: Path) -> None:
    run = run_with_plugin(
        tmp_path,
        PLUGIN,
        """if True:
            from octavo.config import SchedulerConfig
            SchedulerConfig(policy="priority")
            print("known")
            for _ in range(2):
                SchedulerConfig(policy="mine")
            print("found")
            SchedulerConfig(policy="other")
        """,
    )
    assert run.stdout.split() == ["known", "registered", "found"]
    assert "'other' is not one of fcfs, priority, fair, mine" in run.stderr


def test_a_broken_plugin_is_named(tmp_path: Path) -> None:
    program = "from octavo.config import SchedulerConfig; SchedulerConfig(policy='mine')"
    run = run_with_plugin(tmp_path, "import no_such_module\n", program)
    assert run.returncode == 1
    message = (
        "plugin: toy (toy_plugin:register) fails: ModuleNotFoundError: No module named 'no_such"
    )
    assert message in run.stderr


def test_a_plugin_that_fails_after_it_has_registered_something_is_not_run_again(
    tmp_path: Path,
) -> None:
    """Else the second error would be about the name that the first run has taken."""
    run = run_with_plugin(
        tmp_path,
        PLUGIN + "    raise ValueError('no licence')\n",
        """if True:
            from octavo.config import SchedulerConfig
            from octavo.errors import ConfigError
            for _ in range(2):
                try:
                    SchedulerConfig(policy="other")
                except ConfigError as error:
                    print(error)
        """,
    )
    message = "plugin: toy (toy_plugin:register) fails: ValueError: no licence"
    assert run.stdout.splitlines() == ["registered", message, message]


def test_a_thread_waits_for_the_plugins_that_another_one_loads(tmp_path: Path) -> None:
    run = run_with_plugin(
        tmp_path,
        """
from threading import Event
from octavo.registry import POLICIES

begun, found = Event(), Event()

def register():
    begun.set()
    found.wait(0.2)  # in vain: the other thread waits
    POLICIES.register("mine", "toy_plugin:Mine")
""",
        """if True:
            from threading import Thread
            from octavo.registry import POLICIES
            import toy_plugin
            loading = Thread(target=POLICIES.check, args=("mine",))
            loading.start()
            toy_plugin.begun.wait()
            POLICIES.check("mine")
            toy_plugin.found.set()
            print("found")
        """,
    )
    assert run.stdout.split() == ["found"], run.stderr
