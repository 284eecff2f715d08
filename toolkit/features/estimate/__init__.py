"""Estimates the memory of a job."""
