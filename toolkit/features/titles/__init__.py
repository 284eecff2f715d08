"""Titles of long texts."""
