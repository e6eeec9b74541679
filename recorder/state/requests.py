"""The requests that a trace has named so far."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...kernels.arrays import Int64Array
from ..trace.batch import TraceBatch
from ..trace.reader import EventView
from ..trace.schema import IDENTITY_KINDS

MOST_CHARACTERS: Final = 1000  # of a name in a report, whose every row may hold one


IDENTITY_COLUMNS: Final = ("identity_kind", "identity_start", "identity_count", "identity_hash")
MEDIA: Final = IDENTITY_KINDS.index("media")
MOST_IDENTITIES: Final = 64  # of one request id; slots that it wrote under an earlier one are nobody's


class Identity:
    """What a request's KV depends on beside its tokens, from an event on: `values` `[n, 4] int64`, the trace's columns."""

    def __init__(self, event: int, values: Int64Array) -> None:
        self.event = event
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.event == other.event and np.array_equal(self.values, other.values)

    @cached_property
    def _whole(self) -> dict[int, int]:
        return {kind: value for kind, _, _, value in self.values.tolist() if kind != MEDIA}

    def _media(self, positions: Int64Array) -> Int64Array | None:
        """Return the hash of what fills each position, `[n] int64`, 0 for none; None if that is not declared."""
        media = self.values[self.values[:, 0] == MEDIA]
        found = np.zeros(len(positions), np.int64)
        for _, start, count, value in media.tolist():
            found[(positions >= start) & (positions - start < count)] = value
        return found if len(media) else None

    def differs(self, other: "Identity", positions: Int64Array) -> tuple[str, npt.NDArray[np.bool_]]:
        """Say at which positions `[n]` the KV of two requests with equal tokens differs, and by what; "" for nothing."""
        for kind, value in self._whole.items():
            if other._whole.get(kind, value) != value:
                return IDENTITY_KINDS[kind], np.ones(len(positions), np.bool_)
        bounds = np.unique(
            np.concatenate([one.values[one.values[:, 0] == MEDIA][:, 1:3].cumsum(1) for one in (self, other)])
        )
        mine, theirs = self._media(bounds), other._media(bounds)
        wrong = np.zeros(len(positions), np.bool_)
        if mine is not None and theirs is not None and (mine != theirs).any():
            # What follows the first that differs was computed with it, too.
            wrong = positions >= bounds[(mine != theirs).argmax()]
        return ("media" if wrong.any() else ""), wrong


def _identity(view: EventView) -> Int64Array:
    """Return the identity that an event declares, `[n, 4] int64`; none if its columns do not fit one another."""
    columns = [view.ints(name) for name in IDENTITY_COLUMNS]
    fits = len({len(column) for column in columns}) == 1
    return np.stack(columns if fits else [column[:0] for column in columns], axis=1)


def declared_in(batch: TraceBatch) -> set[bytes]:
    """Return the identities that events of a batch declare, as `RequestTable.declared` has them."""
    named = np.flatnonzero(np.diff(batch.offsets(IDENTITY_COLUMNS[0])))
    return {_identity(batch.event(int(row))).tobytes() for row in named}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What a request event says; `prompt_len` and `room` are -1 where it does not; `identities` oldest first."""

    name: str
    prompt_len: int
    room: int
    identities: tuple[Identity, ...] = ()


@dataclass(slots=True)
class RequestTable:
    """Names, prompt lengths, rooms and identities of the requests, by their 64-bit id.

    `declared` are the identities that any request has declared: of one alone no two can differ.
    """

    facts: dict[int, RequestFacts] = field(default_factory=dict)
    declared: set[bytes] = field(default_factory=set)

    def learn(self, view: EventView) -> None:
        """Take over what an event says of the request that it names."""
        self.learn_rows(view.batch, view.index, view.index + 1)

    def identity(self, request_id: int, event: int) -> Identity | None:
        """Return a request's identity as of an event, None if that is unknown."""
        known = self.facts.get(request_id)
        return next((one for one in reversed(known.identities if known else ()) if one.event <= event), None)

    def learn_rows(self, batch: TraceBatch, first: int, stop: int) -> None:
        """Take over what events of rows `first` to `stop - 1` say."""
        columns = (batch.scalar_ints(name)[first:stop].tolist() for name in ("request_id", "prompt_len", "room"))
        declares = np.diff(batch.offsets(IDENTITY_COLUMNS[0]))[first:stop].tolist()
        rows = zip(range(first, stop), declares, batch.strings("name")[first:stop], *columns, strict=True)
        for row, declared, name, request_id, prompt_len, room in rows:
            before = self.facts.get(request_id)
            identities = before.identities if before is not None else ()
            if declared or identities:
                identities = self._declared(batch.event(row), identities)
            self.facts[request_id] = RequestFacts(name=name, prompt_len=prompt_len, room=room, identities=identities)

    def _declared(self, view: EventView, before: tuple[Identity, ...]) -> tuple[Identity, ...]:
        """Return a request's identities with that which an event declares."""
        values = _identity(view)
        if len(values):
            self.declared.add(values.tobytes())
        if before and np.array_equal(before[-1].values, values):
            return before
        told = view.ints("state_start") if view.kind == "keyframe" else values[:0, 0]
        return (*before, Identity(int(told[0]) if len(told) else view.number, values))[-MOST_IDENTITIES:]

    def name(self, request_id: int) -> str:
        """Return a request's name, or its number if no request event named it; of a name of pages its beginning."""
        known = self.facts.get(request_id)
        name = (known.name if known else "") or (str(request_id) if request_id >= 0 else "")
        if len(name) > MOST_CHARACTERS:
            return f"{name[:MOST_CHARACTERS]}... ({len(name):,} characters, request {request_id})"
        return name

    def name_column(self, request_ids: Int64Array) -> pa.Array:
        """Return the names of many requests."""
        unique, inverse = np.unique(request_ids, return_inverse=True)
        return pa.array([self.name(int(i)) for i in unique], type=pa.utf8()).take(pa.array(inverse))

    def rooms_and_prompts(self, request_ids: Int64Array) -> tuple[Int64Array, Int64Array, npt.NDArray[np.bool_]]:
        """Return room and prompt length of each request, -1 where unknown, and whether any event named it; `[n]` each."""
        found = [self.facts.get(i) for i in request_ids.tolist()]
        rooms = np.array([-1 if f is None else f.room for f in found], dtype=np.int64)
        prompts = np.array([-1 if f is None else f.prompt_len for f in found], dtype=np.int64)
        return rooms, prompts, np.array([f is not None for f in found], dtype=np.bool_)
