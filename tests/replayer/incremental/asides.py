"""What happens beside the forwards of a random engine, true or not, and what changes behind their backs."""

from dataclasses import dataclass, field

import numpy as np
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import TraceHeader

from .shapes import HOST, ROWS, SLOTS


@dataclass
class Request:
    """A request that runs, or ran."""

    request_id: int
    tokens: list[int]
    done: int = 0
    drafted: int = 0
    slots: list[int] = field(default_factory=list)


class Asides:
    """The state of a random engine; `fuss` is how often it does what no engine should."""

    def __init__(self, made: TraceHeader, *, seed: int, fuss: float) -> None:
        self.header, self.fuss = made, fuss
        self.rng = np.random.default_rng(seed)
        self.running: dict[int, Request] = {}
        self.gone: list[Request] = []
        self.free = list(range(1, SLOTS - 4))
        self.cached: list[int] = []
        self.luts = [np.zeros(n, np.int64) for n in made.lut_lens]
        self.next_id, self.number = 100, 0
        self.untold: set[int] = set()  # rows whose shared prefix no forward has told of
        self.queue: list[TraceEvent] = []
        self.moved: list[tuple[int, int, int]] = []  # full-to-SWA entries that no forward has told of

    def _fussy(self, rate: float = 0.3) -> bool:
        return bool(self.rng.random() < self.fuss * rate)

    def _ints(self, low: int, high: int, count: int) -> np.ndarray:
        return self.rng.integers(low, high, count)

    def _one(self, *values: int) -> int:
        return int(self.rng.choice(np.array(values, np.int64)))

    def _all_groups(self, kind: str, slots: list[int], **scalars: int | str) -> TraceEvent:
        """Return the event that tells of full slots, and of the SWA slots that they lead to."""
        parts = []
        for index, group in enumerate(self.header.groups):
            lut = self.luts[group.lut] if group.lut >= 0 else None
            for slot in slots:
                mine = slot if lut is None else int(lut[slot]) if slot < len(lut) else 0
                if 0 < mine < group.num_slots:
                    parts.append((index, mine))
        event = self._slot_event(kind, [slot for _, slot in parts], **scalars)
        event.ints["slot_group"] = np.array([index for index, _ in parts], np.int64)
        return event

    def _slot_event(self, kind: str, slots: list[int], *, group: int = 0, **scalars: int | str) -> TraceEvent:
        row = scalars.pop("row", -1)
        starts = np.array(slots, np.int64)
        return TraceEvent(
            kind=kind,
            scalars=scalars,
            ints={
                "slot_group": np.full(len(starts), group, np.int64),
                "slot_start": starts,
                "slot_count": np.ones(len(starts), np.int64),
                "req_pool_indices": np.array([row] if row != -1 else [], np.int64),
            },
        )

    def _slots(self) -> TraceEvent:
        kind = ("alloc", "alloc", "free", "evict")[int(self.rng.integers(4))]
        group = int(self.rng.integers(len(self.header.groups)))
        known = [slot for request in self.running.values() for slot in request.slots] or [1]
        slots = [self._one(*known) if self.rng.random() < 0.7 else self._one(*range(1, SLOTS - 20)) for _ in range(3)]
        slots = [min(slot, SLOTS - 21) for slot in slots]
        if self._fussy(0.1):
            slots.append(self._one(0, SLOTS + 9, -1))  # contradicts the pools: everything is forgotten
        ids = [-1, *(request.request_id for request in self.running.values())]
        status = ("", "", "shared", "cached")[int(self.rng.integers(4))] if kind == "alloc" else ""
        return self._slot_event(kind, slots, group=group, status=status, request_id=self._one(*ids))

    def _status(self) -> TraceEvent:
        row = int(self.rng.integers(0, ROWS + 1))
        ids = [3, *(request.request_id for request in self.running.values())]
        status = ("admitted", "retracted", "finished", "aborted")[int(self.rng.integers(4))]
        return TraceEvent(
            kind="status",
            scalars={"status": status, "request_id": self._one(*ids)},
            ints={"req_pool_indices": np.array([row])},
        )

    def _copy(self) -> TraceEvent:
        tiers, count = self._ints(0, 2, 2), int(self.rng.integers(0, 5))
        ends = [(SLOTS, HOST)[tier] - count + 1 for tier in tiers]
        values = {
            "group": 0, "src_tier": tiers[0], "dst_tier": tiers[1], "count": count,
            "src": self.rng.integers(0, ends[0]), "dst": self.rng.integers(0, ends[1]),
        }  # fmt: skip
        return TraceEvent(kind="kv_copy", ints={f"copy_{name}": np.array([value]) for name, value in values.items()})

    def _transfer(self) -> TraceEvent:
        slots = sorted(set(self._ints(1, SLOTS - 20, 3).tolist()))
        status = ("start", "end", "failed")[int(self.rng.integers(3))]
        direction = ("send", "receive")[int(self.rng.integers(2))]
        event = self._slot_event("transfer", slots, status=status, mode=direction, room=self._one(1, 2))
        event.ints["prefix_lens"] = np.array([0])
        if status == "end" and direction == "receive":
            width = sum(stream.capture_bytes for stream in self.header.groups[0].streams)
            event.bytes["kv_bytes"] = self._bytes(width * len(slots))
        return event

    def _sweep(self) -> TraceEvent:
        slots = self._ints(0, SLOTS + 2 if self._fussy(0.1) else SLOTS, 6)
        event = TraceEvent(
            kind="sweep",
            scalars={"forward": self.number},
            ints={
                "sweep_group": np.zeros(6, np.int64),
                "sweep_slot": slots,
                "sweep_position": np.arange(6),
                "sweep_prev": np.append(-1, slots[:-1]),
                "sweep_locked": np.zeros(6, np.int64),
            },
        )
        self._kv_changes(event, 0, rate=0.9)
        return event

    def _sample(self) -> TraceEvent:
        late = self.number - int(self.rng.integers(0, 3)) if self._fussy(0.1) else 1 << 40
        return TraceEvent(kind="sample", scalars={"forward": late})

    def _loss(self) -> TraceEvent:
        if self.rng.random() < 0.15:
            return TraceEvent(kind="loss", scalars={"lost_events": 2})
        event = self._slot_event("loss", self._ints(0, SLOTS - 20, 3).tolist(), status="slots_listed", lost_events=1)
        event.ints["slot_count"] = self._ints(0, 4, 3)
        if self._fussy(0.2):
            event.ints["slot_count"][0] = 1 << 40
        return event

    def _idle(self) -> TraceEvent:
        """Changes that come with no forward."""
        event = TraceEvent(kind="mark")
        self._table_changes(event)
        self._truth_changes(event)
        self._lut_changes(event)
        return event

    def _nothing(self) -> TraceEvent:
        if self.rng.random() < 0.2:
            return TraceEvent(kind="keyframe")
        return TraceEvent(kind="request", scalars={"request_id": self._one(*range(99, 110)), "name": "r"})

    def _bytes(self, count: int) -> np.ndarray:
        return np.repeat(self._ints(0, 4 if self.fuss > 0.3 else 250, count // 16), 16).astype(np.uint8)

    def _kv_changes(self, event: TraceEvent, runner: int, rate: float = 0.3) -> None:
        streams = self.header.streams(runner)
        if not streams or not self._fussy(rate):
            return
        known = [slot for request in self.running.values() for slot in request.slots[: request.done]] or [1]
        changes = self._ints(0, len(streams), int(self.rng.integers(1, 3)))
        limits = [self.header.groups[streams[one][0]].num_slots for one in changes]
        event.ints |= {
            "kv_change_stream": changes,
            "kv_change_slot": np.array([min(self._one(*known), limit - 1) for limit in limits]),
            "kv_change_phase": self._ints(0, 2, len(changes)),
        }
        event.bytes["kv_change_bytes"] = self._bytes(sum(streams[one][1].capture_bytes for one in changes))

    def _table_changes(self, event: TraceEvent, runs: list[tuple[int, int, int, list[int]]] | None = None) -> None:
        runs = list(runs or [])
        if self._fussy():
            known = [slot for request in self.running.values() for slot in request.slots] or [1]
            for _ in range(int(self.rng.integers(1, 3))):
                start, count = int(self.rng.integers(0, 12)), int(self.rng.integers(0, 4))
                pick = [self._one(*known) if self.rng.random() < 0.8 else self._one(-2, 0, SLOTS - 2, SLOTS + 5)
                        for _ in range(count)]  # fmt: skip
                runs.append((self._one(*range(len(self.header.tables))), int(self.rng.integers(0, ROWS)), start, pick))
            if self._fussy(0.03):
                runs.append((0, ROWS, 0, [1]))  # a row that there is not: everything is forgotten
        event.ints |= {
            "table_index": np.array([run[0] for run in runs], np.int64),
            "table_row": np.array([run[1] for run in runs], np.int64),
            "table_start": np.array([run[2] for run in runs], np.int64),
            "table_count": np.array([len(run[3]) for run in runs], np.int64),
            "table_slots": np.array([slot for run in runs for slot in run[3]], np.int64),
        }

    def _truth_changes(self, event: TraceEvent, runs: list[tuple[int, int, int]] | None = None) -> None:
        runs = list(runs or [])
        if self._fussy(0.2) and self.header.truth_table is not None:
            runs += [(self._one(*range(ROWS)), self._one(*range(12)), self._one(*range(5)))]
        if self.header.truth_table is not None:
            event.ints |= {
                "truth_row": np.array([run[0] for run in runs], np.int64),
                "truth_start": np.array([run[1] for run in runs], np.int64),
                "truth_count": np.ones(len(runs), np.int64),
                "truth_tokens": np.array([run[2] for run in runs], np.int64),
            }

    def _lut_changes(self, event: TraceEvent) -> None:
        runs, self.moved = self.moved, []
        for index, lut in enumerate(self.luts):
            if self._fussy():
                live = [s for request in self.running.values() for s in request.slots[: request.done][-6:]] or [1]
                full = min(self._one(*live), len(lut) - 1)
                other = int(lut[min(self._one(*live), len(lut) - 1)])
                lut[full] = self._one(0, other, other, other, -1, SLOTS - 20, SLOTS + 3)
                runs.append((index, full, int(lut[full])))
        event.ints |= {
            "lut_index": np.array([run[0] for run in runs], np.int64),
            "lut_start": np.array([run[1] for run in runs], np.int64),
            "lut_count": np.ones(len(runs), np.int64),
            "lut_slots": np.array([run[2] for run in runs], np.int64),
        }
