"""Comparison of a recipe's losses under different strategies."""
