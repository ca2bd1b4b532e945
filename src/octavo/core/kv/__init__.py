"""The KV cache: blocks, prefix sharing, and the manager that owns them."""
