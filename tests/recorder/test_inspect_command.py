"""kvcanary inspect."""

import json
import os

import numpy as np
from click.testing import CliRunner
from kvcanary.recorder.cli.inspect import inspect_command
from kvcanary.recorder.cli.recover import recover_command
from kvcanary.recorder.errors import printable
from kvcanary.recorder.trace.event import TraceEvent, loss_event
from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS
from kvcanary.recorder.writing.writer import TraceWriter


def run(*arguments):
    return CliRunner().invoke(inspect_command, [str(a) for a in arguments])


def rich_trace(traces, **options):
    path = traces.folder / "rich.arrow"
    with TraceWriter(path, traces.header(notes=("a [bold]note[/]",)), **options) as writer:
        writer.append(TraceEvent(kind="request", time_ns=5, scalars={"request_id": 1, "name": "r"}))
        for number in range(5):
            writer.append(traces.event(number))
        writer.append(TraceEvent(kind="mark", scalars={"note": "\x1b[31mred", "labels": '{"fault": "kv_flip"}'}))
    return path


def test_json_is_stable(traces):
    path = rich_trace(traces, compression="none")
    done = run(path, "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert list(found) == [
        *("path", "size_bytes", "state", "complete", "header", "num_events", "num_batches", "events_by_kind"),
        *("forwards_by_mode", "requests", "input_tokens", "sampled_tokens", "first_ns", "last_ns", "columns"),
        *("lost_events", "unknown_losses", "num_losses", "losses", "num_gaps", "gaps", "num_marks", "marks"),
        *("next_command", "last_forward", "written_ns"),
    ]
    assert found["state"] == "complete" and found["complete"] is True
    assert found["header"]["engine"] == {"name": "toy", "version": "1.2", "commit": "abc"}
    assert found["events_by_kind"] == {"forward": 5, "mark": 1, "request": 1}
    assert found["forwards_by_mode"] == {"decode": 2, "extend": 3}
    assert (found["num_events"], found["num_batches"], found["requests"]) == (7, 1, 1)
    assert (found["input_tokens"], found["sampled_tokens"]) == (15, 5)
    assert (found["first_ns"], found["last_ns"]) == (0, 1_700_000_000_000_004_000)
    assert set(found["columns"]) == {*SCALARS, *INT_LISTS, *BYTE_LISTS}
    assert found["columns"]["kv_bytes"] == {"stored_bytes": 8 * 8 + 240, "uncompressed_bytes": 7 * 8 + 240}
    assert found["marks"] == [
        {"event": 6, "forward": -1, "time_ns": 0, "note": "\x1b[31mred", "labels": '{"fault": "kv_flip"}'}
    ]
    assert found["next_command"] == f"kvcanary-replay {path}"


def test_the_table(traces):
    path = rich_trace(traces)
    done = run(path)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout, "no colours in a pipe, and none from the trace"
    lines = [line.strip() for line in done.stdout.splitlines()]
    for line in (
        "engine    toy 1.2 (abc)",
        "model     tiny float32",
        "table 0   req_to_token [8, 32] int32",
        "note      a [bold]note[/]",
        "events    7: forward 5, request 1, mark 1",
        "forwards  5: extend 3, decode 2",
        "tokens    15 in, 5 sampled",
        "mark    event 6: \\x1b[31mred",
        "whole   nothing lost",
        f"next    kvcanary-replay {path}",
    ):
        assert line in lines, done.stdout


def test_a_torn_trace(traces):
    path = traces.write(batches=(2, 1))
    os.truncate(path, traces.read(path)[0][0].end_byte + 100)
    done = run(path)
    assert done.exit_code == 125
    assert "torn at byte" in done.stdout and f"next    kvcanary recover {path}" in done.stdout
    found = json.loads(run(path, "--json").stdout)
    assert (found["state"], found["num_events"], found["lost_events"], found["unknown_losses"]) == ("torn", 2, 0, 1)
    assert [(gap["after_event"], gap["missing_events"], gap["kind"]) for gap in found["gaps"]] == [(1, None, "torn")]


def test_a_damaged_trace(traces):
    path = traces.write(batches=(2, 3, 1))
    end = traces.read(path)[0][1].end_byte
    data = bytearray(path.read_bytes())
    data[end - 500 : end] = bytes(500)
    path.write_bytes(data)
    found = json.loads(run(path, "--json").stdout)
    assert (found["state"], found["num_events"], found["lost_events"], found["num_gaps"]) == ("damaged", 3, 3, 1)
    assert run(path).exit_code == 125


def test_a_trace_that_is_being_recorded_is_not_torn_and_not_recovered(traces):
    path = traces.folder / "live.arrow"
    with TraceWriter(path, traces.header()) as writer:
        writer.append(TraceEvent(kind="mark", scalars={"note": "so far"}))
        assert writer.flush()
        done = run(path)
        assert done.exit_code == 125
        assert "live    a recording under way, no forward so far, 1 events, last written 0 s ago" in done.stdout
        assert f"next    kvcanary-replay {path}" in done.stdout
        assert "torn" not in done.stdout and "killed" not in done.stdout
        assert json.loads(run(path, "--json").stdout)["state"] == "recording"
        refused = CliRunner().invoke(recover_command, [str(path)])
        assert refused.exit_code == 2 and "is being recorded" in refused.output
        folder = CliRunner().invoke(recover_command, [str(traces.folder)])
        assert folder.exit_code == 0 and "1 being recorded" in folder.output
        assert not list(traces.folder.glob("*.recovered.arrow"))
        shown = run(traces.folder).stdout
        assert "live    live.arrow: a recording under way, no forward so far" in shown
        assert "whole" not in shown
    assert run(path).exit_code == 0


def test_a_lossy_trace(traces):
    path = traces.folder / "lossy.arrow"
    with TraceWriter(path, traces.header()) as writer:
        writer.append(loss_event(lost_events=4, note="queue full"))
        writer.append(loss_event(lost_events=-1, note="who knows"))
    done = run(path, "--json")
    assert done.exit_code == 125
    found = json.loads(done.stdout)
    assert (found["state"], found["lost_events"], found["unknown_losses"], found["num_losses"]) == ("lossy", 4, 1, 2)
    assert "loss    event 0: 4 events lost: queue full" in run(path).stdout
    shown = run(traces.folder).stdout  # the folder says so too
    assert "loss    lossy.arrow: event 0: 4 events lost: queue full\n" in shown
    assert "loss    lossy.arrow: event 1: an unknown number of events lost: who knows\n" in shown
    assert "nothing lost" not in shown


def test_many_marks_are_counted_and_some_listed(traces):
    path = traces.folder / "marks.arrow"
    with TraceWriter(path, traces.header()) as writer:
        for number in range(1000):
            writer.append(TraceEvent(kind="mark", scalars={"note": f"m{number}"}))
    found = json.loads(run(path, "--json").stdout)
    assert found["num_marks"] == 1000 and len(found["marks"]) == 50
    assert "and 990 more marks" in run(path).stdout


def test_no_trace(traces):
    (traces.folder / "x").write_bytes(b"\xff\xd8\xff" + bytes(99))
    done = run(traces.folder / "x")
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr == f"Error: {traces.folder / 'x'}: not a kvcanary trace but a JPEG image\n"


def test_an_empty_trace(traces):
    path = traces.write(batches=())
    done = run(path)
    assert done.exit_code == 0 and "events    0" in done.stdout and "no event" in done.stdout


def test_printable():
    assert printable("a é\x1b\n\u202e\udc80") == "a é\\x1b\\n\\u202e\\udc80"
    assert np.all([printable(chr(c)) == chr(c) for c in range(32, 127)])
