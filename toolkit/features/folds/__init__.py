"""Finds wrong labels by cross-validation."""
