"""Faster dropout on a CPU."""
