"""Thresholds, temperature and answers held back."""
