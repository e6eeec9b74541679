"""How to replay, how far a replay has come, and how one ends early."""

from dataclasses import dataclass
from typing import Any

from ..kernels.constants import KvHashMode
from ..recorder.errors import TraceError
from ..recorder.header import TraceHeader
from .checks import CHECK_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How to replay.

    `kv_hash` is "auto" (partial where bytes were captured), "none", "partial" or "all"; `checks` names the history
    checks to run.
    """

    kv_hash: str = "auto"
    checks: tuple[str, ...] = CHECK_NAMES
    backend: str = "cpu"
    max_violations: int | None = None
    fail_fast: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "kv_hash": self.kv_hash,
            "checks": list(self.checks),
            "backend": self.backend,
            "max_violations": self.max_violations,
            "fail_fast": self.fail_fast,
            "executor": "stepwise",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
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
    streams = [stream for group in header.groups for stream in group.streams]
    if name == "auto":
        return KvHashMode.PARTIAL if streams else KvHashMode.NONE
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
