"""What cannot be served through transformers is refused with the reason, before memory is taken."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    EncodecConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MusicgenConfig,
    MusicgenDecoderConfig,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaModel

import model_zoo
from fallback.shrunken import MODEL_TYPES, shrunken_config
from fallback.sweep import prompts, write_reference
from octavo import LLM, SamplingParams
from octavo.config import ModelImpl
from octavo.errors import ConfigError, ModelError
from octavo.models import registry
from octavo.models.fallback import build, paged, recording
from octavo.models.loader import load_model
from octavo.models.registry import read_model_config
from octavo.ops.communicator import SingleRank

CPU = torch.device("cpu")
SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}


def refused(directory: Path, model_type: str, impl: ModelImpl = "auto", **fields: Any) -> str:
    shrunken_config(model_type, **fields).save_pretrained(directory)
    with pytest.raises(ModelError) as error:
        read_model_config(directory, impl)
    assert str(directory / "config.json") in str(error.value)
    return str(error.value)


def test_models_are_read_in_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers has one table of attentions, into which a recording puts its own."""
    both = Barrier(2)

    def record_together(*given: Any) -> recording.Recording:
        with suppress(BrokenBarrierError):
            both.wait(0.5)  # in vain where they take turns
        return recording.record(*given)

    monkeypatch.setattr(build, "record", record_together)
    model_types = ("arcee", "stablelm")
    for model_type in model_types:
        shrunken_config(model_type).save_pretrained(tmp_path / model_type)
    with ThreadPoolExecutor(2) as threads:
        read = threads.map(
            lambda name: read_model_config(tmp_path / name, "transformers"), model_types
        )
        assert [each.architecture for each in read] == ["ArceeForCausalLM", "StableLmForCausalLM"]


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba2", "its layers carry a state from token to token"),
        ("qwen3_next", "its layers carry a state from token to token"),
        ("minimax", "carry a state from token to token (layer_types: linear_attention)"),
        ("llama4_text", "its attention stays within chunks (layer_types: chunked_attention)"),
        ("diffllama", r"self_attn calls the attention more than once"),
        ("doge", "attends with a mask of its own"),
        ("gpt_neo", "does not go through transformers' attention interface"),
        ("pegasus", "it has an encoder"),
        ("deepseek_v32", "the argument indices, which octavo has no place for"),
        ("roformer", "RoFormerModel takes no position_ids"),
        ("jetmoe", "depends on what its tensors hold"),
    ],
)
def test_a_model_is_refused_for_what_it_does(model_type: str, reason: str, tmp_path: Path) -> None:
    assert reason in refused(tmp_path, model_type)


def test_a_mask_that_is_no_causal_window_is_refused(tmp_path: Path) -> None:
    assert "no causal window" in refused(tmp_path, "bert", is_decoder=False)


def test_a_class_is_known_by_the_name_that_its_authors_gave_it(tmp_path: Path) -> None:
    """transformers computes some models by another's class, and their files name their own."""
    config = shrunken_config("arcee").to_dict()
    for name in ("ArceeForCausalLM", "ArceeAgainForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        assert read_model_config(tmp_path).architecture == "ArceeForCausalLM"
    for name in ("LlamaForCausalLM", "ArceeForSequenceClassification", "ArceeForSomething"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        with pytest.raises(ModelError, match="of arcee, octavo serves ArceeForCausalLM"):
            read_model_config(tmp_path)


def test_a_part_for_text_may_say_alone_what_weights_are(tmp_path: Path) -> None:
    fields = shrunken_config("llava").to_dict()
    del fields["dtype"]
    for dtype, expected in (("bfloat16", "bfloat16"), (None, "float32")):
        fields["text_config"]["dtype"] = dtype
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert read_model_config(tmp_path).dtype == expected
    fields["text_config"]["dtype"] = "int3"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="dtype is 'int3'; octavo serves"):
        read_model_config(tmp_path)


def test_other_input_than_text_without_a_part_for_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "git", "vision_config": {}}))
    with pytest.raises(ModelError, match=r"other input than text \(vision_config\)"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (lambda b, h, q, kv: kv <= q, None),
        (lambda b, h, q, kv: (kv <= q) & (kv > q - 40), 40),
        (lambda b, h, q, kv: (kv <= q) & (kv // 64 == q // 64), "refused"),  # chunks
        (lambda b, h, q, kv: (kv >= 0) | (q >= 0), "refused"),  # both directions
        (lambda b, h, q, kv: (kv <= q) & (kv > q - 40) | (kv < 4), "refused"),  # first keys
    ],
)
def test_windows_are_read_off_masks(mask: Callable[..., Tensor], window: object) -> None:
    if window == "refused":
        with pytest.raises(recording.Unserved, match="no causal window"):
            recording.window_of(mask, 1000)
    else:
        assert recording.window_of(mask, 1000).size == window


def test_types_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "novel"}))
    with pytest.raises(ModelError, match=r"model_type is 'novel'; neither octavo nor transformers"):
        read_model_config(tmp_path)
    code = {"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "modeling_novel.Novel"}}
    (tmp_path / "config.json").write_text(json.dumps(code))
    (tmp_path / "modeling_novel.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ModelError, match=r"\(auto_map\) is never run"):
        read_model_config(tmp_path)


def test_code_beside_a_known_type_is_not_run(tmp_path: Path) -> None:
    shrunken_config("ernie4_5_moe").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "code.py").write_text("raise SystemExit('was run')")
    assert read_model_config(tmp_path).architecture == "Ernie4_5_MoeForCausalLM"


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"moe_num_experts": -1},
        {"rope_parameters": {"rope_type": "unheard"}},
        {"max_position_embeddings": None},
    ],
)
def test_fields_that_cannot_be_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    shrunken_config("ernie4_5_moe").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("ernie4_5_moe", "moe_num_experts"), ("ernie4_5_moe", "moe_k"), ("deepseek_v3", "v_head_dim")],
)
def test_a_number_that_is_null_is_named(model_type: str, name: str, tmp_path: Path) -> None:
    """While the module is made, and in its forward pass; transformers' errors name no field."""
    default = getattr(AutoConfig.for_model(model_type), name)
    shrunken_config(model_type).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: None}))
    with pytest.raises(ModelError, match=rf"; {name} is null; its default is {default}"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("mellum", {"head_dim": 1}, "rotation makes 2 elements of the 1 that a head has"),
        ("vaultgemma", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping); it must be"),
        ("granitemoe_swa", {"attention_multiplier": math.inf}, "scores by inf (attention_mult"),
        ("granitemoe_swa", {"attention_multiplier": 0.0}, "scores by 0.0 (attention_multiplier"),
        ("granitemoe_swa", {"attention_multiplier": -0.5}, "scores by -0.5 (attention_multipl"),
        ("roberta", {"pad_token_id": None}, "and pad_token_id is null"),
        ("roberta", {"pad_token_id": 255}, "it has no positions from 256 (pad_token_id + 1) on"),
    ],
)
def test_values_that_the_attention_or_positions_cannot_have_are_refused(
    model_type: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert reason in refused(tmp_path, model_type, **fields)


@pytest.mark.parametrize(
    ("model_type", "fields", "reasons"),
    [
        (
            "mixtral",
            {"num_local_experts": 1},
            ["num_experts_per_tok is 2; it must be from 0 to 1 (num_local_experts)"],
        ),
        ("olmoe", {"num_experts": -1}, ["num_experts is -1; it must be positive"]),
        ("ernie4_5_moe", {"moe_k": 5}, ["moe_k is 5; it must be from 0 to 4 (moe_num_experts)"]),
        (
            "deepseek_v3",
            {"n_group": 0},
            ["n_group is 0; it must divide 4 (n_routed_experts) into groups of 2 or more"],
        ),
        ("deepseek_v3", {"n_group": 4}, ["n_group is 4; it must divide 4"]),
        ("deepseek_v3", {"topk_group": 2}, ["topk_group is 2; it must be from 0 to 1 (n_group)"]),
        (
            "dots1",
            {"n_group": -1, "num_experts_per_tok": 5},
            ["n_group is -1; it must divide 4", "num_experts_per_tok is 5; it must be from 0 to 4"],
        ),
        ("deepseek_v3", {"head_dim": 6}, ["head_dim is 6; it must be 8 (qk_rope_head_dim)"]),
        # transformers would take two of the eight for experts of the next token.
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_routed_experts": 8, "n_group": 3},
            ["n_group is 3; it must divide 8 (n_routed_experts)"],
        ),
    ],
)
def test_numbers_that_do_not_fit_together_are_named(
    model_type: str, fields: dict[str, Any], reasons: list[str], tmp_path: Path
) -> None:
    shrunken_config(model_type).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ModelError) as error:
        read_model_config(tmp_path, "transformers")
    message = str(error.value)
    assert [reason for reason in reasons if reason not in message] == []


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # torch's own
@pytest.mark.parametrize(
    ("model_type", "fields", "name"),
    [
        ("deepseek_v3", {"n_shared_experts": 0}, "shared_experts.gate_proj.weight"),
        ("deepseek_v3", {"q_lora_rank": 0}, "self_attn.q_a_proj.weight"),
        ("mellum", {"moe_intermediate_size": 0}, "mlp.experts.gate_up_proj"),
        ("bert", {"type_vocab_size": 0}, "token_type_embeddings.weight"),
    ],
)
def test_parameters_without_elements_are_refused(
    model_type: str, fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    message = refused(tmp_path, model_type, **fields)
    assert f"{name} has shape [" in message
    assert "a size in config.json is 0" in message


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtypes_that_are_not_served_are_refused(name: str, tmp_path: Path) -> None:
    shrunken_config("ernie4_5").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text()) | {"dtype": None, name: "torch.bfloat16"}
    path.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=rf"json: {name} is 'torch.bfloat16'; octavo serves"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("window", [0, -1])
def test_windows_without_a_key_are_refused(window: int, tmp_path: Path) -> None:
    assert f"attends with a window of {window}" in refused(
        tmp_path, "gpt_oss", impl="transformers", sliding_window=window
    )


def test_layers_with_a_window_that_the_config_has_switched_off_are_refused(tmp_path: Path) -> None:
    """Transformers then takes it for 0."""
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert "a window of 0 tokens" in refused(
        tmp_path, "qwen2_moe", impl="transformers", layer_types=types, use_sliding_window=False
    )


def test_modules_that_cannot_set_their_buffers_are_refused(tmp_path: Path) -> None:
    shrunken_config("ernie4_5_moe").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "initializer_range": -0.02}))
    with pytest.raises(ModelError, match="cannot be made from these fields"):
        load_model(read_model_config(tmp_path), torch.float32, CPU, SingleRank(), "dummy")


def test_without_transformers_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrunken_config("ernie4_5_moe").save_pretrained(tmp_path)
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[transformers\]'") as error:
        read_model_config(tmp_path)
    assert error.value.field == "model_impl"
    assert read_model_config(model_zoo.model_directory("llama")).family == "llama"


def test_native_needs_a_family(tmp_path: Path) -> None:
    shrunken_config("ernie4_5_moe").save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match="model_type is 'ernie4_5_moe'; octavo's own families are gpt2"
    ):
        LLM(tmp_path, model_impl="native")
    with pytest.raises(ConfigError, match="'vllm' is not one of auto, native, transformers"):
        LLM(tmp_path, model_impl="vllm")


@pytest.mark.parametrize(
    ("size", "fields", "message"),
    [
        (3, {}, r"the number of attention heads \(4\) cannot be divided evenly among 3 ranks"),
        (3, SIX_HEADS, r"the number of KV heads \(2\) neither divides 3 ranks"),
        (4, {"intermediate_size": 50}, r"the intermediate size of model.layers.0.mlp \(50\)"),
        (4, {"moe_intermediate_size": 50}, r"the intermediate size of an expert \(50\)"),
        (4, {"vocab_size": 5}, "4 ranks are too many for a vocabulary of 5 tokens"),
    ],
)
def test_several_devices_that_cannot_share_a_model_are_refused(
    size: int, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    shrunken_config("ernie4_5_moe", **fields).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        LLM(tmp_path, load_format="dummy", tensor_parallel_size=size)
    assert error.value.field == "tensor_parallel_size"


def test_models_with_several_parts_for_text_are_refused(tmp_path: Path) -> None:
    parts = {"text_encoder": T5Config(), "decoder": MusicgenDecoderConfig()}
    fields = {name: each.to_dict() for name, each in parts.items()}
    MusicgenConfig(**fields, audio_encoder=EncodecConfig().to_dict()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"Multiple valid text configs .*'text_encoder'"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("is_beside", [False, True])
def test_quantizers_that_octavo_does_not_read_are_refused(is_beside: bool, tmp_path: Path) -> None:
    """Which config.json names, or ModelOpt's file."""
    fields = shrunken_config("ernie4_5_moe").to_dict()
    if is_beside:
        modelopt = {"quantization": {"quant_algo": "INT3"}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt))
    else:
        fields["quantization_config"] = {"quant_method": "quip"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    where = r"hf_quant_config\.json" if is_beside else r"config\.json: quantization_config"
    with pytest.raises(ModelError, match=rf"{where}.*quant_.* octavo reads "):
        read_model_config(tmp_path)


def change(directory: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "the weights lack model.norm.weight"),
        (
            lambda t: t.update(extra=torch.zeros(3)),
            "tensors that ernie4_5_moe does not have: extra",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight has shape \[3\]; config.json asks for \[64\]",
        ),
        (
            lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            "the weights lack model.layers.1.mlp.experts.2.up_proj.weight",
        ),
    ],
)
def test_weights_that_contradict_config_json_are_refused(
    edit: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    write_reference("ernie4_5_moe", tmp_path)
    change(tmp_path, edit)
    with pytest.raises(ModelError, match=message):
        LLM(tmp_path, num_blocks=8)


class MixingConfig(LlamaConfig):
    model_type = "octavo_test_mixing"


class MixingModel(LlamaModel):
    """Adds the mean of the step's embeddings to each of them."""

    config_class = MixingConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = Mixing(config.vocab_size, config.hidden_size)


class Mixing(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        return rows + rows.mean(dim=1, keepdim=True)


class MixingForCausalLM(LlamaForCausalLM):
    config_class = MixingConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = MixingModel(config)


def test_tokens_that_change_each_other_beside_the_attention_are_found_out(tmp_path: Path) -> None:
    AutoConfig.register(MixingConfig.model_type, MixingConfig, exist_ok=True)
    AutoModelForCausalLM.register(MixingConfig, MixingForCausalLM, exist_ok=True)
    fields = shrunken_config("llama").to_dict()
    del fields["model_type"]
    MixingConfig(**fields).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="tokens of a step change each other's hidden states"):
        LLM(tmp_path, load_format="dummy", num_blocks=8)


def test_recording_leaves_transformers_as_it_was(tmp_path: Path) -> None:
    """Another model of the same class, in the same process, computes with its own functions."""
    reference = write_reference("llama", tmp_path)
    ids = torch.tensor([prompts()[1]])
    with torch.inference_mode():
        before = reference.model(ids).logits
    with LLM(tmp_path, model_impl="transformers", num_blocks=16) as llm:
        llm.generate(prompts()[0], SamplingParams(max_tokens=2), use_tqdm=False)
        with torch.inference_mode():
            assert torch.equal(reference.model(ids).logits, before)
    assert recording.RECORDING not in paged.AttentionInterface._global_mapping


@pytest.mark.skipif("sarvam_moe" not in MODEL_TYPES, reason="transformers does not know it")
def test_tensors_that_make_no_parameters_are_named(tmp_path: Path) -> None:
    """Queries, keys and values are in one, of which transformers makes three."""
    write_reference("sarvam_moe", tmp_path)
    name = "model.layers.1.attention.query_key_value.weight"
    change(tmp_path, lambda tensors: tensors.update({name: tensors[name][:100].clone()}))
    with pytest.raises(ModelError, match=f"{name} and 0 others do not make .*q_proj") as error:
        LLM(tmp_path, num_blocks=8)
    assert "there are 1 of query_key_value" in str(error.value)
