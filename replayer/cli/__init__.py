"""Command-line commands that replay."""
