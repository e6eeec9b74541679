"""Scatter: committed tokens into the truth table."""
