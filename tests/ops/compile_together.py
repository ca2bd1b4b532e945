"""Kernels that are launched in compiled_together() are compiled, each once, and not launched.

Run by test_compilation.py in a process without the interpreter, on a machine without a GPU: a
launch would fail.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
import triton
import triton.language as tl
from compile_kernels import Hopper
from triton.runtime import JITFunction, driver

from octavo.ops.cuda import clusters
from octavo.ops.cuda.compilation import compiled_together


@triton.jit
def _store(out, value, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), value)


@triton.jit
def _wrong(out, SIZE: tl.constexpr):
    tl.static_assert(SIZE > 1 << 20)
    tl.store(out, SIZE)


def main() -> None:
    driver.set_active(Hopper())
    compiled, others = Counter[str](), set[bool]()
    compile_one = JITFunction._do_compile

    def counted(kernel: Any, *args: Any) -> Any:
        compiled[kernel.__name__] += 1
        others.add(threading.current_thread() is not threading.main_thread())
        return compile_one(kernel, *args)

    JITFunction._do_compile = counted
    out = torch.zeros(64)
    with compiled_together():
        for _ in range(3):
            for size in (16, 32, 64):
                _store[(1,)](out, 2.0, SIZE=size)
            _wrong[(1,)](out, SIZE=64)
            clusters.launch(_store, (4,), 2, out, 3.0, SIZE=8)
    assert JITFunction._do_compile is counted
    assert compiled == {"_store": 4, "_wrong": 1}, compiled
    assert others == {True}
    assert not out.any()
    kernel = _store.warmup(out, 4.0, SIZE=16, grid=(1,))
    assert "st.global" in kernel.asm["ptx"]
    assert compiled["_store"] == 4, "it is compiled already"
    try:
        _wrong.warmup(out, SIZE=64, grid=(1,))
    except triton.CompilationError:
        print("compiled together")


if __name__ == "__main__":
    main()
