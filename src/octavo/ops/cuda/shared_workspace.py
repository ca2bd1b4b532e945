"""What models of one process share on a GPU from one launch to the next: the workspace in which
weights are dequantized (linear_quantized.py).

All of them launch on the same stream, but they may compute in several threads. Another model's
launch may come between those of a thread. A thread that writes the workspace, or launches a graph
that may write it, holds the lock until the last kernel that reads it is launched.
"""

from __future__ import annotations

from threading import Lock

import torch

in_workspace = Lock()


def replay(graph: torch.cuda.CUDAGraph) -> None:
    """Launch a graph, between no two launches of another thread that share the workspace."""
    with in_workspace:
        graph.replay()
