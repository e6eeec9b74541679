"""From a trace to its verdict: one replay, event by event."""
