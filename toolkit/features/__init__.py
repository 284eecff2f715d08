"""Leaves: nothing else in the package needs them, and none needs another."""
