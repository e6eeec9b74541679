"""Violations that last are one row: merging as they come, and expanding them again."""
