"""The requests that a trace has named so far."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...kernels.arrays import Int64Array
from ..trace.batch import TraceBatch
from ..trace.reader import EventView

MOST_CHARACTERS: Final = 1000  # of a name in a report, whose every row may hold one


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What a request event says; `prompt_len` and `room` are -1 where it does not."""

    name: str
    prompt_len: int
    room: int


@dataclass(slots=True)
class RequestTable:
    """Names, prompt lengths and rooms of the requests, by their 64-bit id."""

    facts: dict[int, RequestFacts] = field(default_factory=dict)

    def learn(self, view: EventView) -> None:
        """Take over what an event says of the request that it names."""
        self.learn_rows(view.batch, view.index, view.index + 1)

    def learn_rows(self, batch: TraceBatch, first: int, stop: int) -> None:
        """Take over what events of rows `first` to `stop - 1` say."""
        columns = (batch.scalar_ints(name)[first:stop].tolist() for name in ("request_id", "prompt_len", "room"))
        for name, request_id, prompt_len, room in zip(batch.strings("name")[first:stop], *columns, strict=True):
            self.facts[request_id] = RequestFacts(name=name, prompt_len=prompt_len, room=room)

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
