"""Slots that are filled with what nobody here knows."""

from typing import Any, Final

from .....kernels.arrays import BoolArray, Int64Array
from ....capture.device.recorder import DeviceRecorder
from ....capture.host_arrays import own_int64
from ....capture.recorder import Recorder
from ....trace.schema import RECEIVE

OF_OTHERS: Final = "a load of what somebody else has stored"


def record_unknown(
    recorder: Recorder | DeviceRecorder,
    group: int,
    slots: Any,
    note: str,
    *,
    which: BoolArray | None = None,
    read: bool = False,
) -> None:
    """Record that slots of a group, any integers, are filled with what nobody here knows.

    `which` are some of them; `read` has the bytes recorded that lie there, which a device is not asked for: nothing waits.
    """

    def record(own: Recorder, found: Int64Array, *, read: bool) -> None:
        found = found if which is None else found[which]
        filled: dict[str, Any] = {"direction": RECEIVE, "room": -1, "group": group, "slots": found, "note": note}
        own.transfer("start", **filled)
        own.transfer("end", **filled, read=read)

    if isinstance(recorder, DeviceRecorder):
        recorder.later_with(lambda found: record(recorder.recorder, found, read=False), slots)
    else:
        record(recorder, own_int64(slots), read=read)
