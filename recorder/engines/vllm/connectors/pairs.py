"""What vLLM's prefill engine holds ready for a decode engine, and what that pulls: both sides of a transfer by one number.

NIXL's decode side reads a prompt's blocks out of the prefill side's memory, some time between the request's end there and the
moment when the prefill side is told so. Both know the request by what the router hands on, `kv_transfer_params`. Only with
`kv_role` `kv_producer` and `kv_consumer`: an engine that is both may be either side of any request.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from ....capture.device.recorder import DeviceRecorder
from ....capture.host_arrays import runs_to_slots
from ....capture.recorder import Recorder
from ....trace.schema import PULLED, SEND, TransferStatus
from ...common.hooking import Around, OnFault, around, wrap_method
from ...common.requests import request_id_of
from ..layout import VllmGroup, VllmLayout
from ..step import VllmRequests

_ROLES: Final = {"kv_producer": "prefill", "kv_consumer": "decode"}
# The connectors whose decode side reads what is held ready, one class by two names: vLLM's `MultiConnector` has the second.
PULLING: Final = frozenset({"NixlConnector", "NixlPullConnector"})
MOST_SENT: Final = 8192  # requests whose blocks are held ready


def role_of(config: Any, scheduler: Any) -> str:
    """Return which side of a pair an engine is, as the header has it; "" for none, or if it is not known what it sends."""
    transfer = getattr(config, "kv_transfer_config", None)
    return "" if scheduler is None else _ROLES.get(str(getattr(transfer, "kv_role", "")), "")


def room_of(params: Any) -> int:
    """Return what both sides call a request's transfer, by what the router hands on; -1 if it does not say."""
    if not isinstance(params, Mapping):
        return -1
    named = [params.get(name) for name in ("remote_engine_id", "remote_request_id")]
    return request_id_of("/".join(map(str, named))) if all(named) else -1


def transfers_of(recorder: Recorder | DeviceRecorder) -> Callable[..., None]:
    """Return what records a transfer: on a device without its bytes, for which the engine would wait."""
    return recorder.transfer_unread if isinstance(recorder, DeviceRecorder) else recorder.transfer


class HeldReady:
    """The requests of one prefill engine whose blocks a decode engine may read."""

    def __init__(self, layout: VllmLayout, requests: VllmRequests, recorder: Recorder | DeviceRecorder) -> None:
        self._connector = ""
        # What lies outside of a window need not be read, and is not said to be.
        self._groups = [group for group in layout.groups if not group.window]
        self._requests = requests
        self._transfer = transfers_of(recorder)
        self._sent: dict[str, tuple[int, list[tuple[VllmGroup, Any]]]] = {}

    def attach(self, scheduler: Any, on_fault: OnFault) -> None:
        """Hook the ends of a prefill engine's requests and of their transfers; nothing of another engine's."""
        config: Any = getattr(scheduler, "vllm_config", None)
        if role_of(config, scheduler) != "prefill":
            return
        self._connector = str(config.kv_transfer_config.kv_connector)
        wrap_method(scheduler, "_connector_finished", self.on_held, on_fault)
        wrap_method(scheduler, "_update_from_kv_xfer_finished", self.on_finished, on_fault)

    @around
    def on_held(self, request: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record which slots of a request that has ended are held ready, if any are."""
        holds, params = yield
        room, blocks = room_of(params), (params or {}).get("remote_block_ids")
        if not holds or room < 0 or not blocks:
            return
        tokens, found = int(params.get("remote_num_tokens") or 0), []
        for group in self._groups:
            starts = np.array(blocks[group.gid], np.int64) * group.block_size
            slots = runs_to_slots(starts, np.full(starts.size, group.block_size, np.int64))[:tokens]
            if slots.size and starts.min() > 0:
                found.append((group, slots))
        if len(self._sent) >= MOST_SENT:
            del self._sent[next(iter(self._sent))]
        self._sent[request.request_id] = room, found
        self._record("start", request.request_id)

    def on_finished(self, output: Any, *_args: Any, **_kwargs: Any) -> None:
        """Record transfers that are over, before their slots are given back."""
        for name in getattr(output, "finished_sending", None) or ():
            if name in self._sent:
                self._record("end", name)
                del self._sent[name]

    def _record(self, status: TransferStatus, name: str) -> None:
        room, found = self._sent[name]
        known = self._requests.get(name)
        request_id = request_id_of(name) if known is None else known.request_id
        for group, slots in found:
            where = {"room": room, "group": group.index, "slots": slots, "peer": self._connector, "note": PULLED}
            self._transfer(status, direction=SEND, request_id=request_id, **where)
