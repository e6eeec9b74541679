"""What can go wrong with a simulation that is not the user's configuration."""


class WorkloadError(Exception):
    """A workload file that cannot be used; `str()` names file, line, what was expected and what came."""


class BrokenEngineError(Exception):
    """The simulated engine caught itself in a mistake that a real engine would have made in silence."""
