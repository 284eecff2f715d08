"""Faster attention of training on a CPU, with dropout or in bf16."""
