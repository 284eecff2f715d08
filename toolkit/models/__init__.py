"""Loading pretrained encoders; what transformers lacks."""
