"""What a replay found: violations, findings, and the summary."""
