"""GGUF files (llama.cpp): what their header says, and the tokenizer in it. Imports no torch."""

from octavo.gguf.file import GgufFile, GgufTensor, find_gguf, forget_gguf, is_gguf, read_gguf

__all__ = ["GgufFile", "GgufTensor", "find_gguf", "forget_gguf", "is_gguf", "read_gguf"]
