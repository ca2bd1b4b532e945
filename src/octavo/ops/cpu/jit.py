"""How Numba compiles our kernels, and where the result is kept.

Numba frees an array after the last line that names it, even if its address (`ctypes.data`) is used
later. So kernels take an array's address where they use it.
"""

# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from llvmlite.binding import get_host_cpu_features
from numba import cfunc, njit, types
from numba.core import config

# Not cached individually: `compile_kernel` caches the whole kernel.
jit = njit(nogil=True, error_model="numpy")
# For functions with large vector loops, which indirect callers would otherwise compile again.
inlined = njit(nogil=True, error_model="numpy", inline="always")


def compile_kernel(function: Callable[[int], None]) -> Any:
    """Compile `function` to a C function that takes an address; `.address` is where the code is.

    Cached on disk in a writable place: __pycache__ beside its module, or else the user's cache
    directory.
    """
    options: dict[str, Any] = {"error_model": "numpy"}
    signature = types.void(types.intp)
    try:
        return cfunc(signature, cache=True, **options)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return cfunc(signature, **options)(function)


def digest_of(*modules: ModuleType) -> str:
    """A digest of their sources: Numba's cache notices changes only in the file of its function.

    A kernel that mentions the digest is compiled again when any of them has changed.
    """
    sources = [Path(str(module.__file__)).read_bytes() for module in modules]
    return sha256(b"".join(sources)).hexdigest()


def host_has(feature: str) -> bool:
    """Whether the CPU that Numba compiles for has a feature, by its name in LLVM."""
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return f"+{feature}" in (config.CPU_FEATURES or "").split(",")
    return bool(get_host_cpu_features().get(feature))
