"""Transfers between a prefill and a decode engine: what was sent, what landed, and which side went wrong.

A sender's slots are verified when the transfer begins and again when it ends; what they held travels to the receiver's replay
through the exchange, records and bytes. The receiver's bytes are those that it saw land.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.constants import KvHashMode
from ...kernels.ops.hash.kv_source import fold_kv
from ...recorder.state.events import TransferEvent
from ...recorder.state.pools import RECORD_BYTES, GroupPool
from ...recorder.state.writes import KvChanges
from ...recorder.trace.schema import SUBMITTED
from ..report.findings import Finding, event_finding, of_request
from ..report.report import Results

_T = TypeVar("_T")
ParcelKey = tuple[int, str, int]  # room, name of the pool group, first position


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What a sender's slots held when the transfer began, `n` of them in order of position."""

    trace: str
    event: int
    slots: Int64Array
    head: dict[str, ByteArray]  # by half, [n, 32] records
    tail: dict[str, ByteArray]
    kv: list[ByteArray]  # by stream, [n, capture_bytes]
    origins: list[str]  # by stream, what its bytes are: those in the cache, or those that the model submitted
    unknown: BoolArray  # [n] slots that the sender's trace cannot vouch for
    chain_starts: Int64Array  # [n] where the chains of their records begin
    damaged: BoolArray  # [n] slots whose bytes were not those written
    pulled: bool = False  # the receiver takes what it lacks of it

    def part(self, start: int, count: int) -> "Parcel":
        """Return the slots from the `start`-th on, at most so many."""
        mine = slice(start, start + count)
        records = ({half: of_half[mine] for half, of_half in side.items()} for side in (self.head, self.tail))
        names = ("slots", "unknown", "chain_starts", "damaged")
        parts = {name: getattr(self, name)[mine] for name in names}
        head, tail = records
        return replace(self, head=head, tail=tail, kv=[data[mine] for data in self.kv], **parts)


class Exchange:
    """Parcels on their way.

    `senders` make a sender's replay continue, and return False if nothing is left to do. `wanted` says whether a receiver may
    still come: without one, parcels would pile up for nobody.
    """

    def __init__(self) -> None:
        self.senders: list[Callable[[], bool]] = []
        self.wanted: Callable[[], bool] = lambda: False
        self._parcels: dict[ParcelKey, Parcel] = {}

    def send(self, key: ParcelKey, parcel: Parcel) -> None:
        """Take in a parcel; one sent again replaces the one before."""
        if self.wanted():
            self._parcels[key] = parcel
        else:
            self._parcels.clear()

    def __len__(self) -> int:
        """How many parcels are on their way."""
        return len(self._parcels)

    def withdraw(self, key: ParcelKey) -> None:
        """Forget a parcel whose transfer failed."""
        self._parcels.pop(key, None)

    def receive(self, key: ParcelKey, count: int) -> Parcel | None:
        """Hand out a parcel, once; None if no sender has it. Of one that is pulled, `count` slots from the position on."""
        waiting = list(self.senders)
        while (held := self._held(key)) is None and waiting:
            waiting = [sender for sender in waiting if self._held(key) is None and sender()]
        if held is None:
            return None
        parcel = self._parcels.pop(held)
        return parcel.part(key[2], count) if parcel.pulled else parcel

    def _held(self, key: ParcelKey) -> ParcelKey | None:
        """Return under which key a parcel lies here: one that is pulled under its first position."""
        whole = key[0], key[1], 0
        if whole in self._parcels and self._parcels[whole].pulled:
            return whole
        return key if key in self._parcels else None


_KV_HASH_WORD = RECORD_BYTES // 8 - 1


class Transfers:
    """Judges one trace's transfers and hands them to, or takes them from, the traces replayed with it.

    `transfers_unmatched` of the summary counts transfers whose other side is in no trace of this replay: their slots are left unjudged. So are
    those of a receive without a room, a health check's: nobody has sent it.
    """

    def __init__(self, results: Results, pools: list[GroupPool], exchange: Exchange | None, *, backend: str) -> None:
        self._summary = results.summary
        self._request_table = results.request_table
        self._pools = pools
        self._exchange = exchange
        self._backend = backend

    def send(self, transfer: TransferEvent, changes: KvChanges) -> list[Finding]:
        """Judge slots that are sent, or were; `changes` are their bytes that changed, in place already."""
        key = (transfer.room, self._pools[transfer.group].group.name, transfer.start_position)
        if transfer.status == "failed":
            if self._exchange is not None:
                self._exchange.withdraw(key)
            return []
        if transfer.status == "end":
            self._summary.transfers_sent += 1
            changed = np.flatnonzero(np.isin(transfer.slots, changes.slots))
            return self._found("transfer_source_changed", transfer, changed, "changed while they were being sent")
        damaged = self._kv_hash_differs(transfer)
        if self._exchange is not None:
            self._exchange.send(key, self._parcel(transfer, damaged))
        what = "no longer held the bytes written when they were sent"
        return self._found("transfer_source_damaged", transfer, np.flatnonzero(damaged), what)

    def receive(self, transfer: TransferEvent) -> list[Finding]:
        """Judge slots whose bytes have landed; their records are the sender's, where its trace is replayed with this one."""
        self._summary.transfers_received += 1
        pool, slots = self._pools[transfer.group], transfer.slots
        key = (transfer.room, pool.group.name, transfer.start_position)
        parcel = None
        if self._exchange is not None and transfer.room >= 0:
            parcel = self._exchange.receive(key, len(slots))
        if parcel is None or transfer.unread or not _fits(parcel, pool):
            self._summary.transfers_unmatched += transfer.room >= 0  # without a room nobody has sent it
            pool.forget(slots)
            return []
        count = min(len(slots), len(parcel.slots))
        here = slots[:count]
        for mine, theirs in ((pool.pool.head, parcel.head), (pool.pool.tail, parcel.tail)):
            for half, records in mine.items():
                records[here] = theirs[half][:count]
        pool.learn(slots)
        streams = zip(_leading(pool.group.streams, pool), _leading(pool.pool.kv, pool), parcel.kv, strict=True)
        for stream, data, sent in streams:
            if stream.origin == SUBMITTED:  # nobody has seen them land: the model of this side has not handed them in
                data[here] = sent[:count]
        pool.pool.chain_starts[here] = parcel.chain_starts[:count]
        pool.any_unknown |= bool(parcel.chain_starts.any())
        if parcel.unknown.any():
            pool.forget(here[parcel.unknown[:count]])
        return self._compare(transfer, parcel, count)

    def _compare(self, transfer: TransferEvent, parcel: Parcel, count: int) -> list[Finding]:
        if count != len(transfer.slots) or count != len(parcel.slots):
            detail = f"received {len(transfer.slots)} slots where {parcel.trace} sent {len(parcel.slots)}"
            return [self._finding("transfer_differs", transfer, min(count, len(transfer.slots) - 1), detail)]
        differs = np.zeros(count, np.bool_)
        pool = self._pools[transfer.group]
        landed = zip(_leading(pool.group.streams, pool), parcel.kv, _leading(transfer.landed, pool), strict=True)
        for stream, theirs, mine in landed:
            if stream.origin != SUBMITTED:
                differs |= (theirs != mine).any(axis=1)
        wrong = np.flatnonzero(differs & ~parcel.unknown)
        what = f"hold other bytes than {parcel.trace} sent in event {parcel.event}, the first from its slot "
        what += f"{int(parcel.slots[wrong[0]])}: the transfer or the decode side went wrong" if len(wrong) else ""
        findings = self._found("transfer_differs", transfer, wrong, what)
        sent = f"when {parcel.trace} sent them in event {parcel.event}: the prefill side went wrong"
        what, damaged = f"held other bytes than were written there {sent}", np.flatnonzero(parcel.damaged)
        return findings + self._found("transfer_source_damaged", transfer, damaged, what)

    def _kv_hash_differs(self, transfer: TransferEvent) -> BoolArray:
        """Say for each slot sent, `[n] bool`, whether its bytes are not those that its TAIL record was written with."""
        pool, slots = self._pools[transfer.group], transfer.slots
        differs = np.zeros(len(slots), np.bool_)
        if pool.kv_hash_mode is KvHashMode.NONE:
            return differs
        for half, sources in pool.sources.items():
            now = np.empty(len(slots), np.int64)
            fold_kv(sources=sources, mode=pool.kv_hash_mode, slots=slots, out=now, backend=self._backend)
            differs |= pool.pool.tail[half][slots].view(np.int64)[:, _KV_HASH_WORD] != now
        written = pool.pool.writers[slots, 0] > 0
        return differs & written & ~pool.pool.unknown[slots] & (slots != 0)

    def _parcel(self, transfer: TransferEvent, damaged: BoolArray) -> Parcel:
        tier, slots = self._pools[transfer.group].pool, transfer.slots
        return Parcel(
            trace=Path(self._summary.trace).name,
            event=transfer.event,
            slots=slots,
            head={half: records[slots] for half, records in tier.head.items()},
            tail={half: records[slots] for half, records in tier.tail.items()},
            kv=[data[slots] for data in _leading(tier.kv, self._pools[transfer.group])],
            origins=_origins(self._pools[transfer.group]),
            unknown=tier.unknown[slots],
            chain_starts=tier.chain_starts[slots],
            damaged=damaged,
            pulled=transfer.pulled,
        )

    def _found(self, kind: str, transfer: TransferEvent, which: Int64Array, what: str) -> list[Finding]:
        if not len(which):
            return []
        return [self._finding(kind, transfer, int(which[0]), f"{len(which)} of {len(transfer.slots)} slots {what}")]

    def _finding(self, kind: str, transfer: TransferEvent, index: int, detail: str) -> Finding:
        place = {"position": transfer.start_position + index, "slot": int(transfer.slots[index])}
        place |= {"runner": self._pools[transfer.group].group.runner, "group": transfer.group}
        who = {"req_pool_idx": transfer.row, **of_request(self._request_table, transfer.request_id)}
        return event_finding(kind, transfer, f"room {transfer.room}: {detail}", **place, **who)


def _leading(of_streams: Sequence[_T], pool: GroupPool) -> list[_T]:
    """Return what there is of each stream but those that sample: which bytes they hold of a slot goes by its number."""
    return [one for one, stream in zip(of_streams, pool.group.streams, strict=True) if not stream.samples]


def _origins(pool: GroupPool) -> list[str]:
    return [stream.origin for stream in _leading(pool.group.streams, pool)]


def _fits(parcel: Parcel, pool: GroupPool) -> bool:
    """Say whether both sides captured the same: what a model submits may be other bytes than what its cache holds."""
    widths = [stream.capture_bytes for stream in _leading(pool.group.streams, pool)]
    same = set(parcel.tail) == set(pool.group.halves) and [data.shape[1] for data in parcel.kv] == widths
    return same and parcel.origins == _origins(pool)
