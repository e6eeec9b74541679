"""kvcanary: the flight recorder and crash lab for an LLM inference engine's KV cache."""

__version__: str


def __getattr__(name: str) -> str:
    """Look `__version__` up when it is asked for: what reads a package's metadata takes long to import."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("kvcanary")
    except PackageNotFoundError:  # a bare checkout on sys.path, not installed
        found = "0+unknown"
    globals()["__version__"] = found
    return found
