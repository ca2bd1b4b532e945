"""Encoder-decoder models: logits equal transformers', and what contradicts itself is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_harness import DenseHarness
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

import model_zoo
from octavo.core.kv.specs import CrossAttention, FullAttention
from octavo.errors import ModelError
from octavo.layers.attention import RelativePositionBias
from octavo.layers.config import RelativeBiasConfig
from octavo.layers.embedding import SinusoidalPositions
from octavo.models.base import CausalLM
from octavo.models.config import DecodingRules
from octavo.models.loader import load_model
from octavo.models.registry import read_model_config
from octavo.ops.communicator import SingleRank

CPU = torch.device("cpu")
NAMES = model_zoo.ENCODER_DECODER_NAMES
DECODED = model_zoo.random_token_ids(60, seed=7)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(read_model_config(directory), dtype, CPU, SingleRank())


def expected(name: str, inputs: list[int], decoded: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model_zoo.reference_model(name)(
            input_ids=torch.tensor([inputs]),
            attention_mask=torch.ones(1, len(inputs), dtype=torch.int64),
            decoder_input_ids=torch.tensor([decoded]),
        ).logits[0]
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name: str) -> None:
    """Encoder inputs of one token, of whole blocks, and of others; the decoder's tokens at once and
    in chunks; several sequences together."""
    model = load(model_zoo.model_directory(name))
    inputs = {seq: model_zoo.random_token_ids(n, seed=n) for seq, n in enumerate((1, 8, 64, 77))}
    wants = {seq: expected(name, ids, DECODED) for seq, ids in inputs.items()}
    for cuts in ([0, 60], [0, 1, 2, 10, 59, 60]):
        harness = DenseHarness(model, 80, max_seqs=4)
        harness.encode(inputs)
        parts = [harness.run({seq: DECODED[a:b] for seq in inputs}) for a, b in pairwise(cuts)]
        for seq, want in wants.items():
            got = torch.cat([part[seq] for part in parts])
            torch.testing.assert_close(got, want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_last_layer_may_compute_some_tokens_alone(name: str) -> None:
    model = load(model_zoo.model_directory(name))
    harness = DenseHarness(model, 64, max_seqs=2)
    harness.encode({0: DECODED[:20], 1: DECODED[:9]})
    got = harness.logits({0: DECODED[:30], 1: DECODED[:5]}, torch.tensor([34, 29]))
    for i, (count, length) in enumerate([(9, 5), (20, 30)]):
        want = expected(name, DECODED[:count], DECODED[:length])[-1]
        torch.testing.assert_close(got[i], want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_kv_are_those_declared(name: str) -> None:
    config = read_model_config(model_zoo.model_directory(name))
    model, reference = load(config.path), model_zoo.reference_model(name)
    weights = dict(reference.named_parameters())
    if name == "marian":  # its positions are no weights
        weights = {key: each for key, each in weights.items() if "embed_positions" not in key}
    count = sum(each.numel() for each in weights.values())
    if hasattr(reference, "final_logits_bias"):
        count += reference.final_logits_bias.numel()
    assert config.num_parameters() == count
    assert sum(p.numel() for p in {id(p): p for p in _before_packing(config)}.values()) == count
    num_layers = len(config.layers)
    assert config.kv_specs() == [FullAttention()] * num_layers + [CrossAttention()] * num_layers
    assert [layer.reads_encoder for layer in model.attention_layers] == [
        i >= num_layers for i in range(2 * num_layers)
    ]


def _before_packing(config: Any) -> list[Tensor]:
    from octavo.models.loader import build_model

    return list(build_model(config, torch.float32, CPU, SingleRank()).parameters())


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (16, 9)])
def test_buckets_of_distances_are_those_of_t5(
    bidirectional: bool, num_buckets: int, max_distance: int
) -> None:
    distances = torch.arange(-300, 301)
    config = RelativeBiasConfig(1, num_buckets, max_distance, bidirectional)
    module = RelativePositionBias(config)
    module.weight.copy_(torch.arange(num_buckets).unsqueeze(1))
    got = module.biases(distances)[0].long()
    want = T5Attention._relative_position_bucket(
        distances, bidirectional, num_buckets, max_distance
    )
    assert torch.equal(got, want)


def test_sinusoids_of_an_odd_size() -> None:
    """The cosines are the shorter half."""
    table = SinusoidalPositions(5, 7, CPU).table
    angles = 4 / 10000 ** (torch.arange(0, 7, 2) / 7)
    torch.testing.assert_close(table[4], torch.cat((angles.sin(), angles.cos()[:3])))


def test_t5_under_the_first_name_of_its_class(tmp_path: Path) -> None:
    """As the files of T5's own authors have it, and transformers does not read it."""
    directory = changed(tmp_path, "t5", architectures=["T5WithLMHeadModel"])
    assert read_model_config(directory).architecture == "T5ForConditionalGeneration"


def test_a_bias_of_logits_is_no_matter_of_quantization(tmp_path: Path) -> None:
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}}
    directory = changed(tmp_path, "marian", quantization_config=quantization)
    assert read_model_config(directory).logits_bias


def test_bart_as_it_was_pretrained(tmp_path: Path) -> None:
    """Without prefix and without a bias of the logits."""
    directory = changed(tmp_path, "bart", architectures=["BartModel"])
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    del tensors["final_logits_bias"]
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    with torch.inference_mode():
        want = model_zoo.load_reference(directory)(
            input_ids=torch.tensor([DECODED[:20]]), decoder_input_ids=torch.tensor([DECODED])
        ).logits[0]
    harness = DenseHarness(load(directory), 60)
    harness.encode({0: DECODED[:20]})
    torch.testing.assert_close(harness.run({0: DECODED})[0], want, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("name", "kept"), [("flan-t5", True), ("mt5", True), ("t5", False)])
def test_a_head_of_its_own_that_transformers_5_has_saved(
    tmp_path: Path, name: str, kept: bool
) -> None:
    """It says that all models of these families tie their embeddings, and saves the head beside
    them; what it scales, it says."""
    directory = changed(tmp_path, name, tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    head = tensors["shared.weight"].flip(0) if kept else tensors["shared.weight"]
    (directory / "model.safetensors").unlink()
    save_file(
        tensors | {"lm_head.weight": head.clone()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    with torch.inference_mode():
        want = model_zoo.load_reference(directory)(
            input_ids=torch.tensor([DECODED[:20]]), decoder_input_ids=torch.tensor([DECODED])
        ).logits[0]
    harness = DenseHarness(load(directory), 60)
    harness.encode({0: DECODED[:20]})
    torch.testing.assert_close(harness.run({0: DECODED})[0], want, rtol=0, atol=2e-4)


# -------------------------------------------------------------------- bad directories


def changed(tmp_path: Path, name: str, **fields: Any) -> Path:
    """The model's directory with other fields in config.json."""
    directory = model_zoo.model_directory(name)
    for path in directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((directory / "config.json").read_text()) | fields
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("t5", {"num_decoder_layers": 3}, "the weights lack decoder.block.2"),
        ("t5", {"num_layers": 2}, "tensors that t5 does not have: encoder.block.2"),
        ("t5", {"d_kv": 8}, r"has shape \[64, 48\]; config.json asks for \[32, 48\]"),
        ("t5", {"feed_forward_proj": "gated-gelu"}, "is_gated_act is False; feed_forward_proj"),
        ("flan-t5", {"feed_forward_proj": "relu"}, "is_gated_act is True; feed_forward_proj"),
        (
            "t5",
            {"relative_attention_num_buckets": 32},
            r"\[16, 4\]; config.json asks for \[32, 4\]",
        ),
        ("t5", {"tie_word_embeddings": False}, "the weights lack lm_head"),
        ("bart", {"encoder_layers": 4}, "the weights lack encoder.layers.3"),
        ("bart", {"decoder_ffn_dim": 96}, r"fc1.bias has shape \[80\]"),
        ("bart", {"max_position_embeddings": 100}, r"config.json asks for \[102, 48\]"),
        ("marian", {"vocab_size": 300, "decoder_vocab_size": 300}, "has shape"),
    ],
)
def test_weights_that_contradict_the_config(
    tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(changed(tmp_path, name, **fields))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj is 'gated-tanh'; octavo"),
        ("t5", {"relative_attention_num_buckets": 30}, "num_buckets is 30 .* a multiple of 4"),
        ("t5", {"relative_attention_max_distance": 8}, "less than twice the second"),
        ("t5", {"relative_attention_max_distance": 1e9}, "relative_attention_max_distance is"),
        ("t5", {"num_layers": 0}, "num_layers is 0"),
        ("t5", {"architectures": ["T5EncoderModel"]}, "octavo serves T5ForConditionalGeneration"),
        ("bart", {"decoder_attention_heads": 5}, "decoder_attention_heads is 5; it must divide"),
        ("bart", {"normalize_before": True}, "normalize_before is True; octavo does not"),
        ("marian", {"decoder_vocab_size": 321}, "decoder_vocab_size is 321"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embed"),
    ],
)
def test_configs_that_cannot_be_right(
    tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    directory = changed(tmp_path, name, **fields)
    with pytest.raises(ModelError, match=message):
        read_model_config(directory)


def test_copies_of_the_embedding_must_agree(tmp_path: Path) -> None:
    directory = model_zoo.write_model("t5", tmp_path / "t5")
    tensors = load_file(directory / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    save_file(tensors, directory / "model.safetensors")
    load(directory)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match="says that they are the same"):
        load(directory)


def test_tables_of_their_own_for_encoder_and_decoder_are_refused(tmp_path: Path) -> None:
    directory = model_zoo.write_model("bart", tmp_path, tie_word_embeddings=False)
    with pytest.raises(
        ModelError,
        match=r"embed_tokens.weight differs .*\(tie_word_embeddings is false\); octavo serves bart",
    ):
        load(directory)


# -------------------------------------------------------------------- rules of the output


def with_rules(tmp_path: Path, **rules: Any) -> Path:
    directory = changed(tmp_path, "bart")
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(rules))
    return directory


def test_rules_of_the_output_are_read(tmp_path: Path) -> None:
    directory = with_rules(
        tmp_path,
        **{"forced_bos_token_id": 0, "forced_eos_token_id": [1], "no_repeat_ngram_size": 3},
        **{"bad_words_ids": [[5], [1], [6, 7]], "eos_token_id": 1},
        **{"num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "max_length": 142},
    )
    assert read_model_config(directory).decoding_rules == DecodingRules(0, (1,), 3, ((5,), (6, 7)))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"decoder_start_token_id": 320}, "decoder_start_token_id is 320; it must be one token"),
        ({"decoder_start_token_id": [1, 2]}, "decoder_start_token_id is .*; it must be one token"),
        (
            {"forced_eos_token_id": [1, 320]},
            "forced_eos_token_id is .*; it must be an id below 320",
        ),
        ({"forced_bos_token_id": 320}, "forced_bos_token_id is 320; it must be an id below 320"),
        ({"forced_bos_token_id": [1, 2]}, "forced_bos_token_id is .*; octavo forces one token"),
        ({"begin_suppress_tokens": [3]}, "begin_suppress_tokens is .*; octavo does not implement"),
        ({"suppress_tokens": [320]}, "suppress_tokens is .*; each must be an id below 320"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size is 2"),
        ({"num_beam_groups": 2}, "num_beam_groups is 2"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"bad_words_ids": [[]]}, "bad_words_ids is"),
        ({"bad_words_ids": [[320]]}, "bad_words_ids is"),
        ({"bad_words_ids": [[True]]}, "bad_words_ids is"),
    ],
)
def test_rules_that_octavo_lacks_are_refused_by_name(
    tmp_path: Path, rules: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"generation_config.json: {message}"):
        read_model_config(with_rules(tmp_path, **rules))
