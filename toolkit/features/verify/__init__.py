"""The losses of a recipe under every strategy."""
