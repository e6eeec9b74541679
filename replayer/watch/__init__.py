"""Judging recordings while they are written."""
