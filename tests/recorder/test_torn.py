"""A trace cut at any byte: by default near every edge and every few bytes between, in a fuzz run at every byte."""

import os

import pyarrow as pa
import pyarrow.ipc
from kvcanary.recorder.errors import UnreadableTraceError
from kvcanary.recorder.writing.recovery import recover


def test_cut_anywhere(traces, every_byte):
    path = traces.write(batches=(2, 1), compression="none")
    whole, _, _ = traces.read(path)
    data = path.read_bytes()
    ends = [batch.end_byte for batch in whole]
    blocks = traces.blocks(path)
    header_end = int(blocks[0, 0])
    # Where a header, a batch's metadata, its body, the end mark or the footer ends, or the file's magic.
    edges = {0, header_end, *ends, ends[-1] + 8, len(data) - 10, len(data)}
    edges |= {int(start + metadata_bytes) for start, metadata_bytes, _ in blocks}
    sizes = {*range(0, len(data), 1 if every_byte else 53)}
    sizes |= {size for edge in edges for size in range(edge - 9, edge + 10) if 0 <= size < len(data)}
    torn = traces.folder / "torn.arrow"
    torn.write_bytes(data)
    unreadable = salvaged = 0
    for size in sorted(sizes, reverse=True):
        os.truncate(torn, size)
        try:
            batches, gaps, complete = traces.read(torn)
        except UnreadableTraceError as error:
            assert size < header_end
            assert "record" in str(error), str(error)
            unreadable += 1
            continue
        assert size >= header_end
        assert not complete
        assert len(gaps) == 1 and gaps[0].kind == "torn" and "kvcanary recover torn.arrow" in gaps[0].reason
        assert len(batches) == sum(end <= size for end in ends)
        assert all(batch.record_batch.equals(whole[n].record_batch) for n, batch in enumerate(batches))
        salvaged += 1
    assert unreadable == sum(size < header_end for size in sizes) and salvaged == len(sizes) - unreadable


def test_recover_cuts(traces, every_byte):
    path = traces.write(batches=(2, 1))
    whole, _, _ = traces.read(path)
    data = path.read_bytes()
    good = [traces.plain(view) for batch in whole for view in batch]
    ends = [batch.end_byte for batch in whole]
    header_end = int(traces.blocks(path)[0, 0])
    torn, target = traces.folder / "torn.arrow", traces.folder / "new.arrow"
    sizes = {*range(header_end, len(data), 1 if every_byte else 997)}
    sizes |= {edge + step for edge in (header_end, *ends, ends[-1] + 8, len(data) - 9) for step in range(9)}
    for size in sorted(sizes):
        torn.write_bytes(data[:size])
        result = recover(torn, target, overwrite=True)
        kept = sum(batch.num_events for batch, end in zip(whole, ends, strict=True) if end <= size)
        nothing_lost = size >= ends[-1] + 8  # the end mark is there
        assert result.kept_events == kept
        assert result.lost_events == (0 if nothing_lost else None)
        batches, gaps, complete = traces.read(target)
        assert complete and not gaps
        events = [view for batch in batches for view in batch]
        assert [traces.plain(view) for view in events[:kept]] == good[:kept]
        assert [view.kind for view in events[kept:]] == ([] if nothing_lost else ["loss"])
        if not nothing_lost:
            assert events[kept].scalar("lost_events") == -1
        with pa.OSFile(str(target)) as file:
            assert pa.ipc.open_file(file).read_all().num_rows == len(events)
