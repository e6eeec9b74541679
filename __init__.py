"""kvcanary: the flight recorder and crash lab for an LLM inference engine's KV cache."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvcanary")
except PackageNotFoundError:  # a bare checkout on sys.path, not installed
    __version__ = "0+unknown"
