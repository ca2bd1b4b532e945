"""Observing a running server: metrics, logs, health, and the events behind the pages."""
