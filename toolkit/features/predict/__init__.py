"""Predictions for the rows of a file, and their evaluation if they are labelled."""
