"""Write the verdict that each trace in data/ must keep: `make golden`. Look at the diff before you commit it."""

import json
from pathlib import Path

from kvcanary.replayer.replay import ReplaySettings, replay

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "data"

# What a replay of the same file must give again, on any machine; times and paths are not among it.
KEPT = (
    "verdict", "exit_code", "doubts", "complete", "events", "forwards", "forwards_by_mode", "forwards_watched",
    "requests", "tokens", "slot_counters", "kernel_counters", "verified", "written", "unknown_entries", "violations",
    "violations_by_reason", "violations_by_launch", "first_violation", "first_violation_forward",
    "last_violation_forward", "forwards_hit", "slots_hit", "requests_hit", "findings", "findings_by_kind",
    "first_finding", "marks",
)  # fmt: skip


def verdict(trace: Path, backend: str = "cpu") -> dict[str, object]:
    """Replay a trace and return what a golden verdict keeps of its summary."""
    summary = replay(trace, settings=ReplaySettings(backend=backend), report=None).to_json()
    return {name: summary[name] for name in KEPT}


if __name__ == "__main__":
    for path in sorted(DATA.glob("*.arrow")):
        target = HERE / f"{path.stem}.json"
        target.write_text(json.dumps(verdict(path), indent=2) + "\n")
        print(target.name)
