"""Kernels that are launched in compiled_together() are compiled, each once, and not launched; but
those of other threads are.

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


def check_other_threads(out: torch.Tensor) -> None:
    """An engine may compute in one while another starts, and two may start at once."""
    run, compile_one = JITFunction.run, JITFunction._do_compile
    launched = list[bool]()

    def noted(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        launched.append(not warmup)
        return run(kernel, *args, warmup=True, **options)

    has_begun, may_end = threading.Event(), threading.Event()

    def start_engine() -> None:
        with compiled_together():
            _store[(1,)](out, 2.0, SIZE=128)
            has_begun.set()
            assert may_end.wait(300)

    JITFunction.run = noted
    first, second = (threading.Thread(target=start_engine) for _ in range(2))
    first.start()
    assert has_begun.wait(300)
    assert _store[(1,)](out, 2.0, SIZE=256) is not None, "it is compiled by its own thread"
    assert launched == [False, True], launched
    second.start()
    may_end.set()
    first.join()
    second.join()
    assert JITFunction.run is noted
    assert JITFunction._do_compile is compile_one
    JITFunction.run = run


def check_errors(out: torch.Tensor) -> None:
    """One that is raised inside is raised outside, and Triton's methods are put back."""
    run, compile_one = JITFunction.run, JITFunction._do_compile
    try:
        with compiled_together():
            _store[(1,)](out, 2.0, SIZE=512)
            raise MemoryError
    except MemoryError:
        assert JITFunction.run is run
        assert JITFunction._do_compile is compile_one
        return
    raise AssertionError("no error came out")


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
    check_other_threads(out)
    check_errors(out)
    try:
        _wrong.warmup(out, SIZE=64, grid=(1,))
    except triton.CompilationError:
        print("compiled together")


if __name__ == "__main__":
    main()
