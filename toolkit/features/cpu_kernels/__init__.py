"""Faster dropout and attention of training on a CPU."""
