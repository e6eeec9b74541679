"""What vLLM's draft models run: on the host's thread, and on a device without waiting."""
