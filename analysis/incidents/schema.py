"""The two tables of incidents in a report."""

from typing import Final

import pyarrow as pa

INCIDENTS_NAME: Final = "incidents.parquet"
MEMBERS_NAME: Final = "incident_members.parquet"
# Metadata of incidents.parquet: sizes of the files that it was made of.
STAMP_KEY: Final = b"kvcanary.incidents_of"

# Requests, slot runs that a row lists; `num_requests`, `num_slots` count them all.
MAX_LISTED: Final = 1000

INCIDENT_SCHEMA: Final = pa.schema(
    [
        # numbered from 1, in order of their first events
        ("incident", pa.int32()),
        # what it is: a fault class or "unknown", its title in words, how sure that is
        ("kind", pa.utf8()),
        ("title", pa.utf8()),
        ("confidence", pa.utf8()),
        ("score", pa.float64()),
        # the three best kinds, the first of which is `kind` unless that is unknown
        ("alternatives", pa.list_(pa.utf8())),
        ("alternative_scores", pa.list_(pa.float64())),
        # when it was seen first and last; -1 before the first forward
        ("first_forward", pa.int64()),
        ("last_forward", pa.int64()),
        ("first_event", pa.int64()),
        ("time_ns", pa.int64()),
        ("mode", pa.utf8()),
        # the event in which it went wrong, -1 if that is not known
        ("cause_event", pa.int64()),
        # how far it spread
        ("requests", pa.list_(pa.utf8())),
        ("request_ids", pa.list_(pa.int64())),
        ("num_requests", pa.int64()),
        ("slots", pa.list_(pa.struct([("pool_group", pa.int64()), ("start", pa.int64()), ("count", pa.int64())]))),
        ("num_slots", pa.int64()),
        ("groups", pa.list_(pa.int64())),
        ("halves", pa.list_(pa.utf8())),
        ("runners", pa.list_(pa.int64())),
        ("violations", pa.int64()),
        ("findings", pa.int64()),
        # reasons and kinds of findings, most frequent first
        ("seen_by", pa.list_(pa.utf8())),
        # the first sign: what stands in the slot and since when, what was expected there
        ("first_request", pa.utf8()),
        ("in_slot", pa.utf8()),
        ("expected", pa.utf8()),
        # in words, and the queries that prove it
        ("sentence", pa.utf8()),
        ("detail", pa.utf8()),
        ("evidence", pa.list_(pa.utf8())),
    ]
)

MEMBER_SCHEMA: Final = pa.schema(
    [
        ("source", pa.dictionary(pa.int8(), pa.utf8())),
        # the row's number in violations.parquet or findings.parquet, from 0
        ("number", pa.int64()),
        ("incident", pa.int32()),
    ]
)
