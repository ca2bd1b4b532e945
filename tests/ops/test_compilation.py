"""Kernels are taken by Triton's compiler, not by its interpreter alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def last_line(program: str, *arguments: str) -> str:
    """What a program beside this file prints last, in a process without the interpreter."""
    paths = [*sys.path, str(HERE), str(HERE.parent)]
    environment = {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / program), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_kernels_are_compiled_together_and_not_launched() -> None:
    assert last_line("compile_together.py") == "compiled together"


@pytest.mark.parametrize("variants", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_compile_for_hopper_without_a_gpu(variants: str) -> None:
    compiled = ast.literal_eval(last_line("compile_kernels.py", variants))
    expected = {"_decode_kernel", "_prefill_kernel", "_cascade_kernel", "_norm_kernel"}
    expected |= {"prefill_hopper_kernel", "_cluster_kernel"}
    expected |= {
        "_encoder_kernel",
        "_linear_one_kernel",
        "linear_kernel",
        "_gate_kernel",
        "_soft_cap_kernel",
    }
    expected |= {"_peak_kernel", "outline", "gather", "find_limits", "_sum_kernel", "_draw_kernel"}
    expected |= {"_embed_kernel", "_fill_pending", "_begin_decodes", "_keep_tokens"}
    expected |= {"quantized_linear_kernel", "_dequantize_float8_kernel", "_dequantize_int_kernel"}
    expected |= {"persistent_linear_kernel", "_linear_packed_kernel"}
    expected |= {"_linear_ring_kernel", "_linear_ring_float12_kernel", "linear_float12_kernel"}
    expected |= {"_round_kernel"}
    expected |= {"_route_kernel", "_mark_kernel", "_list_kernel"}
    expected |= {"_experts_kernel", "grouped_kernel"}
    expected |= {"split_kernel", "grouped_mx_kernel", "experts_one_kernel"}
    expected |= {"_gate_up_one_kernel", "_down_one_kernel"}
    expected |= {"_gate_up_packed_kernel", "_down_packed_kernel"}
    expected |= {"grouped_float12_kernel", "_gate_up_float12_kernel", "_down_float12_kernel"}
    expected |= {"_pack_kernel"}
    assert compiled.keys() >= expected
