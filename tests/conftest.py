"""Settings for all tests; read before anything imports torch."""

from __future__ import annotations

import os

# Test processes share the cores. With a thread a core each, tiny matrix products wait for threads
# that the system has put aside, and take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# Triton's kernels run in its interpreter where there is no GPU. Read when kernels are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
