"""A trace that somebody cuts short while it is read, as `cp new.arrow trace.arrow` does.

Each test reads in a process of its own, since a reader that maps the file would end with a signal.
"""

import json
import subprocess
import sys

import pytest

READ = """
import json, os, sys
from kvcanary.recorder.trace.reader import TraceGap, TraceReader
path, keep = sys.argv[1], int(sys.argv[2])
found = []
with TraceReader(path) as reader:
    for number, item in enumerate(reader.stream()):
        found.append([item.kind, item.missing_events, item.reason] if isinstance(item, TraceGap) else item.first_event)
        if number == 0:
            os.truncate(path, keep)
print(json.dumps(found))
"""


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("kept", [0, 1, 3])
def test_what_is_left_is_given_and_the_rest_is_a_gap(traces, compression, kept):
    path = traces.write(batches=(20,) * 6, compression=compression)
    ends = [batch.end_byte for batch in traces.read(path)[0]]
    keep = ends[kept - 1] + 100 if kept else 0
    done = subprocess.run([sys.executable, "-c", READ, path, str(keep)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    *firsts, gap = json.loads(done.stdout)
    assert firsts == [20 * n for n in range(max(kept, 1))]
    assert gap[:2] == ["torn", None]
    assert f"torn at byte {keep}" in gap[2]


def test_a_cut_at_a_batch_end_is_no_whole_trace(traces):
    path = traces.write(batches=(2, 2, 2))
    end = traces.read(path)[0][1].end_byte
    done = subprocess.run([sys.executable, "-c", READ, path, str(end)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, gap = json.loads(done.stdout)
    assert (first, second) == (0, 2)
    assert gap[:2] == ["torn", None]


READ_AHEAD = "import kvcanary.recorder.trace.decode as ahead; ahead.LARGE_BYTES = 0\n" + READ


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 5])
def test_a_cut_while_batches_are_decoded_ahead(traces, kept):
    path = traces.write(batches=(40,) * 6, compression="lz4")
    ends = [batch.end_byte for batch in traces.read(path)[0]]
    keep = ends[kept - 1] + 100 if kept else 0
    done = subprocess.run(
        [sys.executable, "-c", READ_AHEAD, path, str(keep)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    *firsts, gap = json.loads(done.stdout)
    assert firsts == [40 * n for n in range(max(kept, 1))]
    assert gap[:2] == ["torn", None]
    assert f"torn at byte {keep}" in gap[2]
