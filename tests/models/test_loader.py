"""Weights: everything is loaded, nothing is left over, and every fault is named."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_harness import DenseHarness
from safetensors.torch import load_file, save_file
from torch import Tensor

import model_zoo
from octavo.errors import ModelError, OutOfMemory
from octavo.models.loader import (
    build_model,
    fill_with_noise,
    load_model,
    load_weights,
    weight_targets,
)
from octavo.models.registry import read_model_config
from octavo.ops.communicator import SingleRank
from octavo.ops.quantized import ScaledFloat8

CPU = torch.device("cpu")
PROMPT = model_zoo.random_token_ids(20)
Tensors = dict[str, Tensor]


def logits(directory: Path) -> Tensor:
    model = load_model(read_model_config(directory), torch.float32, CPU, SingleRank())
    return DenseHarness(model, len(PROMPT)).run({0: PROMPT})[0]


def changed(directory: Path, name: str, change: Callable[[Tensors], object]) -> Path:
    """A copy of the zoo's model whose tensors `change` has changed in place."""
    shutil.copytree(model_zoo.model_directory(name), directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    return directory


def shard(directory: Path, name: str) -> Path:
    """A copy of the zoo's model in two files with an index."""
    shutil.copytree(model_zoo.model_directory(name), directory, dirs_exist_ok=True)
    single = directory / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    weight_map = {key: f"model-{1 + i % 2}.safetensors" for i, key in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({k: t for k, t in tensors.items() if weight_map[k] == file}, directory / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_every_parameter_has_a_target(name: str) -> None:
    config = read_model_config(model_zoo.model_directory(name))
    model = build_model(config, torch.float32, CPU, SingleRank())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    slices = [each for target in weight_targets(model, config).values() for each in target.slices]
    targets = {each.target.data_ptr(): each.target for each in slices}
    for _, buffer in model.named_buffers():  # of float32 whatever the model's dtype
        assert targets.pop(buffer.data_ptr()).numel() == buffer.numel()
    assert sum(target.numel() for target in targets.values()) == num_parameters
    assert num_parameters == config.num_parameters()
    assert num_parameters == model_zoo.reference_model(name).num_parameters()
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama", "llama3", "gpt2"])
def test_shards_equal_one_file(name: str, tmp_path: Path) -> None:
    assert torch.equal(logits(shard(tmp_path, name)), logits(model_zoo.model_directory(name)))


@pytest.mark.parametrize(
    ("name", "prefix"), [("gpt2", "transformer."), ("opt", "model."), ("llama3", "model.")]
)
def test_names_without_prefix(name: str, prefix: str, tmp_path: Path) -> None:
    """Checkpoints saved from the body of the model alone."""

    def strip(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[key.removeprefix(prefix)] = tensors.pop(key)

    directory = changed(tmp_path, name, strip)
    assert torch.equal(logits(directory), logits(model_zoo.model_directory(name)))


@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "mixtral", "phimoe", "granitemoe", "gpt_neox"],
)
def test_names_in_files_as_transformers_5_holds_them(name: str, tmp_path: Path) -> None:
    directory = model_zoo.model_directory(name)
    reference = model_zoo.load_reference(directory)
    reference.save_pretrained(tmp_path, save_original_format=False)
    shutil.copy(directory / "config.json", tmp_path)
    files = [load_file(each / "model.safetensors") for each in (directory, tmp_path)]
    assert files[0].keys() != files[1].keys()
    torch.testing.assert_close(logits(tmp_path), logits(directory))


@pytest.mark.parametrize("is_original", [False, True])
@pytest.mark.parametrize(
    ("name", "block"), [("mixtral", (8, 8)), ("granitemoe", (8, 8)), ("qwen3_moe", None)]
)
def test_experts_in_fp8_as_transformers_5_writes_them(
    name: str, block: tuple[int, int] | None, is_original: bool, tmp_path: Path
) -> None:
    """Scales are of all experts of a layer, whatever the names of the experts themselves."""
    reference = model_zoo.load_reference(model_zoo.model_directory(name))
    experts = {
        key: ScaledFloat8.quantize(tensor, block or (tensor.shape[-2], tensor.shape[-1]))
        for key, tensor in reference.state_dict().items()
        if key.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }

    def write(directory: Path, values: Tensors, **fields: object) -> Path:
        reference.load_state_dict(values, strict=False)
        reference.save_pretrained(directory, save_original_format=is_original)
        config = json.loads((directory / "config.json").read_text()) | fields
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    dense = write(tmp_path / "dense", {key: each.dequantize() for key, each in experts.items()})
    method = {"quant_method": "fp8", "weight_block_size": block}
    values = {key: each.weight.float() for key, each in experts.items()}
    quantized = write(tmp_path / "quantized", values, quantization_config=method)
    tensors = load_file(quantized / "model.safetensors")
    for key, tensor in tensors.items():
        if "experts." in key or "put_linear" in key:
            tensors[key] = tensor.to(torch.float8_e4m3fn)
    for key, each in experts.items():
        if is_original and name == "mixtral":
            key = key.replace("mlp", "block_sparse_moe")
        tensors[f"{key}_scale_inv"] = each.scales
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits(quantized), logits(dense))


@pytest.mark.parametrize("block", [(128, 16), None])
def test_gates_and_ups_in_one_fp8_tensor_may_have_scales_of_their_own(
    block: tuple[int, int] | None, tmp_path: Path
) -> None:
    """As transformers 5 puts them together where one block is higher than either."""
    reference = model_zoo.load_reference(model_zoo.model_directory("mixtral"))
    quantized: Tensors = {}
    dense: Tensors = {}
    for key, tensor in reference.state_dict().items():
        dense[key] = quantized[key] = tensor
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts = [tensor] if "down" in key else tensor.chunk(2, dim=1)
            height, width = parts[0].shape[1:]
            own = (height, width) if block is None else (min(block[0], height), block[1])
            forms = [ScaledFloat8.quantize(each, own) for each in parts]
            quantized[key] = torch.cat([each.weight.view(torch.uint8) for each in forms], dim=1)
            quantized[key] = quantized[key].view(torch.float8_e4m3fn)
            quantized[f"{key}_scale_inv"] = torch.cat([each.scales for each in forms], dim=1)
            dense[key] = torch.cat([each.dequantize() for each in forms], dim=1)
    config = json.loads((model_zoo.model_directory("mixtral") / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": block}
    for name, tensors, fields in (
        ("dense", dense, {}),
        ("quantized", quantized, {"quantization_config": method}),
    ):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config | fields))
    torch.testing.assert_close(logits(tmp_path / "quantized"), logits(tmp_path / "dense"))


def test_harmless_extras(tmp_path: Path) -> None:
    def add_masks(tensors: Tensors) -> None:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
        tensors["h.2.attn.masked_bias"] = torch.tensor(-1e4)

    assert torch.equal(
        logits(changed(tmp_path / "gpt2", "gpt2", add_masks)),
        logits(model_zoo.model_directory("gpt2")),
    )

    def add_version(tensors: Tensors) -> None:
        tensors["model.decoder.version"] = torch.tensor([3.0])

    logits(changed(tmp_path / "opt", "opt", add_version))

    def add_frequencies(tensors: Tensors) -> None:
        for name in [each for each in tensors if each.endswith(("q_proj.weight", "value.weight"))]:
            tensors[f"{name.rsplit('.', 2)[0]}.rotary_emb.inv_freq"] = torch.ones(6)

    for name in ("llama", "falcon", "glm", "gpt_neox"):
        logits(changed(tmp_path / name, name, add_frequencies))


def test_tied_embeddings_under_either_name(tmp_path: Path) -> None:
    want = logits(model_zoo.model_directory("llama3"))
    embedding = "model.embed_tokens.weight"

    def both(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors[embedding].clone()

    def only_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop(embedding)

    def different(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors[embedding] + 1

    assert torch.equal(logits(changed(tmp_path / "both", "llama3", both)), want)
    assert torch.equal(logits(changed(tmp_path / "head", "llama3", only_head)), want)
    both_names = r"embed_tokens.weight differs from \S*: lm_head.weight, .*tie_word_embeddings"
    with pytest.raises(ModelError, match=both_names):
        logits(changed(tmp_path / "different", "llama3", different))


def test_one_parameter_under_two_names(tmp_path: Path) -> None:
    def with_factor(factor: float) -> Callable[[Tensors], object]:
        return lambda t: t.update({"norm.weight": factor * t["model.norm.weight"]})

    logits(changed(tmp_path, "llama", with_factor(1.0)))
    both_names = r": norm.weight differs from \S*: model.norm.weight, a tensor for the same"
    with pytest.raises(ModelError, match=both_names):
        logits(changed(tmp_path, "llama", with_factor(2.0)))


@pytest.mark.parametrize("damaged", ["model.shared", "model.encoder.embed_tokens", "lm_head"])
def test_a_shared_table_that_holds_nan_under_one_of_its_names(damaged: str, tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        for name in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
            tensors[f"{name}.weight"] = tensors["model.shared.weight"].clone()
        tensors[f"{damaged}.weight"][5, 3] = torch.nan

    with pytest.raises(ModelError, match=rf"safetensors: {damaged}\.weight holds NaN, and differs"):
        logits(changed(tmp_path, "bart", damage))


def test_a_tied_head_is_one_tensor() -> None:
    config = read_model_config(model_zoo.model_directory("llama3"))
    model = build_model(config, torch.float32, CPU, SingleRank())
    assert model.head.linear.weight is model.embedding.weight


def test_missing_tensors(tmp_path: Path) -> None:
    directory = changed(tmp_path, "llama", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lack layers\.1\.mlp\.up_proj\.weight$"):
        logits(directory)
    directory = changed(tmp_path, "llama", lambda t: [t.pop(key) for key in list(t)[2:]])
    with pytest.raises(ModelError, match=r"the weights lack .*, .*, .* and \d+ more"):
        logits(directory)


def test_an_untied_head_is_not_made_up(tmp_path: Path) -> None:
    directory = changed(tmp_path, "llama", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"the weights lack lm_head\.weight"):
        logits(directory)


def test_unknown_tensors(tmp_path: Path) -> None:
    directory = changed(
        tmp_path, "qwen2", lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2)})
    )
    message = (
        r"tensors that qwen2 does not have: model\.layers\.9\.mlp\.up_proj\.weight \(model\.safe"
    )
    with pytest.raises(ModelError, match=message):
        logits(directory)


def test_wrong_shapes(tmp_path: Path) -> None:
    directory = changed(
        tmp_path, "mistral", lambda t: t.update({"model.norm.weight": torch.ones(47)})
    )
    message = (
        r"model\.safetensors: model\.norm\.weight has shape \[47\]; config\.json asks for \[48"
    )
    with pytest.raises(ModelError, match=message):
        logits(directory)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_quantised_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = changed(
        tmp_path, "llama", lambda t: t.update({"model.norm.weight": torch.ones(48).to(dtype)})
    )
    with pytest.raises(
        ModelError, match=rf"norm\.weight is {dtype}: config\.json does not say how"
    ):
        logits(directory)


@pytest.mark.parametrize("num_bytes", [0, 5, 200, -100])
def test_truncated_files(num_bytes: int, tmp_path: Path) -> None:
    directory = changed(tmp_path, "llama", lambda t: None)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or not a safetensors"):
        logits(directory)


def test_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, framework: str) -> None:
        raise RuntimeError(f"unable to mmap 5 bytes from file <{path}>: Cannot allocate memory")

    directory = changed(tmp_path, "llama", lambda t: None)
    monkeypatch.setattr("octavo.models.safetensors_files.safe_open", refuse)
    with pytest.raises(OutOfMemory, match=r"model\.safetensors cannot be mapped into memory: un"):
        logits(directory)


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    directory = changed(tmp_path, "llama", lambda t: None)
    content = b"not JSON"
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content)
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or not a safetensors"):
        logits(directory)


def test_a_missing_shard(tmp_path: Path) -> None:
    directory = shard(tmp_path, "llama")
    (directory / "model-2.safetensors").unlink()
    message = r"model\.safetensors\.index\.json lists model-2\.safetensors, which does not exist"
    with pytest.raises(ModelError, match=message):
        logits(directory)


def test_a_shard_that_lacks_a_tensor(tmp_path: Path) -> None:
    directory = shard(tmp_path, "llama")
    file = directory / "model-1.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors.pop(name)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"model-1\.safetensors lacks {name}, which .* lists"):
        logits(directory)


def test_a_broken_index(tmp_path: Path) -> None:
    directory = shard(tmp_path, "llama")
    index = directory / "model.safetensors.index.json"
    for content, message in (
        ("{}", r"index\.json has no weight_map"),
        ('{"weight_map": []}', r"weight_map does not map tensors to files"),
        ('{"weight_map": {"a": 3}}', r"weight_map does not map tensors to files"),
        ("{", r"index\.json cannot be read"),
    ):
        index.write_text(content)
        with pytest.raises(ModelError, match=message):
            logits(directory)


def test_pickles_are_refused(tmp_path: Path) -> None:
    directory = changed(tmp_path, "llama", lambda t: None)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights: neither model\.safetensors nor"):
        logits(directory)
    (directory / "pytorch_model.bin").write_bytes(b"")
    message = r"as pickle \(pytorch_model\.bin\), which can run any code when it is read; convert"
    with pytest.raises(ModelError, match=message):
        logits(directory)


def test_loading_casts(tmp_path: Path) -> None:
    def halve(tensors: Tensors) -> None:
        for key in tensors:
            tensors[key] = tensors[key].bfloat16()

    config = read_model_config(changed(tmp_path, "qwen3", halve))
    model = build_model(config, torch.float32, CPU, SingleRank())
    load_weights(model, config)
    want = load_file(tmp_path / "model.safetensors")["model.norm.weight"].float()
    (part,) = weight_targets(model, config)["norm.weight"].slices
    assert torch.equal(part.target, want)


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_dummy_weights(name: str, tmp_path: Path) -> None:
    """A config alone is enough; the same seed gives the same weights."""
    shutil.copy(model_zoo.model_directory(name) / "config.json", tmp_path)
    config = read_model_config(tmp_path)
    runs = [
        DenseHarness(
            load_model(config, torch.float32, CPU, SingleRank(), "dummy", seed), len(PROMPT)
        ).run({0: PROMPT})[0]
        for seed in (0, 0, 1)
    ]
    assert runs[0].isfinite().all()
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_dummy_weights_look_random() -> None:
    """More numbers than the noise has: the noise repeats, rows do not."""
    config = read_model_config(Path(__file__).parents[2] / "benchmarks" / "configs" / "llama-15m")
    model = build_model(config, torch.bfloat16, CPU, SingleRank())
    fill_with_noise(model, config, 0)
    weight = model.embedding.weight.float()
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert weight.mean().abs() < 1e-4
    assert torch.unique(weight[:, :8], dim=0).shape[0] == config.vocab_size
    targets = weight_targets(model, config).items()
    norms = [target.slices[0].target for key, target in targets if key.endswith("norm.weight")]
    assert norms
    assert all((norm == 1).all() for norm in norms)
