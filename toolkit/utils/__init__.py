"""Helpers that import no other part of the package, except `errors`."""
