"""The server: HTTP in one process, the engine in another, and their supervision."""
