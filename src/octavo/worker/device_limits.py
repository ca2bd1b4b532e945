"""Which GPUs are served, and in what words the others are refused; loads no Triton."""

from __future__ import annotations

from importlib.util import find_spec

from octavo.errors import ConfigError

LEAST_CAPABILITY = (8, 0)  # Ampere: Triton serves no older one, nor do these multiply bfloat16


def check_gpu(is_nvidia: bool, capability: tuple[int, int]) -> None:
    """Check a GPU before anything is loaded.

    Args:
        is_nvidia: whether this PyTorch is built for NVIDIA's GPUs.
        capability: the GPU's compute capability.

    Raises:
        ConfigError: it is not served, or Triton is missing.
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
