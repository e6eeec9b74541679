"""What a header may say: each field is held to its limits, in code and in a file alike, and the error names it."""

import json

import pytest
from kvcanary.recorder.errors import UnreadableTraceError
from kvcanary.recorder.trace import schema
from kvcanary.recorder.trace.header import KvStream, NotWatched, PoolGroup, Runner, Segment, StateTable, TraceHeader

STREAM = {"half": "K", "bytes_per_token": 64, "capture_bytes": 16}
GROUP = {"name": "full", "num_slots": 64}
TABLE = {"rows": 2, "width": 8}
HEADER = {"format_major": 1, "groups": [GROUP], "tables": [TABLE]}

CASES = [
    (KvStream, {**STREAM, "capture_bytes": 0}, "capture_bytes"),
    (KvStream, {**STREAM, "capture_bytes": 24}, "multiple of 16"),
    (KvStream, {**STREAM, "capture_bytes": 80}, "expected at most bytes_per_token, 64"),
    (KvStream, {**STREAM, "bytes_per_token": schema.MAX_TOKEN_BYTES + 1}, "bytes_per_token"),
    (PoolGroup, {**GROUP, "num_slots": 0}, "num_slots"),
    (PoolGroup, {**GROUP, "num_slots": schema.MAX_SLOTS + 1}, "num_slots"),
    (PoolGroup, {**GROUP, "host_num_slots": -1}, "host_num_slots"),
    (PoolGroup, {**GROUP, "kind": "ring"}, "kind is 'ring'"),
    (PoolGroup, {**GROUP, "window": 4}, "kind is 'full' and window 4"),
    (PoolGroup, {**GROUP, "kind": "swa"}, "kind is 'swa' and window 0"),
    (PoolGroup, {**GROUP, "page_size": 0}, "page_size"),
    (PoolGroup, {**GROUP, "slot_shift": 2}, "slot_shift"),
    (PoolGroup, {**GROUP, "num_layers": -1}, "num_layers"),
    (PoolGroup, {**GROUP, "lut": -2}, "lut"),
    (PoolGroup, {**GROUP, "padding_slots": (64,)}, "padding_slots has 64"),
    (PoolGroup, {**GROUP, "padding_slots": (-1,)}, "padding_slots"),
    (PoolGroup, {**GROUP, "padding_slots": (0,) * (schema.MAX_PADDING_SLOTS + 1)}, "padding_slots"),
    (PoolGroup, {**GROUP, "halves": ()}, "expected K or K and V"),
    (PoolGroup, {**GROUP, "halves": ("K", "K")}, "expected K or K and V"),
    (StateTable, {"rows": 0, "width": 8}, "rows"),
    (StateTable, {"rows": 1 << 20, "width": 1 << 17}, "cells"),
    (Runner, {"token_offset": 2}, "token_offset"),
    (Runner, {"derived": ("kind",)}, "names of list columns"),
    (NotWatched, {"what": "nothing", "name": "x"}, "not_watched says 'nothing'"),
    (Segment, {"number": -1}, "number"),
    (Segment, {"number": 0, "first_event": -1}, "first_event"),
]
PLACES = {PoolGroup: "groups", StateTable: "tables", Runner: "runners", NotWatched: "not_watched"}


def in_a_file(kind: type, values: dict) -> dict:
    """Return a header's JSON that has the values in their place."""
    if kind is KvStream:
        return {**HEADER, "groups": [{**GROUP, "streams": [values]}]}
    return {**HEADER, "segment": values} if kind is Segment else {**HEADER, PLACES[kind]: [values]}


@pytest.mark.parametrize(("kind", "values", "named"), CASES)
def test_a_part_of_a_header_that_no_replay_can_stand_on(kind: type, values: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind(**values)
    with pytest.raises(UnreadableTraceError, match=r"cannot be used: .* - at `\$\.") as error:
        TraceHeader.from_json(json.dumps(in_a_file(kind, values)))
    assert PLACES.get(kind, "") in str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": [GROUP] * (schema.MAX_PARTS + 1)}, r"length <= 64 - at `\$\.groups`"),
        ({"tables": [TABLE] * (schema.MAX_PARTS + 1)}, r"length <= 64 - at `\$\.tables`"),
        ({"lut_lens": [0]}, r">= 1 - at `\$\.lut_lens\[0\]`"),
        ({"runners": []}, r"length >= 1 - at `\$\.runners`"),
        ({"sweep_interval": -1}, r"at `\$\.sweep_interval`"),
        ({"role": "both"}, "role is 'both', expected one of '', 'prefill', 'decode'"),
        ({"tokens": "salted"}, "tokens is 'salted'"),
        ({"groups": [{**GROUP, "table": 1}]}, r"group 0 \(full\): table is 1, there are 1"),
        ({"groups": [{**GROUP, "runner": 3}]}, r"group 0 \(full\): runner is 3, there are 1"),
        ({"groups": [{**GROUP, "lut": 0}]}, r"group 0 \(full\): lut is 0, there are 0"),
        ({"groups": [{**GROUP, "halves": ["K"], "streams": [{**STREAM, "half": "V"}]}]}, r"of the halves \['V'\]"),
        ({"groups": [{**GROUP, "streams": [STREAM] * 5}]}, "5 streams of one half, expected at most 4"),
    ],
)
def test_a_header_whose_parts_do_not_fit_one_another(changes: dict, named: str) -> None:
    TraceHeader.from_json(json.dumps(HEADER))
    with pytest.raises(UnreadableTraceError, match=named):
        TraceHeader.from_json(json.dumps({**HEADER, **changes}))
