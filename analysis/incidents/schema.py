"""The two tables of incidents in a report."""

from typing import Final

import pyarrow as pa

INCIDENTS_NAME: Final = "incidents.parquet"
MEMBERS_NAME: Final = "incident_members.parquet"
# Metadata of incidents.parquet: sizes of the files that it was made of.
STAMP_KEY: Final = b"kvcanary.incidents_of"

# Requests, slot runs that a row lists; `num_requests`, `num_slots` count them all.
MAX_LISTED: Final = 1000

_TEXTS: Final = pa.list_(pa.utf8())
_NUMBERS: Final = pa.list_(pa.int64())
_RUN: Final = pa.struct([("pool_group", pa.int64()), ("start", pa.int64()), ("count", pa.int64())])

_ALIKE: Final = pa.struct([*((name, pa.utf8()) for name in ("name", "tracker", "kind")), ("likeness", pa.float64())])

INCIDENT_SCHEMA: Final = pa.schema(
    [
        # numbered from 1, in order of their first events
        ("incident", pa.int32()),
        # what it is: a fault class or "unknown", its title in words, how sure that is
        *((name, pa.utf8()) for name in ("kind", "title", "confidence")),
        ("score", pa.float64()),
        # the three best kinds, the first of which is `kind` unless that is unknown
        ("alternatives", _TEXTS),
        ("alternative_scores", pa.list_(pa.float64())),
        # when it was seen first and last; -1 before the first forward
        *((name, pa.int64()) for name in ("first_forward", "last_forward", "first_event", "time_ns")),
        ("mode", pa.utf8()),
        # the event in which it went wrong, -1 if that is not known
        ("cause_event", pa.int64()),
        # how far it spread
        ("requests", _TEXTS),
        ("request_ids", _NUMBERS),
        ("num_requests", pa.int64()),
        ("slots", pa.list_(_RUN)),
        ("num_slots", pa.int64()),
        ("groups", _NUMBERS),
        ("halves", _TEXTS),
        ("runners", _NUMBERS),
        *((name, pa.int64()) for name in ("violations", "findings")),
        # reasons and kinds of findings, most frequent first
        ("seen_by", _TEXTS),
        # the first sign: what stands in the slot and since when, what was expected there; then in words
        *((name, pa.utf8()) for name in ("first_request", "in_slot", "expected", "sentence", "detail")),
        # the queries that prove it
        ("evidence", _TEXTS),
        # where it went wrong, of which `kind` is a leaf: table, allocation, write, read, transfer, content, identity, input
        ("branch", pa.utf8()),
        # the known bugs that look most like it: name, thread ("owner/repository#number", "" of the fault lab), kind, how much alike
        ("alike", pa.list_(_ALIKE)),
    ]
)

MEMBER_SCHEMA: Final = pa.schema(
    # `number` is the row's in violations.parquet or findings.parquet, from 0
    [("source", pa.dictionary(pa.int8(), pa.utf8())), ("number", pa.int64()), ("incident", pa.int32())]
)
