"""What vLLM's attention is given and what comes out of it: lengths, tables, windows, positions, outputs."""
