"""What kernels need to know of a device: its kind, its multiprocessors, and their memory."""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver

from octavo.ops.cuda.tile_sizes import MUCH_SHARED_MEMORY

_SMS_OF_H200 = 132


@cache
def num_sms(device: torch.device) -> int:
    """How many multiprocessors a GPU has; a CPU's interpreter stands for an H200."""
    if device.type != "cuda":
        return _SMS_OF_H200
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; a CPU's interpreter has no limit."""
    if device.type != "cuda":
        return MUCH_SHARED_MEMORY
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether a GPU is one."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9


def is_on_hopper(device: torch.device) -> bool:
    """Whether it is a Hopper GPU; the device may also be a CPU."""
    return device.type == "cuda" and is_hopper(device)
