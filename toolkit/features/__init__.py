"""Features: no other part of the package depends on one, and no feature on another."""
