"""The KV cache: blocks, block tables, prefix sharing, and the manager that owns them."""
