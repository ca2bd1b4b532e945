"""All-reduce of rows over the GPUs of one host: ours, fused with residual and norm, beside NCCL's.

Ours go in one shot or in two (ops/cuda/all_reduce.py); "fused" chooses as the engine does. Times
are per call, in a CUDA graph of calls. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_harness import report
from torch import Tensor

from octavo.ops.communicator import Reduction, ReductionSite
from octavo.ops.cuda import all_reduce
from octavo.ops.cuda.all_reduce import PeerCommunicator
from octavo.ops.cuda.norm import norm
from octavo.ops.norm import Affine

ROWS = (1, 2, 16, 64, 128, 256, 512, 2048, 8192)
CALLS = 40  # per graph
ALTERNATING = (ReductionSite.ATTENTION, ReductionSite.MLP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--max-rows", type=int, default=8192)
    parser.add_argument("--stress", type=int, default=3000, help="calls that are checked")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        mp.spawn(  # type: ignore[attr-defined]
            _rank, (torch.cuda.device_count(), store, arguments), torch.cuda.device_count()
        )


def _rank(rank: int, size: int, store: str, arguments: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    hosts = dist.new_group(backend="gloo")
    assert isinstance(hosts, dist.ProcessGroup)
    hidden, dtype = arguments.hidden_size, torch.bfloat16

    def communicator(hop_bytes: float) -> PeerCommunicator:
        all_reduce.HOP_BYTES = hop_bytes
        made = PeerCommunicator(group, hosts)
        made.reserve(arguments.max_rows, hidden, dtype, device)
        return made

    peers = communicator(all_reduce.HOP_BYTES)
    default = all_reduce.HOP_BYTES
    one_shot, two_shot = communicator(1e15), communicator(0)
    all_reduce.HOP_BYTES = default
    weight = torch.ones(hidden, dtype=dtype, device=device)
    errors = _check(peers, weight, arguments.stress, arguments.max_rows)
    rows: dict[str, dict[str, float]] = {}
    for num_rows in ROWS:
        if num_rows > arguments.max_rows:
            continue
        x = torch.randn(num_rows, hidden, dtype=dtype, device=device)
        parts = torch.randn(2, num_rows, hidden, dtype=torch.float32, device=device)
        residual = torch.zeros_like(x)

        def fused(call: int, x: Tensor = x, residual: Tensor = residual) -> None:
            _reduce(x, residual, weight, peers, ALTERNATING[call % 2])

        def splits(call: int, x: Tensor = parts, residual: Tensor = residual) -> None:
            _reduce(x, residual, weight, peers, ALTERNATING[call % 2])

        def norm_alone(call: int, x: Tensor = x, residual: Tensor = residual) -> None:
            norm(x, Affine(weight), 1e-5, residual, is_rms=True)

        def one(call: int, x: Tensor = x, residual: Tensor = residual) -> None:
            _reduce(x, residual, weight, one_shot, ALTERNATING[call % 2])

        def two(call: int, x: Tensor = x, residual: Tensor = residual) -> None:
            _reduce(x, residual, weight, two_shot, ALTERNATING[call % 2])

        def nccl(call: int, x: Tensor = x) -> None:
            dist.all_reduce(x)

        ways: dict[str, Callable[[int], None]] = {
            "norm": norm_alone,
            "nccl": nccl,
            "one_shot": one,
            "two_shot": two,
            "fused": fused,
            "fused_2_splits": splits,
        }
        rows[str(num_rows)] = {
            name: round(_time(way, 4 if num_rows > 1000 else CALLS), 2)
            for name, way in ways.items()
        }
        if rank == 0:
            print(num_rows, num_rows * hidden * 2 >> 10, "KiB", rows[str(num_rows)], flush=True)
    if rank == 0:
        limit = all_reduce.one_shot_rows(size, hidden * dtype.itemsize)
        report(
            "all_reduce",
            ranks=size,
            hidden_size=hidden,
            one_shot_rows=limit,
            errors=errors,
            us=rows,
        )
    dist.destroy_process_group()


def _reduce(
    x: Tensor, residual: Tensor, weight: Tensor, peers: PeerCommunicator, site: ReductionSite
) -> None:
    norm(x, Affine(weight), 1e-5, residual, True, reduction=Reduction(peers, site))


def _time(call: Callable[[int], None], calls: int) -> float:
    """Microseconds per call."""
    for index in range(4):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    times = []
    for _ in range(12):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        graph.replay()  # the ranks start at different times; the first replay hides that
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return sorted(times)[len(times) // 2]


def _check(peers: PeerCommunicator, weight: Tensor, calls: int, max_rows: int) -> int:
    """Calls whose sums are wrong, of some with random sizes, values and delays."""
    rank, size = peers.shard.rank, peers.shard.size
    device, hidden = weight.device, weight.shape[0]
    order = random.Random(1)
    waits = random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(calls):
        num_rows = order.choice((1, 1, 2, 3, 17, 64, 130, min(1000, max_rows)))
        parts = []
        for each in range(size):
            generator = torch.Generator(device).manual_seed(size * call + each)
            part = torch.randn(num_rows, hidden, device=device, generator=generator)
            part[:, ::7] = -0.0
            if call % 5 == 0:
                part[0, 3] = float("nan") if each else float("inf")
            parts.append(part.to(weight.dtype))
        total = torch.zeros(num_rows, hidden, device=device)
        for part in parts:
            total += part.float()
        if waits.random() < 0.2:
            torch.cuda._sleep(waits.randrange(200_000))
        residual = torch.zeros(num_rows, hidden, dtype=weight.dtype, device=device)
        _reduce(parts[rank], residual, weight, peers, ReductionSite(call % 3))
        expected = total.to(weight.dtype)
        same = (residual == expected) | (residual.isnan() & expected.isnan())
        wrong += (~same).any()
    return int(wrong)


if __name__ == "__main__":
    main()
