"""What `kvcanary export --perfetto` writes, read back by Perfetto's own schema."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kvcanary.analysis.cli.export import export_command
from kvcanary.analysis.store.session import open_traces
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from ..support.commands import run
from ..support.places import DATA


class Read:
    """The tracks of a file by number, and what stands on each; slices must be closed and not overlap."""

    def __init__(self, path: Path) -> None:
        trace = Trace()
        trace.ParseFromString(path.read_bytes())
        self.tracks: dict[int, Any] = {}
        self.slices: dict[str, list[tuple[str, int, int, dict[str, Any]]]] = {}
        self.counts: dict[str, list[tuple[int, int]]] = {}
        self.instants: list[tuple[str, int]] = []
        open_slices: dict[int, Any] = {}
        last: dict[int, int] = {}
        for packet in trace.packet:
            if packet.HasField("track_descriptor"):
                described = packet.track_descriptor
                assert described.uuid not in self.tracks
                assert not described.parent_uuid or described.parent_uuid in self.tracks
                self.tracks[described.uuid] = described
                continue
            event = packet.track_event
            name = self.tracks[event.track_uuid].name
            assert packet.timestamp >= last.get(event.track_uuid, 0)
            last[event.track_uuid] = packet.timestamp
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                assert event.track_uuid not in open_slices
                open_slices[event.track_uuid] = packet
            elif event.type == TrackEvent.TYPE_SLICE_END:
                began = open_slices.pop(event.track_uuid)
                notes = {
                    note.name: note.string_value or note.double_value or note.int_value
                    for note in began.track_event.debug_annotations
                }
                self.slices.setdefault(name, []).append(
                    (began.track_event.name, began.timestamp, packet.timestamp, notes)
                )
            elif event.type == TrackEvent.TYPE_COUNTER:
                self.counts.setdefault(name, []).append((packet.timestamp, event.counter_value))
            else:
                self.instants.append((event.name, packet.timestamp))
        assert not open_slices


@pytest.fixture
def replayed(tmp_path: Path) -> Path:
    trace = tmp_path / "free_too_early.arrow"
    shutil.copy(DATA / trace.name, trace)
    assert run("replay", "--quiet", trace).returncode == 1
    return trace


def test_all_that_a_time_line_shows_is_what_sql_says(replayed: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.pftrace"
    done = CliRunner().invoke(export_command, [str(replayed), "--perfetto", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["bytes"] == out.stat().st_size
    found = Read(out)
    with open_traces(replayed) as session:
        forwards = session.sql("select forward, mode, time_ns, num_tokens from forwards order by forward").to_pylist()
        requests = session.sql("select name from requests where num_forwards > 0").to_pylist()
        hit = session.sql("select distinct request from incident_requests").to_pylist()
        evicted = session.sql("select coalesce(sum(slot_count), 0)::bigint as n from slot_events where kind = 'evict'")
        damage = session.sql(
            "select source, count(*) as n from damage_forwards where forward >= 0 group by 1"
        ).to_pylist()
        incidents = session.sql("select incident, title, time_ns from incidents").to_pylist()
    slices = found.slices["forwards"]
    assert [(name, start) for name, start, _, _ in slices] == [
        (f"{row['mode']} {row['forward']}", row["time_ns"]) for row in forwards
    ]
    assert [end for _, _, end, _ in slices[:-1]] == [start for _, start, _, _ in slices[1:]]
    assert [notes["num_tokens"] for _, _, _, notes in slices] == [row["num_tokens"] for row in forwards]
    named = Counter(name for track in ("request", "hit") for name, *_ in found.slices.get(track, []))
    assert named == Counter(row["name"] for row in requests)
    assert {name for name, *_ in found.slices["hit"]} == {row["request"] for row in hit}
    assert all(notes["incidents"] == "#1" for *_, notes in found.slices["hit"])
    assert sum(count for _, count in found.counts.get("slots evicted, group 0", [])) == evicted["n"][0].as_py()
    for row in damage:
        assert sum(count for _, count in found.counts[f"{row['source']}s"]) == row["n"]
    assert found.instants == [(f"#{row['incident']} {row['title']}", row["time_ns"]) for row in incidents]


def test_slots_held_never_exceed_the_pool_and_end_as_the_history_says(tmp_path: Path) -> None:
    trace, out = DATA / "simulated" / "clean_swa.arrow", tmp_path / "x.pftrace"
    assert CliRunner().invoke(export_command, [str(trace), "--perfetto", str(out)]).exit_code == 0
    counts = Read(out).counts
    with open_traces(trace) as session:
        groups = session.sql("select pool_group, num_slots from pool_groups").to_pylist()
        for row in groups:
            held = session.sql(
                f"select count(distinct slot) as n from slot_lifetimes where to_event is null and pool_group = {row['pool_group']}"
            )
            series = counts[f"slots held, group {row['pool_group']}"]
            assert series[-1][1] == held["n"][0].as_py()
            assert all(0 <= count <= row["num_slots"] for _, count in series)
            assert max(count for _, count in series) > 0


def test_a_folder_is_a_process_a_trace(tmp_path: Path) -> None:
    for name in ("kv_flip.arrow", "clean_llama.arrow"):
        shutil.copy(DATA / name, tmp_path / name)
    out = tmp_path / "x.pftrace"
    assert CliRunner().invoke(export_command, [str(tmp_path), "--perfetto", str(out)]).exit_code == 0
    processes = [track.process for track in Read(out).tracks.values() if track.HasField("process")]
    assert sorted(one.process_name for one in processes) == ["clean_llama", "kv_flip"]
    assert len({one.pid for one in processes}) == 2


def test_a_trace_is_not_overwritten(tmp_path: Path) -> None:
    trace = tmp_path / "kv_flip.arrow"
    shutil.copy(DATA / trace.name, trace)
    done = CliRunner().invoke(export_command, [str(trace), "--perfetto", str(trace)])
    assert done.exit_code == 2
    assert trace.read_bytes() == (DATA / trace.name).read_bytes()
