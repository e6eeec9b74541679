"""The trace format: schema, header, events, reading, and recovery."""
