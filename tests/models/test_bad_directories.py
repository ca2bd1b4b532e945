"""Model directories with every field wrong in every way: octavo's own errors, and no long ones.

What is accepted must be usable: its shapes can be counted and its rotary table can be made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import model_zoo
from octavo import LLM
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ModelError, OutOfMemory
from octavo.json_fields import Fields
from octavo.layers.rotary import rotary_table
from octavo.models.loader import build_model, load_weights
from octavo.models.registry import OWN_FAMILIES, read_model_config
from octavo.ops.communicator import SingleRank

CPU = torch.device("cpu")
LONG_INTEGER = "an integer of 5,000 digits"  # which json.dumps would not write
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 1.5, 10**9, 10**400, 1e308, 1e-320, LONG_INTEGER),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "x" * 5000, "\ud800", "\0", "../.."),
    *([], [None], [1], [10**400], ["x" * 5000], [[]], {}, {"a": {}}, {"content": "\ud800"}),
    *([{"name": []}], [{"name": "default", "template": {}}]),
]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e4},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "truncate": True, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7}
    | {"mscale_all_dim": 0.9, "attention_factor": 1.0},
    "longrope": {"factor": 4.0, "short_factor": [1.5] * 6, "long_factor": [2.0] * 6},
}
# Each has other fields than most families have; the rest are nightly.
TELLING_FAMILIES = ("falcon", "gemma3_text", "gpt2", "gpt_oss")
SHARED_ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 64}


def write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values).replace(f'"{LONG_INTEGER}"', "9" * 5000))


def fields_of(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(
        (model_zoo.model_directory(name) / "config.json").read_text()
    )
    return fields


def outcome(read: Callable[[], object]) -> str:
    """Why it was refused, "" if it was not; any other exception passes through."""
    try:
        read()
    except ModelError as error:
        message = str(error)
        assert len(message) < 1000
        message.encode()  # it can be printed
        return message
    return ""


def use(directory: Path) -> None:
    config = read_model_config(directory)
    assert config.num_layers == len(config.layer_windows) <= 10_000
    if config.weight_bytes(4) < 1 << 22:
        for rotary in config.rotaries:
            rotary_table(rotary, config.max_model_len, CPU)


def changes(fields: dict[str, Any], names: set[str]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for name in sorted(names):
        yield name, "nothing", {key: value for key, value in fields.items() if key != name}
        for value in VALUES:
            yield name, value, fields | {name: value}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in TELLING_FAMILIES else pytest.mark.slow)
        for name in OWN_FAMILIES
        if name in model_zoo.NAMES
    ],
)
def test_every_field_of_config(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fields are those that are there and those that octavo asks for."""
    fields = fields_of(family)
    names = set(fields)
    get = Fields.get

    def recording(self: Fields, name: str, *default: Any) -> Any:
        if "rope_parameters" not in self.where:
            names.add(name)
        return get(self, name, *default)

    write(tmp_path / "config.json", fields)
    with monkeypatch.context() as patch:
        patch.setattr(Fields, "get", recording)
        use(tmp_path)
    num_refused = 0
    for name, value, changed in changes(fields, names):
        write(tmp_path / "config.json", changed)
        reason = outcome(lambda: use(tmp_path))
        num_refused += bool(reason)
        if value is LONG_INTEGER:
            assert reason.startswith(str(tmp_path / "config.json")), name
    assert num_refused > 200


@pytest.mark.parametrize("kind", ROPES)
def test_every_field_of_the_rotary_embedding(kind: str, tmp_path: Path) -> None:
    fields = fields_of("llama")
    rope = SHARED_ROPE | ROPES[kind] | {"rope_type": kind}
    names = {name for each in ROPES.values() for name in each} | set(rope) | {"type"}
    for _, _, changed in changes(rope, names):
        write(tmp_path / "config.json", fields | {"rope_parameters": changed})
        outcome(lambda: use(tmp_path))


def test_every_field_of_generation_config(tmp_path: Path) -> None:
    shutil.copy(model_zoo.model_directory("llama") / "config.json", tmp_path)
    generation = {"do_sample": True, "eos_token_id": 1, "temperature": 0.6, "top_p": 0.9}
    names = {*generation, "top_k", "min_p", "repetition_penalty"}
    for _, _, changed in changes(generation, names):
        write(tmp_path / "generation_config.json", changed)
        outcome(lambda: use(tmp_path))


def test_every_field_of_tokenizer_config(tmp_path: Path) -> None:
    source = model_zoo.model_directory("llama")
    shutil.copy(source / "tokenizer.json", tmp_path)
    config = json.loads((source / "tokenizer_config.json").read_text())

    def read() -> None:
        tokenizer = Tokenizer.from_directory(tmp_path)
        assert tokenizer.encode("fox")
        for token in tokenizer.special_tokens.values():
            ids = tokenizer.encode(token, add_special_tokens=False)
            assert all(token_id < tokenizer.vocab_size for token_id in ids)

    for _, _, changed in changes(config, {*config, "chat_template"}):
        write(tmp_path / "tokenizer_config.json", changed)
        outcome(read)
    config["chat_template"] = "{{ " + "(" * 100_000
    write(tmp_path / "tokenizer_config.json", config)
    assert outcome(read)


def test_every_value_in_the_index(tmp_path: Path) -> None:
    source = model_zoo.model_directory("llama")
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors, tmp_path / "part.safetensors")
    config = read_model_config(tmp_path)
    model = build_model(config, torch.float32, CPU, SingleRank())
    whole = dict.fromkeys(tensors, "part.safetensors")
    index = {"metadata": {}, "weight_map": whole}

    def read() -> None:
        load_weights(model, config)

    path = tmp_path / "model.safetensors.index.json"
    for name, value, changed in changes(index, {"weight_map"}):
        write(path, changed)
        assert outcome(read), (name, value)
    for value in VALUES:
        write(path, index | {"weight_map": whole | {"model.norm.weight": value}})
        assert outcome(read), value
    write(path, index | {"weight_map": whole | {"x" * 5000: "part.safetensors"}})
    assert "part.safetensors lacks xxx" in outcome(read)
    write(path, index)
    assert not outcome(read)


def test_a_tensor_of_a_type_that_torch_does_not_have(tmp_path: Path) -> None:
    """The safetensors library reads its header, and not its values."""
    source = model_zoo.model_directory("llama")
    shutil.copy(source / "config.json", tmp_path)
    file = tmp_path / "model.safetensors"
    entry = {"dtype": "F6_E3M2", "shape": [48], "data_offsets": [0, 36]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(36))
    config = read_model_config(tmp_path)
    model = build_model(config, torch.float32, CPU, SingleRank())
    message = r"model\.safetensors: model\.norm\.weight cannot be read: .* F6_E3M2"
    with pytest.raises(ModelError, match=message):
        load_weights(model, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; .* at most 10,000$"),
        ({"hidden_size": 10**400}, r"hidden_size is about 2\*\*1328; it must be a positive int"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps is about 2\*\*1328; .* from 1e-30 to 1e\+30"),
        ({"rms_norm_eps": LONG_INTEGER}, "config.json cannot be read: .*4300"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}},
            "rope_theta is 1; yarn needs another base",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1e29}},
            "the extended context has .* positions",
        ),
    ],
)
def test_what_is_said(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write(tmp_path / "config.json", fields_of("llama") | change)
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


def test_a_model_of_any_size_is_weighed_before_it_is_built(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 9_999, "hidden_size": 1 << 30, "vocab_size": 1 << 31}
    write(tmp_path / "config.json", fields_of("llama") | sizes)
    with pytest.raises(OutOfMemory):
        LLM(str(tmp_path), load_format="dummy")


@pytest.mark.parametrize(
    ("name", "read"),
    [("config.json", read_model_config), ("chat_template.jinja", Tokenizer.from_directory)],
)
def test_a_file_beyond_all_measure(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    shutil.copy(model_zoo.model_directory("llama") / "tokenizer.json", tmp_path)
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room
    with pytest.raises(ModelError, match=rf"{name} is larger than 67,108,864 bytes"):
        read(tmp_path)
