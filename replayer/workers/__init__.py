"""Several traces at once: jobs, the worker processes that take them, and the order of what they print."""
