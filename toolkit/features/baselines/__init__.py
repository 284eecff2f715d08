"""Comparison with simple models on the same rows."""
