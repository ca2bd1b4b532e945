"""Joining the ranks of a tensor-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from octavo.ops.communicator import Communicator, GroupCommunicator, SingleRank
from octavo.parallel import Shard


def connect(shard: Shard, address: str, device: torch.device) -> Communicator:
    """Join the group; returns when all of its ranks have.

    Args:
        address: where the ranks meet, "file:///path" of a file that does not exist yet, or
            "tcp://127.0.0.1:port", where rank 0 will listen.
        device: on which tensors will be exchanged; a GPU is the process's current one.
    """
    if shard.size == 1:
        return SingleRank()
    is_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=address,
        rank=shard.rank,
        world_size=shard.size,
        device_id=device if is_gpu else None,
    )
    group = dist.group.WORLD
    assert group is not None, "it was just made"
    if device.type == "cuda":
        from octavo.ops.cuda.all_reduce import PeerCommunicator

        return PeerCommunicator(group)
    return GroupCommunicator(group)
