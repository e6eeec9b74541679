"""How to record, if nobody is there to call an API: every setting, as code takes it and as people give it.

`SETTINGS` is the one list of them: variables (`environment.py`), the TOML file, the options of `kvcanary record` and the
table in docs/guide/production.md are all made from it, or held against it by a test. To find out whether a recording is
asked for must be cheap: nothing heavy is imported here.
"""

import hashlib
import re
import secrets
import signal
import socket
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...kernels.constants import ORACLE_NAME
from ..trace.files import all_segments

if TYPE_CHECKING:
    from ..trace.header import TraceHeader
    from .injection import Injection

PREFIX: Final = "KVCANARY_"
SIGNALS: Final = ("USR1", "USR2")
COMPRESSIONS: Final = ("lz4", "zstd", "none")
PRIVACIES: Final = ("plain", "hashed")  # hashed: salted hashes take the place of tokens, or of names

MAX_FLUSH_BYTES: Final = 1 << 30  # a list column of a batch has 32-bit offsets
MAX_QUEUED_BYTES: Final = 8 << 30
MAX_NAME: Final = 200  # characters of a fleet's and of a server's


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """How a trace is written: when a batch is, when a segment begins, what is kept. 0 stands for never, and for all.
    `SETTINGS` says what each is; times are in nanoseconds, `freeze_signal` is a signal's number. Raises `ValueError`
    for settings that make no sense.
    """

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

    def __post_init__(self) -> None:
        for name, most in (("flush_bytes", MAX_FLUSH_BYTES), ("max_queued_bytes", MAX_QUEUED_BYTES)):
            if not 0 < getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 to {most}")
        if self.flush_interval_ns <= 0:
            raise ValueError(f"flush_interval_ns is {self.flush_interval_ns}, expected more than 0")
        for name in ("segment_bytes", "segment_ns", "keep_segments", "keep_bytes", "keep_folder_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")
        for named, given in (
            ("keep_segments and keep_bytes need", self.keep_segments or self.keep_bytes),
            ("keep_folder_bytes needs", self.keep_folder_bytes),
        ):
            if given and not self.cut:
                raise ValueError(f"{named} segments: set segment_seconds (segment_ns) or segment_bytes too")
        if 0 < self.keep_bytes < self.segment_bytes:
            raise ValueError(
                f"keep_bytes is {self.keep_bytes}, less than the {self.segment_bytes} of segment_bytes: not one "
                "finished segment would fit; make segments smaller, several of which fit"
            )

    @property
    def cut(self) -> bool:
        """Whether the recording is cut into segments."""
        return bool(self.segment_bytes or self.segment_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings(WriterSettings):
    """How to record: `WriterSettings`, and what the recorder and an engine's adapter take. `config` is the TOML file
    that was read, if any; `inject` is a fault to be put into the engine. `history` is "on", "off", or "auto": on if the engine's allocators are known.
    """

    folder: Path
    config: Path | None = None
    kv_watch_every: int = 1
    capture_bytes: int = 16
    all_layers: str = "on"
    outputs_every: int = 1
    sweep_every: int = 0
    history: str = "auto"
    tokens: str = "plain"
    token_salt_file: Path | None = None
    names: str = "plain"
    oracle: str = ""
    inject: "Injection | None" = None
    fleet: str = ""
    server: str = ""
    sample_servers: float = 1.0
    sample_windows: float = 1.0
    window_seconds: int = 300
    bytes_a_day: int = 0

    @property
    def in_windows(self) -> bool:
        """Whether there are times in which nothing is recorded; with an oracle or an injected fault there are none."""
        return (self.sample_windows < 1 or self.bytes_a_day > 0) and not self.oracle and self.inject is None

    @property
    def server_name(self) -> str:
        """What this server is called, in all its processes: the machine's name if nobody says."""
        return self.server or socket.gethostname()

    @property
    def servers_said(self) -> str:
        """Which share of which fleet's servers records."""
        return f"{self.sample_servers:.6%} of fleet {self.fleet!r}"

    @property
    def server_chosen(self) -> bool:
        """Whether this server is one of those that record."""
        return hashed_place("server", self.fleet, self.server_name) < self.sample_servers

    def window_chosen(self, number: int) -> bool:
        """Say whether a window is recorded on this server: the `number`-th since 1970."""
        return hashed_place("window", self.fleet, self.server_name, str(number)) < self.sample_windows

    def new_sampling_seed(self) -> int | None:
        """Draw a seed for what is sampled of all layers; None if nothing is to be."""
        return secrets.randbits(32) if self.all_layers == "on" and self.capture_bytes else None

    def writer_options(self) -> dict[str, Any]:
        """Return what `Recorder` takes beside what only the adapter knows; raise `ValueError` for an unusable salt file."""
        options: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(WriterSettings)}
        if self.in_windows:  # the sampler asks all the recordings of a process, those that are over too
            options |= {"freeze_file": None, "freeze_signal": 0}
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
        return (
            f"kvcanary: recording to {all_segments(path) if self.cut else path} ({groups}; {self.capture_bytes or 'no'} "
            f"bytes a token and half, {watch}, {sweep}, slot history {self.history}, {self.compression}, flush every "
            f"{self.flush_interval_ns / 1e9:g} s or {self.flush_bytes >> 10} KiB, at most "
            f"{self.max_queued_bytes >> 20} MiB queued; {self._segments()}; tokens {self.tokens}, names {self.names}"
            f"{self._sampled()}"
            f"{f'; settings from {self.config}' if self.config else ''})"
        )

    def _sampled(self) -> str:
        said = f"; server {self.server_name} of {self.servers_said}" * (self.sample_servers < 1)
        said += f"; {self.sample_windows:.6%} of the windows of {self.window_seconds} s" * (self.sample_windows < 1)
        return said + f"; at most {self.bytes_a_day / (1 << 20):g} MiB a day in the folder" * (self.bytes_a_day > 0)

    def _segments(self) -> str:
        if not self.cut:
            return "one file"
        size, age = f"{self.segment_bytes / (1 << 20):g} MiB", f"{self.segment_ns / 1e9:g} s"
        cuts = [size] * bool(self.segment_bytes) + [age] * bool(self.segment_ns)
        number, kept_size = f"{self.keep_segments} segments", f"{self.keep_bytes / (1 << 20):g} MiB"
        kept = [number] * bool(self.keep_segments) + [kept_size] * bool(self.keep_bytes)
        frozen = self.freeze_file, self.freeze_signal and signal.Signals(self.freeze_signal).name
        said = f"segments of {' or '.join(cuts)}, "
        said += f"the last {' and '.join(kept)} kept" if kept else "all kept"
        if self.keep_folder_bytes:
            said += f", at most {self.keep_folder_bytes / (1 << 20):g} MiB in the folder at the start"
        return said + (f", frozen by {' or '.join(map(str, filter(None, frozen)))}" if any(frozen) else "")


def hashed_place(*names: str) -> float:
    """Return where names stand between 0 and 1: the first 64 bits of the SHA-256 of them, in UTF-8 with a NUL between two."""
    return int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:8]) / 2**64


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as people give it: in a variable, in the TOML file, as an option of `kvcanary record`. `name` carries
    its unit, in which it is given; the field of `RecordingSettings` holds `scale` times as much. `kind` is number,
    bytes (a number, or one with KiB, MiB or GiB behind it), share, name, word, path or signal. `least` and `most` bound what is
    given, `multiple` divides it; `help` is one line for people.
    """

    name: str
    kind: str
    help: str
    field: str = ""  # its name in `RecordingSettings`; empty: the same
    scale: int = 1
    least: int = 0
    most: int = 1 << 40
    multiple: int = 1
    words: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        """Its name in `RecordingSettings`."""
        return self.field or self.name

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
        if self.kind in ("path", "signal", "oracle"):
            return ""
        value: Any = RecordingSettings.__dataclass_fields__[self.attribute].default
        if self.kind == "share":
            return f"{100 * value:g}%"
        return str(value // self.scale if isinstance(value, int) else value)

    def parse(self, given: Any, where: str) -> Any:
        """Return the attribute's value; raise `ValueError`, whose message begins with `where`, for another than expected."""
        if isinstance(given, str | int) and not isinstance(given, bool):
            value = self._value(str(given).strip())
            if value is not None:
                return value
        raise ValueError(f"{where} is {given!r}, expected {self.expected}")

    def _value(self, text: str) -> Any:
        if self.kind == "word":
            return text if text in self.words else None
        if self.kind == "oracle":
            return text if ORACLE_NAME.fullmatch(text) else None
        if self.kind == "name":
            return text if 0 < len(text) <= MAX_NAME and text.isprintable() else None
        if self.kind == "share":
            percent = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%", text, re.ASCII)
            return float(percent[1]) / 100 if percent and float(percent[1]) <= 100 else None
        if self.kind == "signal":
            name = text.upper().removeprefix("SIG")
            return int(signal.Signals["SIG" + name]) if name in SIGNALS else None
        if self.kind == "path":
            try:
                return Path(text).expanduser() if text and "\0" not in text else None
            except RuntimeError:  # ~nobody, or a user without a home: the folder of that name
                return Path(text)
        match = re.fullmatch(r"([0-9]{1,18})\s*([KMG]iB)?", text, re.IGNORECASE | re.ASCII)
        if match is None or (match[2] and self.kind != "bytes"):
            return None
        value = int(match[1]) * _UNITS[(match[2] or "").upper()]
        fits = self.least <= value <= self.most and value % self.multiple == 0
        return value * self.scale if fits else None

    @property
    def expected(self) -> str:
        """What is expected, in words."""
        if self.kind == "word":
            return f"one of {', '.join(self.words)}"
        if self.kind == "signal":
            return f"the name of a signal, one of {', '.join(SIGNALS)}"
        if self.kind == "oracle":
            return "hash, or module:name"
        if self.kind == "path":
            return "a path"
        if self.kind == "name":
            return f"a name of at most {MAX_NAME} characters"
        if self.kind == "share":
            return "a percentage, as 1% or 0.25%"
        unit = ", or a number and KiB, MiB or GiB" if self.kind == "bytes" else ""
        multiple = f", a multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"a whole number from {self.least} to {self.most}{multiple}{unit}"


_UNITS: Final = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_HISTORIES: Final = ("auto", "on", "off")

FOLDER: Final = Setting("trace", "path", "Folder for the traces; nothing is recorded without it.", "folder")
SETTINGS: Final = (
    FOLDER,
    Setting("kv_watch_every", "number", "Forwards between two looks for KV bytes that nobody wrote; 0 never."),
    Setting(
        "capture_bytes",
        "bytes",
        "Leading bytes of each token's K and V that are kept; 0 none.",
        most=1 << 20,
        multiple=16,
    ),
    Setting(
        "all_layers",
        "word",
        "Whether all layers are sampled, and looked at for NaN, infinity and rows of zeros; on the CPU alone.",
        words=("on", "off"),
    ),
    Setting(
        "outputs_every",
        "number",
        "Forwards between two looks at what comes out of attention, on a GPU 16 times as many; 0 never.",
    ),
    Setting("sweep_every", "number", "Forwards between two walks of the whole prefix cache; 0 never."),
    Setting("history", "word", "Whether allocations and frees of slots are recorded.", words=_HISTORIES),
    Setting("compression", "word", "Of the trace, in the writer's thread.", words=COMPRESSIONS),
    Setting("flush_bytes", "bytes", "A batch is written early once that much waits.", least=1, most=MAX_FLUSH_BYTES),
    Setting(
        "flush_interval_ms",
        "number",
        "A batch is written at the latest after that time; until then its events lie in the tail.",
        "flush_interval_ns",
        scale=1_000_000,
        least=1,
        most=3_600_000,
    ),
    Setting(
        "max_queued_bytes",
        "bytes",
        "What may wait for a slow disk; beyond it events are dropped and counted.",
        least=1,
        most=MAX_QUEUED_BYTES,
    ),
    Setting("segment_bytes", "bytes", "A new segment is begun at that size; 0: never for its size."),
    Setting(
        "segment_seconds",
        "number",
        "A new segment is begun at that age; 0: never for its age.",
        "segment_ns",
        scale=1_000_000_000,
        most=1 << 30,
    ),
    Setting("keep_segments", "number", "Flight recorder: keep only the last so many segments; 0: all.", most=1 << 20),
    Setting("keep_bytes", "bytes", "Flight recorder: keep only the last segments that fit; 0: all."),
    Setting(
        "keep_folder_bytes",
        "bytes",
        "At the start, delete segments of recordings that are over until all fit; 0: keep them.",
    ),
    Setting("freeze_file", "path", "Flight recorder: once this file is there, what is kept stays."),
    Setting("freeze_signal", "signal", "Flight recorder: this signal does the same.", words=SIGNALS),
    Setting("tokens", "word", "hashed: salted hashes take the place of token ids.", words=PRIVACIES),
    Setting("token_salt_file", "path", "What the salt is made from; without it each process draws its own."),
    Setting("names", "word", "hashed: salted hashes take the place of the requests' names.", words=PRIVACIES),
    Setting("fleet", "name", "Sampling: the fleet that this server belongs to, part of what is hashed."),
    Setting("server", "name", "Sampling: this server, the same in all its processes; without it the machine's name."),
    Setting("sample_servers", "share", "Sampling: the share of the fleet's servers that record."),
    Setting("sample_windows", "share", "Sampling: the share of time that is recorded, window by window."),
    Setting("window_seconds", "number", "Sampling: how long a window is.", least=1, most=86_400),
    Setting("bytes_a_day", "bytes", "Sampling: what may be written into the folder in a day (UTC); 0: all."),
    Setting("oracle", "oracle", "Damages outputs: an oracle samples all tokens, hash or module:name of your own."),
)
