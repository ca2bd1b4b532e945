"""Carries out Gluon kernels in torch: Triton's interpreter knows none.

Only what the kernels of linear_hopper.py, linear_hopper_quantized.py, linear_hopper_persistent.py,
linear_hopper_float12.py, linear_gemv_packed.py, linear_ring.py, linear_ring_float12.py,
experts_hopper.py, experts_mx_hopper.py, experts_one_mx.py, experts_one_float8.py,
attention_prefill_hopper.py and attention_decode_cluster.py use.
Layouts say where a value lies, not what it is, and are ignored; except that inline assembly takes
neighbouring columns together, as the operands of wgmma do. The partitions of a program run in
threads, and wait for each other at the barriers in shared memory. Programs run one after the other,
but for those that may wait for others, by adding 0 to a number in memory, by a volatile load, or
for bytes from their cluster: then the next one begins.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ptx_emulator import Words, carry_out
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

PATIENCE = 60.0  # seconds that a partition waits at a barrier, or a program for another one
LONGEST_NAP = 0.032  # seconds, of a program that waits for another one
_atomic = threading.Lock()
_partition = threading.local()  # `num_warps` of the one that the thread runs, if it runs one
# Of Gluon's names, what torch has under another one.
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8e4nv": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
LAYOUTS = (
    "BlockedLayout",
    "DistributedLinearLayout",
    "DotOperandLayout",
    "NVMMADistributedLayout",
    "NVMMASharedLayout",
    "SliceLayout",
    "SwizzledSharedLayout",
)


class Block(Tensor):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """As torch's own, which for tensors so small takes most of the time; but of what it asks
        about types, functions and results, only what matters here."""
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is Tensor:
            return result.as_subclass(Block)
        if type(result) in (tuple, list):
            return type(result)(block(each) if type(each) is Tensor else each for each in result)
        return result

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:  # type: ignore[override]
        if bitcast:
            return self.view(dtype)  # type: ignore[return-value]
        if dtype == torch.float8_e4m3fn:  # as a GPU converts: infinity becomes a number, too
            return self.clamp(-448, 448).as_subclass(Tensor).to(dtype).as_subclass(Block)
        return super().to(dtype)  # type: ignore[return-value]


def block(values: Tensor) -> Block:
    return values.as_subclass(Block)


class Pointer:
    """Into a tensor, as many elements behind its first one as `offset` says."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory = _from_first(memory)
        self.offset = offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


def _from_first(values: Tensor) -> Tensor:
    """A tensor's memory from its first element on, with what lies between strided ones."""
    if values.is_contiguous():
        return values.view(-1)
    size = values.untyped_storage().nbytes() // values.element_size() - values.storage_offset()
    return values.as_strided((size,), (1,))


SWIZZLED = 128  # bytes of a row that shared memory may hold together


class Shared:
    """A tensor in shared memory."""

    layout = None

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.dtype = values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def index(self, i: int) -> Shared:
        return Shared(self.values[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.values.narrow(dim, start, length))

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        values = self.values.view(dtype)
        across = values.shape[-1]
        if across * dtype.itemsize == SWIZZLED < shape[-1] * dtype.itemsize:
            return Panels(values.view(-1, shape[-1] // across, shape[-2], across))
        return Shared(values.view(shape))

    _reinterpret = reinterpret

    def load(self, layout: object) -> Block:
        return block(self.values.clone())

    def store(self, values: Tensor) -> None:
        self.values.copy_(values)


class Panels(Shared):
    """Swizzled matrices whose rows are longer than 128 bytes: their columns lie in panels that
    wide, one after the other. What `index` finds is a copy, to be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        matrices, panels, rows, across = self.values.shape
        return matrices, rows, panels * across

    def index(self, i: int) -> Shared:
        return Shared(self.values[int(i)].transpose(0, 1).flatten(1))


class Descriptor:
    """What TMA fetches blocks of."""

    def __init__(self, matrix: Tensor, *shape: int) -> None:
        self.matrix, self.dtype, self.layout = matrix, matrix.dtype, None
        nbytes = math.prod(shape) * matrix.element_size()
        self.block_type = SimpleNamespace(shape=shape, nbytes=nbytes)


class Barriers:
    """mbarriers: a phase ends when it was arrived at, and all bytes that it expects are there."""

    def __init__(self, count: int) -> None:
        self.changed = threading.Condition()
        self.phases, self.pending, self.missing = [0] * count, [1] * count, [0] * count
        self.arrivals = [1] * count  # in a phase
        self.shape = (count, 1)

    def index(self, i: int) -> tuple[Barriers, int]:
        return self, int(i)

    def expect_arrivals(self, i: int, count: int) -> None:
        self.arrivals[i] = self.pending[i] = count

    def change(self, i: int, arrivals: int, num_bytes: int) -> None:
        with self.changed:
            self.pending[i] -= arrivals
            self.missing[i] += num_bytes
            assert self.pending[i] >= 0, "a barrier was arrived at twice in a phase"
            if not self.pending[i] and not self.missing[i]:
                self.phases[i] += 1
                self.pending[i] = self.arrivals[i]
                self.changed.notify_all()

    def wait(self, i: int, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phases[i] % 2 != int(parity), PATIENCE)
        assert done, "a partition waits for ever"


class Copies:
    """To shared memory, which are not there before a barrier was arrived at."""

    def __init__(self) -> None:
        self.open: list[tuple[Shared, Tensor]] = []

    def add(self, target: Shared, source: Pointer, mask: Any = None) -> None:
        self.open.append((target, _load(source, mask)))

    def arrive(self, bar: tuple[Barriers, int], increment_count: bool) -> None:
        """Each thread of the partition does, once its copies are there."""
        assert not increment_count
        for target, values in self.open:
            target.store(values)
        self.open.clear()
        bar[0].change(bar[1], 32 * _partition.num_warps, 0)


class Cluster:
    """The shared memory of programs that write into each other's; addresses begin with a rank."""

    RANK = 1 << 20  # bytes of each

    def __init__(self) -> None:
        self.changed = threading.Condition()
        # What has come lies there before a program declares its memory; the rest are NaN.
        self.octets: defaultdict[int, NDArray[np.uint8]] = defaultdict(
            lambda: np.full(self.RANK, 255, np.uint8)
        )
        self.missing: Counter[int] = Counter()  # bytes that have not come, of those that will
        self.opened: Counter[int] = Counter()

    def declare(self, rank: int, text: str) -> int:
        (size,) = map(int, re.findall(r"\[(\d+)\]", text))
        with self.changed:
            self.octets[rank] = self.octets[rank][:size]
        return rank * self.RANK

    def open(self, inbox: int, num_bytes: int) -> None:
        with self.changed:
            self.missing[inbox // self.RANK] += int(num_bytes)
            self.opened[inbox // self.RANK] += 1

    def write(self, values: Tensor, address: Tensor, inside: Tensor, vec: int, sends: bool) -> None:
        """vec: so many elements that follow each other have addresses that do."""
        first = address.reshape(-1, vec)[:, :1]
        assert torch.equal(address.reshape(-1, vec), first + 4 * torch.arange(vec)), "vectors"
        assert (first % (4 * vec) == 0).all(), "vectors lie where addresses are multiples"
        octets = values.float().contiguous().numpy().view(np.uint8).reshape(-1, 4)
        with self.changed:
            for data, place, is_inside in zip(
                octets, address.flatten().tolist(), inside.flatten().tolist(), strict=True
            ):
                if is_inside:
                    rank, offset = divmod(place, self.RANK)
                    self.octets[rank][offset : offset + 4] = data
                    self.missing[rank] -= 4 * sends
            self.changed.notify_all()

    def read(self, address: Tensor) -> Tensor:
        rank, offset = divmod(address.flatten().numpy(), self.RANK)
        assert len(set(rank.tolist())) == 1, "a program reads its own memory"
        data = self.octets[int(rank[0])][offset[:, None] + np.arange(4)]
        assert data.shape[1] == 4
        return block(torch.from_numpy(data.copy().view(np.float32)).view(address.shape))

    def wait(self, inbox: int) -> None:
        rank = inbox // self.RANK
        assert self.opened[rank] == 1
        with self.changed:
            done = self.changed.wait_for(lambda: not self.missing[rank], PATIENCE)
        assert done, f"{self.missing[rank]} bytes do not come"


def launch_clusters(
    kernel: JITFunction[Any], grid: tuple[int, ...], cluster: int, *args: Any, **constants: Any
) -> None:
    """In place of clusters.launch."""
    run(kernel, (cluster * grid[0], *grid[1:]), *args, cluster=cluster, **constants)


def run(
    kernel: JITFunction[Any],
    grid: tuple[int, ...],
    *args: Any,
    cluster: int = 1,
    **constants: Any,
) -> None:
    """Run a kernel's programs.

    args: tensors for pointers, Descriptor for TMA. cluster: so many programs that follow each other
    along the first axis are one. constants: the kernel's compile-time constants.
    """
    clusters: defaultdict[tuple[int, ...], Cluster] = defaultdict(Cluster)
    num_warps = constants.pop("num_warps")
    given = [Pointer(each) if isinstance(each, Tensor) else each for each in args]
    with ThreadPoolExecutor(math.prod(grid)) as pool:
        running = []
        for program in product(*map(range, grid)):
            halts = threading.Event()
            own = clusters[program[0] // cluster, *program[1:]]
            names = _Namespaces(program, grid, num_warps, halts, own, program[0] % cluster)
            function = names.rebound(kernel)
            running.append(pool.submit(_carry_out, function, halts, given, constants))
            halts.wait()
        for each in running:
            each.result()


def _carry_out(
    function: Callable[..., Any], halts: threading.Event, args: list[Any], constants: dict[str, Any]
) -> None:
    try:
        function(*args, **constants)
    finally:
        halts.set()


class Emulated:
    """In place of a kernel: a launch of it is carried out here."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            options.pop("maxnreg", None)
            given = [
                Descriptor(each.base, *each.block_shape)
                if isinstance(each, TensorDescriptor)
                else each
                for each in args
            ]
            run(self._kernel, grid, *given, **options)

        return launch


class _Namespaces:
    """What the names of a kernel's module mean while a program runs."""

    def __init__(
        self,
        program: tuple[int, ...],
        grid: tuple[int, ...],
        num_warps: int,
        halts: threading.Event,
        cluster: Cluster,
        rank: int,
    ) -> None:
        """halts: set when the program waits for another one. cluster, rank: the program's."""
        barrier = SimpleNamespace(
            init=lambda bar, count: bar[0].expect_arrivals(bar[1], count),
            wait=lambda bar, parity, pred=True: bar[0].wait(bar[1], parity) if pred else None,
            expect=lambda bar, num_bytes: bar[0].change(bar[1], 1, num_bytes),
            arrive=lambda bar, count, pred=True: bar[0].change(bar[1], count, 0) if pred else None,
            MBarrierLayout=lambda: "barrier",
        )
        copies = Copies()
        polls = Polls()
        language = SimpleNamespace(
            **DTYPES,
            **{name: lambda *args, **options: None for name in LAYOUTS},
            program_id=lambda axis: block(torch.tensor(program[axis])),
            num_programs=lambda axis: grid[axis],
            num_warps=lambda: getattr(_partition, "num_warps", num_warps),
            static_range=range,
            allocate_shared_memory=_allocate,
            arange=lambda start, end, layout=None: block(
                torch.arange(start, end, dtype=torch.int32)
            ),
            zeros=lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype)),
            zeros_like=torch.zeros_like,
            to_tensor=torch.as_tensor,
            full=lambda shape, value, dtype, layout: block(torch.full(shape, value, dtype=dtype)),
            cdiv=lambda a, b: -(-a // b),
            minimum=_extreme(min, torch.fmin),
            maximum=_extreme(max, torch.fmax),
            abs=torch.abs,
            exp=torch.exp,
            exp2=torch.exp2,
            rsqrt=torch.rsqrt,
            log2=torch.log2,
            floor=torch.floor,
            max=_largest,
            min=lambda values, axis: values.amin(axis),
            sum=lambda values, axis: values.sum(axis),
            erf=torch.erf,
            where=lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
            join=lambda a, b: torch.stack((a, b), dim=-1),
            split=lambda pairs: pairs.unbind(-1),
            convert_layout=lambda values, layout, assert_trivial=False: values,
            broadcast=torch.broadcast_tensors,
            inline_asm_elementwise=_assembly,
            warp_specialize=partial(_partitions, num_warps),
            load=partial(_load_of, halts, polls),
            store=_store,
            atomic_add=partial(_atomic_add, halts, polls),
        )
        self.meanings = {
            "gl": language,
            "tl": language,
            "mbarrier": barrier,
            "async_copy": SimpleNamespace(mbarrier_arrive=copies.arrive),
            "fence_async_shared": lambda: None,
            "mma_v2": _multiply,
            "warpgroup_mma": _multiply,
            "warpgroup_mma_wait": lambda count, deps: deps[0] if len(deps) == 1 else tuple(deps),
            "copy_async": copies.add,
            "fetch_tile": _fetch,
            "sync_threads": lambda: None,
            **_in_cluster(cluster, rank, halts),
            "_transposed": lambda x: x.unflatten(1, (-1, 8)).mT.flatten(1, 2),
        }
        self.globals: dict[int, dict[str, Any]] = {}

    def rebound(self, function: JITFunction[Any] | InterpretedFunction) -> Callable[..., Any]:
        raw: FunctionType = function.fn
        return FunctionType(
            raw.__code__, self._globals(raw.__globals__), raw.__name__, raw.__defaults__
        )

    def _globals(self, module: dict[str, Any]) -> dict[str, Any]:
        if id(module) not in self.globals:
            own: dict[str, Any] = {"__builtins__": __builtins__}
            self.globals[id(module)] = own
            for name, value in module.items():
                if isinstance(value, ModuleType) or name.startswith("__"):
                    continue
                if isinstance(value, JITFunction | InterpretedFunction):
                    value = self.rebound(value)
                own[name] = getattr(value, "value", value)
            own |= self.meanings | {"min": min}
        return self.globals[id(module)]


def _in_cluster(cluster: Cluster, rank: int, halts: threading.Event) -> dict[str, Any]:
    """What the functions of clusters.py do."""

    def wait(inbox: int) -> None:
        halts.set()
        cluster.wait(inbox)

    def of_rank(address: Any, ranks: Tensor) -> Tensor:
        return torch.as_tensor(address) % Cluster.RANK + ranks * Cluster.RANK

    def send_pair(x: Tensor, y: Tensor, address: Tensor, barrier: Tensor, inside: Tensor) -> None:
        assert torch.equal(barrier // Cluster.RANK, address // Cluster.RANK)
        pairs, places = torch.stack((x, y), -1), torch.stack((address, address + 4), -1)
        cluster.write(pairs, places, torch.stack((inside, inside), -1), 2, True)

    def send(x: Tensor, address: Tensor, barrier: Tensor, vec: int) -> None:
        assert torch.equal(barrier // Cluster.RANK, address // Cluster.RANK)
        cluster.write(x, address, torch.ones_like(address), vec, True)

    return {
        "declare_inbox": lambda text: cluster.declare(rank, text),
        "open_inbox": cluster.open,
        "wait_until_open": lambda: None,
        "of_rank": of_rank,
        "send": send,
        "send_pair": send_pair,
        "wait_for_bytes": wait,
        "keep_own": lambda x, address, inside: cluster.write(x, address, inside, 4, False),
        "read_own": lambda address, vec: cluster.read(address),
    }


def _allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Shared | Barriers:
    if layout == "barrier":
        return Barriers(shape[0])
    values = torch.empty(shape, dtype=dtype)
    values.view(torch.uint8).fill_(255)  # NaN, or -1
    return Shared(values)


def _fetch(matrix: Descriptor, place: list[int], bar: tuple[Barriers, int], target: Shared) -> None:
    starts, shape = [int(each) for each in place], matrix.block_type.shape
    octets = target.values.view(torch.uint8)  # not every operation knows float8
    octets.zero_()
    inside = tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))
    found = matrix.matrix[inside].contiguous()
    if found.numel():
        found = found.view(torch.uint8)
        octets[tuple(map(slice, found.shape))] = found
    bar[0].change(bar[1], 0, -matrix.block_type.nbytes)


def _multiply(a: Any, b: Any, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Any:
    left, right = (each.values if isinstance(each, Shared) else each for each in (a, b))
    exact = torch.int32 if left.dtype == torch.int8 else torch.float32
    product = left.to(exact) @ right.to(exact)
    return block(product + acc if use_acc else product)


def _extreme(of_numbers: Callable[..., Any], of_tensors: Callable[..., Any]) -> Callable[..., Any]:
    """As on a GPU, NaN is dropped where the other one is a number."""

    def extreme(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return of_tensors(a, torch.as_tensor(b, dtype=a.dtype))
        return of_numbers(a, b)

    return extreme


def _largest(values: Tensor, axis: int) -> Tensor:
    """NaN only of nothing but NaN, as `fmax`."""
    if not values.is_floating_point():
        return values.amax(axis)
    is_nan = values.isnan()
    largest = values.masked_fill(is_nan, -torch.inf).amax(axis)
    return largest.masked_fill(is_nan.all(axis), torch.nan)


def _load_of(
    halts: threading.Event, polls: Polls, pointer: Pointer, *args: Any, **options: Any
) -> Any:
    if not options.get("volatile"):
        return _load(pointer, *args, **options)
    _let_others_run(halts, polls, pointer)
    found = _load(pointer, *args, **options)
    polls.found(pointer, found)
    return found


class Polls:
    """How often a program has looked at places in memory without finding anything new.

    It may wait for several places in turns. What is new at one of them, or that it looks at another
    one, is progress, and resets all counts.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], Tensor] = {}  # the octets that were there
        self._counts: Counter[tuple[int, int]] = Counter()
        self._slept = 0.0

    def nap(self, pointer: Pointer) -> None:
        """Longer each time: of many programs that wait, those that look all the time would keep
        the others from working."""
        assert self._slept < PATIENCE, "a program waits for ever"
        seconds = min(1e-3 * 2 ** min(self._counts[self._place(pointer)], 10), LONGEST_NAP)
        time.sleep(seconds)
        self._slept += seconds

    def found(self, pointer: Pointer, values: Tensor) -> None:
        """After a nap. As octets, because NaN is never equal to itself."""
        place = self._place(pointer)
        octets = values.as_subclass(Tensor).clone().flatten().view(torch.uint8)
        last = self._last.get(place)
        if last is None or not torch.equal(octets, last):
            self._last[place] = octets
            self._counts.clear()
            self._slept = 0.0
        self._counts[place] += 1

    @staticmethod
    def _place(pointer: Pointer) -> tuple[int, int]:
        offset = pointer.offset
        if isinstance(offset, Tensor):
            offset = offset.as_subclass(Tensor).flatten()[0]
        return pointer.memory.data_ptr(), int(offset)


def _let_others_run(halts: threading.Event, polls: Polls, pointer: Pointer) -> None:
    """A program that may wait for another one: the next one begins."""
    halts.set()
    polls.nap(pointer)


def _load(
    pointer: Pointer,
    mask: Any = None,
    other: float = 0.0,
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
) -> Any:
    offset = torch.as_tensor(pointer.offset).as_subclass(Tensor)
    if mask is None:
        found = pointer.memory[offset]
        # Of one number, torch makes a view of the memory, which others may write to.
        return block(found if offset.dim() else found.clone())
    inside = torch.as_tensor(mask).as_subclass(Tensor).expand(offset.shape)
    values = pointer.memory[offset.clamp(0, len(pointer.memory) - 1)]
    assert (offset[inside] < len(pointer.memory)).all(), "a load from behind a tensor"
    return block(torch.where(inside, values, torch.as_tensor(other, dtype=values.dtype)))


def _store(pointer: Pointer, values: Any, mask: Any = None) -> None:
    offset = torch.as_tensor(pointer.offset).as_subclass(Tensor)
    inside = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask
    values = torch.as_tensor(values).as_subclass(Tensor).expand(offset.shape)
    inside = torch.as_tensor(inside).as_subclass(Tensor).expand(offset.shape)
    pointer.memory[offset[inside]] = values.to(pointer.memory.dtype)[inside]


def _atomic_add(
    halts: threading.Event,
    polls: Polls,
    pointer: Pointer,
    value: Any,
    sem: str,
    scope: str,
    mask: Tensor | None = None,
) -> Any:
    """To one number; or the same of the places of a tensor, of which the mask leaves one."""
    if mask is not None:
        before = torch.full(mask.shape, -1, dtype=torch.int32)
        (i,) = mask.nonzero().flatten().tolist()
        place = Pointer(pointer.memory, pointer.offset[i])
        before[i] = _atomic_add(halts, polls, place, int(value[i]), sem, scope)
        return block(before)
    if value == 0:
        _let_others_run(halts, polls, pointer)
    with _atomic:
        before = int(pointer.memory[int(pointer.offset)])
        pointer.memory[int(pointer.offset)] += value
    if value == 0:
        polls.found(pointer, torch.tensor(before))
    return before


def _partitions(
    num_warps: int,
    functions: list[tuple[Callable[..., Any], tuple[Any, ...]]],
    warps: list[int],
    registers: object,
) -> Any:
    """Run the partitions in threads; the first one's result."""
    results: dict[int, Any] = {}

    def carry_out(i: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        _partition.num_warps = num_warps if i == 0 else warps[i - 1]
        try:
            results[i] = function(*args)
        except BaseException as error:
            results[i] = error

    threads = [
        threading.Thread(target=carry_out, args=(i, *each)) for i, each in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return results[0]


def _of_warps(text: str, values: Tensor, others: Tensor) -> Tensor:
    """What the lanes of a warp decide together in attention_prefill_hopper.py: whether any of its
    16 rows exceeds by 8; or whether to multiply."""
    if "mul" in text:
        return values * others
    exceed = (values - others > 8.0).view(-1, 16).any(1)
    return exceed.repeat_interleave(16).int()


def _assembly(
    text: str, constraints: str, args: list[Tensor], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """What ptx_emulator.py knows; or a prefetch, which has no result; or `atom.inc` of a number in
    memory by the first lane; or `tanh`; or what lanes vote for. `pack` neighbouring words of each
    argument have a register each, octets share one, and so do so many elements of the results."""
    if "prefetch" in text:
        for each in args:
            assert isinstance(each, Pointer)
            assert (each.offset < len(each.memory)).all(), "fetched from behind a tensor"
        return None
    if "atom" in text:
        assert "inc.u32" in text
        place, lanes, last = args
        results = torch.zeros_like(lanes)
        with _atomic:
            before = int(place.memory[place.offset[0]])
            results[0] = before
            place.memory[place.offset[0]] = 0 if before >= last[0] else before + 1
        return results
    if "vote" in text:
        return _of_warps(text, *args)
    if "tanh" in text:
        return torch.tanh(*args)
    if not isinstance(dtype, tuple):
        (one,) = _assembly(text, constraints, args, (dtype,), is_pure, pack)
        return one
    num = len(dtype)
    assert pack * dtype[0].itemsize == 4
    registers: dict[str, Words] = {}
    for words in args:
        assert words.dtype in (torch.int8, torch.int32)
        numbers = words.as_subclass(Tensor).contiguous().numpy().view(np.uint32)
        count = pack * words.itemsize // 4
        for i in range(count):
            registers[f"${num + len(registers)}"] = numbers[..., i::count]
    assert len(constraints.split(",")) == num + len(registers)
    shape = registers[f"${num}"].shape
    carry_out(text, registers)
    results = (np.broadcast_to(registers[f"${i}"], shape).copy() for i in range(num))
    return tuple(
        block(torch.from_numpy(each.view(np.int32)).view(kind))
        for each, kind in zip(results, dtype, strict=True)
    )
