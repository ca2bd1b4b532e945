"""What a device can do at best, from its maker's data sheet or from a file of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from octavo.errors import ConfigError, shown
from octavo.models.quantization import WeightKernels

GIB = 1 << 30
GB = 10**9
TERA = 10**12
TEXTS = ("name", "kernels")  # fields that are no amounts
MAX_RATE = 10**21  # of bandwidths and FLOPs
MAX_MEMORY = 1 << 44  # bytes; the pool of a simulation lists the blocks of all of it


@dataclass(frozen=True, slots=True)
class GPU:
    """Peak rates of one device; how much of them is reached is the cost model's business."""

    name: str
    memory: int  # bytes
    memory_bandwidth: float  # bytes/s
    flops: float  # of 16-bit matrix products, dense; 1/s
    link_bandwidth: float  # bytes/s to the other devices of the host, each way
    host_bandwidth: float  # bytes/s to the host's memory, each way
    kernels: WeightKernels = "none"  # that octavo has for quantized weights there

    def __post_init__(self) -> None:
        choices = get_args(WeightKernels)
        if self.kernels not in choices:
            raise ConfigError("gpu.kernels", f"{self.kernels!r} is not one of {', '.join(choices)}")
        for field in fields(self):
            value = getattr(self, field.name)
            limit = MAX_MEMORY if field.name == "memory" else MAX_RATE
            if field.name not in TEXTS and not 1 <= value <= limit:
                raise ConfigError(
                    f"gpu.{field.name}", f"{shown(value)} is not between 1 and {limit:,}"
                )


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-40gb", 40 * GIB, 1555 * GB, 312 * TERA, 300 * GB, 32 * GB, "ampere"),
        GPU("a100-80gb", 80 * GIB, 2039 * GB, 312 * TERA, 300 * GB, 32 * GB, "ampere"),
        GPU("h100", 80 * GIB, 3352 * GB, 989 * TERA, 450 * GB, 64 * GB, "hopper"),
        GPU("h200", 141 * GB, 4800 * GB, 989 * TERA, 450 * GB, 64 * GB, "hopper"),
        # One core of a server, computing in float32; only good as a start for a calibration.
        GPU("cpu", 16 * GIB, 20 * GB, TERA // 10, 10 * GB, 10 * GB, "cpu"),
    )
}


# What NVIDIA's driver calls those that have these rates; other cards of a name are slower.
DRIVER_NAMES = {
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}


def find_driver_name(name: str) -> GPU | None:
    """A device by the name that its driver gives it; None if its rates are not known."""
    return GPUS[DRIVER_NAMES[name]] if name in DRIVER_NAMES else None


def find_gpu(name: str) -> GPU:
    """A device by its name, or from a JSON file with GPU's fields.

    Raises:
        ConfigError: there is no such device; the message lists those there are. Or the file is
            broken.
    """
    if name in GPUS:
        return GPUS[name]
    if name.endswith(".json"):
        return _read_gpu(Path(name))
    raise ConfigError(
        "gpu", f"{name!r} is not one of {', '.join(GPUS)}, and not a .json file with one's own"
    )


def _read_gpu(path: Path) -> GPU:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("gpu", f"{path} cannot be read: {error}") from error
    names = [field.name for field in fields(GPU)]
    needed = {field.name for field in fields(GPU) if field.default is MISSING}
    if not isinstance(values, Mapping) or not needed <= set(values) <= set(names):
        raise ConfigError("gpu", f"{path} must be a JSON object with {', '.join(names)}")
    return GPU(**{name: _checked(path, name, value) for name, value in values.items()})


def _checked(path: Path, name: str, value: Any) -> Any:
    kinds: tuple[type, ...] = (str,) if name in TEXTS else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ConfigError("gpu", f"{path}: {name} is {value!r}, not a {kinds[-1].__name__}")
    return value
