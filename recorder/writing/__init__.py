"""Writing a trace from inside an engine: queue, file, segments, tail."""
