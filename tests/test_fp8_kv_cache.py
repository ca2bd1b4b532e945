"""An FP8 KV cache from end to end: the same tokens, whatever the engine did on the way."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

import model_zoo
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import ConfigError, ModelError
from octavo.ops import KVScales
from octavo.registry import ATTENTION_BACKENDS

# transformers 5.24 has another name for the argument, which older versions do not know.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

PROMPTS = [model_zoo.random_token_ids(n, seed=n) for n in (3, 16, 33, 50)]
NUM_TOKENS = 14
# What generate() calls a cache that is given to it; the first since transformers 5.24.
PARAMETERS = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in PARAMETERS else "past_key_values"
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SCALES = [
    KVScales(0.004, 0.3),
    KVScales(0.011, 0.007),
    KVScales(0.3, 0.02),
]  # some keys are beyond 448 times theirs


class RoundedCache(DynamicCache):
    """transformers' KV cache, of keys and values that were rounded as an FP8 KV cache rounds."""

    def __init__(self, scales: list[KVScales]) -> None:
        super().__init__()
        self._scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        scales = self._scales[layer_idx]
        key = KVScales.quantize(key_states, scales.key).float() * scales.key
        value = KVScales.quantize(value_states, scales.value).float() * scales.value
        return super().update(key, value, layer_idx, *args, **kwargs)


def expected(directory: Path, scales: list[KVScales]) -> list[list[int]]:
    """Greedy tokens of transformers."""
    model = model_zoo.load_reference(directory)
    found = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            ids = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                **{CACHE: RoundedCache(scales)},
            )
        found.append(ids[0, len(prompt) :].tolist())
    return found


def load(directory: Path | str, **options: Any) -> LLM:
    defaults = {"num_blocks": 200, "max_num_seqs": 16, "max_model_len": 80}
    return LLM(str(directory), **(defaults | {"kv_cache_dtype": "fp8"} | options))


def greedy(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def with_scales(
    directory: Path,
    change: Callable[[dict[str, Tensor]], object] = lambda _: None,
    **scheme: Any,
) -> Path:
    """A Llama of unquantized weights with the scales of an FP8 KV cache, as compressed-tensors
    writes them."""
    shutil.copytree(model_zoo.model_directory("llama3"), directory)
    tensors = load_file(directory / "model.safetensors")
    for layer, scales in enumerate(SCALES):
        prefix = f"model.layers.{layer}.self_attn"
        tensors[f"{prefix}.k_scale"] = torch.tensor([scales.key])
        tensors[f"{prefix}.v_scale"] = torch.tensor(scales.value)
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    kv_cache = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": kv_cache | scheme,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gpt2"])
def test_tokens_equal_those_of_transformers_with_a_rounded_cache(name: str, backend: str) -> None:
    directory = model_zoo.model_directory(name)
    layers = model_zoo.reference_model(name).config.num_hidden_layers
    llm = load(directory, attention_backend=backend)
    assert greedy(llm) == expected(directory, [KVScales()] * layers)


def test_the_scales_of_a_checkpoint_are_honoured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = with_scales(tmp_path / "model")
    plain = model_zoo.model_directory("llama3")
    scaled, unscaled = (expected(plain, each) for each in (SCALES, [KVScales()] * len(SCALES)))
    assert scaled != unscaled, "they make a difference"
    assert greedy(load(directory)) == scaled
    assert "dequantized" not in caplog.text, "weights are not quantized"
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    assert greedy(load(directory)) == scaled, "without a word in config.json"


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_chunks_and_cached_prefixes_change_nothing(mode: str, block_size: int) -> None:
    directory, params = model_zoo.model_directory("llama3"), replace(GREEDY, max_tokens=30)
    wanted = greedy(load(directory, block_size=block_size, enable_prefix_caching=False), params)
    starved = load(
        directory,
        block_size=block_size,
        num_blocks=96 // block_size,
        preemption_mode=mode,
        max_num_batched_tokens=48,
        watermark=0.0,
    )
    roomy = load(directory, block_size=block_size, max_num_batched_tokens=20)
    for llm in (starved, roomy):
        for _cache in ("cold", "warm"):
            assert greedy(llm, params) == wanted
    assert starved.engine.scheduler.num_preemptions[mode] > 0
    assert roomy.engine.kv.num_hit_tokens > 0


def test_samples_and_beams_share_blocks_and_copy_them() -> None:
    directory = model_zoo.model_directory("llama3")
    asks: list[SamplingParams | BeamSearchParams] = [
        SamplingParams(n=3, seed=3, max_tokens=10, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=10),
    ]
    results = []
    for options in (
        {},
        {"num_blocks": 22, "max_model_len": 64},
        {"attention_backend": "reference"},
    ):
        llm = load(directory, block_size=8, **options)
        streams = [llm.client.make_request(PROMPTS[1], each) for each in asks]
        for stream in streams:
            llm.client.add_request(stream)
        while llm.client.has_unfinished:
            llm.client.step()
        outputs = [stream.output for stream in streams]
        results.append([[s.token_ids for s in output.outputs] for output in outputs if output])
        assert len(results[-1]) == len(asks)
    assert results[0] == results[1] == results[2]


def test_a_block_takes_one_byte_for_each_element() -> None:
    directory = model_zoo.model_directory("llama3")
    memory = 1 << 20
    plain, fp8 = (
        LLM(str(directory), kv_cache_dtype=each, num_blocks=None, kv_cache_memory=memory)
        for each in ("auto", "fp8")
    )
    sizes = [each.engine.executor.capacity for each in (plain, fp8)]
    assert sizes[0].block_bytes == 4 * sizes[1].block_bytes, "the model is in float32"
    assert [each.num_blocks for each in sizes] == [84, 340], "and the null block in addition"


def without(ending: str) -> Callable[[dict[str, Tensor]], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(ending)]:
            del tensors[name]

    return change


def setting(value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({"model.layers.1.self_attn.v_scale": value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("1.self_attn.v_scale"), "no v_scale of layer 1"),
        (without("k_scale"), "no k_scale of layer 0"),
        (without("_scale"), "no k_scale of layer 0"),
        (
            setting(torch.tensor(float("nan"))),
            r"1.self_attn.v_scale is nan; a scale must be between 1e-30 and 1e\+30$",
        ),
        (
            setting(torch.tensor(1e31)),
            r"1.self_attn.v_scale is 1e\+31; a scale must be between 1e-30 and 1e\+30$",
        ),
        (
            setting(torch.tensor(0.0)),
            r"1.self_attn.v_scale is 0; a scale must be between 1e-30 and 1e\+30$",
        ),
        (
            setting(torch.tensor(-1.0)),
            r"1.self_attn.v_scale is -1; a scale must be between 1e-30 and 1e\+30$",
        ),
        (setting(torch.tensor(2)), r"layers.1.self_attn.v_scale is torch.int64; scales are"),
        (
            lambda tensors: tensors.update(
                {"model.layers.1.self_attn.v_proj.output_scale": torch.tensor(9.0)}
            ),
            r"v(_proj.output)?_scale is [0-9.]+, but another v_scale of layer 1 is [0-9.]+",
        ),
        (setting(torch.ones(2, 1)), r"v_scale has shape \[2, 1\]; octavo takes one scale"),
    ],
)
def test_faulty_scales_are_named(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    directory = with_scales(tmp_path / "model", change)
    with pytest.raises(ModelError, match=message):
        load(directory)
    with load(directory, kv_cache_dtype="auto") as llm:  # which reads none
        assert greedy(llm)


@pytest.mark.parametrize(("field", "value"), [("type", "int"), ("num_bits", 4)])
def test_scales_for_other_numbers_are_refused(field: str, value: object, tmp_path: Path) -> None:
    directory = with_scales(tmp_path / "model", **{field: value})
    with pytest.raises(ModelError, match=rf"kv_cache_scheme: {field} is .*floats of 8 bits"):
        load(directory)


def test_scales_are_promised_by_a_word_too(tmp_path: Path) -> None:
    """As AutoFP8 writes it: "static"."""
    directory = with_scales(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    for scheme in ("static", "dynamic"):
        config["quantization_config"]["kv_cache_scheme"] = scheme
        (directory / "config.json").write_text(json.dumps(config))
        if scheme == "static":
            with load(directory) as llm:
                assert greedy(llm) == expected(model_zoo.model_directory("llama3"), SCALES)
    with pytest.raises(ModelError, match="kv_cache_scheme is 'dynamic'; an FP8 KV cache takes"):
        load(directory)
    config["quantization_config"]["kv_cache_scheme"] = "static"
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(model_zoo.model_directory("llama3") / "model.safetensors", directory)
    with pytest.raises(ModelError, match="have no k_scale of layer 0"):
        load(directory)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_modelopt_leaves_out_scales_that_are_1(algorithm: str, tmp_path: Path) -> None:
    directory = with_scales(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    written = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": algorithm}}
    (directory / "hf_quant_config.json").write_text(json.dumps(written))
    plain = model_zoo.model_directory("llama3")
    if algorithm != "FP8":
        with pytest.raises(ModelError, match="kv_cache_quant_algo is 'NVFP4'; an FP8 KV cache"):
            load(directory)
        return
    assert greedy(load(directory)) == expected(plain, SCALES)
    shutil.copy(plain / "model.safetensors", directory)
    unscaled = [KVScales()] * len(SCALES)
    assert greedy(load(directory)) == expected(plain, unscaled)
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    config["quantization_config"] = {"quant_method": "modelopt", "kv_cache_scheme": scheme}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "hf_quant_config.json").unlink()
    assert greedy(load(directory)) == expected(plain, unscaled)


def test_unknown_types_are_refused_with_the_known() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*'int8' is not one of auto, fp8"):
        LLM("demo", kv_cache_dtype="int8")


class Unscaled:
    """An attention backend that knows nothing of it."""

    score_features: frozenset[str] = frozenset()
    kv_block_shape = staticmethod(lambda *sizes: sizes)


def test_a_backend_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS._entries, "unscaled", Unscaled)
    with pytest.raises(ConfigError, match="Unscaled does not compute fp8_kv_cache"):
        load(model_zoo.model_directory("llama3"), attention_backend="unscaled")
