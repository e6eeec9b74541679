"""What the hash oracle foretells of the inputs of a piece's forwards, in a few passes over columns.

The definition is `oracle.expected_tokens`, forward by forward; here all forwards between two request events go at once,
since what is known of the requests stays the same meanwhile.
"""

import numpy as np
import numpy.typing as npt

from ....kernels.constants import UNKNOWN_TOKEN
from ....kernels.ops.oracle.reference import generalized_ids, oracle_tokens
from ....recorder.capture.host_arrays import ragged_index
from ....recorder.state.requests import RequestTable
from ....recorder.trace.batch import TraceBatch
from ....recorder.trace.header import TraceHeader
from .screening import gathered

Int64Array = npt.NDArray[np.int64]


def foretold(
    batch: TraceBatch, header: TraceHeader, request_table: RequestTable, *, first: int, end: int, backend: str
) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    """Return the inputs that the events `first` to `end` must have been fed.

    Args:
        batch: what holds them; all are whole.
        header: the trace's, with an oracle.
        request_table: what is known of the requests before them; it learns what they say.
        first, end: places in the batch.
        backend: see `dispatch.select`.

    Returns:
        `(tokens, asked)`: `[input_ids of those events] int64`, and `[end - first] bool`: the forwards that they are for.
    """
    offsets = batch.offsets("input_ids")
    tokens = batch.values("input_ids")[offsets[first] : offsets[end]].copy()
    asked = np.zeros(end - first, np.bool_)
    kinds, modes, runners = batch.kinds, batch.strings("mode"), batch.scalar_ints("runner")
    waiting: list[int] = []
    for event in range(first, end):
        if kinds[event] == "request":
            _foretell(batch, header, request_table, np.array(waiting, np.int64), tokens, int(offsets[first]), backend)
            waiting = []
            request_table.learn(batch.event(event))
        elif kinds[event] == "forward":
            mode = modes[event]
            if mode == "draft_extend" or (mode == "decode" and not header.runners[runners[event]].token_offset):
                waiting.append(event)
                asked[event - first] = True
    _foretell(batch, header, request_table, np.array(waiting, np.int64), tokens, int(offsets[first]), backend)
    return tokens, asked


def _foretell(
    batch: TraceBatch,
    header: TraceHeader,
    request_table: RequestTable,
    events: Int64Array,
    out: Int64Array,
    begin: int,
    backend: str,
) -> None:
    """Put what is known into `out`, whose first entry is input `begin` of the batch."""
    if not len(events) or header.oracle is None:
        return
    bs = np.diff(batch.offsets("req_pool_indices"))[events]
    rows, request_ids, extend = (
        gathered(batch, name, events) for name in ("req_pool_indices", "request_ids", "extend_lens")
    )
    lens = np.where(rows == 0, 0, np.maximum(extend, 0))
    written = np.add.reduceat(np.append(lens, 0), np.cumsum(bs) - bs) * (bs > 0)
    places = ragged_index(batch.offsets("input_ids")[events], written)
    request = np.repeat(np.arange(len(lens)), lens)
    unique, inverse = np.unique(request_ids, return_inverse=True)
    rooms, prompts, told = request_table.rooms_and_prompts(unique)
    ids = np.empty(len(unique), np.int64)
    generalized_ids(request_ids=unique, rooms=rooms, out=ids)
    runners = batch.scalar_ints("runner")[events]
    offset = np.array([runner.token_offset for runner in header.runners], np.int64)[runners]
    at = batch.values("positions")[ragged_index(batch.offsets("positions")[events], written)]
    at = at + np.repeat(offset, written)
    known_as = inverse[request]
    tokens = np.empty(len(at), np.int64)
    oracle_tokens(
        request_ids=ids[known_as], positions=at, vocab_size=header.oracle.vocab_size, out=tokens, backend=backend
    )
    known = told[known_as]
    modes = batch.strings("mode")
    drafts = np.repeat(np.array([modes[event] == "draft_extend" for event in events.tolist()], np.bool_), written)
    known &= ~drafts | ((prompts >= 0)[known_as] & (at >= prompts[known_as]))
    known &= out[places - begin] != UNKNOWN_TOKEN
    out[places[known] - begin] = tokens[known]
