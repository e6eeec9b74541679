"""Whether a replay on a device gives, byte for byte, what the CPU's stepwise replay gives."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.replay import ReplaySettings, replay_joined

TABLES = ("violations", "findings", "swa_divergence")
# Not what was found, but how long it took and where it was done.
OF_THE_RUN = ("seconds", "report", "settings")


def replay_both(
    traces: Sequence[Path | Sequence[Path]], folder: Path, device: str, settings: ReplaySettings | None = None
) -> list[tuple[Summary, Summary]]:
    """Replay traces on the CPU and on a device; raise `AssertionError` where anything differs."""
    settings = settings or ReplaySettings(checks=())
    done = []
    for name, where in (("cpu", "cpu"), ("device", device)):
        reports = [folder / name / str(number) for number in range(len(traces))]
        for report in reports:
            report.mkdir(parents=True)
        chosen = dataclasses.replace(settings, executor="stepwise", device=where)
        done.append(replay_joined(list(traces), settings=chosen, reports=reports))
    for number, (ours, theirs) in enumerate(zip(*done, strict=True)):
        same_report(folder / "cpu" / str(number), folder / "device" / str(number))
        one, other = ours.to_json(), theirs.to_json()
        differ = {key: (one[key], other[key]) for key in one if key not in OF_THE_RUN and one[key] != other[key]}
        assert not differ, differ
    return list(zip(*done, strict=True))


def same_report(one: Path, other: Path) -> None:
    """Raise `AssertionError` where two reports' tables differ in anything."""
    for name in TABLES:
        paths = [folder / f"{name}.parquet" for folder in (one, other)]
        assert paths[0].exists() == paths[1].exists(), name
        if paths[0].exists():
            tables = [pq.read_table(path) for path in paths]
            assert tables[0].equals(tables[1], check_metadata=True), (name, [table.num_rows for table in tables])
