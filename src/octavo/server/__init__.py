"""The server: HTTP in one process, the engine in another, and whoever keeps both alive."""
