"""Fine-tuning of BERT-like encoders, the same under every way to launch it."""

__version__ = "0.1.0"
