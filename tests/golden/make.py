"""Write the verdict that each trace in data/ must keep: `make golden`. Look at the diff before you commit it."""

import json
from pathlib import Path

from kvcanary.replayer.run.replay import ReplaySettings, replay_joined

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "data"

# What a replay of the same file must give again, on any machine; times and paths are not among it.
KEPT = (
    "verdict", "exit_code", "doubts", "complete", "events", "forwards", "forwards_by_mode", "forwards_watched",
    "requests", "tokens", "slot_counters", "kernel_counters", "verified", "written", "unknown_entries",
    "swa_divergence", "transfers_sent", "transfers_received", "transfers_unmatched", "violations",
    "violations_by_reason", "violations_by_launch", "first_violation", "first_violation_forward",
    "last_violation_forward", "forwards_hit", "slots_hit", "requests_hit", "findings", "findings_by_kind",
    "first_finding", "marks", "entries_read", "not_watched",
)  # fmt: skip


def cases() -> dict[str, list[Path]]:
    """Return the traces that are replayed together, by the name of their golden verdicts."""
    alone = {path.stem: [path] for path in DATA.glob("*.arrow")}
    alone |= {
        path.stem: [path] for folder in ("sglang", "simulated", "vllm") for path in (DATA / folder).glob("*.arrow")
    }
    pairs = {
        folder.name: [folder / "prefill.arrow", folder / "decode.arrow"]
        for folder in (DATA / "simulated").iterdir()
        if folder.is_dir()
    }
    return dict(sorted({**alone, **pairs}.items()))


def verdicts(traces: list[Path], backend: str = "cpu") -> list[dict[str, object]]:
    """Replay traces together and return what a golden verdict keeps of each summary."""
    settings = ReplaySettings(backend=backend)
    found = replay_joined(traces, settings=settings, reports=[None] * len(traces))
    return [{name: summary.to_json()[name] for name in KEPT} for summary in found]


if __name__ == "__main__":
    for name, traces in cases().items():
        (HERE / f"{name}.json").write_text(json.dumps(verdicts(traces), indent=2) + "\n")
        print(name)
