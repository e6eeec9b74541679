"""Slots that a KV connector fills: what lies in them is unknown until a forward of this engine writes them.

Each load is recorded as a receive without a room. If the scheduler runs in this process, it says which slots are loaded,
and when a load that runs beside the forwards is over. Else the runner only sees that a request begins with tokens in the
cache: all of them are taken for loaded, if they can have been.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .....kernels.arrays import BoolArray, Int64Array
from ....capture.device.recorder import DeviceRecorder
from ....capture.host_arrays import on_host, ragged_index, runs_to_slots
from ....capture.recorder import Recorder
from ....trace.header import NotWatched
from ....trace.schema import RECEIVE, TransferStatus
from ...common.hooking import Around, Hook, OnFault, around, wrap_method
from ..device import DeviceStep
from ..layout import VllmGroup, VllmLayout
from ..step import Step, VllmRequest, VllmRequests, table_read
from .copies import ConnectorCopies, ExternalSlots, HostPages
from .landed import not_watched as not_watched_unknown
from .pairs import PULLING, HeldReady, role_of, room_of, transfers_of
from .storages import Member

_NO_BLOCKS: Final = np.empty(0, np.int64)
# Connectors that write no slot but those of the tokens that they were asked for; others may load a request's whole
# prefix anew, over what the prefix cache holds of it.
EXACT: Final = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"}) | PULLING


def connector_of(config: Any) -> str:
    """Return the name of the connector that may load into a runner's cache, "" if there is none."""
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is None or getattr(transfer, "kv_role", None) == "kv_producer":
        return ""
    return str(getattr(transfer, "kv_connector", "") or "unknown")


class Reads(NamedTuple):
    """Slots `[n]` of a group that the request at place `request` of a batch reads."""

    group: VllmGroup
    request: int
    slots: Int64Array


class ExternalLoads:
    """The loads of one runner's cache; `scheduler` is None if it runs in another process.

    What the members that are known copy is recorded, too; what they load is unknown before that.
    """

    def __init__(
        self,
        connector: str,
        layout: VllmLayout,
        requests: VllmRequests,
        recorder: Recorder | DeviceRecorder,
        scheduler: Any,
        members: Sequence[Member],
    ) -> None:
        pages = HostPages(layout)
        known = [
            (member.name, ConnectorCopies(member.storage, layout, recorder, pages))
            for member in members
            if member.storage is not None
        ]
        self._saying = dict(known)  # of those that say what they are asked to load, by the connector's name
        # Of the others, what has landed.
        self._seen = [
            (ConnectorCopies(landed, layout, recorder, pages), landed)
            for landed in {member.landed for member in members if member.landed is not None}
        ]
        self._copies = [*(copies for _, copies in known), *(copies for copies, _ in self._seen)]
        self._connector = connector
        self._groups = layout.groups
        self._held = HeldReady(layout, requests, recorder)
        self._requests = requests
        self._transfer = transfers_of(recorder)
        self._scheduler = scheduler
        self._loads: dict[str, list[ExternalSlots]] = {}
        self._under_way: set[str] = set()
        self._ends_are_seen = False
        self._landed: set[str] = set()  # requests whose load the runner has seen end, if it has no scheduler
        self._pulls = False  # what is loaded lies in a prefill engine

    def attach(self, on_fault: OnFault) -> None:
        """Hook the scheduler's blocks, behind the hooks of the slot history: a slot is given out, then loaded."""
        for copies in self._copies:
            copies.attach(on_fault)
        if self._scheduler is not None:
            self._held.attach(self._scheduler, on_fault)
        if not self._connector or self._scheduler is None:
            return
        self._pulls = role_of(getattr(self._scheduler, "vllm_config", None), self._scheduler) == "decode"
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        for group in self._groups:
            hook = self._around_loads(group, managers[group.gid])
            if not wrap_method(managers[group.gid], "allocate_external_computed_blocks", hook, on_fault):
                raise ValueError(
                    "this vLLM has no allocate_external_computed_blocks: which blocks a KV connector loads is unknown"
                )
        self._ends_are_seen = wrap_method(self._scheduler, "_update_from_kv_xfer_finished", self.on_finished, on_fault)

    def _around_loads(self, group: VllmGroup, manager: Any) -> Hook:
        @around
        def on_allocated(name: str, local: int, loaded: int, *_args: Any, **_kwargs: Any) -> Around:
            """Note what is loaded for a request: positions behind the `local` ones of its blocks, null blocks left out."""
            yield
            blocks, size = [block.block_id for block in manager.req_to_blocks.get(name, ())], group.block_size
            first = local if self._loader(name) in EXACT else 0
            positions = np.arange(first, min(local + loaded, len(blocks) * size), dtype=np.int64)
            slots = np.array(blocks, np.int64)[positions // size] * size + positions % size
            held = slots >= size
            for mine, own in ((held & (positions < local), False), (held & (positions >= local), True)):
                if mine.any():
                    load = ExternalSlots(group.index, int(positions[mine][0]), slots[mine], own)
                    self._loads.setdefault(name, []).append(load)
                    for copies, seen in self._seen:
                        copies.guarded(seen.allocated, name, load)

        return on_allocated

    def _loader(self, name: str) -> str:
        """Return the connector that loads for a request: of several, the one that vLLM's `MultiConnector` has chosen."""
        connector: Any = self._scheduler.connector
        chosen = getattr(connector, "_requests_to_connector", {}).get(name)
        return self._connector if chosen is None else type(connector._connectors[chosen]).__name__

    def begin_step(self, running: Any) -> None:
        """Record the loads that go on beside a step: those of requests that do not take part in it."""
        for copies in self._copies:
            copies.has_begun = False
        for name in self._loads:
            if self._ends_are_seen and name not in running and name not in self._under_way:
                self._under_way.add(name)
                self._record(name, "start")

    def on_finished(self, output: Any, *_args: Any, **_kwargs: Any) -> None:
        """Record loads that are over, before their slots are used or given back; a load that failed fills slots too."""
        failed = np.array(sorted(getattr(output, "invalid_block_ids", None) or ()), np.int64)
        lost = getattr(output, "failed_recving", None) or ()  # as a whole: of several groups no blocks are said
        for name in getattr(output, "finished_recving", None) or ():
            self._over(name, failed, lost=name in lost, is_over=True)
        for group in self._groups if failed.size else ():  # a block is one group's; which one's is not said
            starts = failed[(failed > 0) & (failed < group.num_blocks)] * group.block_size
            slots = runs_to_slots(starts, np.full(starts.size, group.block_size, np.int64))
            if slots.size:
                self._receive("failed", ExternalSlots(group.index, 0, slots, own=False), -1)

    def _over(self, name: str, failed: Int64Array = _NO_BLOCKS, *, lost: bool = False, is_over: bool = False) -> None:
        if name in self._loads:
            self._record(name, "end", failed, lost=lost, is_over=is_over)
            self._ended(name, self._loads[name])
            for copies in self._copies:
                copies.flush(name, [(load.group, load.slots) for load in self._loads[name]])
        self._left(name)

    def _ended(self, name: str, loads: Sequence[ExternalSlots]) -> None:
        for copies, seen in self._seen:
            for load in loads:
                copies.guarded(seen.ended, name, load)

    def left(self, name: str) -> None:
        """Forget what was going to be loaded for a request that has given its slots back."""
        self._left(name)
        for copies in self._copies:
            copies.forget(name)
        for copies, seen in self._seen:
            copies.guarded(seen.forget, name)

    def _left(self, name: str) -> None:
        self._loads.pop(name, None)
        self._under_way.discard(name)

    def _record(
        self,
        name: str,
        status: TransferStatus,
        failed: Int64Array = _NO_BLOCKS,
        *,
        lost: bool = False,
        is_over: bool = False,
    ) -> None:
        known, room = self._requests.get(name), -1 if lost else self._room(name)
        saying = self._saying.get(self._loader(name)) if status == "end" else None
        loads = self._loads[name]
        if saying is not None:  # what counts as loaded, and was not asked for or did not come, holds what it held
            loads = [part for load in loads for part in saying.changed(saying.asked_for(load, is_over=is_over))]
        for load in loads:
            group = self._groups[load.group]
            # What failed is not what the other side holds; and of a window not all of that is read.
            other = group.window or bool(np.isin(load.slots // group.block_size, failed).any())
            if load.own or status == "end":
                number = known.request_id if known is not None and load.own else -1
                self._receive(status, load, number, -1 if other or not load.own else room)

    def _room(self, name: str) -> int:
        """Return what the engine that a request's blocks are pulled from calls it, -1 if that is not known."""
        request = self._scheduler.requests.get(name) if self._pulls and self._loader(name) in PULLING else None
        return room_of(getattr(request, "kv_transfer_params", None))

    def _receive(self, status: TransferStatus, load: ExternalSlots, request_id: int, room: int = -1) -> None:
        where: dict[str, Any] = {
            "group": load.group,
            "slots": load.slots,
            "start_position": load.start,
            "peer": self._connector,
        }
        self._transfer(status, direction=RECEIVE, room=room, request_id=request_id, **where)

    def took_result(self, result: Any) -> None:
        """Take note of the loads that have ended, by a runner's output."""
        if self._connector and self._scheduler is None:
            output = getattr(result, "kv_connector_output", None)
            self._landed.update(getattr(output, "finished_recving", None) or ())

    def before_model(self, step: Step, output: Any, requests: Sequence[VllmRequest]) -> None:
        """Record what has been loaded for the requests of a step, or may have been for those that are new in it."""
        self._make_unknown(step, output, requests, lambda fresh: read_by_tables(step, self._groups, fresh))
        for copies, seen in self._seen:
            copies.guarded(seen.before_model, step, requests)
        tables = [table[: len(step.names)] for table, _ in step.tables]
        for copies in self._copies:
            copies.before_model(step.names, lambda: blocks_of(tables, step.names))

    def before_device(self, step: DeviceStep, output: Any, requests: Sequence[VllmRequest]) -> None:
        """As `before_model`, of a step that the device captures: by the blocks that the scheduler says its requests have."""
        self._make_unknown(step, output, requests, lambda fresh: read_by_blocks(step, self._groups, requests, fresh))
        for copies, seen in self._seen:
            copies.guarded(seen.before_device, step, requests)
        gids = [group.gid for group in self._groups]

        def held() -> dict[str, list[set[int]]]:
            return {known.name: [set(known.blocks[gid]) for gid in gids] for known in requests if known.blocks}

        for copies in self._copies:
            copies.before_model(step.names, held)

    def _make_unknown(
        self,
        step: Step | DeviceStep,
        output: Any,
        requests: Sequence[VllmRequest],
        read: Callable[[BoolArray], Iterator[Reads]],
    ) -> None:
        if self._scheduler is not None:
            for name in step.names if self._loads else ():
                self._over(name)
            return
        if not self._connector:
            return
        every = bool(getattr(output, "has_sync_kv_loads", True))
        loaded = [known.fresh and (every or known.name in self._landed) for known in requests]
        fresh = np.array(loaded, np.bool_) & (step.prefix > 0)
        self._landed.difference_update(step.names)
        for group, r, slots in read(fresh) if fresh.any() else ():
            own = slots[slots >= group.block_size]
            if own.size:
                load = ExternalSlots(group.index, int(step.prefix[r]) - own.size, own, own=False)
                self._receive("end", load, -1)
                self._ended(step.names[r], [load])


def read_by_tables(step: Step, groups: Sequence[VllmGroup], fresh: BoolArray) -> Iterator[Reads]:
    """Yield what each of some requests of a batch, `[bs]`, reads in each group, by the block tables."""
    for (table, block_size), group in zip(step.tables, groups, strict=True):
        read = table_read(table, block_size, group, np.where(fresh, step.prefix, 0))
        offsets = np.cumsum(read.counts) - read.counts
        for r in np.flatnonzero(fresh).tolist():
            yield Reads(group, r, read.slots[ragged_index(offsets[r : r + 1], read.counts[r : r + 1])])


def read_by_blocks(
    step: DeviceStep, groups: Sequence[VllmGroup], requests: Sequence[VllmRequest], fresh: BoolArray
) -> Iterator[Reads]:
    """As `read_by_tables`, by the blocks that the scheduler says the requests have."""
    for group in groups:
        for r in np.flatnonzero(fresh).tolist():
            end = int(step.prefix[r])
            at = np.arange(max(end - group.window - 1, 0) if group.window else 0, end)
            blocks = np.array(requests[r].blocks[group.gid], np.int64)
            yield Reads(group, r, blocks[at // group.block_size] * group.block_size + at % group.block_size)


def blocks_of(tables: Sequence[Any], names: Sequence[str]) -> dict[str, list[set[int]]]:
    """Return the blocks that each request of a batch has in each group, by the rows of the block tables."""
    rows = [on_host(table, wait=True) for table in tables]
    return {name: [set(table[r].tolist()) for table in rows] for r, name in enumerate(names)}


def not_watched(config: Any, members: Sequence[Member], *, on_gpu: bool) -> list[NotWatched]:
    """Return what of its connectors' work a trace does not hold."""
    transfer = getattr(config, "kv_transfer_config", None)
    entries = []
    for member in members:
        own = member.name if len(members) > 1 else getattr(transfer, "kv_connector", None) or "unknown"
        name, loads = f"KV connector {own}", bool(connector_of(config))
        if member.landed is not None:
            entries += not_watched_unknown(name, loads=loads, on_gpu=on_gpu)
            continue
        if member.storage is not None:
            reasons = {
                "slots": "what it loads and did not store in this recording is unknown until a forward writes the slot"
            }
            if on_gpu:
                looked = hasattr(member.storage, "rows_here")
                said = "on a GPU up to 4096 bytes of each layer's part of a block are compared, if its memory is pinned"
                reasons["other"] = said if looked else "the bytes that it copies are not compared on a GPU"
        else:
            reasons = {"other": "what it stores elsewhere is not compared"}
            if loads:
                reasons = {"slots": "what it loads is unknown until a forward writes the slot", **reasons}
        entries += [NotWatched(what=what, name=name, reason=reason) for what, reason in reasons.items()]
    return list(dict.fromkeys(entries))
