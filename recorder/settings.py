"""How to record, where nobody is there to call an API: the settings, and each one's name, unit, range, cost and use.

`KNOBS` is the one list of them: variables (`environment.py`), the TOML file, the options of `kvcanary record` and the
table in docs/production.md are all made from it, or held against it by a test.
"""

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .segment_names import all_segments

if TYPE_CHECKING:  # whether a recording is asked for must be cheap to find out
    from .header import TraceHeader

PREFIX: Final = "KVCANARY_"

HISTORIES: Final = ("auto", "on", "off")
COMPRESSIONS: Final = ("lz4", "zstd", "none")
PRIVACIES: Final = ("plain", "hashed")
SIGNALS: Final = ("USR1", "USR2")


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
            from .privacy import Privacy, new_salt, read_salt

            salt = read_salt(self.token_salt_file) if self.token_salt_file else new_salt()
            options["privacy"] = Privacy(salt, tokens=self.tokens == "hashed", names=self.names == "hashed")
        return options

    def start_up_line(self, path: Path, header: "TraceHeader") -> str:
        """Return the one line that a process logs when its recording begins."""
        watch = f"KV watch every {self.kv_watch_every} forwards" if self.kv_watch_every else "no KV watch"
        sweep = f"sweep every {header.sweep_interval} forwards" if header.sweep_interval else "no sweep"
        groups = ", ".join(f"{g.name} {g.num_slots} slots" for g in header.groups)
        cut = self.segment_bytes or self.segment_ns
        return (
            f"kvcanary: recording to {all_segments(path) if cut else path} ({groups}; {self.capture_bytes or 'no'} bytes a token and half, {watch}, {sweep}, "
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting as people give it: in a variable, in the TOML file, as an option of `kvcanary record`.

    `name` carries its unit, in which it is given; `field` is the attribute of `RecordingSettings`, in which `scale`
    times as much stands. `kind` is number, bytes (a number, or one with KiB, MiB or GiB behind it), word, path or
    signal. `least` and `most` bound what is given, `multiple` divides it; `help` is one line for people.
    """

    name: str
    field: str
    kind: str
    help: str
    scale: int = 1
    least: int = 0
    most: int = 1 << 40
    multiple: int = 1
    words: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    @property
    def option(self) -> str:
        """The option of `kvcanary record`."""
        return "--" + self.name.replace("_", "-")

    @property
    def default(self) -> str:
        """The default as people would give it, empty for none."""
        if self.field == "folder":
            return ""
        value = RecordingSettings.__dataclass_fields__[self.field].default
        if self.kind in ("path", "signal"):
            return ""
        return str(value // self.scale if isinstance(value, int) else value)

    def parse(self, given: Any, where: str) -> Any:
        """Return the field's value.

        Raises:
            ValueError: not what was expected; the message begins with `where`.
        """
        text = str(given).strip()
        if isinstance(given, str | int) and not isinstance(given, bool):
            value = _PARSERS[self.kind](self, text)
            if value is not None:
                return value
        raise ValueError(f"{where} is {given!r}, expected {self.expected}")

    @property
    def expected(self) -> str:
        """What is expected, in words."""
        if self.kind == "word":
            return f"one of {', '.join(self.words)}"
        if self.kind == "signal":
            return f"the name of a signal, one of {', '.join(SIGNALS)}"
        if self.kind == "path":
            return "a path"
        unit = ", or a number and KiB, MiB or GiB" if self.kind == "bytes" else ""
        multiple = f", a multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"a whole number from {self.least} to {self.most}{multiple}{unit}"


_UNITS: Final = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def _number(knob: Knob, text: str) -> int | None:
    match = re.fullmatch(r"([0-9]{1,18})\s*([KMG]iB)?", text, re.IGNORECASE | re.ASCII)
    if match is None or (match[2] and knob.kind != "bytes"):
        return None
    value = int(match[1]) * _UNITS[(match[2] or "").upper()]
    return value * knob.scale if knob.least <= value <= knob.most and value % knob.multiple == 0 else None


def _word(knob: Knob, text: str) -> str | None:
    return text if text in knob.words else None


def _path(_: Knob, text: str) -> Path | None:
    return Path(text) if text and "\0" not in text else None


def _signal(_: Knob, text: str) -> int | None:
    name = text.upper().removeprefix("SIG")
    return int(signal.Signals["SIG" + name]) if name in SIGNALS else None


_PARSERS: Final = {"number": _number, "bytes": _number, "word": _word, "path": _path, "signal": _signal}

TRACE_KNOB: Final = Knob(
    name="trace", field="folder", kind="path", help="Folder for the traces; nothing is recorded without it."
)
KNOBS: Final = (
    TRACE_KNOB,
    Knob(
        name="kv_watch_every",
        field="kv_watch_every",
        kind="number",
        help="Forwards between two looks for KV bytes that nobody wrote; 0 never.",
    ),
    Knob(
        name="capture_bytes",
        field="capture_bytes",
        kind="bytes",
        most=1 << 20,
        multiple=16,
        help="Leading bytes of each token's K and V that are kept; 0 none.",
    ),
    Knob(
        name="sweep_every",
        field="sweep_every",
        kind="number",
        help="Forwards between two walks of the whole prefix cache; 0 never.",
    ),
    Knob(
        name="history",
        field="history",
        kind="word",
        words=HISTORIES,
        help="Whether allocations and frees of slots are told.",
    ),
    Knob(
        name="compression",
        field="compression",
        kind="word",
        words=COMPRESSIONS,
        help="Of the trace, in the writer's thread.",
    ),
    Knob(
        name="flush_bytes",
        field="flush_bytes",
        kind="bytes",
        least=1,
        most=1 << 30,
        help="A batch is written early once that much waits.",
    ),
    Knob(
        name="flush_interval_ms",
        field="flush_interval_ns",
        kind="number",
        scale=1_000_000,
        least=1,
        most=3_600_000,
        help="A batch is written at the latest after that time: what a killed process loses.",
    ),
    Knob(
        name="max_queued_bytes",
        field="max_queued_bytes",
        kind="bytes",
        least=1,
        most=8 << 30,
        help="What may wait for a slow disk; beyond it events are dropped and counted.",
    ),
    Knob(
        name="segment_bytes",
        field="segment_bytes",
        kind="bytes",
        help="A new segment is begun at that size; 0: never for its size.",
    ),
    Knob(
        name="segment_seconds",
        field="segment_ns",
        kind="number",
        scale=1_000_000_000,
        most=1 << 30,
        help="A new segment is begun at that age; 0: never for its age.",
    ),
    Knob(
        name="keep_segments",
        field="keep_segments",
        kind="number",
        most=1 << 20,
        help="Flight recorder: keep only the last so many segments; 0: all.",
    ),
    Knob(
        name="keep_bytes",
        field="keep_bytes",
        kind="bytes",
        help="Flight recorder: keep only the last segments that fit; 0: all.",
    ),
    Knob(
        name="keep_folder_bytes",
        field="keep_folder_bytes",
        kind="bytes",
        help="At the start, delete segments of recordings that are over until all fit; 0: keep them.",
    ),
    Knob(
        name="freeze_file",
        field="freeze_file",
        kind="path",
        help="Flight recorder: once this file is there, what is kept stays.",
    ),
    Knob(
        name="freeze_signal",
        field="freeze_signal",
        kind="signal",
        words=SIGNALS,
        help="Flight recorder: this signal does the same.",
    ),
    Knob(
        name="tokens",
        field="tokens",
        kind="word",
        words=PRIVACIES,
        help="hashed: salted hashes take the place of token ids.",
    ),
    Knob(
        name="token_salt_file",
        field="token_salt_file",
        kind="path",
        help="What the salt is made from; without it each process draws its own.",
    ),
    Knob(
        name="names",
        field="names",
        kind="word",
        words=PRIVACIES,
        help="hashed: salted hashes take the place of the requests' names.",
    ),
)
