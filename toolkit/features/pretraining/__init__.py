"""Continued pretraining on unlabelled texts."""
