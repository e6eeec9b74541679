"""Findings: faults that are no violation row of the canary, each with the event that proves it."""

from dataclasses import dataclass

import pyarrow as pa

FINDING_SCHEMA = pa.schema(
    [
        ("kind", pa.utf8()),
        ("event", pa.int64()),
        ("forward", pa.int64()),
        ("time_ns", pa.int64()),
        ("runner", pa.int16()),
        ("group", pa.int16()),
        ("request_id", pa.int64()),
        ("request", pa.utf8()),
        ("req_pool_idx", pa.int64()),
        ("position", pa.int64()),
        ("slot", pa.int64()),
        ("detail", pa.utf8()),
    ]
)

FINDING_KINDS = {
    "slot_out_of_pool": "a forward reads or writes a slot that the pool does not have",
    "swa_lut_out_of_range": "a slot has no entry in the full-to-SWA table",
    "entry_out_of_table": "a forward reads a row or position that its block table does not have",
    "input_not_truth": "the model was fed a token that the scheduler does not have at that position",
    "input_not_sampled": "the model was fed another token than the one sampled for that position",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding; -1 where a field does not apply."""

    kind: str
    event: int
    forward: int
    time_ns: int
    runner: int
    group: int
    request_id: int
    request: str
    req_pool_idx: int
    position: int
    slot: int
    detail: str


def finding_table(findings: list[Finding]) -> pa.Table:
    """Build a table of findings."""
    return pa.table(
        [pa.array([getattr(f, field.name) for f in findings], type=field.type) for field in FINDING_SCHEMA],
        schema=FINDING_SCHEMA,
    )
