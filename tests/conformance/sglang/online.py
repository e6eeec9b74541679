"""What the online canary found in a run: its ring step by step, and its log."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# The canary's fields in the order of its ring; hashes as unsigned numbers.
Row = tuple[int, int, int, int, int, int, int, int]

UNSIGNED = (1 << 64) - 1
TAGS = [f"{where}_{half}_{group}" for group in ("FULL", "SWA") for where in ("HEAD", "TAIL", "SWEEP") for half in "KV"]
REASONS = {
    "verify_chain_hash": 1,
    "verify_position": 2,
    "verify_real_kv_hash": 4,
    "write_token": 8,
    "write_position": 16,
    "verify_token": 32,
}
VIOLATION = re.compile(
    r"kv_canary violation: launch_tag=(\w+) fail_reason=([\w+]+) slot_idx=(-?\d+) position=(-?\d+) "
    r"stored_token=(-?\d+) expected_token=(-?\d+) stored_chain_hash=(0x[0-9a-f]+) expected_aux=(0x[0-9a-f]+)"
)


@dataclass(slots=True, kw_only=True)
class OnlineFindings:
    """Rows by the canary's step, slots looked at by each launch tag up to that step, rows of its log, faults injected."""

    by_step: dict[int, Counter[Row]] = field(default_factory=dict)
    counters: dict[int, list[int]] = field(default_factory=dict)
    logged: Counter[Row] = field(default_factory=Counter)
    injected: int = 0
    generated: int = 0


def canonical(row: list[int]) -> Row:
    """Return a ring's row with its hashes unsigned."""
    tag, slot, position, stored, expected, chain, aux, reasons = row
    return (tag, slot, position, stored, expected, chain & UNSIGNED, aux & UNSIGNED, reasons)


def read_online(folder: Path) -> OnlineFindings:
    """Read a run's ring and log.

    Raises:
        KeyError: a launch tag or a reason that is not known.
    """
    found = OnlineFindings()
    ring = folder / "ring"
    for line in ring.read_text().splitlines() if ring.exists() else []:
        step = json.loads(line)
        found.counters[step["step"]] = step["counters"]
        if step["rows"]:
            found.by_step[step["step"]] = Counter(canonical(row) for row in step["rows"])
    for line in (folder / "log").read_text(errors="replace").splitlines():
        match = VIOLATION.search(line)
        if match:
            tag, reasons, *numbers, chain, aux = match.groups()
            bits = sum(REASONS[reason] for reason in reasons.split("+"))
            found.logged[(TAGS.index(tag), *map(int, numbers), int(chain, 16), int(aux, 16), bits)] += 1
        elif "kv_canary perturb" in line and "slot=" in line and "skipped" not in line:
            found.injected += 1
        found.generated += line.startswith("generated ")
    return found
