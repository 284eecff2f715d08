"""What simple models reach on the same rows."""
