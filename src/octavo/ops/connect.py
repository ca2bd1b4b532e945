"""Joining the ranks of a tensor-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from octavo.errors import ConfigError
from octavo.ops.communicator import Communicator, GroupCommunicator, SingleRank
from octavo.parallel import OPTION, Shard


def connect(
    shard: Shard, address: str, device: torch.device, is_one_host: bool = True
) -> Communicator:
    """Join the group; returns when all of its ranks have.

    Args:
        address: where the ranks meet, "file:///path" of a file that is empty or not there yet, or
            "tcp://host:port", where rank 0 will listen.
        device: on which tensors will be exchanged; a GPU is the process's current one.
        is_one_host: whether all ranks are on this host, where GPUs may reach each other's memory.

    Raises:
        ConfigError: this PyTorch lacks what exchanges tensors between such devices.
    """
    if shard.size == 1:
        return SingleRank()
    is_gpu = device.type == "cuda"
    backend = "nccl" if is_gpu else "gloo"
    if not dist.is_backend_available(backend):
        raise ConfigError(
            OPTION, f"ranks exchange tensors by {backend}, which this PyTorch was built without"
        )
    dist.init_process_group(
        backend,
        init_method=address,
        rank=shard.rank,
        world_size=shard.size,
        device_id=device if is_gpu else None,
    )
    group = dist.group.WORLD
    assert group is not None, "it was just made"
    if not is_gpu:
        return GroupCommunicator(group)
    hosts = dist.new_group(backend="gloo")
    assert isinstance(hosts, dist.ProcessGroup), "all ranks belong to it"
    if is_one_host:
        from octavo.ops.cuda.all_reduce import PeerCommunicator

        return PeerCommunicator(group, hosts)
    return GroupCommunicator(group, hosts)
