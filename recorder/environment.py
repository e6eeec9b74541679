"""What an engine's operator sets in the environment: `KVCANARY_*` variables as checked settings.

Only entry points read these; everything below them takes a `RecordingSettings`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # whether a recording is asked for must be cheap to find out
    from .header import TraceHeader

PREFIX: Final = "KVCANARY_"
TRACE: Final = "KVCANARY_TRACE"

HISTORIES: Final = ("auto", "on", "off")
COMPRESSIONS: Final = ("lz4", "zstd", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """How to record, where nobody is there to call an API.

    Attributes:
        folder: where the traces go, one for each process that runs a model.
        kv_watch_every: forwards between two looks for KV bytes that nobody wrote, 0 never.
        capture_bytes: leading bytes of each token's K and V that are kept, a multiple of 16.
        sweep_every: target forwards between two walks of the prefix cache, 0 never.
        history: whether allocations and frees of slots are told: "on", "off", or "auto" for where the allocator's
            tensors lie in the host's memory, so that telling costs no wait for a device.
        compression: "lz4", "zstd" or "none".
        flush_bytes: a batch is written once that many bytes wait.
        flush_interval_ns: a batch is written at the latest after that time.
        max_queued_bytes: what may wait for the disk; beyond it events are dropped, and counted.
    """

    folder: Path
    kv_watch_every: int = 1
    capture_bytes: int = 16
    sweep_every: int = 0
    history: str = "auto"
    compression: str = "lz4"
    flush_bytes: int = 4 << 20
    flush_interval_ns: int = 1_000_000_000
    max_queued_bytes: int = 256 << 20

    def writer_options(self) -> dict[str, Any]:
        """Return what `Recorder` passes on to the trace's writer."""
        return {
            "compression": self.compression,
            "flush_bytes": self.flush_bytes,
            "flush_interval_ns": self.flush_interval_ns,
            "max_queued_bytes": self.max_queued_bytes,
        }

    def start_up_line(self, path: Path, header: "TraceHeader") -> str:
        """Return the one line that a process logs when its recording begins."""
        watch = f"KV watch every {self.kv_watch_every} forwards" if self.kv_watch_every else "no KV watch"
        sweep = f"sweep every {header.sweep_interval} forwards" if header.sweep_interval else "no sweep"
        groups = ", ".join(f"{g.name} {g.num_slots} slots" for g in header.groups)
        return (
            f"kvcanary: recording to {path} ({groups}; {self.capture_bytes} bytes a token and half, {watch}, {sweep}, "
            f"slot history {self.history}, {self.compression}, flush every "
            f"{self.flush_interval_ns / 1e9:g} s or {self.flush_bytes >> 10} KiB, at most "
            f"{self.max_queued_bytes >> 20} MiB queued)"
        )


# variable -> (setting, unit in which it is given, least, most)
_NUMBERS: Final = {
    "KVCANARY_KV_WATCH_EVERY": ("kv_watch_every", 1, 0, 1 << 40),
    "KVCANARY_CAPTURE_BYTES": ("capture_bytes", 1, 16, 1 << 20),
    "KVCANARY_SWEEP_EVERY": ("sweep_every", 1, 0, 1 << 40),
    "KVCANARY_FLUSH_BYTES": ("flush_bytes", 1, 1, 1 << 30),
    "KVCANARY_FLUSH_INTERVAL_MS": ("flush_interval_ns", 1_000_000, 1, 3_600_000),
    "KVCANARY_MAX_QUEUED_BYTES": ("max_queued_bytes", 1, 1, 8 << 30),
}
_WORDS: Final = {
    "KVCANARY_HISTORY": ("history", HISTORIES),
    "KVCANARY_COMPRESSION": ("compression", COMPRESSIONS),
}
VARIABLES: Final = (TRACE, *_NUMBERS, *_WORDS)


def is_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether a recording is asked for; looks at one variable and imports nothing."""
    return bool(environ.get(TRACE, "").strip())


def read_environment(environ: Mapping[str, str] = os.environ) -> RecordingSettings | None:
    """Return the settings, or None where no recording is asked for.

    Raises:
        ValueError: a value out of range, or a `KVCANARY_` variable that does not exist; the message names it and
            says what was expected.
    """
    if not is_wanted(environ):
        return None
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in VARIABLES)
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such setting; there are {', '.join(VARIABLES)}")
    values: dict[str, int | str] = {}
    for name, (setting, unit, least, most) in _NUMBERS.items():
        text = environ.get(name, "").strip()
        if not text:
            continue
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            raise ValueError(f"{name} is {text!r}, expected a whole number from {least} to {most}")
        values[setting] = int(text) * unit
    for name, (setting, allowed) in _WORDS.items():
        text = environ.get(name, "").strip()
        if text and text not in allowed:
            raise ValueError(f"{name} is {text!r}, expected one of {', '.join(allowed)}")
        if text:
            values[setting] = text
    settings = RecordingSettings(folder=Path(environ[TRACE].strip()), **values)  # type: ignore[arg-type]
    if settings.capture_bytes % 16:
        raise ValueError(f"KVCANARY_CAPTURE_BYTES is {settings.capture_bytes}, expected a multiple of 16")
    return settings
