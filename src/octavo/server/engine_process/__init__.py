"""The engine in a process of its own: what crosses the border, and who keeps that process alive."""
