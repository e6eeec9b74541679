"""Findings: faults that are no violation row of the canary, each with the events that prove it."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from ...recorder.state.forward import Forward
from ...recorder.state.requests import RequestTable

# Kinds that no history check finds; each check says what its own mean.
OTHER_KINDS = {
    "swa_lut_out_of_range": "a slot has no entry in the full-to-SWA table",
    "entry_out_of_table": "a forward reads a row or position that its block table does not have",
    "launch_missing": "the canary did not look where it should have: a launch is missing",
    "transfer_source_damaged": "slots no longer held the bytes written when they were sent to the decode side",
    "transfer_source_changed": "slots changed while they were being sent to the decode side",
    "transfer_differs": "what the decode side received is not what the prefill side sent",
    "model_bytes": "the first layer's K or V of a token is not what the model that was named (--model) gives for it",
    "ranks_disagree": "a tensor-parallel rank ran another forward than the rank it is compared with",
}

# Why bytes that a token did not have before show no other adapter and no other weights.
NO_ADAPTER: Final = ("partly", "no_adapter")

# Codes of `Finding.cause`: what tells findings of one kind apart. A kind that can have only one cause has no code.
FINDING_CAUSES = {
    "held_by_request": "another request holds the slot",
    "held_by_cache": "the prefix cache holds the slot",
    "free": "nobody holds the slot",
    "still_used": "the prefix cache has the slot, and the engine counts a user of it whom nobody knows",
    "nobodys": "no request is left, no cache has the slot, and it is not free",
    "never_given_out": "nobody was ever given the slot",
    "given_out_anew": "the slot was given out anew while it was in use",
    "same_event": "one event names the slot twice",
    "same_forward": "another entry of the same forward uses the slot or the row",
    "never_written": "nobody has written the slot",
    "written_before": "the slot was written last before it was given out",
    "swa_slot_shared": "two full slots lead to one sliding-window slot",
    "swa_slot_missing": "a full slot inside the window leads to no sliding-window slot",
    "row_given_away": "the row was given to another request",
    "row_taken_back": "the row was taken back",
    "request_left": "the request is gone and still holds the slot",
    "row_moved_on": "the request's row no longer names the slot",
    "given_after_end": "the slot was given to a request that was gone",
    "other_adapter": "the slot was computed with another LoRA adapter",
    "other_salt": "the slot was computed under another cache salt",
    "other_weights": "the slot was computed with other weights",
    "other_media": "the slot was computed with other media at its position",
    "other_prefix": "the state is that of another prefix",
    "other_position": "the state is that of the request's own prefix at another position",
    "changed_bytes": "the bytes are not those that were left there",
    "padding": "the recurrent state is that of padding's slot, which is nobody's",
    "not_zeroed": "a request that has no tokens yet began with a state that is not one of zeros",
    "begun_anew": "a request that has tokens already began with no state",
    "left_as_it_was": "the forward computed a token, and left the state as it was",
    "as_anothers": "the forward left the bytes of another request's state, which ends with another token",
    "cleared": "the state is one of zeros, and nobody was seen to fill its slot",
    "rotated": "K is not what the same token's is at the same position, or follows from its K at others, and V is",
    "no_adapter": "no request declares an adapter, and other requests' tokens have the bytes that they had in that forward",
    "partly": "of what the forward computed of the request other tokens have the bytes that they had",
    "stored_wrong": "the storage does not hold what was stored",
    "stored_over": "the storage holds in its place what was stored for another page",
    "changed_in_store": "the storage no longer holds what it held after the store",
    "two_to_one": "another slot is being stored in the same place",
    "other_order": "the same bytes lie at the other end in another order",
    "loaded_wrong": "the slot does not hold what the storage holds",
    "loaded_another": "the slot holds what was stored in another page",
    "nothing_landed": "the slot holds what it held before the load",
    "not_landed_here": "the slot holds what it held before the load, and where it was stored from the bytes lie still",
    "landed_elsewhere": "the load's bytes lie in another slot",
    "nan": "a value that was written is NaN",
    "infinite": "a value that was written is infinite",
    "holds_other_token": "the slot holds another token's bytes than that which was fed",
    "holds_other_position": "the slot holds the token's bytes at another position",
    "no_token": "the slot's bytes are no token's of the model",
    "zeros": "all values of a row that was written are 0",
    "saturated": "all values of a row that was written are 0 or the largest that the 8-bit type can hold",
    "handed_zeros": "all values of a row that the model handed to the cache are 0",
    "as_before": "the slot holds what it held before the forward that wrote it",
}


class Cause(NamedTuple):
    """What a program needs to know of a finding, as its columns: a code of `FINDING_CAUSES`, and what it is about.

    `other_request_id` is who holds, held or wrote the slot, `token` what was fed or stands in the slot, and
    `expected_token` what belongs there; -1 if a field does not apply.
    """

    cause: str = ""
    other_request_id: int = -1
    token: int = -1
    expected_token: int = -1


NO_CAUSE = Cause()
# What findings.parquet did not have from the beginning.
ADDED_COLUMNS = frozenset(Cause._fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding; -1 where a field does not apply. `cause` and what follows it are a `Cause`; `detail` is for people.

    It stands for `count` slots or tokens, the first of which `position` and `slot` name; `evidence` is JSON: event numbers.
    """

    kind: str
    event: int
    forward: int
    time_ns: int
    runner: int = -1
    group: int = -1
    request_id: int = -1
    request: str = ""
    req_pool_idx: int = -1
    position: int = -1
    slot: int = -1
    detail: str
    count: int = 1
    evidence: str = "[]"
    cause: str = ""
    other_request_id: int = -1
    token: int = -1
    expected_token: int = -1


_TYPES = {"runner": pa.int16(), "group": pa.int16(), str: pa.utf8(), int: pa.int64()}
FINDING_SCHEMA = pa.schema([(f.name, _TYPES.get(f.name, _TYPES[f.type])) for f in dataclasses.fields(Finding)])
MAX_EVIDENCE = 16


def forward_finding(
    kind: str, forward: Forward, detail: str, names: RequestTable, *, request: int = -1, **fields: Any
) -> Finding:
    """Return a finding about entry `request` of a forward's batch: past it about its padding, -1 about all of it."""
    request_id, row = -1, -1 if request < 0 else 0
    if 0 <= request < len(forward.request_ids):
        request_id, row = int(forward.request_ids[request]), int(forward.req_pool_indices[request])
    fields = {"evidence": evidence(forward.event), "req_pool_idx": row, **fields}
    return event_finding(kind, forward, detail, runner=forward.runner, **of_request(names, request_id), **fields)


def event_finding(kind: str, what: Any, detail: str, **fields: Any) -> Finding:
    """Return a finding at an event that says its forward, too."""
    return Finding(kind=kind, event=what.event, forward=what.forward, time_ns=what.time_ns, detail=detail, **fields)


def of_request(names: RequestTable, request_id: int) -> dict[str, Any]:
    """Return the fields of a finding that say which request it is of."""
    return {"request_id": request_id, "request": names.name(request_id)}


def evidence(*events: int | Iterable[int]) -> str:
    """Return event numbers as the JSON list that `Finding.evidence` holds; negative ones stand for "none"."""
    flat: set[int] = set()
    for item in events:
        flat.update([int(item)] if isinstance(item, (int, np.integer)) else (int(event) for event in item))
    return json.dumps(sorted(event for event in flat if event >= 0)[:MAX_EVIDENCE])


def counted(detail: str, count: int) -> str:
    """Return the detail of a finding that stands for `count` slots or tokens."""
    return f"{detail}{_first_of(count)}"


def uncounted(detail: str, count: int) -> str:
    """Return the detail of the first slot or token alone."""
    return detail.removesuffix(_first_of(count))


def _first_of(count: int) -> str:
    return "" if count == 1 else f" (the first of {count:,})"


def finding_table(findings: list[Finding]) -> pa.Table:
    """Build a table of findings."""
    return pa.table(
        [pa.array([getattr(f, field.name) for f in findings], type=field.type) for field in FINDING_SCHEMA],
        schema=FINDING_SCHEMA,
    )
