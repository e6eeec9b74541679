"""Pages of a mapped trace are given back behind the reader, and read as they were where somebody still looks."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
from kvcanary.recorder.mapped_pages import MappedPages

SIZE = 32 << 20


def resident_bytes(path: Path) -> int:
    """Return how much of a mapped file counts as this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    found, inside = 0, False
    for line in lines:
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            found += 1024 * int(line.split()[1])
    return found


def test_pages_are_given_back_and_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    content = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    with pa.memory_map(os.fsencode(path)) as file:
        data = file.read_buffer()
        view = np.frombuffer(data, np.uint8)
        assert np.array_equal(view, content)
        assert resident_bytes(path) == SIZE
        pages = MappedPages(data)
        pages.release(1 << 20)  # too little to be worth a call
        assert resident_bytes(path) == SIZE
        pages.release(SIZE - 1)
        assert resident_bytes(path) <= 1 << 20
        assert np.array_equal(view, content)
        pages.release(SIZE)
        assert np.array_equal(view, content)
