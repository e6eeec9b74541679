"""KV that goes from a prefill engine to a decode engine: told on both sides under the request's bootstrap room.

SGLang sends a prompt in chunks while it is computed. It is told as one transfer, which begins when the last chunk goes
out and ends when the sender says so; the receiver tells it when the scheduler takes the request over. Of a
sliding-window pool only the window's end is sent.
"""

from typing import Any, Final

import numpy as np

from ..device.recorder import DeviceRecorder
from ..forward_input import translate
from ..host_arrays import read_runs
from ..recorder import Recorder
from .sglang_hooks import Finish
from .sglang_layout import Layout
from .sglang_requests import KnownRequest, kv_field, row_of

# SGLang's KVPoll
FAILED: Final = 0
SUCCESS: Final = 4


class Transfers:
    """Tells the transfers of one scheduler; both sides name a pool group alike, so they find one another."""

    def __init__(self, layout: Layout, recorder: Recorder | DeviceRecorder) -> None:
        self._layout = layout
        self._recorder = recorder
        self._first: dict[int, int] = {}  # of each room that is being sent, its first position

    def sending(self, req: Any) -> None:
        """Note where the first chunk of a request begins; called before each chunk is sent."""
        self._first.setdefault(room_of(req), int(getattr(req, "start_send_idx", 0) or 0))

    def sent_last(self, req: Any, known: KnownRequest) -> None:
        """Tell that all chunks of a request are on their way."""
        first = self._first.setdefault(room_of(req), 0)
        self._tell("start", "send", req, known, first, "")

    def on_poll(self, req: Any, known: KnownRequest) -> Any:
        """Return a hook around a sender's `poll` that tells of the transfer's end, once."""

        def hook(*_args: Any, **_kwargs: Any) -> Finish | None:
            if room_of(req) not in self._first:
                return None

            def finish(state: Any, error: BaseException | None) -> None:
                if error is None and state in (FAILED, SUCCESS) and (first := self._first.pop(room_of(req), -1)) >= 0:
                    status, note = ("end", "") if state == SUCCESS else ("failed", "the sender says so")
                    self._tell(status, "send", req, known, first, note)

            return finish

        return hook

    def forget(self, req: Any) -> None:
        """Forget a request whose row is free: it sends nothing any more."""
        self._first.pop(room_of(req), None)

    def received(self, req: Any, known: KnownRequest) -> None:
        """Tell that a request's prompt has landed."""
        first = int(kv_field(req, "cache_protected_len") or 0)
        self._tell("start", "receive", req, known, first, "")
        self._tell("end", "receive", req, known, first, "")

    def _tell(self, status: str, direction: str, req: Any, known: KnownRequest, first: int, note: str) -> None:
        row, end = row_of(req), len(req.origin_input_ids)
        if row < 0:
            return
        for runner in self._layout.runners.values():
            table = self._layout.tables[runner.table]
            for number in runner.groups.values():
                group = self._layout.groups[number]
                start = first
                if group.window:
                    start = max(first, (end - group.window) // group.page_size * group.page_size)
                count = max(0, end - start)
                where = (np.array([row]), np.array([start]), np.array([count]))
                slots = translate(self._layout.luts[group.lut] if group.lut >= 0 else None, read_runs(table, *where))
                self._recorder.transfer(
                    status,
                    direction=direction,
                    room=room_of(req),
                    group=number,
                    slots=slots,
                    start_position=start,
                    request_id=known.request_id,
                    row=row,
                    note=note,
                )


def room_of(req: Any) -> int:
    """Return a request's bootstrap room, -1 for none."""
    room = getattr(req, "bootstrap_room", None)
    return -1 if room is None else int(room)
