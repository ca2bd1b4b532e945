"""Measuring an engine: request traces, throughput and latency, and where KV memory goes."""
