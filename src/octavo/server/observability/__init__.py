"""Observing a running server: metrics, logs, the dashboard's feed, and the debug endpoint."""
