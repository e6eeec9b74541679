"""KV that goes from a prefill engine to a decode engine, recorded on both sides under the request's bootstrap room.

SGLang sends a prompt in chunks while it is computed. It is recorded as one transfer, which begins when the last chunk goes
out and ends when the sender says so. On the other side it begins when the sender knows where to write, and ends
when the scheduler takes the request over. Of a sliding-window pool only the window's end is sent.

A health check's or warm-up's prompt is sent to nobody, and the decode engine takes over what its slots held before: that
is a receive without a room, which leaves the slots unjudged.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from .....kernels.arrays import Int64Array
from ....capture.device.recorder import DeviceRecorder
from ....capture.host_arrays import read_runs
from ....capture.recorder import Recorder
from ....trace.event import INT64_MAX
from ....trace.schema import RECEIVE, SEND, TransferDirection, TransferStatus
from ...common.hooking import Around, OnFault, around, wrap_method
from ..history import GroupHistory
from ..layout import SglangLayout, own_slots
from ..requests import SglangRequest, kv_field, row_of

# SGLang's KVPoll
FAILED: Final = 0
SUCCESS: Final = 4


class SglangTransfers:
    """Records the transfers of one scheduler; both sides name a pool group alike, so they find one another.

    `histories` are those of the slots, empty if there is none; `see` returns a request of the engine's; `on_fault` is
    called when a hook failed.
    """

    def __init__(
        self,
        layout: SglangLayout,
        recorder: Recorder | DeviceRecorder,
        histories: list[GroupHistory],
        see: Callable[[Any], SglangRequest],
    ) -> None:
        self.on_fault: OnFault = lambda _hook, _error: None
        self._layout = layout
        self._recorder = recorder
        self._histories = histories
        # On a device behind what the allocator gave out, which may wait for a frame.
        self._in_turn: Any = recorder.later_with if isinstance(recorder, DeviceRecorder) else _now
        self._see = see
        # The room and the first position of each request that is being sent or received.
        self._under_way: dict[str, tuple[int, int]] = {}

    @around
    def on_send(self, req: Any, *args: Any, **kwargs: Any) -> Around:
        """Note where the first chunk of a request begins; record that its last one goes out, and the transfer's end."""
        sender = req.disagg_kv_sender
        if to_nobody(sender):
            return
        under_way = room_of(req), int(getattr(req, "start_send_idx", 0) or 0)
        under_way = self._under_way.setdefault(req.rid, under_way)
        if args[0] if args else kwargs.get("last_chunk", False):
            yield
            known = self._see(req)
            self._under_way[req.rid] = under_way
            self._record("start", SEND, req, known, under_way)

            @around
            def on_poll(*_args: Any, **_kwargs: Any) -> Around:
                if req.rid in self._under_way:
                    state = yield
                    if state in (FAILED, SUCCESS):
                        note = "" if state == SUCCESS else "the sender says so"
                        self._over("failed" if note else "end", SEND, req, known, note)

            wrap_method(
                sender, "poll", on_poll, self.on_fault
            )  # not counted as cost: an idle engine asks in every round
            self._watch_failure(sender, SEND, req, known)

    def _watch_failure(self, side: Any, direction: TransferDirection, req: Any, known: SglangRequest) -> None:
        """Hook what the scheduler asks a side that has failed, itself or on another rank, before it frees the slots."""

        def hook(*_args: Any, **_kwargs: Any) -> None:
            self._over("failed", direction, req, known, "the engine gives it up")

        wrap_method(side, "failure_exception", hook, self.on_fault)

    def on_expect(self, decode_reqs: Any, *_args: Any, **_kwargs: Any) -> None:
        """Record prompts whose senders know where to write them."""
        for decode_req in decode_reqs or ():
            if row_of(decode_req.req) >= 0:
                self.expected(decode_req.req, self._see(decode_req.req), decode_req.kv_receiver)

    @around
    def on_receive(self, decode_req: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record the prompts that the scheduler takes over."""
        req, receiver = decode_req.req, decode_req.kv_receiver
        if getattr(decode_req, "host_staged", False):
            self._recorder.lost("a prompt was received in the host's memory, which is not recorded")
            return
        yield
        self.received(req, self._see(req), receiver)

    def received(self, req: Any, known: SglangRequest, receiver: Any) -> None:
        """Record that a request's prompt has landed."""
        if req.rid not in self._under_way:
            self.expected(req, known, receiver)
        self._over("end", RECEIVE, req, known)

    def expected(self, req: Any, known: SglangRequest, receiver: Any) -> None:
        """Record that a request's prompt may land in its slots from now on, and when that fails."""
        room = -1 if to_nobody(receiver) else room_of(req)
        under_way = self._under_way[req.rid] = (room, int(kv_field(req, "cache_protected_len") or 0))
        self._record("start", RECEIVE, req, known, under_way)
        self._watch_failure(receiver, RECEIVE, req, known)

    def forget(self, req: Any) -> None:
        """Forget a request whose row is free: it sends and receives nothing any more."""
        self._under_way.pop(req.rid, None)

    def _over(
        self, status: TransferStatus, direction: TransferDirection, req: Any, known: SglangRequest, note: str = ""
    ) -> None:
        """Record a transfer's end, unless it has been recorded."""
        under_way = self._under_way.pop(req.rid, None)
        if under_way is not None:
            self._record(status, direction, req, known, under_way, note)

    def _record(
        self,
        status: TransferStatus,
        direction: TransferDirection,
        req: Any,
        known: SglangRequest,
        under_way: tuple[int, int],
        note: str = "",
    ) -> None:
        room, first = under_way
        row, end = row_of(req), len(req.origin_input_ids)
        if row < 0:
            return
        for runner in self._layout.runners.values():
            for number in runner.groups.values():
                group = self._layout.groups[number]
                start = first
                if group.window:
                    start = max(first, (end - group.window) // group.page_size * group.page_size)
                parts = [(room, start, self._slots(runner.table, number, row, start, end - start))]
                if direction == RECEIVE and start > first:
                    # What comes right before a window may have a slot, but is not sent; the chain begins at it.
                    before = self._slots(runner.table, number, row, start - 1, 1)
                    parts.append((-1, start - 1, before[before > 0]))
                for in_room, position, which in parts:
                    if which.size and direction == RECEIVE and status == "start":
                        # No forward writes them, so nothing has recorded yet whose they are.
                        mine = which, np.array([row]), np.array([known.request_id]), np.array([which.size])
                        for history in self._histories:
                            if number in history.groups:
                                self._in_turn(history.written, *mine)
                    if which.size or in_room == room:
                        self._recorder.transfer(
                            status,
                            direction=direction,
                            room=in_room,
                            group=number,
                            slots=which,
                            start_position=position,
                            request_id=known.request_id,
                            row=row,
                            note=note,
                        )

    def _slots(self, table: int, number: int, row: int, start: int, count: int) -> Int64Array:
        """Return the slots of `count` positions of a row from `start` on, `[count]` in a group's own numbering."""
        where = (np.array([row]), np.array([start]), np.array([max(0, count)]))
        return own_slots(self._layout, number, read_runs(self._layout.tables[table], *where))


def _now(record: Callable[..., None], *args: Any) -> None:
    record(*args)


def room_of(req: Any) -> int:
    """Return a request's bootstrap room, -1 for none; whoever sends a request may choose it: 63 bits, alike on both sides."""
    room = getattr(req, "bootstrap_room", None)
    return -1 if room is None else int(room) & INT64_MAX


def to_nobody(connection: Any) -> bool:
    """Say whether a sender or receiver is the one that SGLang takes where nothing is sent: for health checks."""
    return type(connection).__name__.startswith("FakeKV")
