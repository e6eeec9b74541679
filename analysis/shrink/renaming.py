"""What is left of a trace under new names: requests, tokens, bytes and slots that say nothing of what was run."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.capture.host_arrays import runs_to_slots
from ...recorder.capture.privacy import Privacy, with_privacy
from ...recorder.trace.event import TraceEvent
from ...recorder.trace.header import PoolGroup, TraceHeader
from ...recorder.trace.schema import TIER_HOST
from .parts import Part

_TOKENS: Final = ("input_ids", "sampled_tokens", "truth_tokens")
_HASHES: Final = ("identity_hash", "recurrent_before", "recurrent_after")
_HASHES_IN_HALVES: Final = ("copy_src_hash", "copy_dst_hash", "copy_before_hash")
_DIGEST_BYTES: Final = 16
_LOW: Final = (1 << 32) - 1
_HOST: Final = 1 << 20  # the spaces of host slots stand behind those of the pools


@dataclass(slots=True)
class Names:
    """New names, given in the order in which they are asked for; `salt` is forgotten with this object."""

    header: TraceHeader
    requests: dict[int, int] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)
    salt: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    pages: dict[int, Int64Array] = field(default_factory=dict)  # by space, the new page of each

    def request(self, request_id: int) -> int:
        """Return the new id of a request; that of nobody stays."""
        return request_id if request_id < 0 else self.requests.setdefault(request_id, len(self.requests) + 1)

    def request_ids(self, ids: Int64Array) -> Int64Array:
        """Return new ids, `[n] int64`."""
        return np.array([self.request(one) for one in ids.tolist()], np.int64)

    def hashes(self, values: Int64Array) -> Int64Array:
        """Return salted 64-bit hashes of hashes; 0, which stands for none, stays."""
        return np.array([self._hash(value) if value else 0 for value in values.tolist()], np.int64)

    def halves(self, values: Int64Array) -> Int64Array:
        """Return hashes of which each 32-bit half is that of its own half: the lower one says something by itself."""
        low, high = self.hashes(values & _LOW), self.hashes(values >> 32 & _LOW)
        return low & _LOW | high << 32

    def _hash(self, value: int) -> int:
        digest = hashlib.blake2b(value.to_bytes(8, "little", signed=True), digest_size=8, key=self.salt).digest()
        return int.from_bytes(digest, "little", signed=True) or 1

    # --- slots

    def space(self, group: int) -> int:
        """Return the space in which a pool group's slots are numbered: its block table's, or one behind a full-to-SWA table."""
        known = self.header.groups[group]
        return known.table if known.lut < 0 else len(self.header.tables) + known.lut

    def of_tier(self, group: int) -> int:
        """Return the space of a pool group's slots, or of the host's, which stand behind those."""
        return group if group >= _HOST else self.space(group)

    def page_size(self, space: int) -> int:
        """Return how many neighbouring slots keep together in a space."""
        sizes = [known.page_size for known in self._groups_of(space)]
        return int(np.lcm.reduce(sizes)) if sizes else 1

    def _groups_of(self, space: int) -> list[PoolGroup]:
        return [known for g, known in enumerate(self.header.groups) if space in (self.space(g), _HOST + g)]

    def size(self, space: int) -> int:
        """Return how many slots there are in a space."""
        groups = self.header.groups
        if space >= _HOST:
            return groups[space - _HOST].host_num_slots
        return max([known.num_slots for g, known in enumerate(groups) if self.space(g) == space], default=0)

    def slots(self, space: int, slots: Int64Array) -> Int64Array:
        """Return new slots; a slot that no pool has stays."""
        if space not in self.pages:
            return slots
        size, pages = self.page_size(space), self.pages[space]
        inside = (slots >= 0) & (slots // size < len(pages))
        return np.where(inside, pages[np.where(inside, slots // size, 0)] * size + slots % size, slots)

    def compact(self, used: dict[int, list[Int64Array]]) -> None:
        """Give used pages numbers from 0 on, page 0, which has the padding slot, its own; `used` by space."""
        for space, parts in used.items():
            slots, size = np.unique(np.concatenate([np.zeros(1, np.int64), *parts])), self.page_size(space)
            sampled = any(stream.samples for known in self._groups_of(space) for stream in known.streams)
            if slots[-1] >= self.size(space) or sampled:
                continue  # a slot that no pool has is told from others by the pool's size, a sampled one's bytes by its number
            pages = np.unique(slots[slots >= 0] // size)
            self.pages[space] = np.zeros(-(-self.size(space) // size), np.int64)
            self.pages[space][pages] = np.arange(len(pages))

    def sizes(self) -> TraceHeader:
        """Return the header with pools that hold the used pages alone."""
        groups = []
        for g, known in enumerate(self.header.groups):
            found: dict[str, Any] = {}
            for name, space in (("num_slots", self.space(g)), ("host_num_slots", _HOST + g)):
                if space in self.pages and getattr(known, name):
                    found[name] = (int(self.pages[space].max()) + 1) * self.page_size(space)
            groups.append(replace(known, **found))
        luts = []
        for lut, length in enumerate(self.header.lut_lens):
            table = next((known.table for known in self.header.groups if known.lut == lut), -1)
            pages = self.pages.get(table)
            luts.append(length if pages is None else (int(pages.max()) + 1) * self.page_size(table))
        return replace(self.header, groups=tuple(groups), lut_lens=tuple(luts))


def renamed(part: Part, *, slots: bool) -> tuple[Part, Names]:
    """Return a part under new names, and these; without `slots` the slots keep their numbers."""
    names = Names(part.header)
    privacy = Privacy(names.salt)
    if slots:
        used: dict[int, list[Int64Array]] = {}

        def note(space: int, slots: Int64Array) -> Int64Array:
            used.setdefault(space, []).append(slots)
            return slots

        for event in part.events:
            _slots_of(TraceEvent(kind=event.kind, scalars=event.scalars, ints=dict(event.ints)), names, note)
        names.compact(used)
    events = [_renamed(event, names, privacy) for event in part.events]
    header = with_privacy(replace(names.sizes(), notes=()), privacy)
    groups = []
    for group in header.groups:
        streams = [replace(stream, capture_bytes=_DIGEST_BYTES) for stream in group.streams]
        groups.append(replace(group, streams=tuple(streams)))
    return Part(
        replace(header, groups=tuple(groups), run_id="", trace_id="", segment=None), events, part.numbers
    ), names


def _renamed(event: TraceEvent, names: Names, privacy: Privacy) -> TraceEvent:
    scalars, ints = dict(event.scalars), dict(event.ints)
    found = TraceEvent(kind=event.kind, time_ns=event.time_ns, scalars=scalars, ints=ints, bytes=dict(event.bytes))
    if "request_id" in scalars:
        scalars["request_id"] = names.request(int(scalars["request_id"]))
    if scalars.get("name"):
        scalars["name"] = f"R{scalars['request_id']}"
    if scalars.get("peer"):
        scalars["peer"] = names.peers.setdefault(str(scalars["peer"]), f"peer-{len(names.peers) + 1}")
    if "request_ids" in ints:
        ints["request_ids"] = names.request_ids(ints["request_ids"])
    privacy.hash_kv(found, names.header)
    _first_digests(found, names.header)
    ints.pop("sampled_logprobs", None)  # they give tokens away
    ints.update({name: privacy.hash_tokens(ints[name]) for name in _TOKENS if name in ints})
    ints.update({name: names.hashes(ints[name]) for name in _HASHES if name in ints})
    ints.update({name: names.halves(ints[name]) for name in _HASHES_IN_HALVES if name in ints})
    return _slots_of(found, names, names.slots)


def _first_digests(event: TraceEvent, header: TraceHeader) -> None:
    """Keep of each row of bytes one digest; the others repeat it."""
    runner = int(event.scalars.get("runner", 0))
    widths = np.array([stream.capture_bytes for _, stream in header.streams(runner)], np.int64)
    if event.kind == "transfer" and "kv_bytes" in event.bytes:
        group = header.groups[int(event.ints["slot_group"][0])]
        rows = np.repeat([s.capture_bytes for s in group.streams], int(event.ints["slot_count"].sum()))
    else:
        rows = np.repeat(widths, len(event.ints.get("input_ids", ())))
    for name in ("kv_bytes", "kv_submitted_bytes"):
        if name in event.bytes:
            event.bytes[name] = _leading(event.bytes[name], rows)
    if "kv_change_bytes" in event.bytes:
        event.bytes["kv_change_bytes"] = _leading(
            event.bytes["kv_change_bytes"], widths[event.ints["kv_change_stream"]]
        )


def _leading(data: Any, widths: Int64Array) -> Any:
    starts = np.cumsum(widths) - widths
    return data[(starts[:, None] + np.arange(_DIGEST_BYTES)).reshape(-1)]


def _slots_of(event: TraceEvent, names: Names, change: Callable[[int, Int64Array], Int64Array]) -> TraceEvent:
    """Put in place of each slot that an event names what `change` makes of it, by its space; return the event."""
    header, ints = names.header, event.ints
    tables = len(header.tables)

    def by(owners: Int64Array, values: Int64Array, space: Callable[[int], int]) -> Int64Array:
        found = values.copy()
        for owner in np.unique(owners).tolist():
            found[owners == owner] = change(space(owner), values[owners == owner])
        return found

    if "out_cache_loc" in ints:
        parts = ints["out_cache_loc"].reshape(tables, -1)
        ints["out_cache_loc"] = np.concatenate([change(t, part) for t, part in enumerate(parts)])
    if "table_slots" in ints:
        owners = np.repeat(ints["table_index"], ints["table_count"])
        ints["table_slots"] = by(owners, ints["table_slots"], int)
    if "lut_slots" in ints:
        table = {known.lut: known.table for known in header.groups if known.lut >= 0}
        full = _begins(ints["lut_index"], ints["lut_start"], ints["lut_count"], by, lambda lut: table.get(lut, 0))
        owners = np.repeat(ints["lut_index"], ints["lut_count"])
        ints["lut_start"], ints["lut_slots"] = full, by(owners, ints["lut_slots"], lambda lut: tables + lut)
    if "kv_change_slot" in ints:
        runner = int(event.scalars.get("runner", 0))
        groups = np.array([group for group, _ in header.streams(runner)], np.int64)[ints["kv_change_stream"]]
        ints["kv_change_slot"] = by(groups, ints["kv_change_slot"], names.space)
    if "attention_slots" in ints:
        owners = np.repeat(ints["attention_group"], ints["attention_count"])
        ints["attention_slots"] = by(owners, ints["attention_slots"], names.space)
    for name in ("sweep_slot", "sweep_prev"):
        if name in ints:
            ints[name] = by(ints["sweep_group"], ints[name], names.space)
    if "slot_group" in ints:
        ints["slot_start"] = _begins(ints["slot_group"], ints["slot_start"], ints["slot_count"], by, names.space)
    for side in ("src", "dst") if "copy_group" in ints else ():
        spaces = np.where(ints[f"copy_{side}_tier"] == TIER_HOST, _HOST, 0) + ints["copy_group"]
        ints[f"copy_{side}"] = _begins(spaces, ints[f"copy_{side}"], ints["copy_count"], by, names.of_tier)
    if "copy_landed" in ints:
        spaces = np.where(ints["copy_dst_tier"] == TIER_HOST, _HOST, 0) + ints["copy_group"]
        ints["copy_landed"] = by(spaces, ints["copy_landed"], names.of_tier)
    return event


def _begins(
    owners: Int64Array, starts: Int64Array, counts: Int64Array, by: Any, space: Callable[[int], int]
) -> Int64Array:
    """Return where runs of slots begin under new names: used pages keep their order, so that runs stay runs."""
    counts = np.maximum(counts, 0)
    slots = by(np.repeat(owners, counts), runs_to_slots(starts, counts), space)
    found = starts.copy()
    found[counts > 0] = slots[(np.cumsum(counts) - counts)[counts > 0]]
    return found
