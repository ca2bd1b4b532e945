"""Which module implements which architecture: one line a model. Imports no torch by itself."""

from __future__ import annotations

MODELS = {
    "GPT2LMHeadModel": "octavo.models.gpt2",
    "OPTForCausalLM": "octavo.models.opt",
    "LlamaForCausalLM": "octavo.models.llama",
    "MistralForCausalLM": "octavo.models.llama",
    "Qwen2ForCausalLM": "octavo.models.llama",
    "Qwen3ForCausalLM": "octavo.models.llama",
}
