"""Command-line commands that need only the trace: inspect and recover."""
