"""How to replay, how far a replay has come, and how one ends early."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ...kernels.constants import KV_ALIGN_BYTES, PADDING_SLOT, KvHashMode
from ...recorder.errors import TraceError
from ...recorder.trace.header import TraceHeader
from ..checks import CHECK_NAMES

EXECUTORS: Final = ("interval", "stepwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How to replay.

    `kv_hash` is "auto" (every captured byte), "none", "partial" (the first 16, as the published canary does by default)
    or "all" (every byte of a slot, refused where the trace holds fewer); `checks` names the history checks to run;
    `executor` is "interval", which verifies a prefix position again only if something may have changed, or "stepwise",
    which verifies every one in every forward, and finds the same; `device` is "cpu", or "cuda" or "cuda:N", which steps
    whatever `executor` says; `merge_rows` says whether violations that last are one row, None for what the executor has;
    `all_rows` keeps every row of a slot that has very many; `oracle` is the module:name of one's own that sampled; `model` is
    the path of the checkpoint that ran, with which the first layer's bytes are compared.
    """

    kv_hash: str = "auto"
    checks: tuple[str, ...] = CHECK_NAMES
    backend: str = "cpu"
    max_violations: int | None = None
    fail_fast: bool = False
    executor: str = "interval"
    device: str = "cpu"
    merge_rows: bool | None = None
    all_rows: bool = False
    oracle: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        """Raise `ValueError` for an executor that there is not."""
        if self.executor not in EXECUTORS:
            raise ValueError(f"executor is {self.executor!r}, expected one of {', '.join(EXECUTORS)}")
        if self.device != "cpu":
            object.__setattr__(self, "executor", "stepwise")

    @property
    def merges_rows(self) -> bool:
        """Whether violations that last are written as one row."""
        return self.executor == "interval" if self.merge_rows is None else self.merge_rows

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        names = ("kv_hash", "checks", "backend", "max_violations", "fail_fast", "executor", "device")
        return {name: getattr(self, name) for name in names} | {"checks": list(self.checks)}


class Progress(NamedTuple):
    """How far a replay has come."""

    bytes_read: int
    bytes_total: int
    forwards: int
    tokens: int
    violations: int


class StopReplayError(Exception):
    """Ends a replay early on the user's own terms; `str()` says why."""


def resolve_kv_hash(name: str, header: TraceHeader) -> KvHashMode:
    """Resolve `kv_hash` against what the trace holds; raise `TraceError` where it holds too little."""
    streams = [stream for group in header.groups for stream in group.streams if not stream.samples]
    if name == "auto":
        if not streams:
            return KvHashMode.NONE
        # The two modes hash the same where no stream has more than PARTIAL's bytes.
        return KvHashMode.ALL if max(s.capture_bytes for s in streams) > KV_ALIGN_BYTES else KvHashMode.PARTIAL
    mode = KvHashMode[name.upper()]
    if mode is KvHashMode.NONE:
        return mode
    if not streams:
        raise TraceError("the trace holds no KV bytes; replay with --kv-hash none, or record with capture_bytes=16")
    short = [stream for stream in streams if stream.capture_bytes < stream.bytes_per_token]
    if mode is KvHashMode.ALL and short:
        raise TraceError(
            f"--kv-hash all needs every byte of a slot; the trace holds {short[0].capture_bytes} of "
            f"{short[0].bytes_per_token}; use --kv-hash partial, or record with "
            f"capture_bytes={max(stream.bytes_per_token for stream in streams)}"
        )
    return mode


def check_padding(header: TraceHeader) -> None:
    """Raise `TraceError` where a trace uses slot 0, at which no canary looks; a recorder numbers such slots from 1."""
    for group in header.groups:
        if set(group.padding_slots) != {PADDING_SLOT}:
            raise TraceError(
                f"group {group.name} has padding_slots {list(group.padding_slots)}, a trace can have slot {PADDING_SLOT} only; "
                "record with kvcanary's Recorder, which numbers the slots so, or add 1 to them"
            )
