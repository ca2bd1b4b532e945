"""Implementations by name: octavo's own, and those that other packages add.

A program adds one by `register`. A package that is installed beside octavo does so in a plugin: a
function without arguments, which an entry point of the group `octavo.plugins` names in the
package's pyproject.toml:

    [project.entry-points."octavo.plugins"]
    shortest-first = "my_package:register"

Plugins run in every process that meets a name it does not know, the server's engine process among
them, or that lists the names; so names of octavo's own cost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from octavo.errors import ConfigError, OctavoError, shown

T = TypeVar("T")
GROUP = "octavo.plugins"

# Held by the thread that loads them, which looks names up meanwhile; other threads wait until all
# names are there.
_loading = threading.RLock()
_plugins_are_loaded = False
_plugin_error: ConfigError | None = None


class Registry(Mapping[str, T], Generic[T]):
    """The implementations that an option may name.

    An entry is an object, or where to find it, "module:attribute" or "module", which is imported
    when the entry is first used.
    """

    def __init__(self, option: str, builtin: Mapping[str, T | str]) -> None:
        """`option` is the field that errors name."""
        self._option = option
        self.builtin = tuple(builtin)
        self._entries: dict[str, T | str] = dict(builtin)

    def register(self, name: str, implementation: T | str) -> None:
        """Add an implementation, or where to find it. Raises ConfigError if the name is taken."""
        if name in self._entries:
            raise ConfigError(self._option, f"{shown(name)} is registered already")
        self._entries[name] = implementation

    def check(self, name: object, *others: str) -> None:
        """Raises ConfigError, with all names, if `name` is neither one nor among `others`."""
        if name not in others and name not in self:
            names = ", ".join([*others, *self])
            raise ConfigError(self._option, f"{shown(name)} is not one of {names}")

    def find(self, name: str) -> T:
        """The implementation of that name. Raises ConfigError, with all names, if there is none."""
        self.check(name)
        return self[name]

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            load_plugins()
        entry = self._entries[name]
        if not isinstance(entry, str):
            return entry
        try:
            implementation: T = import_place(entry)
        except OctavoError:
            raise
        except Exception as error:  # a module can fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                self._option, f"{shown(name)} is registered as {entry}, which fails: {reason}"
            ) from error
        return implementation

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if name not in self._entries:
            load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(self._entries)

    def __len__(self) -> int:
        load_plugins()
        return len(self._entries)


def import_place(place: str) -> Any:
    """What is at "module:attribute" or "module", which is imported.

    Example:
        >>> import_place("octavo.models.decoder:Decoder")
    """
    module, _, attribute = place.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def load_plugins() -> None:
    """Run the plugins that are installed, once in a process.

    Raises ConfigError if one fails, on every call: without it, what it would have added is missing.
    None is run again, because what it has registered already would be taken.
    """
    global _plugins_are_loaded, _plugin_error
    with _loading:
        if _plugin_error is not None:
            raise _plugin_error
        if _plugins_are_loaded:
            return
        _plugins_are_loaded = True  # plugins themselves look names up
        for plugin in entry_points(group=GROUP):
            try:
                plugin.load()()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                message = f"{plugin.name} ({plugin.value}) fails: {reason}"
                _plugin_error = ConfigError("plugin", message)
                raise _plugin_error from error


# What an option's value is checked against before the packages that implement it are imported.
POLICIES: Registry[Any] = Registry(
    "policy",
    {
        "fcfs": "octavo.core.policies:FirstComeFirstServed",
        "priority": "octavo.core.policies:Priority",
        "fair": "octavo.core.policies:FairShare",
    },
)
MEMORY_POLICIES: Registry[Any] = Registry(
    "memory_policy",
    {
        "paged": "octavo.core.kv.manager:KVCacheManager",
        "orca-max": "octavo.core.kv.reserving:OrcaMax",
        "orca-pow2": "octavo.core.kv.reserving:OrcaPow2",
        "orca-oracle": "octavo.core.kv.reserving:OrcaOracle",
        "fastertransformer": "octavo.core.kv.reserving:FasterTransformer",
    },
)
ATTENTION_BACKENDS: Registry[Any] = Registry(
    "attention_backend",
    {
        "cpu": "octavo.ops.cpu.attention:CpuBackend",
        "reference": "octavo.ops.reference.attention:ReferenceBackend",
        "triton": "octavo.ops.cuda.attention:TritonBackend",
    },
)
LINEAR_METHODS: Registry[Any] = Registry(
    "linear_method",
    {
        "plain": "octavo.layers.linear:PlainLinear",
        "quantized": "octavo.layers.linear:QuantizedLinear",
        "rounded": "octavo.layers.linear:RoundedLinear",
    },
)
EXPERTS_METHODS: Registry[Any] = Registry(
    "experts_method",
    {
        "plain": "octavo.layers.experts:PlainExperts",
        "quantized": "octavo.layers.experts:QuantizedExperts",
    },
)
EXECUTORS: Registry[Any] = Registry(
    "executor",
    {
        "local": "octavo.executor.local:LocalExecutor",
        "sharded": "octavo.executor.sharded:ShardedExecutor",
        "ray": "octavo.executor.ray_launcher:make_executor",
    },
)
