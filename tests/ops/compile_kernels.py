"""Compiles kernels for an H100 or H200 on a machine without a GPU, and launches nothing.

The interpreter carries out Python: it says nothing about whether Triton's compiler takes a kernel.
Run by test_compilation.py in a process without the interpreter. As it is, it takes each branch of
each kernel to Triton's own representation with layouts, where most faults of a kernel show, and of
each kernel the first variant to machine code; and spares Triton what it would do again and again.
With the argument `all` it compiles all to machine code, as a server does, also branches together
with each other, and tiles of all sizes.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction

from octavo.ops.cuda import pdl
from octavo.ops.cuda.tile_sizes import SM_REGISTERS

if TYPE_CHECKING:
    from octavo.ops.cuda.expert_weights import ExpertMatrices
    from octavo.ops.experts import RouterWeights
    from octavo.routing import RoutingConfig

compiled: Counter[str] = Counter()
variants: defaultdict[str, set[str]] = defaultdict(set)  # of each kernel
reductions: Counter[bool] = Counter()  # over lanes of linear layouts, and others
has_all = sys.argv[1:] == ["all"]
options: dict[str, Any] = {}  # of the compiler
# Kernels without a wait: they are launched without the option, when all before them have ended.
SERIALISED = {"_embed_kernel"}
waiting: set[str] = set()  # kernels that write nothing before their wait
ALONE = {"_linear_ring_float12_kernel"}  # one program on each SM


class Hopper:
    """A driver that knows a GPU's properties and has none."""

    utils = property(lambda self: self)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132}


class EnoughCompiled(Exception):
    """A kernel has come as far as it is to be compiled."""


def stop_at_layouts() -> None:
    """From here on kernels of which one variant was compiled are not compiled to machine code."""
    compile_variant, make_llir = JITFunction._do_compile, CUDABackend.make_llir
    put = FileCacheManager.put
    taken: set[tuple[str, str]] = set()  # names of kernels, and keys of their variants
    under_way: list[str] = []

    def compile_to_layouts(self: Any, key: Any, *args: Any) -> Any:
        if (self.__name__, key) in taken:
            return None
        under_way.append(self.__name__)
        try:
            return compile_variant(self, key, *args)
        except EnoughCompiled:
            taken.add((self.__name__, key))
            compiled[self.__name__] += 1
            return None
        finally:
            under_way.pop()

    def make_llir_of_the_first(self: Any, module: Any, *args: Any) -> Any:
        name = under_way[-1]
        if compiled[name]:
            assert_reduced_lanes_are_neighbours(name, str(module))
            raise EnoughCompiled
        return make_llir(self, module, *args)

    def keep_what_is_read(self: Any, data: Any, filename: str, binary: bool = True) -> str:
        # Of a variant that does not come to an end, nothing is looked up in Triton's cache.
        return "" if compiled[under_way[-1]] else put(self, data, filename, binary)

    JITFunction._do_compile = compile_to_layouts
    CUDABackend.make_llir = make_llir_of_the_first
    FileCacheManager.put = keep_what_is_read


def leave_out_repetition() -> None:
    """What changes nothing of what is compiled, and is a fifth of the time.

    The source of a function is parsed for each variant, and wherever a kernel calls it. Each sum,
    difference and product of integers comes with a check for overflows, which only a mode for
    debugging keeps. And the collector looks through all of torch.
    """
    parse = JITFunction.parse
    trees: dict[int, ast.Module] = {}

    def parse_once(self: Any) -> ast.Module:
        if id(self) not in trees:
            trees[id(self)] = parse(self)
        return trees[id(self)]

    JITFunction.parse = parse_once
    options.update(sanitize_overflow=False)
    gc.freeze()


def install() -> None:
    """From here on a launch compiles its kernel and does no more."""
    driver.set_active(Hopper())
    pdl.launch_options = lambda device: {"PDL": True, "launch_pdl": True}
    if not has_all:
        stop_at_layouts()
        leave_out_repetition()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        kernel = run(self, *args, grid=grid, warmup=True, **options, **kwargs)
        if kernel is None:
            return None
        assert_reduced_lanes_are_neighbours(self.__name__, kernel.asm["ttgir"])
        if self.__name__ in ALONE:
            assert_two_find_no_room(self.__name__, kernel.asm["ptx"])
        if "ttg.warp_specialize" not in kernel.asm["ttgir"]:
            assert_nothing_is_written_before_the_wait(self.__name__, kernel.asm["ptx"])
        compiled[self.__name__] += 1
        variants[self.__name__].add(kernel.hash)
        return kernel

    JITFunction.run = compile_only


def assert_reduced_lanes_are_neighbours(name: str, ttgir: str) -> None:
    """Of linear layouts, Triton 3.6 reduces as many lanes as hold different values of the axis, but
    neighbouring ones: it gives wrong results where these are others."""
    lanes = re.findall(r"^(#\w+) = #ttg\.linear<.* lane = (\[.*?\]), warp", ttgir, re.MULTILINE)
    layouts = {layout: ast.literal_eval(bases) for layout, bases in lanes}
    reduced = r'"tt\.reduce".*?axis = (\d+).*?^ *\}\) : \(tensor<[^,]*, (.*?)>[,)]'
    for axis, layout in re.findall(reduced, ttgir, re.MULTILINE | re.DOTALL):
        *outer, parent = re.findall(r"dim = (\d+)|(#\w+)\b(?!\.)", layout)
        bases = layouts.get(parent[1], [])
        for dim, _ in reversed(outer):  # of slices, the innermost first
            bases = [base[: int(dim)] + base[int(dim) + 1 :] for base in bases]
        own = [i for i, base in enumerate(bases) if base[int(axis)]]
        reductions[bool(own)] += 1
        assert not own or own == list(range(own[0], own[-1] + 1)), (name, layout, bases)


def assert_two_find_no_room(name: str, ptx: str) -> None:
    """Two programs take more registers than an SM has."""
    (registers,) = map(int, re.findall(r"\.maxnreg (\d+)", ptx))
    (threads,) = map(int, re.findall(r"\.reqntid (\d+)", ptx))
    assert 2 * registers * threads > SM_REGISTERS, (name, registers, threads)


def assert_nothing_is_written_before_the_wait(name: str, ptx: str) -> None:
    """See pdl.py: until then, kernels before may read it. Where warps part, the order of the text
    says nothing."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    if not wait:
        assert "griddepcontrol.launch_dependents" not in ptx or name in SERIALISED, name
        return
    early = re.findall(r"^.*\b(?:st|red|atom)(?:\.\w+)*\.global.*$", before, re.MULTILINE)
    assert not early, (name, early)
    waiting.add(name)


def attention() -> None:
    """Decodes, prompts and cascades, with each feature of scores and with none, and over a cache of
    e4m3; cross-attention."""
    from attention_cases import FEATURES, Bench, Case, some_scores
    from test_cross_attention import Crossed

    from octavo.ops import CascadeSegments, KVScales
    from octavo.ops.base import RoundingBackend
    from octavo.ops.cuda import attention_decode
    from octavo.ops.quantized import Rounding

    attention_decode._may_wait = lambda device: True
    sequences = ((0, 1), (150, 1), (150, 19))
    shared = CascadeSegments(*(np.array(each, np.int32) for each in ([0], [128], [0, 2], [0, 1])))
    plain = Case(
        sequences, head_dim=128, group=4, num_kv_heads=2, rotary_dim=128, dtype=torch.bfloat16
    )
    normed = replace(plain, head_dim=256, group=2, head_norm=True, window=100)
    cases = [plain, normed, replace(normed, head_dim=512, rotary_dim=512, value_norm=True)]
    for features in [[each] for each in FEATURES] if has_all else [FEATURES]:
        cases.append(replace(plain, scores=some_scores(plain, *features)))
    for case in cases[: 2 if has_all else 1]:
        cases.append(replace(case, kv_scales=KVScales(0.5, 0.25)))
    cases.append(replace(plain, head_dim=17, rotary_dim=None, kv_scales=KVScales()))
    for case in cases:
        bench = Bench("triton", case)
        bench.run()
        bench.computed = [150, 150, 150]
        bench.step([(0, 1), (1, 1)], [shared])
    many = replace(plain, num_kv_heads=8)  # whose programs combine all query heads
    bench = Bench("triton", many)
    bench.computed = [0, 150, 150]
    bench.step([(0, 1), (1, 1)])
    query, key, value = torch.zeros(2, 48, 128, dtype=plain.dtype).split([32, 8, 8], dim=1)
    assert isinstance(bench.backend, RoundingBackend)
    for rounding in (Rounding.IN_TWO, Rounding.GROUPS, Rounding.INTEGERS):
        assert bench.backend.rounds(5, rounding)
        bench.backend.forward_rounded(5, query, key, value, bench.rotary, None, rounding)
    crossed = Crossed((150, 20), (1, 1), num_kv_heads=8, dtype=torch.bfloat16)
    crossed.run("triton", "cpu")
    replace(crossed, query_lens=(1, 19)).run("triton", "cpu")


def prompts_on_hopper() -> None:
    """attention_prefill_hopper.py's kernel with heads and tiles of all sizes, with sinks and a
    window, of a block and of a part of it, with a cap, and of an encoder's keys."""
    from octavo.ops.cuda import attention_prefill_hopper
    from octavo.ops.cuda.paged import PREFILL_FIELDS

    attention_prefill_hopper.num_sms = lambda device: 132
    attend = attention_prefill_hopper.attend_on_hopper
    for dim, block_size, group, window, tile, is_causal, cap in (
        (128, 16, 4, None, 128, True, None),
        (256, 8, 1, None, 64, False, 50.0),
        (64, 128, 7, 128, 64, True, None),
    ):
        query = torch.zeros(4, 2 * group, dim, dtype=torch.bfloat16)
        cache = torch.zeros(2, 2, 2, block_size, dim, dtype=torch.bfloat16)
        numbers = torch.zeros(1, PREFILL_FIELDS, dtype=torch.int32)
        sinks = None if window is None else torch.zeros(2 * group)
        output = query.flatten(1)
        attend(query, cache, numbers, numbers[0], output, 0.1, cap, sinks, window, tile, is_causal)


def dequantized_blocks() -> None:
    """attention_dequantized.py's kernel into both types."""
    from octavo.ops.cuda.attention_dequantized import DequantizedBlocks

    cache = torch.zeros(2, 3, 2, 16, 64, dtype=torch.float8_e4m3fn)
    numbers = torch.zeros(1, 4, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        blocks = DequantizedBlocks(dtype, cache.device, room=1 << 20)
        blocks.fill(cache, numbers, numbers[0])


def clusters() -> None:
    """attention_decode_cluster.py's kernel with heads of all sizes, groups of one and of many
    heads, and all features."""
    from attention_cases import UnitNorm, rotary_table

    from octavo.ops import KVScales
    from octavo.ops.cuda.attention_decode_cluster import ClusterConfig, attend_in_clusters
    from octavo.ops.cuda.attention_scores import KernelScores
    from octavo.ops.cuda.kv_write import HeadChanges

    one_tile = ClusterConfig(is_one_tile=True)
    for config, dim, block_size, group, rotary_dim, has_scores, kv_scales in (
        (ClusterConfig(), 128, 16, 8, 128, False, None),
        (ClusterConfig(8), 128, 16, 8, 128, False, None),
        (ClusterConfig(), 64, 48, 7, 24, True, None),
        (ClusterConfig(), 128, 8, 1, None, True, None),
        (ClusterConfig(), 256, 16, 2, 256, False, None),
        (one_tile, 256, 16, 4, 256, True, None),
        (one_tile, 128, 16, 8, 128, False, None),
        (ClusterConfig(8), 128, 16, 8, 128, False, KVScales(0.1, 0.2)),
        (ClusterConfig(), 64, 48, 7, 24, True, KVScales(0.1, 0.2)),
        (one_tile, 256, 16, 4, 256, False, KVScales(0.1, 0.2)),
    ):
        query = torch.zeros(2, 2 * group, dim, dtype=torch.bfloat16)
        key = torch.zeros(2, 2, dim, dtype=torch.bfloat16)
        cached = torch.bfloat16 if kv_scales is None else torch.float8_e4m3fn
        cache = torch.zeros(2, 2, 2, block_size, dim, dtype=cached)
        numbers = torch.zeros(1, 8, dtype=torch.int32)
        rotary, norm, cap, sinks = None, None, None, None
        if rotary_dim is not None:
            rotary = rotary_table(rotary_dim, interleaved=has_scores)
            norm = UnitNorm(dim, torch.bfloat16, "cpu").weight, 1e-5
        if has_scores:
            cap, sinks = 2.0, torch.zeros(2 * group)
        attend_in_clusters(
            query,
            key,
            key,
            cache,
            numbers,
            numbers[0],
            query.flatten(1),
            HeadChanges(rotary, norm, norm, 1e-5 if dim == 256 and norm else None),
            KernelScores(0.1, cap, None, sinks, None),
            config,
            kv_scales,
        )


def encoders() -> None:
    """With relative biases and without."""
    from test_bidirectional import attended, layers

    from octavo.ops.cuda.attention_encoder import TritonBidirectional

    cpu, lens = torch.device("cpu"), (150, 20)
    heads = torch.split(torch.zeros(sum(lens), 6, 128, dtype=torch.bfloat16), 2, dim=1)
    for has_bias in (True, False):
        attended(TritonBidirectional(layers(2, 2, 128, has_bias, cpu), cpu), lens, heads)


def norms() -> None:
    """All forms in which a norm meets the residual stream, and sums over ranks."""
    from test_all_reduce import Neighbour

    from octavo.ops.communicator import Reduction, ReductionSite
    from octavo.ops.cuda.all_reduce import Exchange
    from octavo.ops.cuda.norm import norm
    from octavo.ops.norm import Affine
    from octavo.ops.quantized import Rounding

    rows, size = 3, 4096
    x, residual, second = torch.zeros(3, rows, size, dtype=torch.bfloat16)
    splits = torch.zeros(2, rows, size)
    affine = Affine(torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size, dtype=x.dtype))
    peers = torch.zeros(4, dtype=torch.int64)
    for exchange in (
        Exchange(peers, 1, 4, rows, x.dtype, two_shot=True),
        Exchange(peers[:2], 1, 2, rows, x.dtype, two_shot=False),
    ):
        reduction = Reduction(Neighbour(exchange), ReductionSite.MLP)
        for is_rms in (True, False):
            norm(splits, affine, 1e-5, residual, is_rms, reduction=reduction)
        norm(splits, None, 0.0, residual, True, reduction=reduction)
    for is_rms in (True, False):
        norm(x, affine, 1e-5, None, is_rms)
        for rounding in Rounding:
            norm(splits, affine, 1e-5, residual, is_rms, rounding=rounding)
    norm(x, affine, 1e-5, residual, True, second=second, twins=[affine])
    both = affine, affine
    norm(splits, affine, 1e-5, residual, True, second=splits, branch=affine, branches=both)
    norm(x, affine, 1e-5, residual, True, branch=affine, factor=0.5, twins=both)
    norm(splits, affine, 1e-5, residual, True, branch=affine, reduction=reduction)


def projections() -> None:
    """GEMVs and skinny GEMMs with each epilogue, and what is elementwise."""
    from octavo.ops.cuda import linear as cuda_linear
    from octavo.ops.cuda.activation import apply_gate, soft_cap
    from octavo.ops.cuda.float12 import Float12Weight, launch_packing, pack_float12
    from octavo.ops.cuda.linear_gemv import linear_one
    from octavo.ops.cuda.linear_ring import Ring, linear_ring
    from octavo.ops.cuda.linear_ring_float12 import Float12Ring, linear_ring_float12
    from octavo.ops.cuda.linear_table import choose_tiles
    from octavo.ops.epilogue import Epilogue
    from octavo.ops.norm import DeferredNorm

    x, weight = torch.zeros(16, 4096), torch.zeros(128, 4096)
    x, weight, bias = x.bfloat16(), weight.bfloat16(), torch.zeros(128).bfloat16()
    workspace = torch.zeros(1 << 20), torch.zeros(1 << 10, dtype=torch.int32)
    cuda_linear.split_workspace = lambda device: workspace  # type: ignore[assignment]
    row, scale = x[:1], torch.zeros(4096)
    stored = pack_float12(weight)
    launch_packing(weight, stored.scales, stored.words)
    norms = (
        DeferredNorm(row, x[0], 1e-5, 0.0),
        DeferredNorm(row, scale, 1e-5, 1.0, row, x[1:2], scale),
    )
    for epilogue in Epilogue:
        with_all = has_all or epilogue in (Epilogue.NONE, Epilogue.SILU_MUL)
        cuda_linear.linear(x[:1], weight, None, epilogue)
        cuda_linear.linear(x[:1], weight[: 2 if epilogue.is_gated else 1], None, epilogue)
        for norm in norms if with_all else ():
            linear_one(norm, weight, None, epilogue)
            linear_ring(norm, weight, bias, epilogue, Ring(8, 8, 4, 150), 132)
            for rows, pieces in ((8, 16), (16, 8)) if has_all else ((8, 16),):
                ring = Float12Ring(rows, pieces, 3, 150)
                linear_ring_float12(norm, stored, bias, epilogue, ring, 132)
        for rows, pieces in ((8, 16), (16, 8)) if with_all else ((8, 16),):
            ring = Float12Ring(rows, pieces, 3, 150)
            linear_ring_float12(row, stored, None, epilogue, ring, 132)
        linear_ring(row, weight, None, epilogue, Ring(4, 16, 4, 150), 132)
        out = x.new_empty((16, 64 if epilogue.is_gated else 128))
        tiles = choose_tiles(len(x), out.shape[1], x.shape[1], epilogue)
        assert tiles is not None
        for given in (None, bias) if with_all else (bias,):
            cuda_linear.launch_dense(x, weight, given, out, epilogue, tiles, is_partial=False)
        if epilogue.is_gated:
            apply_gate(x, epilogue)
    soft_cap(x, 30.0)
    many = Float12Weight((4096, 1024), torch.zeros(512, 16, 192).int(), torch.zeros(4096))
    ring = Float12Ring(8, 16, 2, 150)  # of which programs take several
    linear_ring_float12(row[:, :1024], many, None, Epilogue.SILU_MUL, ring, 132)
    few_float12()


def few_float12() -> None:
    """Few tokens times 12 bits, with tiles of each kind."""
    from octavo.ops.cuda.float12 import pack_float12
    from octavo.ops.cuda.linear_hopper_float12 import (
        Float12Tiles,
        choose_float12_tiles,
        linear_float12,
    )
    from octavo.ops.epilogue import Epilogue

    weight = pack_float12(torch.zeros(512, 1024, dtype=torch.bfloat16))
    x, bias = (torch.zeros(128, 1024).bfloat16(), torch.zeros(512).bfloat16())
    many = 1 << 17  # rows, so that tiles are not folded
    for num_tokens in (1, 16, 32, 64, 128) if has_all else (8, 128):
        tiles = choose_float12_tiles(num_tokens, many, 1024, 132)
        linear_float12(x[:num_tokens], weight, None, tiles=tiles)
        linear_float12(x[:num_tokens], weight, None, Epilogue.SILU_MUL, tiles)
    for num_tokens, fold in ((8, 4), (8, 2), (16, 4), (16, 2)) if has_all else ((8, 4),):
        tiles = Float12Tiles(num_tokens, fold=fold)
        linear_float12(x[:num_tokens], weight, bias, tiles=tiles)
        linear_float12(x[:num_tokens], weight, bias, Epilogue.GELU_TANH_MUL, tiles)


def quantized_projections() -> None:
    """GEMMs of each form; what rounds inputs, and what dequantizes."""
    from test_quantized_forms import FORMS, dense

    from octavo.ops.cuda import linear as cuda_linear
    from octavo.ops.cuda import linear_quantized, linear_table
    from octavo.ops.cuda.float7 import launch_packing, pack_float7
    from octavo.ops.cuda.linear_gemv import Scales, linear_one
    from octavo.ops.cuda.linear_gemv_packed import PackedPrograms, linear_packed
    from octavo.ops.cuda.linear_quantized import launch
    from octavo.ops.cuda.linear_ring import Ring, linear_ring
    from octavo.ops.cuda.quantize import empty_inputs, round_inputs
    from octavo.ops.cuda.quantized_tiles import Product, Tiles, candidates
    from octavo.ops.cuda.stored_weights import StoredWeight, dequantize
    from octavo.ops.epilogue import Epilogue
    from octavo.ops.quantized import Rounding

    workspace = torch.zeros(1 << 20), torch.zeros(1 << 10, dtype=torch.int32)
    for module in (cuda_linear, linear_quantized):
        module.split_workspace = lambda device: workspace
    linear_quantized._num_sms = lambda device: 132
    much_alike = set() if has_all else {"float8-row", "int4", "int4-small"}
    for i, name in enumerate(FORMS):
        dtype = torch.float16 if i % 2 else torch.bfloat16
        stored = StoredWeight.of(FORMS[name](dense(128, 1024).to(dtype)))
        if stored is None:
            assert name == "mxfloat4"
            continue
        dequantize(stored, torch.zeros(128, 1024, dtype=dtype))
        for num_tokens, epilogue in (
            (1, Epilogue.NONE),
            (8, Epilogue.NONE),
            (64, Epilogue.SILU_MUL),
            (300, Epilogue.SILU_MUL if i % 3 == 0 else Epilogue.NONE),
        ):
            if num_tokens == 300 and name in much_alike:
                continue
            x = torch.zeros(num_tokens, 1024, dtype=dtype)
            out = x.new_zeros(num_tokens, 64 if epilogue.is_gated else 128)
            product = Product.of(num_tokens, stored, epilogue.is_gated)
            assert product is not None
            choice = candidates(product)[0]
            if isinstance(choice, PackedPrograms):
                linear_packed(x, stored, out[0], out, epilogue, choice)
                continue
            assert isinstance(choice, Tiles)
            launch(x, stored, out[0], out, epilogue, choice, is_partial=num_tokens == 1)
    few_packed()
    rounded = round_inputs(torch.zeros(128, 4096, dtype=torch.bfloat16), Rounding.TOKENS)
    for epilogue in (Epilogue.NONE, Epilogue.SILU_MUL):
        out = torch.zeros(128, 64 if epilogue.is_gated else 128, dtype=torch.bfloat16)
        gated = epilogue.is_gated
        blocks = StoredWeight.of(FORMS["float8-block"](dense(128, 1024)))
        assert blocks is not None
        x = torch.zeros(len(out), 1024, dtype=out.dtype)
        of_blocks = Scales(blocks.scales, blocks.block_rows, blocks.group)
        linear_one(x[:1], blocks.weight, None, epilogue, scales=of_blocks)
        for of_weight in (of_blocks, Scales(torch.zeros(128, 1), 1, 0)):
            ring = Ring(4, 16, 4, 150)
            linear_ring(x[:1], blocks.weight, None, epilogue, ring, 132, of_weight)
        in_float8, factors, _ = round_inputs(x, Rounding.GROUPS)
        product = Product.of(128, blocks, gated, Rounding.GROUPS)
        assert product is not None
        grouped = candidates(product)[0]
        assert isinstance(grouped, Tiles)
        launch(in_float8, blocks, None, out, epilogue, grouped, False, factors)
        in_two = empty_inputs(5, out.shape[1], Rounding.IN_TWO, out.device, group=64)
        for given, rounding, results in (
            (rounded, Rounding.TOKENS, out),
            (round_inputs(x[:40], Rounding.SPANS), Rounding.TOKENS, out[:40]),
            (round_inputs(x[:5], Rounding.IN_TWO), Rounding.IN_TWO, out[:5]),
            (round_inputs(x[:5], Rounding.IN_TWO), Rounding.IN_TWO, in_two),
            (empty_inputs(5, 1024, Rounding.IN_TWO, x.device, group=64), Rounding.IN_TWO, out[:5]),
        ):
            if gated and given.group == in_two.group:
                continue
            num_tokens = next(each for each in (8, 64, 128) if len(given.values) <= each)
            shape = num_tokens, out.shape[1], 4096, 0, 0, False, gated, rounding
            tiles = candidates(Product(*shape))[0]
            assert isinstance(tiles, linear_table.Tiles)
            if results is in_two:
                tiles = replace(tiles, splits=1)
            weight, of_rows = rounded.values[:, : given.values.shape[-1]], (torch.zeros(128, 1), 1)
            words = pack_float7(torch.zeros_like(weight))
            for packed in (None, words) if tiles.columns % 128 == 0 else (None,):
                cuda_linear.launch_dense(
                    given, weight, None, results, epilogue, tiles, False, of_rows, packed
                )
    launch_packing(weight.contiguous(), words.words)


def few_packed() -> None:
    """Few tokens times 4 bits: gates and ups, rows in splits, and in two partitions."""
    from test_quantized_forms import FORMS

    from octavo.ops.cuda.linear_hopper_packed import PackedTiles, linear_few_packed
    from octavo.ops.cuda.quantize import round_inputs
    from octavo.ops.cuda.quantized_tiles import Product, candidates
    from octavo.ops.cuda.stored_weights import StoredWeight
    from octavo.ops.epilogue import Epilogue
    from octavo.ops.quantized import Rounding

    workspace = torch.zeros(1 << 20), torch.zeros(1 << 10, dtype=torch.int32)
    cases = [
        (2048, 1024, Epilogue.SILU_MUL),
        (2048, 1024, Epilogue.NONE),
        (5120, 256, Epilogue.NONE),
    ]
    for name in ("int4", "int4-asymmetric"):
        for num_rows, size, epilogue in cases:
            stored = StoredWeight.of(FORMS[name](torch.randn(num_rows, size).bfloat16()))
            assert stored is not None
            for num_tokens in (8, 16) if has_all else (8 if name == "int4" else 16,):
                product = Product.of(num_tokens, stored, epilogue.is_gated, Rounding.INTEGERS)
                assert product is not None
                (tiles,) = candidates(product)
                assert isinstance(tiles, PackedTiles)
                x = torch.zeros(num_tokens, size, dtype=torch.bfloat16)
                out = x.new_zeros(num_tokens, product.num_rows)
                inputs = round_inputs(x, Rounding.INTEGERS)
                linear_few_packed(inputs, stored, out[0], out, epilogue, tiles, False, workspace)


def draws() -> None:
    """Greedy, random and limited draws, of whole rows, with masks; scores of what was drawn, and
    the best tokens; and what becomes of tokens."""
    from octavo.ops.base import DecodeItems
    from octavo.ops.cuda.embedding import embed
    from octavo.ops.cuda.logit_edits import EditRecords
    from octavo.ops.cuda.pending_tokens import begin_decodes, fill_pending, keep_tokens
    from octavo.ops.cuda.sampling import DeviceDraws, sample
    from octavo.ops.cuda.sampling_candidates import best_tokens
    from octavo.ops.cuda.sampling_scores import deliver_scores, score

    rows, size = 3, 50_272
    zeros = torch.zeros(rows, dtype=torch.int64)
    asked = DeviceDraws(
        rows=zeros,
        temperature=torch.ones(rows),
        top_k=zeros,
        top_p=torch.ones(rows, dtype=torch.float64),
        log_min_p=torch.zeros(rows),
        seeds=zeros,
        sample_indices=zeros,
        positions=zeros,
        mask_places=torch.zeros(rows, dtype=torch.int32),
        masks=torch.zeros(rows, -(-size // 32), dtype=torch.int32),
    )
    for dtype in (torch.bfloat16, torch.float32):
        for is_greedy, is_limited in ((True, False), (False, False), (False, True)):
            how = replace(asked, is_greedy=is_greedy, is_limited=is_limited)
            sample(torch.zeros(rows, size, dtype=dtype), how)
    logits = torch.zeros(rows, size, dtype=torch.bfloat16)
    for number, part in product((0, 4, 64), (slice(0, 2), slice(1, 3))):
        score(logits, zeros[part], zeros[part], number)
    assert len(variants["_score_chunk_kernel"]) <= 3, "one for all places where arrays may begin"
    score(logits, None, zeros, 8)
    for number in (4, 64):
        best_tokens(logits, number)
    places = torch.zeros(rows, dtype=torch.int32)
    for num in (1, rows, 16):
        some = torch.zeros(num, dtype=torch.int64)
        fill_pending(some, places, zeros)
        keep_tokens(some, places, zeros)
    for name in ("_fill_pending", "_keep_tokens"):
        assert len(variants[name]) == 1, "one for all numbers: none is compiled while serving"
    keep_tokens(zeros, places, zeros, zeros[:2], zeros[:1], (8, 1 + rows))
    items = [DecodeItems(torch.zeros(64, dtype=torch.int32), window, 16) for window in (None, 128)]
    for shapes in (items[:1], items):
        begin_decodes(places[:1], zeros, zeros, places, zeros, zeros, shapes)
    embed(zeros, torch.zeros(size, 64, dtype=torch.bfloat16), 5, 8.0)
    records = EditRecords(8, 4, size, torch.device("cpu"))
    for num in (1, 3, 16):
        records.count(np.zeros((num, 4), np.int32), 0)
    assert len(variants["_count_kernel"]) == 1
    records.copy([0], [1])
    keep_tokens(zeros, places, zeros, records=records)
    keep_tokens(zeros, places, zeros, zeros[:2], zeros[:1], (8, 1 + rows), records)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        records.edit(torch.zeros(rows, size, dtype=dtype), places, 0)
    for number in (0, 4, 8, 12, 16, 32, 64) if has_all else (0, 8):
        logits = torch.zeros(rows, size, dtype=torch.bfloat16)
        deliver_scores(logits, zeros, places, number, zeros, rows)


def experts() -> None:
    """Routing by each rule, and experts of one token, of few and of many for each expert; of all
    forms of weights."""
    from octavo.ops.cuda import experts as cuda_experts
    from octavo.ops.cuda import experts_mx_hopper, experts_one_mx, experts_one_packed
    from octavo.ops.cuda.expert_weights import ExpertMatrices
    from octavo.ops.cuda.experts_mx_hopper import MxExperts
    from octavo.ops.cuda.routing import CudaRouter, list_blocks
    from octavo.ops.epilogue import Epilogue
    from octavo.ops.experts import ExpertWeights, QuantizedExpertWeights, RouterWeights
    from octavo.ops.quantized import GroupedInt, MxFloat4, Rounding, ScaledFloat8
    from octavo.routing import RoutingConfig, Scoring

    num, size, inner = 32, 704, 192
    num_hit = torch.zeros(1, dtype=torch.int64)
    router = RouterWeights(*torch.zeros(1, num, size, dtype=torch.bfloat16))
    up = torch.zeros(num, 2 * inner, size, dtype=torch.bfloat16)
    down = torch.zeros(num, size, inner, dtype=torch.bfloat16)
    biases = torch.zeros(num, 2 * inner).bfloat16(), torch.zeros(num, size).bfloat16()
    softmax = RoutingConfig(num_experts=num, top_k=8)
    sigmoid = replace(softmax, scoring=Scoring.SIGMOID, correction=True, num_groups=8, top_groups=4)
    scaled = RouterWeights(router.weight, scales=router.weight[:, 0].contiguous())
    CudaRouter(scaled, softmax, num_hit).apply(torch.zeros(2, size, dtype=torch.bfloat16))
    sparsemixer = replace(softmax, scoring=Scoring.SPARSEMIXER, top_k=2, renormalised=False)
    cases = [(softmax, Epilogue.SILU_MUL, ()), (softmax, Epilogue.CLAMPED_SWIGLU, biases)]
    few_or_many = (1, 2, 64, 128, 1024) if has_all else (1, 2, 1024)  # tiles of 16 to 128 tokens
    for config, epilogue, given in cases:
        weights = ExpertWeights(up, down, *given)
        for num_tokens in (1, 128) if given else few_or_many:
            x = torch.zeros(num_tokens, size, dtype=torch.bfloat16)
            routed = CudaRouter(router, config, num_hit).apply(x)
            cuda_experts.mix(x, routed, weights, epilogue)
    for module in (cuda_experts, experts_one_packed):  # what a GPU multiplies in pairs
        module.has_bfloat16_pairs = lambda device: True
    experts_mx_hopper.is_on_hopper = lambda device: True
    cuda_experts.num_sms = experts_one_mx.num_sms = lambda device: 132
    dense = torch.randn(num, 2 * inner, size), torch.randn(num, size, inner)
    zeros = torch.zeros(num, 2 * inner, size // 32, dtype=torch.int16)
    for quantize in (
        lambda weight: ScaledFloat8.quantize(weight, (1, weight.shape[2])),
        lambda weight: ScaledFloat8.quantize(weight, (128, 128)),
        MxFloat4.quantize,
        lambda weight: replace(
            GroupedInt.quantize(weight, 4, 32),
            zeros=zeros if weight.shape[2] == size else None,
        ),
        lambda weight: GroupedInt.quantize(weight, 4, 64),
    ):
        forms = QuantizedExpertWeights(*map(quantize, dense))
        kernel = cuda_experts.CudaExperts.of(forms, Epilogue.SILU_MUL)
        assert kernel is not None
        for num_tokens in (1, 2, 128) if has_all else (1, 128):
            x = torch.zeros(num_tokens, size, dtype=torch.bfloat16)
            rounding = Rounding.IN_TWO if num_tokens > 1 else Rounding.NONE
            kernel.apply_partial(x, CudaRouter(router, softmax, num_hit).apply(x, rounding))
        matrices = [ExpertMatrices.of(each) for each in forms[:2]]
        experts_on_hopper([each for each in matrices if each is not None], router, softmax)
        on_hopper = MxExperts.of(forms, Epilogue.SILU_MUL, torch.bfloat16)
        for num_tokens in (*few_or_many, 8) if on_hopper else ():
            x = torch.zeros(num_tokens, size, dtype=torch.bfloat16)
            rounding = on_hopper.rounding(num_tokens, softmax.top_k)
            on_hopper.apply_partial(x, CudaRouter(router, softmax, num_hit).apply(x, rounding))
    bounded_experts_of_one_token()
    copied_experts()
    float8_experts_of_one_token()
    experts_that_route()
    correction = torch.zeros(num)
    CudaRouter(router._replace(correction=correction), sigmoid, num_hit).apply(x)
    CudaRouter(router, sparsemixer, num_hit).apply(x[:1])
    list_blocks(torch.zeros(64, 8, dtype=torch.int32), num, num_hit)
    routers_that_norm(router, softmax, sigmoid)


def routers_that_norm(
    router: RouterWeights, softmax: RoutingConfig, sigmoid: RoutingConfig
) -> None:
    """Of partial sums and of complete ones, with and without a residual stream, a bias, corrections
    and inputs in two numbers."""
    from octavo.ops.cuda.routing_normed import CudaNormRouter
    from octavo.ops.norm import DeferredNorm
    from octavo.ops.quantized import Rounding

    num, size = router.weight.shape
    num_hit = torch.zeros(1, dtype=torch.int64)
    residual, total = torch.zeros(2, 8, size, dtype=torch.bfloat16)
    parts = DeferredNorm(torch.zeros(4, 8, size), residual[0], 1e-5, 0.0, residual, total)
    complete = DeferredNorm(residual, residual[0], 1e-5, 1.0)
    for rounding in (Rounding.IN_TWO, Rounding.TOKENS_IN_TWO):
        CudaNormRouter(router, softmax, num_hit).apply(parts, rounding)
    corrected = router._replace(bias=residual[0, :num], correction=torch.zeros(num))
    CudaNormRouter(corrected, sigmoid, num_hit).apply(complete)


def bounded_experts_of_one_token() -> None:
    """experts_one_mx.py's kernel with biases and more inputs than a stage holds: `experts` has none
    of these."""
    from octavo.ops.cuda.experts_mx_hopper import MxExperts
    from octavo.ops.epilogue import Epilogue
    from octavo.ops.experts import QuantizedExpertWeights, Routed
    from octavo.ops.quantized import MxFloat4

    num, size, inner = 4, 3200, 192
    up, down = torch.randn(num, 2 * inner, size), torch.randn(num, size, inner)
    biases = torch.zeros(num, 2 * inner).bfloat16(), torch.zeros(num, size).bfloat16()
    weights = QuantizedExpertWeights(MxFloat4.quantize(up), MxFloat4.quantize(down), *biases)
    kernel = MxExperts.of(weights, Epilogue.CLAMPED_SWIGLU, torch.bfloat16)
    assert kernel is not None
    routed = Routed(torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 4))
    kernel.apply_partial(torch.zeros(1, size, dtype=torch.bfloat16), routed)


def copied_experts() -> None:
    """Of one token, of few and of more for each expert."""
    from octavo.ops.cuda import experts_hopper_float12
    from octavo.ops.cuda.experts_copied import CopiedExperts
    from octavo.ops.cuda.routing import list_blocks
    from octavo.ops.epilogue import Epilogue
    from octavo.ops.experts import ExpertWeights, Routed

    num, size, inner = 4, 704, 192
    up, down = torch.zeros(num, 2 * inner, size), torch.zeros(num, size, inner)
    weights = ExpertWeights(up.bfloat16(), down.bfloat16())
    kernel = CopiedExperts(weights, Epilogue.SILU_MUL, range(1, 100))
    experts_hopper_float12.num_sms = lambda device: 132
    num_hit = torch.zeros(1, dtype=torch.int64)
    for num_tokens in (1, 2, 8, 30) if has_all else (1, 30):
        ids = torch.zeros(num_tokens, 4, dtype=torch.int32)
        lists = None if num_tokens == 1 else list_blocks(ids, num, num_hit)
        routed = Routed(ids, torch.zeros(num_tokens, 4), lists)
        kernel.apply_partial(torch.zeros(num_tokens, size, dtype=torch.bfloat16), routed)


def float8_experts_of_one_token() -> None:
    """experts_one_float8.py's kernel with a scale for each row and for blocks, with one block or
    two at once, and with a norm and a router."""
    from octavo.ops.cuda import experts_one_float8
    from octavo.ops.cuda.expert_weights import ExpertMatrices
    from octavo.ops.cuda.experts_one_float8 import (
        Float8Projection,
        mix_one_float8,
        norm_route_and_mix_one_float8,
    )
    from octavo.ops.epilogue import Epilogue
    from octavo.ops.experts import Routed, RouterWeights, Unrouted
    from octavo.ops.norm import DeferredNorm
    from octavo.ops.quantized import ScaledFloat8
    from octavo.routing import RoutingConfig

    num_hit = torch.zeros(1, dtype=torch.int64)
    experts_one_float8.num_sms = lambda device: 132
    for block, top_k, size in (((1, 4096), 4, 2048), ((128, 128), 3, 640)):
        dense = torch.randn(top_k, 512, size), torch.randn(top_k, size, 256)
        forms = [ScaledFloat8.quantize(each, block) for each in dense]
        matrices = [ExpertMatrices.of(each) for each in forms]
        up, down = [Float8Projection.of(each) for each in matrices if each is not None]
        assert up is not None
        assert down is not None
        routed = Routed(torch.zeros(1, top_k, dtype=torch.int32), torch.zeros(1, top_k))
        x = torch.zeros(1, size, dtype=torch.bfloat16)
        mix_one_float8(x, routed, up, down, Epilogue.SILU_MUL)
        norm = DeferredNorm(x, x[0], 1e-5, 0.0, x, x)
        router = RouterWeights(torch.zeros(40, size, dtype=torch.bfloat16))
        config = RoutingConfig(num_experts=40, top_k=top_k)
        given = Unrouted(norm, router, config, num_hit)
        norm_route_and_mix_one_float8(given, up, down, Epilogue.SILU_MUL)


def experts_that_route() -> None:
    """experts_one_mx.py's kernel with a norm and a router: with and without a residual stream, and
    renormalised weights."""
    from octavo.ops.cuda.experts_mx_hopper import MxExperts
    from octavo.ops.epilogue import Epilogue
    from octavo.ops.experts import QuantizedExpertWeights, RouterWeights, Unrouted
    from octavo.ops.norm import DeferredNorm
    from octavo.ops.quantized import MxFloat4
    from octavo.routing import RoutingConfig

    num, size, inner = 40, 704, 192
    forms = torch.randn(num, 2 * inner, size), torch.randn(num, size, inner)
    weights = QuantizedExpertWeights(*map(MxFloat4.quantize, forms))
    kernel = MxExperts.of(weights, Epilogue.SILU_MUL, torch.bfloat16)
    assert kernel is not None
    row, scale, router = (torch.zeros(rows, size, dtype=torch.bfloat16) for rows in (1, 1, num))
    plain = RouterWeights(router)
    num_hit = torch.zeros(1, dtype=torch.int64)
    for norm, given, renormalised in (
        (DeferredNorm(row, scale[0], 1e-5, 0.0), plain, False),
        (
            DeferredNorm(row, scale[0], 1e-5, 1.0, row, row),
            RouterWeights(router, router[:, 0]),
            True,
        ),
    ):
        config = RoutingConfig(num_experts=num, top_k=8, renormalised=renormalised)
        kernel.apply_unrouted(Unrouted(norm, given, config, num_hit))


def experts_on_hopper(
    matrices: list[ExpertMatrices], router: RouterWeights, config: RoutingConfig
) -> None:
    """experts_hopper.py's kernel for blocks and tiles of each size, if it takes the form."""
    from octavo.ops.cuda import experts as cuda_experts
    from octavo.ops.cuda.expert_tiles import choose_hopper_tiles
    from octavo.ops.cuda.float7 import pack_float7
    from octavo.ops.cuda.quantize import empty_inputs
    from octavo.ops.cuda.routing import CudaRouter
    from octavo.ops.epilogue import Epilogue
    from octavo.ops.quantized import Rounding

    up, down = matrices
    launch = cuda_experts.launch_on_hopper
    for num_tokens in (2, 64, 128) if has_all else (64,):
        x = torch.zeros(num_tokens, up.size, dtype=torch.bfloat16)
        routed = CudaRouter(router, config, torch.zeros(1, dtype=torch.int64)).apply(x)
        lists = routed.lists
        tiles = choose_hopper_tiles(num_tokens, lists.block_rows, up, down)
        if tiles is None:
            continue
        out = torch.empty(config.top_k, num_tokens, up.size)
        inputs = empty_inputs(num_tokens, up.size, Rounding.IN_TWO, x.device)
        packed = [
            pack_float7(torch.zeros(256, -(-each.size // 128) * 128).to(torch.float8_e4m3fn))
            for each in matrices
        ]
        for words in (None, tuple(packed)) if up.scale_columns == 0 else (None,):
            launch(inputs, (up, down), (None, None), out, routed, Epilogue.SILU_MUL, tiles, words)


if __name__ == "__main__":
    install()
    experts()
    attention()
    prompts_on_hopper()
    dequantized_blocks()
    clusters()
    encoders()
    norms()
    projections()
    quantized_projections()
    draws()
    assert reductions[True], "Triton prints layouts in another way"
    assert len(waiting) > len(compiled) / 2, waiting
    print(dict(compiled))
