"""How to record, where nobody is there to call an API; how people say it stands in `knobs.py`."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trace.files import all_segments

if TYPE_CHECKING:  # whether a recording is asked for must be cheap to find out
    from ..trace.header import TraceHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """How to record, where nobody is there to call an API.

    Attributes:
        folder: where the traces go, one for each process that runs a model.
        config: the TOML file that was read, if any.
        kv_watch_every: forwards between two looks for KV bytes that nobody wrote, 0 never.
        capture_bytes: leading bytes of each token's K and V that are kept, a multiple of 16; 0 none.
        sweep_every: target forwards between two walks of the prefix cache, 0 never.
        history: whether allocations and frees of slots are told: "on", "off", or "auto" for where the allocator's
            tensors lie in the host's memory, so that telling costs no wait for a device.
        compression: "lz4", "zstd" or "none".
        flush_bytes: a batch is written once that many bytes wait.
        flush_interval_ns: a batch is written at the latest after that time.
        max_queued_bytes: what may wait for the disk; beyond it events are dropped, and counted.
        segment_bytes: a new segment is begun once the current one has that size, 0 never for its size.
        segment_ns: a new segment is begun once the current one is that old, 0 never for its age.
        keep_segments: flight recorder: only the last so many segments stay, 0 all.
        keep_bytes: flight recorder: only the last segments that fit into so many bytes stay, 0 all.
        keep_folder_bytes: when a recording begins, segments of recordings that are over are deleted until all in the
            folder fit into so many bytes, 0 never.
        freeze_file: where this file appears, the flight recorder keeps what it has.
        freeze_signal: number of the signal that does the same, 0 none.
        tokens: "plain", or "hashed" for salted hashes in their place.
        token_salt_file: what the salt is made from; None: a fresh random one for each process.
        names: "plain", or "hashed" for hashes in place of the requests' names.
    """

    folder: Path
    config: Path | None = None
    kv_watch_every: int = 1
    capture_bytes: int = 16
    sweep_every: int = 0
    history: str = "auto"
    compression: str = "lz4"
    flush_bytes: int = 4 << 20
    flush_interval_ns: int = 1_000_000_000
    max_queued_bytes: int = 256 << 20
    segment_bytes: int = 0
    segment_ns: int = 0
    keep_segments: int = 0
    keep_bytes: int = 0
    keep_folder_bytes: int = 0
    freeze_file: Path | None = None
    freeze_signal: int = 0
    tokens: str = "plain"
    token_salt_file: Path | None = None
    names: str = "plain"

    def writer_options(self) -> dict[str, Any]:
        """Return what `Recorder` takes beside what only the engine's adapter knows.

        Raises:
            ValueError: the salt's file cannot be used.
        """
        options: dict[str, Any] = {
            "compression": self.compression,
            "flush_bytes": self.flush_bytes,
            "flush_interval_ns": self.flush_interval_ns,
            "max_queued_bytes": self.max_queued_bytes,
        }
        names = ["segment_bytes", "segment_ns", "keep_segments", "keep_bytes", "keep_folder_bytes"]
        names += ["freeze_file", "freeze_signal"]
        options |= {name: getattr(self, name) for name in names if getattr(self, name)}
        if "hashed" in (self.tokens, self.names):
            from ..capture.privacy import Privacy, new_salt, read_salt

            salt = read_salt(self.token_salt_file) if self.token_salt_file else new_salt()
            options["privacy"] = Privacy(salt, tokens=self.tokens == "hashed", names=self.names == "hashed")
        return options

    def start_up_line(self, path: Path, header: "TraceHeader") -> str:
        """Return the one line that a process logs when its recording begins."""
        watch = f"KV watch every {self.kv_watch_every} forwards" if self.kv_watch_every else "no KV watch"
        sweep = f"sweep every {header.sweep_interval} forwards" if header.sweep_interval else "no sweep"
        groups = ", ".join(f"{g.name} {g.num_slots} slots" for g in header.groups)
        where = all_segments(path) if self.segment_bytes or self.segment_ns else path
        return (
            f"kvcanary: recording to {where} ({groups}; {self.capture_bytes or 'no'} bytes a token and half, {watch}, {sweep}, "
            f"slot history {self.history}, {self.compression}, flush every "
            f"{self.flush_interval_ns / 1e9:g} s or {self.flush_bytes >> 10} KiB, at most "
            f"{self.max_queued_bytes >> 20} MiB queued; {self._segments()}; tokens {self.tokens}, names {self.names}"
            f"{f'; settings from {self.config}' if self.config else ''})"
        )

    def _segments(self) -> str:
        """Say how the trace is cut, what is kept of it, and what freezes it."""
        cuts = [f"{self.segment_bytes / (1 << 20):g} MiB"] if self.segment_bytes else []
        cuts += [f"{self.segment_ns / 1e9:g} s"] if self.segment_ns else []
        if not cuts:
            return "one file"
        kept = [f"{self.keep_segments} segments"] if self.keep_segments else []
        kept += [f"{self.keep_bytes / (1 << 20):g} MiB"] if self.keep_bytes else []
        frozen = [str(self.freeze_file)] if self.freeze_file else []
        frozen += [signal.Signals(self.freeze_signal).name] if self.freeze_signal else []
        past = f", at most {self.keep_folder_bytes / (1 << 20):g} MiB in the folder at the start"
        past = past if self.keep_folder_bytes else ""
        keep = f", the last {' and '.join(kept)} kept" if kept else ", all kept"
        freeze = f", frozen by {' or '.join(frozen)}" if frozen else ""
        return f"segments of {' or '.join(cuts)}{keep}{past}{freeze}"
