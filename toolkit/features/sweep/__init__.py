"""Several runs with other settings."""
