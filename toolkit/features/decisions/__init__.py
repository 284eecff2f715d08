"""Thresholds, temperature and abstention."""
