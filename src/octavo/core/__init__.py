"""What runs and where its KV cache lives. Plain Python: nothing here imports torch."""
