"""The devices that a worker can compute on. Loads no torch until one is looked for, and no Triton
before a GPU was found fit."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.host_memory import limited_spinning
from octavo.parallel import OPTION, WHOLE, Shard

if TYPE_CHECKING:
    from octavo.worker.device.base import Device

LEAST_CAPABILITY = (8, 0)  # Ampere: Triton supports no older one, nor do these multiply bfloat16


def find_device(config: EngineConfig, neighbours: Shard = WHOLE) -> Device:
    """The device that `config` asks for, or the best one of this machine.

    Args:
        neighbours: which of the ranks this process is that share a model and this host: each has a
            device of its own, which becomes torch's current one.

    Raises:
        ConfigError: there is no such device, it is not supported, or it cannot do what was asked.
    """
    with limited_spinning():
        import torch

    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device", "'cuda' was asked for, but PyTorch finds no NVIDIA GPU here")
    wants_cpu = config.device == "cpu" or config.attention_backend in ("cpu", "reference")
    if (wants_cpu and config.device != "cuda") or not has_gpu:
        from octavo.worker.device.cpu import CpuDevice

        return CpuDevice(config.num_threads, neighbours.size)
    if neighbours.size > 1:
        count = torch.cuda.device_count()
        torch.cuda.set_device(neighbours.rank % count)  # first: no other GPU gets a context
        check_gpus([torch.cuda.get_device_name(i) for i in range(count)], neighbours)
    check_gpu(torch.version.cuda is not None, torch.cuda.get_device_capability())
    from octavo.worker.device.cuda import CudaDevice  # loads Triton

    return CudaDevice(torch.device("cuda", torch.cuda.current_device()), neighbours.size)


def check_gpus(names: list[str], neighbours: Shard) -> None:
    """Check that a model can be shared by the first `neighbours.size` GPUs of this machine.

    Raises:
        ConfigError: there are not so many, or they are of different kinds.
    """
    if neighbours.size > len(names):
        raise ConfigError(
            OPTION, f"{neighbours.size} is more than the {len(names)} GPUs of this machine"
        )
    kinds = dict.fromkeys(names[: neighbours.size])
    if len(kinds) > 1:
        raise ConfigError(
            OPTION,
            f"the first {neighbours.size} GPUs are of different kinds ({', '.join(kinds)}), and "
            "all would wait for the slowest; choose equal ones by CUDA_VISIBLE_DEVICES",
        )


def check_gpu(is_nvidia: bool, capability: tuple[int, int]) -> None:
    """Check a GPU before anything is loaded.

    Args:
        is_nvidia: whether this PyTorch is built for NVIDIA's GPUs.
        capability: the GPU's compute capability.

    Raises:
        ConfigError: it is not supported, or Triton is missing.
    """
    instead = "device='cpu' computes without it"
    if not is_nvidia:
        raise ConfigError("device", f"of GPUs only NVIDIA's are served; {instead}")
    if capability < LEAST_CAPABILITY:
        has, least = (".".join(map(str, numbers)) for numbers in (capability, LEAST_CAPABILITY))
        raise ConfigError(
            "device", f"this GPU has compute capability {has}, and {least} is needed; {instead}"
        )
    if find_spec("triton") is None:
        raise ConfigError("device", "a GPU needs Triton: pip install triton")
