"""One request's life, from tokens in to text out. Torch-free: it talks to an Executor."""
