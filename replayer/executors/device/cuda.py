"""Which device a replay runs on; every way in which there is none ends in one clear error."""

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ....recorder.errors import TraceError, first_line
from ....recorder.state.pools import pool_bytes
from ....recorder.trace.header import TraceHeader

INTERPRETER = "interpreter"  # the kernels in Triton's interpreter, on CPU tensors: for tests
_NAME = re.compile(r"cuda(?::(\d{1,4}))?")


def is_device_name(name: str) -> bool:
    """Whether a name could be a device's: "cpu", "cuda" or "cuda:N"."""
    return name == "cpu" or _NAME.fullmatch(name) is not None


def find_device(name: str) -> Any:
    """Return the torch device called "cuda" or "cuda:N".

    Raises:
        TraceError: there is none; the error says why and what to do.
    """
    if name == INTERPRETER:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise TraceError("--device interpreter is for tests, with TRITON_INTERPRET=1 in the environment")
        import torch

        return torch.device("cpu")
    match = _NAME.fullmatch(name)
    if match is None:
        raise TraceError(f"--device {name}: expected cpu, cuda or cuda:N")
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise TraceError(
                f"--device {name} needs {package}, which is not installed here; install a PyTorch with CUDA, or replay "
                "with --device cpu"
            )
    import torch

    if torch.version.cuda is None:
        raise TraceError(
            f"--device {name}: this PyTorch ({torch.__version__}) was built without CUDA; install one with it, or replay "
            "with --device cpu"
        )
    if not torch.cuda.is_available():
        raise TraceError(f"--device {name}: no CUDA GPU can be used here; replay with --device cpu")
    count = torch.cuda.device_count()
    index = int(match[1] or 0)
    if index >= count:
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise TraceError(f"--device {name}: there is no such GPU, this machine has {there}")
    return torch.device("cuda", index)


@contextmanager
def reported(device: str, header: TraceHeader) -> Iterator[None]:
    """Turn what a device throws into an error that says what to do."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)) as error:
        if "out of memory" not in str(error):
            raise TraceError(f"{device} failed ({first_line(error)}); replay with --device cpu") from None
        need = pool_bytes(header) / 2**30
        raise TraceError(
            f"{device} has too little free memory: the trace's pools and tables need about {need:.1f} GiB; free some, use "
            "another GPU, or replay with --device cpu"
        ) from None
