"""How fast a trace is read, beside its bytes read plainly off the disk and out of the page cache."""

import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGET_SHARE = 0.6  # of what the disk or the page cache gives
READ_BYTES = 4 << 20


def reading_child(todo: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Read a trace as bytes and as the reader does, off the disk and out of the page cache: medians in turn.

    One core that only decompresses and checksums stands beside them.
    """
    path = Path(todo["trace"])
    # Of its own pages: read into a bytearray, which begins 16 bytes behind a page, the page cache gives a fourth of its
    # speed on a processor whose string copy is slow there, and every reader looks good beside it.
    buffer = memoryview(mmap.mmap(-1, READ_BYTES))
    ways: dict[str, Callable[[], None]] = {
        "disk alone": lambda: read_plainly(path, buffer),
        "disk": lambda: read_batches(path),
        "page cache alone": lambda: read_plainly(path, buffer),
        "page cache": lambda: read_batches(path),
        "decoding alone": lambda: decode_only(path),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(todo["runs"] + 1):
        for name, way in ways.items():
            if name.startswith("disk"):
                forget_pages(path)
            begin = time.perf_counter()
            way()
            if number:  # the first has loaded what is loaded once
                times[name].append(time.perf_counter() - begin)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    shares = {name: seconds[f"{name} alone"] / seconds[name] for name in ("disk", "page cache")}
    return {"seconds": seconds, "shares": shares}


def read_plainly(path: Path, buffer: memoryview) -> None:
    """Read a file's bytes and do nothing with them."""
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def read_batches(path: Path) -> None:
    """Read a trace as a replay does."""
    from kvcanary.recorder.trace.reader import TraceBatch, TraceReader

    with TraceReader(path) as reader:
        if not all(isinstance(item, TraceBatch) for item in reader.stream()):
            raise SystemExit(f"{path}: not whole")


def decode_only(path: Path) -> None:
    """Decompress and checksum a trace's columns in this thread."""
    import pyarrow as pa
    from crc32c import crc32c

    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.ipc.open_file(pa.memory_map(str(path)), options=options) as file:
        for index in range(file.num_record_batches):
            for column in file.get_batch(index).columns:
                for part in column.buffers():
                    if part is not None:
                        crc32c(part)


def forget_pages(path: Path) -> None:
    """Have the system forget what it holds of a file, so that the next read comes off the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reading_table(readings: list[tuple[str, int, dict[str, Any]]]) -> list[str]:
    """Return what reading alone comes to, of traces by name and bytes."""
    lines = [
        "| workload | disk, MB/s | reading, MB/s | share | page cache, MB/s | reading, MB/s | share | LZ4 and CRC, one core, MB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, size, read in readings:
        rate = {way: f"{size / 1e6 / seconds:,.0f}" for way, seconds in read["seconds"].items()}
        cells = [f"{rate[f'{way} alone']} | {rate[way]} | {share:.0%}" for way, share in read["shares"].items()]
        lines.append(f"| {name} | {' | '.join(cells)} | {rate['decoding alone']} |")
    return lines
