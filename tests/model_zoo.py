"""Tiny random models of every family in Hugging Face format, and transformers' own view of them.

`model_directory(name)` writes a model once a process and returns where; `reference_model(name)`
is transformers' model of that directory. Weights are large enough that greedy outputs vary and
near-ties are rare. Same seed, same files.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel

from octavo import LLM, BeamSearchParams
from octavo.layers.embedding import Embedding
from octavo.outputs import RequestOutput

transformers.utils.logging.disable_progress_bar()

VOCAB_SIZE = 320
MAX_POSITIONS = 512
SLIDING_WINDOW = 20
BOS_ID, EOS_ID = 0, 1

TOKENIZER_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "A block table maps logical blocks to physical blocks; blocks are shared and copied on write.",
    "Grüße aus dem Süden, naïve façade, π ≈ 3.14159, 東京 and 😀 emoji 👩‍🚀.",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

_COMMON = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
_LLAMA = {
    **_COMMON,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": None,
}
_OPT = {
    **_COMMON,
    "hidden_size": 48,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 2,
}

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_GLM = {
    **_LLAMA,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_GEMMA = {
    **_LLAMA,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": SLIDING_WINDOW,
    "final_logit_softcapping": 20.0,
}
# Layers with windows have other heads than those without; the shapes of the head are given in full.
_GEMMA_4 = {
    **_LLAMA,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": SLIDING_WINDOW,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
_GEMMA_4_SMALL = {
    **_GEMMA_4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
}
_GEMMA_4_LARGE = {
    **_GEMMA_4,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_EXPERTS = {
    **_LLAMA,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 40,
    "num_experts": 7,
    "num_experts_per_tok": 3,
}
_LOCAL_EXPERTS = {**_LLAMA, "num_key_value_heads": 2, "num_local_experts": 5}
_PARTIAL_ROTARY = {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}

# name -> (transformers' prefix of the classes, fields of the configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2",
        {**_COMMON, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITIONS},
    ),
    "opt": ("OPT", _OPT),
    "opt-350m": ("OPT", {**_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "llama": ("Llama", {**_LLAMA, "num_key_value_heads": 4}),
    "llama3": (
        "Llama",
        {
            **_LLAMA,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": (
        "Mistral",
        {**_LLAMA, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": SLIDING_WINDOW},
    ),
    "qwen2": (
        "Qwen2",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": SLIDING_WINDOW,
            "max_window_layers": 2,
        },
    ),
    "qwen3": (
        "Qwen3",
        {**_LLAMA, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "phi3": (
        "Phi3",
        {
            **_LLAMA,
            "num_key_value_heads": 2,
            "sliding_window": SLIDING_WINDOW,
            "original_max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "factor": 4.0,
                "short_factor": [1.0, 1.2, 1.5],
                "long_factor": [2.0, 5.0, 30.0],
            },
        },
    ),
    "smollm3": (
        "SmolLM3",
        {**_LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 2, "no_rope_layer_interval": 2},
    ),
    "granite": (
        "Granite",
        {
            **_LLAMA,
            "num_key_value_heads": 2,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "starcoder2": (
        "Starcoder2",
        {**_LLAMA, "num_key_value_heads": 2, "sliding_window": SLIDING_WINDOW},
    ),
    "stablelm": ("StableLm", {**_LLAMA, "num_key_value_heads": 2, **_PARTIAL_ROTARY}),
    "stablelm-parallel": (
        "StableLm",
        {
            **_LLAMA,
            **_PARTIAL_ROTARY,
            "num_key_value_heads": 4,
            "use_parallel_residual": True,
            "use_qkv_bias": True,
        },
    ),
    "seed_oss": (
        "SeedOss",
        {**_LLAMA, "num_key_value_heads": 2, "head_dim": 16, "attention_out_bias": True},
    ),
    "exaone4": (
        "Exaone4",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "sliding_window": SLIDING_WINDOW,
            "sliding_window_pattern": 2,
        },
    ),
    "ministral": (
        "Ministral",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            **_LLAMA,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 32.0,
                "original_max_position_embeddings": MAX_POSITIONS // 32,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "gpt_neox": ("GPTNeoX", {**_LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    "falcon": ("Falcon", _LLAMA),  # of the first kind: one KV head, one norm
    "falcon-new": (
        "Falcon",
        {
            **_LLAMA,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "ffn_hidden_size": 100,
            "tie_word_embeddings": False,
        },
    ),
    "gemma": ("Gemma", {**_LLAMA, "num_key_value_heads": 2, "head_dim": 16}),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 3.0}),
    "gemma3_text": ("Gemma3", {**_GEMMA, "layer_types": _ALTERNATING}),
    "gemma4-e2b": ("Gemma4", {**_GEMMA_4_SMALL, "use_double_wide_mlp": True}),
    "gemma4_text": ("Gemma4", _GEMMA_4_SMALL),
    "gemma4-31b": ("Gemma4", _GEMMA_4_LARGE),
    "gemma4-26b-a4b": (
        "Gemma4",
        {
            **_GEMMA_4_LARGE,
            "enable_moe_block": True,
            "num_experts": 9,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "olmo2": ("Olmo2", {**_LLAMA, "num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": _ALTERNATING,
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
        },
    ),
    "glm": ("Glm", _GLM),
    "glm4": ("Glm4", _GLM),
    "cohere": ("Cohere", {**_LLAMA, "num_key_value_heads": 2, "logit_scale": 0.5}),
    "cohere2": (
        "Cohere2",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "sliding_window": SLIDING_WINDOW,
            "sliding_window_pattern": 2,
            "logit_scale": 0.5,
        },
    ),
    "gptj": (
        "GPTJ",
        {
            **_COMMON,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": MAX_POSITIONS,
            "rotary_dim": 6,
        },
    ),
    "mpt": (
        "Mpt",
        {**_COMMON, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": MAX_POSITIONS},
    ),
    "bloom": (
        "Bloom",
        {**_COMMON, "hidden_size": 48, "n_layer": 3, "n_head": 6, "seq_length": MAX_POSITIONS},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**_EXPERTS, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "mixtral": ("Mixtral", {**_LOCAL_EXPERTS, "sliding_window": SLIDING_WINDOW}),
    "olmoe": ("Olmoe", {**_EXPERTS, "intermediate_size": 40}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": SLIDING_WINDOW,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **{key: value for key, value in _EXPERTS.items() if key != "num_experts"},
            "head_dim": 16,
            "n_routed_experts": 12,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "phimoe": ("Phimoe", {**_LOCAL_EXPERTS, "lm_head_bias": True, "router_jitter_noise": 0.45}),
    "granitemoe": (
        "GraniteMoe",
        {
            **_LOCAL_EXPERTS,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_LOCAL_EXPERTS,
            "head_dim": 16,
            "num_experts_per_tok": 2,
            "sliding_window": SLIDING_WINDOW,
        },
    ),
}
NAMES = tuple(MODELS)

_T5 = {
    **{"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "decoder_start_token_id": 2},
    **{"d_model": 48, "d_kv": 16, "d_ff": 80, "num_layers": 3, "num_heads": 4},
    # So small that most distances of a test are beyond the exact buckets.
    **{"relative_attention_num_buckets": 16, "relative_attention_max_distance": 40},
}
_BART = {
    **_COMMON,
    **{"pad_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None},
    **{"d_model": 48, "encoder_layers": 3, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "max_position_embeddings": MAX_POSITIONS},
}
# As MODELS, with an encoder.
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {**_T5, "num_decoder_layers": 2}),
    "flan-t5": ("T5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "bart": ("Bart", {**_BART, "scale_embedding": True}),
    "marian": ("Marian", {**_BART, "activation_function": "swish", "decoder_layers": 3}),
}
ENCODER_DECODER_NAMES = tuple(ENCODER_DECODERS)


def write_model(name: str, directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write config.json, model.safetensors and tokenizer files of a model, with an encoder or
    without.

    `overrides` replace fields of its configuration.
    """
    has_encoder = name in ENCODER_DECODERS
    prefix, fields = (ENCODER_DECODERS if has_encoder else MODELS)[name]
    has_text_class = prefix in ("Gemma3", "Gemma4")
    config_class = f"{prefix}TextConfig" if has_text_class else f"{prefix}Config"
    config = getattr(transformers, config_class)(**{**fields, **overrides})
    unusual = {"GPT2": "GPT2LMHeadModel", "Marian": "MarianMTModel"}
    usual = f"{prefix}For{'ConditionalGeneration' if has_encoder else 'CausalLM'}"
    model_class = unusual.get(prefix, usual)
    model = getattr(transformers, model_class)(config).eval()
    randomise(model, seed)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@functools.cache
def model_directory(name: str, seed: int = 0) -> Path:
    """The directory of one of NAMES, written at the first call and removed with the process."""
    return write_model(name, _session_directory() / f"{name}-{seed}", seed)


@functools.cache
def reference_model(name: str, seed: int = 0) -> PreTrainedModel:
    """transformers' model of `model_directory(name, seed)`: fp32, eager attention."""
    return load_reference(model_directory(name, seed))


def load_reference(directory: Path) -> PreTrainedModel:
    """transformers' model of any directory: fp32, eager attention."""
    config = transformers.AutoConfig.from_pretrained(directory)
    kind = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        kind = transformers.AutoModelForSeq2SeqLM
    model: PreTrainedModel = kind.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model  # from_pretrained has put it into evaluation mode


def random_token_ids(num_tokens: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Ids of ordinary tokens: the first few, which are special, are left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocab_size, (num_tokens,), generator=generator).tolist()


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens, with a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<bos>", "<eos>", "<pad>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(directory)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Matrices keep the size of their input, norms scatter around 1, the head is sharp."""
    generator = torch.Generator().manual_seed(seed)
    normal: Callable[..., torch.Tensor] = functools.partial(torch.randn, generator=generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = normal(parameter.shape)
            if parameter.dim() == 1:
                is_scale = name.endswith(("weight", "scale"))
                kind = type(model).__name__
                is_offset = "Gemma" in kind and "Gemma4" not in kind
                mean = 0 if is_offset else 1  # stored without the 1
                parameter.copy_(mean + 0.3 * values if is_scale else 0.05 * values)
                if "Gemma4" in kind and name.endswith("q_norm.weight"):  # its scores have no scale
                    parameter.mul_(len(parameter) ** -0.5)
            elif "wpe" in name or "embed_positions" in name:
                parameter.copy_(values * 0.7)
            elif any(table in name for table in ("wte", "embed_tokens", "embed_in", "word_embed")):
                parameter.copy_(values * 0.35)
            elif "shared" in name:
                scales_logits = getattr(model.config, "scale_decoder_outputs", False)
                parameter.copy_(values * (1.0 if scales_logits else 0.35))
            elif "relative_attention_bias" in name:
                parameter.copy_(values)
            elif name.endswith("Attention.q.weight"):  # T5 has no scale in its scores
                parameter.copy_(values * 0.4 / parameter.shape[1] ** 0.5)
            else:  # [out, in], or GPT-2's [in, out]; near enough for scale
                if "fc2" in name:  # else what ReLU leaves, being positive, drowns the tokens
                    values -= values.mean(dim=-1, keepdim=True)
                size = 1 if "experts" in name and "bias" in name else min(parameter.shape[-2:])
                parameter.copy_(values * 1.5 / size**0.5)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(normal(model.final_logits_bias.shape) * 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(normal(buffer.shape) * 0.2)
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.2 * normal(buffer.shape))


@functools.cache
def _session_directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="octavo-models-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def beam_options(width: int) -> dict[str, Any]:
    """For transformers' generate: a search whose result `check_beams` takes."""
    return {
        **{"do_sample": False, "num_beams": width, "num_return_sequences": width},
        **{"output_scores": True, "return_dict_in_generate": True},
    }


def generate(name: str, prompt: Sequence[int], max_new_tokens: int, **how: Any) -> Any:
    """transformers' generate: greedy, or as `how` says; nothing of the prompt is masked."""
    with torch.inference_mode():
        return reference_model(name).generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_new_tokens,
            **{"do_sample": False} | how,
        )


def check_beam_search(llm: LLM, name: str, prompt: Sequence[int], width: int) -> None:
    """Sequences and scores of transformers, for every kind of length penalty and early stopping."""
    num_given = 1 if name in ENCODER_DECODER_NAMES else len(prompt)
    for penalty, early in [(1.0, False), (0.0, True), (2.0, "never"), (-1.0, "never")]:
        params = BeamSearchParams(
            beam_width=width, max_tokens=8, length_penalty=penalty, early_stopping=early
        )
        [output] = llm.beam_search(prompt, params, use_tqdm=False)
        how = {"length_penalty": penalty, "early_stopping": early} | beam_options(width)
        check_beams(output, generate(name, prompt, 8, **how), num_given)


def check_beams(output: RequestOutput, expected: Any, num_given: int) -> None:
    """Sequences and scores equal those of transformers, which begin with `num_given` tokens."""
    scores = [beam.score for beam in output.outputs]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), rel=1e-5)
    for beam, sequence in zip(output.outputs, expected.sequences.tolist(), strict=True):
        padded = beam.token_ids + sequence[num_given + len(beam.token_ids) :]
        assert padded == sequence[num_given:]


def embed_as_nan(token_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever computes this token gets NaN: in its hidden state, its KV and its logits."""
    embed = Embedding.forward

    def forward(self: Embedding, ids: torch.Tensor) -> torch.Tensor:
        return embed(self, ids).masked_fill((ids == token_id).unsqueeze(-1), torch.nan)

    monkeypatch.setattr(Embedding, "forward", forward)
