"""What is minimised: losses and optional terms."""
