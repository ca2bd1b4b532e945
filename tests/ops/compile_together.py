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
    compiled, compiling, launched = Counter[str](), set[str](), set[tuple[str, bool]]()
    compile_one, run = JITFunction._do_compile, JITFunction.run

    def counted(kernel: Any, *args: Any) -> Any:
        compiled[kernel.__name__] += 1
        compiling.add(threading.current_thread().name.split("_")[0])
        return compile_one(kernel, *args)

    def noted(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        launched.add((threading.current_thread().name, not warmup))
        return run(kernel, *args, warmup=True, **options)

    JITFunction._do_compile, JITFunction.run = counted, noted
    out = torch.zeros(64)
    entered = threading.Event()

    def elsewhere() -> None:
        _store[(1,)](out, 2.0, SIZE=4)
        with compiled_together():
            entered.set()

    other = threading.Thread(target=elsewhere, name="other")
    with compiled_together():
        for _ in range(3):
            for size in (16, 32, 64):
                _store[(1,)](out, 2.0, SIZE=size)
            _wrong[(1,)](out, SIZE=64)
            clusters.launch(_store, (4,), 2, out, 3.0, SIZE=8)
        other.start()
        assert not entered.wait(3.0), "two at a time"
    other.join()
    assert entered.is_set()
    assert (JITFunction._do_compile, JITFunction.run) == (counted, noted)
    assert compiled == {"_store": 5, "_wrong": 1}, compiled
    assert compiling == {"octavo-compile", "other"}, compiling
    assert launched == {("MainThread", False), ("other", True)}, launched
    kernel = _store.warmup(out, 4.0, SIZE=16, grid=(1,))
    assert "st.global" in kernel.asm["ptx"]
    assert compiled["_store"] == 5, "it is compiled already"
    try:
        _wrong.warmup(out, SIZE=64, grid=(1,))
    except triton.CompilationError:
        print("compiled together")


if __name__ == "__main__":
    main()
