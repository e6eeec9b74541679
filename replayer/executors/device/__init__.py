"""Stepwise replay on a GPU: pools and tables live in device memory, the host reads the trace and what was found."""
