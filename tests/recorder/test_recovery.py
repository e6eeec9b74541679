"""Recovery of traces with damage in the middle, and the command."""

import os

import pyarrow as pa
import pyarrow.ipc
import pytest
from click.testing import CliRunner
from kvcanary.recorder.cli.recover import recover_command
from kvcanary.recorder.errors import TraceError, UnreadableTraceError
from kvcanary.recorder.trace.event import batch_metadata
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.trace.recordings import traces_in
from kvcanary.recorder.writing.recovery import recover


def damaged(traces, which=1, batches=(2, 3, 1)):
    """A trace one of whose batches has a flipped bit in its body."""
    path = traces.write("bad.arrow", batches=batches)
    ends = [batch.end_byte for batch in traces.read(path)[0]]
    data = bytearray(path.read_bytes())
    data[ends[which] - 8 - data[: ends[which]][::-1].index(b"\x04\x22\x4d\x18"[::-1])] ^= 0x40
    path.write_bytes(data)
    return path


def test_a_gap_in_the_middle(traces):
    source, target = damaged(traces), traces.folder / "new.arrow"
    result = recover(source, target)
    assert (result.kept_batches, result.kept_events, result.lost_events, result.num_gaps) == (2, 3, 3, 1)
    assert "events 2-4 left out" in result.causes[0]
    batches, gaps, complete = traces.read(target)
    assert complete and not gaps
    views = [view for batch in batches for view in batch]
    assert [view.kind for view in views] == ["forward", "forward", "loss", "forward"]
    assert [view.number for view in views] == [view.scalar("event") for view in views] == [0, 1, 2, 3]
    assert [view.scalar("forward") for view in views] == [0, 1, -1, 5]
    assert views[2].scalar("lost_events") == 3 and views[2].time_ns == views[1].time_ns
    assert "recovered: bad.arrow: batch 1 " in views[2].scalar("note")
    with pa.OSFile(str(target)) as file:
        assert pa.ipc.open_file(file).read_all().column("event").to_pylist() == [0, 1, 2, 3]


def test_a_whole_trace_stays_as_it_is(traces):
    source, target = traces.write(compression="zstd"), traces.folder / "new.arrow"
    result = recover(source, target)
    assert (result.kept_events, result.lost_events, result.num_gaps) == (6, 0, 0)
    assert target.read_bytes() == source.read_bytes()


def test_unknown_columns_are_kept(traces):
    source = traces.write(batches=(2,))
    with TraceReader(source) as reader:
        (batch,) = reader.stream()
        record = batch.record_batch.append_column("new", pa.array([[1], [2, 3]], pa.list_(pa.int32())))
        record = record.append_column("text", pa.array(["a", "b"]))
        schema = record.schema.with_metadata(reader.schema.metadata)
    with pa.OSFile(str(source), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(record, custom_metadata=batch_metadata(record, 0))
    os.truncate(source, source.stat().st_size - pa_footer_bytes(source) - 8)
    recover(source, traces.folder / "new.arrow")
    with pa.OSFile(str(traces.folder / "new.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.column("new").to_pylist() == [[1], [2, 3], []]
    assert table.column("text").to_pylist() == ["a", "b", ""]


def pa_footer_bytes(path):
    return int.from_bytes(path.read_bytes()[-10:-6], "little") + 10


def test_it_never_harms_other_files(traces):
    source = damaged(traces)
    before = source.read_bytes()
    for target in (source, source.parent / "." / source.name):
        with pytest.raises(TraceError, match="is the trace to recover itself"):
            recover(source, target, overwrite=True)
    link = traces.folder / "link.arrow"
    link.symlink_to(source)
    with pytest.raises(TraceError, match="itself"):
        recover(source, link, overwrite=True)
    other = traces.folder / "other.arrow"
    other.write_text("mine")
    with pytest.raises(TraceError, match="it exists"):
        recover(source, other)
    with pytest.raises(TraceError, match="its folder does not exist"):
        recover(source, traces.folder / "nowhere" / "x.arrow")
    with pytest.raises(TraceError, match="not a regular file"):
        recover(source, traces.folder, overwrite=True)
    with pytest.raises(UnreadableTraceError):
        recover(other, traces.folder / "x.arrow")
    assert source.read_bytes() == before and other.read_text() == "mine"
    assert sorted(p.name for p in traces.folder.iterdir()) == ["bad.arrow", "link.arrow", "other.arrow"]


def test_a_full_disk_leaves_nothing_behind(traces, monkeypatch):
    source = damaged(traces)
    monkeypatch.setattr(
        "kvcanary.recorder.writing.trace_file.TraceFile.close",
        lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(TraceError, match="No space left"):
        recover(source, traces.folder / "new.arrow")
    assert [p.name for p in traces.folder.iterdir()] == ["bad.arrow"]


def test_the_command(traces):
    source = damaged(traces)
    run = CliRunner().invoke(recover_command, [str(source)])
    assert run.exit_code == 0, run.output
    target = traces.folder / "bad.recovered.arrow"
    lines = run.output.splitlines()
    assert lines[0] == "kept    3 events in 2 batches"
    assert lines[1] == "lost    3 events"
    assert "batch 1 " in lines[2]
    assert lines[-2:] == [f"wrote   {target}", f"next    kvcanary-replay {target}"]
    again = CliRunner().invoke(recover_command, [str(source)])
    assert again.exit_code == 2 and "pass --force" in again.stderr
    assert CliRunner().invoke(recover_command, [str(source), "--force"]).exit_code == 0
    os.truncate(source, source.stat().st_size - pa_footer_bytes(source) - 8)
    run = CliRunner().invoke(recover_command, [str(source), "-o", str(traces.folder / "o.arrow")])
    assert "lost    3 events that are known of, and an unknown number behind them" in run.output
    assert (traces.folder / "o.arrow").exists()
    run = CliRunner().invoke(recover_command, [str(traces.folder / "nowhere")])
    assert run.exit_code == 2 and "no such file" in run.stderr


def test_a_file_that_looks_like_ours_is_left_alone(traces):
    source = damaged(traces)
    mine = traces.folder / "new.arrow.part"
    mine.write_text("mine")
    recover(source, traces.folder / "new.arrow")
    assert mine.read_text() == "mine"
    assert sorted(p.name for p in traces.folder.iterdir()) == ["bad.arrow", "new.arrow", "new.arrow.part"]


def test_errors_name_the_file_that_the_user_named_and_any_name_will_do(traces):
    source = damaged(traces)
    target = traces.folder / "nowhere" / "x.arrow"
    with pytest.raises(TraceError, match=rf"^{target}: cannot be written: its folder does not exist"):
        recover(source, target)
    longest = traces.folder / ("x" * 249 + ".arrow")
    assert recover(source, longest).kept_events == 3
    assert longest.exists()


def test_names_that_are_no_utf8(traces):
    source = damaged(traces)
    strange = traces.folder / os.fsdecode(b"bad\xff.arrow")
    source.rename(strange)
    run = CliRunner().invoke(recover_command, [str(strange)])
    assert run.exit_code == 0, run.output
    assert "\\udcff" in run.output
    assert traces.read(traces.folder / os.fsdecode(b"bad\xff.recovered.arrow"))[2]


def test_a_link_into_nowhere_is_kept_unless_forced(traces):
    source, link = damaged(traces), traces.folder / "link.arrow"
    link.symlink_to("nowhere")
    with pytest.raises(TraceError, match=r"link\.arrow: cannot be written: it exists"):
        recover(source, link)
    assert link.is_symlink()
    assert recover(source, link, overwrite=True).kept_events == 3
    assert not link.is_symlink() and not (traces.folder / "nowhere").exists()


def test_a_folder_tells_of_a_recovered_file_that_its_trace_has_outgrown(traces):
    """As where it was recovered while its engine was still running."""
    source, whole = traces.folder / "t.arrow", traces.write("whole", batches=(2, 3, 1)).read_bytes()
    source.write_bytes(whole[: traces.read(traces.folder / "whole")[0][0].end_byte])
    command = [str(traces.folder)]
    assert "2 events kept" in CliRunner().invoke(recover_command, command).output
    assert CliRunner().invoke(recover_command, command).exit_code == 0
    source.write_bytes(whole)
    target = traces.folder / "t.recovered.arrow"
    earlier = source.stat().st_mtime_ns - 10**9
    os.utime(target, ns=(earlier, earlier))
    run = CliRunner().invoke(recover_command, command)
    assert run.exit_code == 2
    assert f"{target}: is older than t.arrow, which was written since; pass --force to renew it" in run.stderr
    assert source in traces_in(traces.folder) and target not in traces_in(traces.folder)
    run = CliRunner().invoke(recover_command, [*command, "--force"])
    assert run.exit_code == 0
    assert f"wrote   {target}   6 events kept, 0 lost" in run.stdout
    assert target in traces_in(traces.folder) and source not in traces_in(traces.folder)
