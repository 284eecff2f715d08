"""Loads pretrained encoders; fast BigBird attention, BERT to BigBird, LoRA, layers."""
