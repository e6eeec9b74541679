"""What a writer says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterStats:
    """What a writer has done so far; `queued_bytes` includes what is being written right now.

    `frozen` are the folders of what was frozen (of a recording that is one file, that file).
    """

    appended_events: int
    written_events: int
    dropped_events: int
    queued_bytes: int
    written_batches: int
    written_bytes: int
    frozen: tuple[str, ...]
    failed: str | None
