"""Wrong labels, found by cross-validation."""
