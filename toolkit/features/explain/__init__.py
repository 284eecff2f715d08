"""Which words led to an answer."""
