"""Models in GGUF files: they compute what transformers computes with the dequantized weights."""

from __future__ import annotations

import os
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_harness import DenseHarness
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import gguf_files
import model_zoo
from gguf_files import Kind, everywhere, gguf, with_experts, write_pair
from octavo import LLM, SamplingParams
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, ModelError
from octavo.gguf import GgufFile, find_gguf, forget_gguf, read_gguf
from octavo.gguf import file as gguf_file
from octavo.layers.base import WeightSlot
from octavo.model_files import open_files
from octavo.models.gguf import ARCHITECTURES, DENSE_TYPES
from octavo.models.gguf_weights import GgufWeights
from octavo.models.hub import resolve_model
from octavo.models.loader import build_model, load_model, load_weights, weight_targets
from octavo.models.quantization import KeptParts, WeightKernels
from octavo.models.registry import read_model_config
from octavo.ops.communicator import SingleRank
from octavo.ops.quantized import GroupedInt, MxFloat4
from octavo.parallel import Shard
from octavo.weight_forms import describe_dequantized

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CPU = torch.device("cpu")
PROMPT = model_zoo.random_token_ids(70)  # longer than the zoo's sliding windows
# Experts of which two ranks have whole blocks.
SPARSE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}  # for K-quants
ROPE = {"rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
Q_PROJ = "blk.0.attn_q.weight"


class OneOf(SingleRank):
    """A rank that needs no others."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard


def logits(path: Path) -> Tensor:
    model = load_model(read_model_config(path), torch.float32, CPU, SingleRank())
    return DenseHarness(model, len(PROMPT)).run({0: PROMPT})[0]


def check(path: Path) -> None:
    """The same logits as transformers' from the same values.

    They reach 14, and float32 costs either 1 to 2e-4 of them, by the CPU.
    """
    reference = model_zoo.load_reference(path.parent / "hf")
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits(path), expected, rtol=0, atol=5e-4)


def projections(path: Path) -> dict[str, WeightSlot]:
    """Where the weights of the projections are, once they are loaded."""
    config = read_model_config(path)
    model = build_model(config, torch.float32, CPU, SingleRank())
    load_weights(model, config)
    return {
        name: part.target
        for name, target in weight_targets(model, config).items()
        for part in target.slices
        if isinstance(part.target, WeightSlot)
    }


def gathered(path: Path, num_ranks: int) -> dict[str, Tensor]:
    """All weights, put together from what the ranks have loaded."""
    whole: dict[str, Tensor] = {}
    for rank in range(num_ranks):
        shard = Shard(rank, num_ranks)
        config = read_model_config(path).sharded(shard)
        model = build_model(config, torch.float32, CPU, OneOf(shard))
        load_weights(model, config)
        for name, target in weight_targets(model, config).items():
            weight = whole.setdefault(name, torch.full(target.shape, torch.nan))
            for part in target.slices:
                is_slot = isinstance(part.target, WeightSlot)
                loaded = part.target.dense() if is_slot else part.target
                weight[part.where] = loaded[: len(weight[part.where])]
    return whole


@pytest.mark.parametrize("name", gguf_files.ARCHITECTURES)
def test_architectures(name: str, tmp_path: Path) -> None:
    check(write_pair(name, tmp_path, everywhere(Kind.Q8_0)))


def test_all_architectures_are_tested() -> None:
    assert set(gguf_files.ARCHITECTURES.values()) == set(ARCHITECTURES)


@pytest.mark.parametrize(
    "kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
)
def test_types(kind: str, tmp_path: Path) -> None:
    check(write_pair("llama", tmp_path, everywhere(Kind[kind]), **WIDE))


def test_types_may_differ_in_a_layer(tmp_path: Path) -> None:
    """As in Q4_K_M, whose values and some others have more bits."""

    def choose(name: str, shape: tuple[int, ...]) -> Kind:
        if len(shape) == 1:
            return Kind.F32
        return Kind.Q6_K if "attn_v" in name or name == "output.weight" else Kind.Q4_0

    check(write_pair("llama", tmp_path, choose, **WIDE))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", {"rope_parameters": ROPE | LLAMA3 | {"original_max_position_embeddings": 64}}),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
        (
            "qwen2",
            {
                "rope_parameters": {
                    **ROPE,
                    **{"rope_type": "yarn", "factor": 4.0},
                    "original_max_position_embeddings": 128,
                }
            },
        ),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 8}),
    ],
    ids=["llama3", "linear", "yarn", "biases", "tied"],
)
def test_options(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    check(write_pair(name, tmp_path, everywhere(Kind.Q8_0), **overrides))


def test_a_scaling_without_type_and_a_base_that_is_not_said(tmp_path: Path) -> None:
    """As in llama.cpp, a factor is linear, and the base is 10,000, whatever the family's is."""
    rotary = ROPE | {"rope_type": "linear", "factor": 4.0}
    metadata = {"llama.rope.scaling.type": None}
    check(
        write_pair("llama", tmp_path / "a", everywhere(Kind.Q8_0), metadata, rope_parameters=rotary)
    )
    metadata = {"smollm3.rope.freq_base": None}
    check(
        write_pair("smollm3", tmp_path / "b", everywhere(Kind.Q8_0), metadata, rope_parameters=ROPE)
    )
    metadata = {f"gpt-oss.rope.scaling.{name}": None for name in ("type", "factor")}
    path = write_pair("gpt_oss", tmp_path / "c", everywhere(Kind.Q8_0), metadata)
    assert [each.kind for each in read_model_config(path).rotaries] == ["default"]


@pytest.mark.parametrize("name", ["attention.scale", "embedding_scale", "residual_scale"])
def test_multipliers_of_granite_must_be_said(name: str, tmp_path: Path) -> None:
    """What transformers takes for those that config.json leaves out is not what llama.cpp takes."""
    path = write_pair("granite", tmp_path, everywhere(Kind.Q8_0), {f"granite.{name}": None})
    with pytest.raises(ModelError, match=f"has no granite.{name}"):
        read_model_config(path)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
    ],
)
def test_a_scaling_beside_factors_of_frequencies_is_refused(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    path = write_pair("llama3", tmp_path, everywhere(Kind.Q8_0), metadata)
    message = r"rope.scaling.type is .* factor of 4.0, .* beside rope_freqs.weight"
    with pytest.raises(ModelError, match=message):
        read_model_config(path)


def test_windows_of_all_layers_but_every_other(tmp_path: Path) -> None:
    """The metadata has the number of layers of which one has no window, or an array."""
    metadata = {"gemma3.attention.sliding_window_pattern": 2}
    path = write_pair("gemma3_text", tmp_path, everywhere(Kind.Q8_0), metadata)
    check(path)
    assert read_gguf(path).metadata["gemma3.attention.sliding_window_pattern"] == 2
    assert read_model_config(path).layer_windows == (model_zoo.SLIDING_WINDOW, None) * 2
    metadata = {"gemma3.attention.sliding_window_pattern": 0}  # in llama.cpp, none is without
    path = write_pair("gemma3_text", tmp_path / "all", everywhere(Kind.Q8_0), metadata)
    assert read_model_config(path).layer_windows == (model_zoo.SLIDING_WINDOW,) * 4
    metadata = {"gemma3.attention.sliding_window_pattern": ["false"] * 4}
    path = write_pair("gemma3_text", tmp_path / "texts", everywhere(Kind.Q8_0), metadata)
    with pytest.raises(
        ModelError, match=r"sliding_window_pattern is .*; its elements must be true"
    ):
        read_model_config(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.head_count": [4, 4], "feed_forward_length": [96, 96]}, None),
        ({"attention.head_count": [4]}, r"head_count is \[4\]; there must be one for each of 2 la"),
        ({"feed_forward_length": [96, 48]}, "octavo serves layers that have it in common"),
        ({"embedding_length": [64, 64]}, r"embedding_length is \[64, 64\]; it must be a positive"),
    ],
)
def test_some_values_may_be_arrays_of_the_layers(
    metadata: dict[str, list[int]], message: str | None, tmp_path: Path
) -> None:
    """As in llama.cpp, which has them in models whose layers differ."""
    changes = {f"llama.{key}": value for key, value in metadata.items()}
    path = write_pair("llama", tmp_path, everywhere(Kind.Q8_0), changes, num_hidden_layers=2)
    if message is None:
        check(path)
        return
    with pytest.raises(ModelError, match=message):
        read_model_config(path)


def test_true_is_no_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_bool("general.alignment", True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"general\.alignment is True; it must be a power of two"):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "qwen3_moe"])
def test_transformers_reads_the_same_from_the_file(name: str, tmp_path: Path) -> None:
    """Its own reader undoes what the converter has done to queries, keys, norms and experts."""
    path = write_pair(name, tmp_path, everywhere(Kind.Q8_0))
    reference = model_zoo.load_reference(tmp_path / "hf")
    for parameter in reference.parameters():
        parameter.data.zero_()
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=reference)
    assert not reference.load_state_dict(read["tensors"], strict=False).unexpected_keys
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits(path), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_weights_stay_quantized_value_for_value(kind: Kind, tmp_path: Path) -> None:
    path = write_pair("qwen2", tmp_path, everywhere(kind))
    for name, slot in projections(path).items():
        if name == "output.weight":
            continue
        tensor = next(each for each in gguf.GGUFReader(path).tensors if each.name == name)
        assert isinstance(slot.content, GroupedInt)
        assert slot.content.group == 32
        assert slot.content.nbytes == tensor.n_bytes
        expected = torch.from_numpy(gguf.dequantize(tensor.data, kind))
        assert torch.equal(slot.dense(), expected)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q6_K])
def test_ranks_take_their_parts(kind: Kind, tmp_path: Path) -> None:
    path = write_pair("llama", tmp_path, everywhere(kind), **{**WIDE, "num_key_value_heads": 2})
    expected, found = gathered(path, 1), gathered(path, 2)
    assert len(found) == len(expected) == 3 + 9
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_experts_in_mxfp4_stay_so_value_for_value(tmp_path: Path) -> None:
    """As gpt-oss is published: with biases, and with values in an order of their own."""
    path = write_pair("gpt_oss", tmp_path, with_experts(Kind.MXFP4, Kind.Q8_0), **SPARSE)
    check(path)
    slots = projections(path)
    for tensor in gguf.GGUFReader(path).tensors:
        if not tensor.name.endswith("_exps.weight"):
            continue
        stem = tensor.name.removesuffix(".weight")
        found = [slots[f"{stem}.{expert}.weight"] for expert in range(tensor.data.shape[0])]
        assert all(isinstance(slot.content, MxFloat4) for slot in found)
        expected = torch.from_numpy(gguf.dequantize(tensor.data, Kind.MXFP4))
        assert torch.equal(torch.stack([slot.dense() for slot in found]), expected)
    assert sum(isinstance(slot.content, MxFloat4) for slot in slots.values()) == 3 * 5


@pytest.mark.parametrize(
    ("name", "kind"), [("gpt_oss", Kind.MXFP4), ("mixtral", Kind.Q4_0), ("olmoe", Kind.Q6_K)]
)
def test_ranks_take_their_parts_of_experts(name: str, kind: Kind, tmp_path: Path) -> None:
    path = write_pair(name, tmp_path, with_experts(kind, Kind.Q8_0), **SPARSE)
    expected, found = gathered(path, 1), gathered(path, 2)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_tokens_and_texts(tmp_path: Path) -> None:
    """Through the engine, with the file's tokenizer, chat template and end tokens."""
    path = write_pair(
        "llama",
        tmp_path,
        everywhere(Kind.Q4_0),
        {"general.sampling.temp": 0.6, "general.sampling.top_k": 7},
    )
    llm, reference = LLM(path, dtype="float32"), model_zoo.load_reference(tmp_path / "hf")
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.render_chat([{"role": "user", "content": "Grüße, 東京 😀"}])
    [output] = llm.generate(prompt, SamplingParams(max_tokens=24, temperature=0))
    given = torch.tensor([output.prompt_token_ids])
    expected = reference.generate(given, max_new_tokens=24, do_sample=False)[0, given.shape[1] :]
    ids = expected.tolist()
    assert list(output.outputs[0].token_ids) == ids
    assert output.outputs[0].text == llm.tokenizer.decode(ids)
    config = read_model_config(path)
    assert config.eos_token_ids == (model_zoo.EOS_ID,)
    assert config.bos_token_id == model_zoo.BOS_ID
    assert config.sampling_defaults == {"temperature": 0.6, "top_k": 7}


@pytest.mark.parametrize(
    ("kinds", "form", "weight_bytes", "dtype"),
    [
        ("Q8_0", "int", 8.5 / 8, "bfloat16"),
        ("Q4_0", "int", 4.5 / 8, "bfloat16"),
        ("Q4_0 Q6_K", None, None, "bfloat16"),
        ("Q4_K", None, None, "bfloat16"),
        ("F16", None, None, "float16"),
        ("F32", None, None, "float32"),
    ],
)
def test_memory_is_counted_as_weights_are_kept(
    kinds: str, form: str | None, weight_bytes: float | None, dtype: str, tmp_path: Path
) -> None:
    first, *others = (Kind[name] for name in kinds.split())

    def choose(name: str, shape: tuple[int, ...]) -> Kind:
        if len(shape) == 1:
            return Kind.F32
        return others[0] if others and "attn_v" in name else first

    config = read_model_config(write_pair("llama", tmp_path, choose, **WIDE))
    assert config.dtype == dtype
    assert (config.quantization is None) == (kinds in DENSE_TYPES)
    if config.quantization is not None:
        assert config.quantization.form == form
        assert config.quantization.weight_bytes() == weight_bytes
        in_layers = sum(config.quantized_parts)
        saved = config.weight_bytes(4) - config.least_weight_bytes(4)
        assert saved == (int((4 - weight_bytes) * in_layers) if weight_bytes else 0)


@pytest.mark.parametrize(
    ("name", "experts", "others", "hopper", "ampere", "lost"),
    [
        ("gpt_oss", Kind.MXFP4, Kind.BF16, (True, True), (True, True), None),
        ("gpt_oss", Kind.MXFP4, Kind.Q8_0, (True, True), (False, True), None),
        ("mixtral", Kind.Q4_0, Kind.Q8_0, (True, True), (False, True), None),
        ("mixtral", Kind.Q8_0, Kind.Q8_0, (True, False), (False, False), "gguf experts are"),
        ("mixtral", Kind.Q8_0, Kind.F16, (True, False), (True, False), "gguf experts are"),
        ("olmoe", Kind.Q6_K, Kind.Q4_0, (True, False), (False, False), "gguf experts are"),
        ("olmoe", Kind.F16, Kind.Q4_0, (True, True), (False, True), None),
    ],
)
def test_what_a_gpu_keeps_quantized_of_experts_and_projections(
    name: str,
    experts: Kind,
    others: Kind,
    hopper: tuple[bool, bool],
    ampere: tuple[bool, bool],
    lost: str | None,
    tmp_path: Path,
) -> None:
    """There is no kernel for experts of 8 bits: they are dequantized, which the log says."""
    config = read_model_config(write_pair(name, tmp_path, with_experts(experts, others), **SPARSE))
    kept: dict[WeightKernels, tuple[bool, bool]] = {"hopper": hopper, "ampere": ampere}
    for kernels, expected in kept.items():
        assert config.quantization is not None
        assert config.quantization.kept_by(kernels) == KeptParts(*expected)
    text = describe_dequantized(config, "bfloat16", "hopper")
    assert (text is None) if lost is None else (text is not None and text.startswith(lost))
    bits = {Kind.MXFP4: 4.25, Kind.Q4_0: 4.5, Kind.Q8_0: 8.5}
    bits_of_experts = bits | {Kind.Q4_0: 5.0}  # with scales in float32
    num_projections, num_experts = config.quantized_parts
    saved = num_projections * (16 - (bits.get(others, 16) if hopper[0] else 16)) / 8
    saved += num_experts * (16 - (bits_of_experts.get(experts, 16) if hopper[1] else 16)) / 8
    assert config.weight_bytes(2) - config.kept_by("hopper").least_weight_bytes(2) == int(saved)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_file_that_the_benchmarks_write(name: str, tmp_path: Path) -> None:
    """Of a model without BOS, as the demo model is; its vocabulary is one of placeholders."""
    specification = spec_from_file_location("gguf_file", BENCHMARKS / "gguf_file.py")
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    source = model_zoo.write_model(name, tmp_path / "hf", bos_token_id=None)
    tensors = load_file(source / "model.safetensors")
    rounded = {key: tensor.half().float() for key, tensor in tensors.items()}
    save_file(rounded, source / "model.safetensors", {"format": "pt"})
    path = tmp_path / "model.gguf"
    module.write_gguf(source, path)
    check(path)
    tokenizer = Tokenizer.find(path)
    assert tokenizer is not None
    assert tokenizer.vocab_size == model_zoo.VOCAB_SIZE


def test_a_model_in_several_files(tmp_path: Path) -> None:
    path = write_pair("llama", tmp_path, everywhere(Kind.Q8_0))
    expected, directory = logits(path), tmp_path / "split"
    directory.mkdir()
    reader, names = gguf.GGUFReader(path), [f"m-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(directory / name, "llama")
        for field in reader.fields.values():
            if number == 0 and not field.name.startswith(("GGUF.", "general.architecture")):
                gguf_files.add_value(writer, field.name, field.contents())
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::3]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert resolve_model(str(directory)) == directory / names[0]
    assert torch.equal(logits(directory / names[0]), expected)
    assert torch.equal(logits(directory / names[2]), expected)
    assert list(open_files(directory / names[0]).describe()) == names
    (directory / names[1]).rename(directory / "elsewhere")
    with pytest.raises(ModelError, match=r"has 3 files, of which m-00002-of-00003.gguf"):
        read_model_config(directory / names[0])


def test_a_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tokenizer, the configuration and the weights together; and again where the file was
    written again."""
    path = write_pair("llama", tmp_path, everywhere(Kind.Q8_0))
    read: list[Path] = []
    read_one = gguf_file._read_one

    def counting(path: Path) -> GgufFile:
        read.append(path)
        return read_one(path)

    monkeypatch.setattr(gguf_file, "_read_one", counting)
    with LLM(path, num_blocks=64):
        assert read == [path]
    first = read_gguf(path)
    assert read_gguf(path) is first
    path.write_bytes(path.read_bytes() + bytes(32))
    assert read_gguf(path) is not first


def test_which_file_a_directory_means(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    (tmp_path / "a.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"2 GGUF models; give one of them: a.gguf, b.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match="there is no such file"):
        resolve_model("models/missing.gguf")


# ---------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gguf")
    return write_pair("llama", directory, everywhere(Kind.Q8_0), num_hidden_layers=1)


@pytest.fixture(scope="module")
def good_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    choose = with_experts(Kind.MXFP4, Kind.Q8_0)
    return write_pair("gpt_oss", directory, choose, num_hidden_layers=1)


def patched(good: Path, tmp_path: Path, change: Callable[[bytearray], object]) -> Path:
    data = bytearray(good.read_bytes())
    change(data)
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    return path


def refused(
    good: Path, tmp_path: Path, change: Callable[[bytearray], object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        logits(patched(good, tmp_path, change))


def put(layout: str, value: Any, after: bytes = b"", skip: int = 0) -> Callable[[bytearray], None]:
    """Write a number at so many bytes behind the place where a text ends."""

    def change(data: bytearray) -> None:
        begin = data.index(after) + len(after) + skip if after else skip
        struct.pack_into(f"<{layout}", data, begin, value)

    return change


def cut(size: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        del data[size:]

    return change


HUGE = 10**12
FAULTS: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "magic": (put("I", 0), "is not a GGUF file: it does not begin with b'GGUF'"),
    "version": (put("I", 1, skip=4), "GGUF version 1; octavo reads 2 and 3"),
    "big-endian": (put("I", 3 << 24, skip=4), "it is big-endian"),
    "tensors": (put("Q", HUGE, skip=8), r"1,000,000,000,000 tensors, which take at least"),
    "values": (put("Q", HUGE, skip=16), r"1,000,000,000,000 values of metadata, which take"),
    "more values": (put("Q", 500, skip=16), "bad.gguf: "),
    "key": (
        put("Q", HUGE, skip=24),
        r"the key of value 0 has 1,000,000,000,000 bytes; at most 65,535",
    ),
    "text": (
        put("Q", 1 << 63, b"general.architecture", 4),
        "general.architecture has 9,223,372,036,854,775,808 bytes",
    ),
    "array": (
        put("Q", HUGE, b"tokenizer.ggml.tokens", 8),
        r"tokenizer.ggml.tokens has 1,000,000,000,000 elements; octavo reads 16,777,216",
    ),
    "longer array": (
        put("Q", 1 << 23, b"tokenizer.ggml.tokens", 8),
        r"8,388,608 elements of tokenizer.ggml.tokens, which take at least",
    ),
    "nested array": (put("I", 9, b"tokenizer.ggml.tokens", 4), "is an array of type 9"),
    "type of value": (put("I", 77, b"llama.block_count"), "llama.block_count is of type 77"),
    "dimensions": (put("I", 9, Q_PROJ.encode()), "has 9 dimensions; they are 1 to 4"),
    "empty": (put("Q", 0, Q_PROJ.encode(), 4), r"has shape \[64, 0\]: it is empty"),
    "size": (put("Q", 1 << 60, Q_PROJ.encode(), 4), "the file is truncated"),
    "rows": (put("Q", 65, Q_PROJ.encode(), 4), r"rows of Q8_0 are multiples of 32"),
    "shape": (put("Q", 32, Q_PROJ.encode(), 4), r"\[64, 32\]; the metadata asks for \[64, 64\]"),
    "type": (put("I", 5, Q_PROJ.encode(), 20), f"tensor {Q_PROJ} is of type 5, which is none of"),
    "no weights": (put("I", 24, Q_PROJ.encode(), 20), "I8, which the gguf package does not"),
    "offset": (put("Q", 33, Q_PROJ.encode(), 24), "begins at 33, which is no multiple of 32"),
    "far": (put("Q", 1 << 62, Q_PROJ.encode(), 24), "the file is truncated"),
    "overlap": (put("Q", 0, Q_PROJ.encode(), 24), "overlap"),
    "end": (cut(-1), "the file is truncated"),
    "half a header": (cut(3000), "bad.gguf"),
    "nothing": (cut(0), "is not a GGUF file"),
    "layers": (put("I", 0, b"llama.block_count", 4), "llama.block_count is 0; it must be"),
    "many layers": (
        put("I", 1 << 31, b"llama.block_count", 4),
        "llama.block_count is 2147483648; the file has tensors of 1 layers",
    ),
    "heads": (put("I", 3, b"llama.attention.head_count", 4), "num_key_value_heads is 4|must div"),
    "bos": (put("I", 320, b"tokenizer.ggml.bos_token_id", 4), "the vocabulary has 320 tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_files(fault: str, good: Path, tmp_path: Path) -> None:
    refused(good, tmp_path, *FAULTS[fault])


@pytest.mark.parametrize("num_tensors", [0, 1])
def test_long_names_make_no_long_messages(num_tensors: int, tmp_path: Path) -> None:
    """One of a value of an unknown type, or of a tensor with nine dimensions."""
    path, name = tmp_path / "long.gguf", b"a" * 60_000
    header = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, 1 - num_tensors)
    path.write_bytes(header + struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 77, 0))
    with pytest.raises(ModelError) as error:
        read_gguf(path)
    reason = str(error.value).removeprefix(str(path))
    assert "60,000 bytes; at most 64" in reason if num_tensors else "of type 77" in reason
    assert len(reason) < 200


def test_any_cut_and_any_changed_byte_of_the_header_is_an_error_or_harmless(
    good: Path, tmp_path: Path
) -> None:
    size = min(each.offset for each in read_gguf(good).tensors.values())
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(size, (150,), generator=generator).tolist()
    values = torch.randint(256, (150,), generator=generator).tolist()
    for place, value in zip(places, values, strict=True):
        with pytest.raises(ModelError):
            read_gguf(patched(good, tmp_path, cut(place)))
        path = patched(good, tmp_path, put("B", value, skip=place))
        try:
            read_model_config(path)
        except ModelError:
            continue


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "No such file"),
        (lambda path: os.truncate(path, 3000), "length is greater than file size"),
    ],
)
def test_a_file_that_changes_while_it_is_read(
    change: Callable[[Path], object], message: str, good: Path, tmp_path: Path
) -> None:
    """As a download does that is started again, or a cache that is cleared."""
    path = patched(good, tmp_path, lambda data: None)
    config = read_model_config(path)
    with GgufWeights(config).tensors(torch.float32, CPU) as tensors:
        *_, last = tensors
        change(path)
        with pytest.raises(ModelError, match=rf"bad\.gguf can no longer be read: .*{message}"):
            last[2].read(tuple(slice(0, size) for size in last[2].shape))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q6_K])
def test_scales_that_are_not_finite(kind: Kind, tmp_path: Path) -> None:
    path = write_pair("llama", tmp_path, everywhere(kind), **WIDE)
    tensor = read_gguf(path).tensors["blk.0.ffn_down.weight"]
    row = tensor.num_bytes // tensor.shape[0]
    scale = 208 if kind == Kind.Q6_K else 0
    data = bytearray(path.read_bytes())
    struct.pack_into("<e", data, tensor.offset + 5 * row + scale, float("nan"))
    path.write_bytes(data)
    message = f"{tensor.name} as {kind.name} has scales that are not finite, in row 5"
    with pytest.raises(ModelError, match=message):
        logits(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture is 'mamba'; octavo serves llama, qwen2"),
        ({"general.type": "adapter"}, "general.type is 'adapter'; octavo serves models"),
        ({"llama.expert_count": 8}, "has no llama.expert_used_count"),
        ({"llama.expert_used_count": 2}, "expert_used_count is 2; octavo does not serve it for"),
        ({"llama.new_option": 0.5}, "llama.new_option is 0.5; octavo does not know this option"),
        ({"llama.attention.causal": False}, "octavo serves causal models"),
        ({"llama.attention.value_length": 8}, "value_length is 8; octavo serves heads of one"),
        ({"llama.embedding_length": "wide"}, "embedding_length is 'wide'; it must be a positive"),
        ({"llama.rope.scaling.type": "su"}, "rope.scaling.type is 'su'; octavo knows none, linear"),
        ({"llama.rope.scaling.type": "yarn"}, "has no llama.rope.scaling.factor"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is nan; it must be from"),
        ({"llama.context_length": None}, "has no llama.context_length"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "has no llama.attention.layer_norm_rms"),
        ({"tokenizer.ggml.tokens": ["a"] * 400}, "must have a row for each of the 400 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 elements for 320 tokens"),
        ({"general.sampling.temp": -1.0}, "general.sampling: temperature"),
        ({"split.count": 2}, "split.count is 2; its files are called NAME-00001-of-00002.gguf"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_metadata_that_is_not_served(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if "general.architecture" in metadata:
        path = write_pair("llama", tmp_path, everywhere(Kind.F32), num_hidden_layers=1)
        data = path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1)
        path.write_bytes(data)
    else:
        path = write_pair("llama", tmp_path, everywhere(Kind.F32), metadata, num_hidden_layers=1)
    with pytest.raises(ModelError, match=message):
        read_model_config(path)


EXPERT_FAULTS: dict[str, tuple[Callable[[bytearray], object], str]] = {
    "more experts": (
        put("I", 6, b"gpt-oss.expert_count", 4),
        r"exps.weight has shape \[5, 64, 96\]; it must have 3 dimensions, and its first is "
        r"gpt-oss.expert_count \(6\)",
    ),
    "no experts": (put("I", 0, b"gpt-oss.expert_count", 4), "gpt-oss.expert_count|has no"),
    "a million": (put("I", 10**6, b"gpt-oss.expert_count", 4), r"expert_count \(1000000\)"),
    "too many are used": (put("I", 6, b"expert_used_count", 4), "6 of 5 experts cannot be chosen"),
    "all of none": (put("I", 0, b"expert_used_count", 4), "expert_used_count is 0; it must be"),
    "size": (
        put("I", 64, b"expert_feed_forward_length", 4),
        r"exps.0.(weight|bias) has shape \[.*96.*\]; the metadata asks for \[.*64.*\]",
    ),
    "values for blocks": (put("I", 0, b"blk.0.ffn_up_exps.weight", 28), "truncated|overlap"),
    "no such type": (put("I", 38, b"blk.0.ffn_up_exps.weight", 28), "type 38, which is none of"),
}


@pytest.mark.parametrize("fault", EXPERT_FAULTS)
def test_faulty_experts(fault: str, good_experts: Path, tmp_path: Path) -> None:
    refused(good_experts, tmp_path, *EXPERT_FAULTS[fault])


@pytest.mark.parametrize("value", [253, 255])
def test_exponents_that_stand_for_no_number(value: int, good_experts: Path, tmp_path: Path) -> None:
    tensor = read_gguf(good_experts).tensors["blk.0.ffn_down_exps.weight"]
    num_experts, num_rows, _ = tensor.shape
    row = tensor.num_bytes // (num_experts * num_rows)
    exponent = put("B", value, skip=tensor.offset + (2 * num_rows + 7) * row)
    message = rf"exps.2.weight as MXFP4 has the exponent {value} at \[7, 0\]; weights are finite"
    refused(good_experts, tmp_path, exponent, message)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_corruptions_of_a_mixture_are_errors_or_harmless(
    count: int, good_experts: Path, tmp_path: Path
) -> None:
    """Numbers behind names become extreme, bytes change, names change places, files end early: no
    other error, and no memory for what is not there."""
    data, file = good_experts.read_bytes(), read_gguf(good_experts)
    end = min(each.offset for each in file.tensors.values())
    names = [name.encode() for name in (*file.metadata, *file.tensors)]
    chance = random.Random(count)
    extremes = [
        0,
        1,
        3,
        31,
        255,
        *(2**bits + i for bits in (16, 31, 32, 40, 62, 63) for i in (-1, 0)),
    ]
    for _ in range(count):
        bad = bytearray(data)
        match chance.randrange(4):
            case 0 | 1:
                name, layout = chance.choice(names), chance.choice("BIQ")
                place = bad.index(name) + chance.choice((-8, *range(len(name), len(name) + 32, 4)))
                value = chance.choice(extremes) % (1 << 8 * struct.calcsize(layout))
                struct.pack_into(f"<{layout}", bad, min(place, end - 8), value)
            case 2:
                one = chance.choice(names)
                bad = bad.replace(one, chance.choice([n for n in names if len(n) == len(one)]))
            case _:
                bad[chance.randrange(end)] = chance.randrange(256)
                del bad[chance.choice((len(bad), chance.randrange(len(bad)))) :]
        path = tmp_path / "bad.gguf"
        path.write_bytes(bad)
        tracemalloc.start()
        try:
            config = read_model_config(path)
            if config.max_model_len <= model_zoo.MAX_POSITIONS:
                load_model(config, torch.float32, CPU, SingleRank())
        except ModelError:
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 << 20


def test_tensors_that_are_missing_or_left_over(good: Path, tmp_path: Path) -> None:
    def rename(old: bytes, new: bytes) -> Callable[[bytearray], None]:
        def change(data: bytearray) -> None:
            data[:] = data.replace(old, new)

        return change

    path = patched(good, tmp_path, rename(b"blk.0.attn_v.weight", b"blk.0.attn_x.weight"))
    with pytest.raises(ModelError, match=r"does not have: blk.0.attn_x.weight \(bad.gguf\)"):
        logits(path)
    path = patched(good, tmp_path, rename(b"token_embd.weight", b"token_xmbd.weight"))
    with pytest.raises(ModelError, match=r"has no tensor token_embd\.weight"):
        logits(path)


def test_options_that_do_not_go_with_the_format(good: Path) -> None:
    with pytest.raises(ConfigError, match="served by octavo's own families"):
        LLM(good, model_impl="transformers")
    with pytest.raises(ConfigError, match=r"quantized already \(gguf\)"):
        LLM(good, quantization="fp8")


def test_without_the_package(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_gguf()
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(ModelError, match=r"pip install 'octavo\[gguf\]'"):
        read_model_config(good)
