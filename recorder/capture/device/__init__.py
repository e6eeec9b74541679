"""Recording an engine whose pools lie on a GPU, without ever waiting for it on the engine's thread."""
