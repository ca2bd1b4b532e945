"""Families of models: each module describes one and imports no torch."""
