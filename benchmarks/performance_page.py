"""The sections of docs/results/performance.md: each stands between two marks, and one benchmark writes it."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "results" / "performance.md"


def write_section(name: str, text: str) -> None:
    """Put `text` between the marks of section `name`, in place of what stood there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    page = PAGE.read_text(encoding="utf-8")
    if page.count(begin) != 1 or page.count(end) != 1:
        raise SystemExit(f"{PAGE}: expected one {begin} and one {end}")
    before, rest = page.split(begin)
    _, after = rest.split(end)
    PAGE.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", encoding="utf-8")


def machine() -> str:
    """Return the CPU, the cores that may be used, and the memory."""
    name = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = next((int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def today() -> str:
    """Return the date, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d")


def load() -> float:
    """Return how many processes wanted a core in the last minute."""
    return os.getloadavg()[0]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
