"""The HTTP API: what a client may send, what it gets back, and nothing of the engine."""
