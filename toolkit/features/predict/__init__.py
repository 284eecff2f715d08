"""Answers for every row of a file."""
