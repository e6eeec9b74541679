"""Every setting of a recording as people give it: its name, unit, range, default and use.

`KNOBS` is the one list of them: variables (`environment.py`), the TOML file, the options of `kvcanary record` and the
table in docs/guide/production.md are all made from it, or held against it by a test.
"""

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .settings import RecordingSettings

PREFIX: Final = "KVCANARY_"

HISTORIES: Final = ("auto", "on", "off")
COMPRESSIONS: Final = ("lz4", "zstd", "none")
PRIVACIES: Final = ("plain", "hashed")
SIGNALS: Final = ("USR1", "USR2")


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
    if not text or "\0" in text:
        return None
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~nobody, or a user without a home: the folder of that name
        return Path(text)


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
        help="A batch is written at the latest after that time; until then its events lie in the tail.",
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
