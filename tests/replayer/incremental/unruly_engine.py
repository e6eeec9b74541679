"""A random engine that mostly does what an engine does, and now and then anything at all: histories for two replays to agree on.

Requests come, are chunked, decoded, drafted, retracted and resumed, share prefixes and leave; meanwhile table entries,
full-to-SWA entries, truth tokens and KV bytes move behind the forwards' backs, slots are given out and freed whether
held or not, copies, transfers, sweeps and losses pass by, rows repeat, and numbers are out of range. `fuss` is how
often anything of that happens.
"""

from pathlib import Path

import numpy as np
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.schema import SLOT_HISTORIES
from kvcanary.recorder.writing.writer import TraceWriter

from .asides import Asides, Request
from .shapes import ROWS, SLOTS, WIDTH, header


class UnrulyEngine(Asides):
    """Yields one event after another of a random history; the same seed gives the same history."""

    def event(self) -> TraceEvent:
        """Return what happens next."""
        if not self.queue:
            self.queue.append(self._next())
        return self.queue.pop(0)

    def _next(self) -> TraceEvent:
        draw = self.rng.random()
        if draw < 0.12:
            return self._admit() or self._forward()
        if draw < 0.12 + 0.25 * self.fuss:
            makers = (self._slots, self._slots, self._status, self._copy, self._transfer, self._sweep, self._sample,
                      self._loss, self._idle, self._nothing)  # fmt: skip
            return makers[int(self.rng.integers(len(makers)))]()
        if draw < 0.2 + 0.25 * self.fuss:
            return self._leave() or self._forward()
        return self._forward()

    def _admit(self) -> TraceEvent | None:
        rows = [row for row in range(1, ROWS) if row not in self.running]
        if not rows:
            return None
        row = self._one(*rows)
        old = self.gone.pop() if self.gone and self.rng.random() < 0.4 else None
        request = old or Request(self.next_id, self._ints(0, 5, int(self.rng.integers(1, 14))).tolist())
        request.slots, request.done, request.drafted = [], 0, 0
        self.next_id += 1
        others = [other for other in self.running.values() if other.done]
        if others and self.rng.random() < 0.6:  # a prefix that somebody computed
            other = others[int(self.rng.integers(len(others)))]
            shared = int(self.rng.integers(1, other.done + 1))
            request.tokens = other.tokens[:shared] + request.tokens[shared:] + [1]
            request.slots, request.done, request.drafted = other.slots[:shared], shared, min(shared, other.drafted)
        self.running[row] = request
        self.untold.add(row)
        if request.slots:
            status = "shared" if self.rng.random() < 0.8 else "cached"
            return self._all_groups("alloc", request.slots, status=status, request_id=request.request_id, row=row)
        return TraceEvent(
            kind="status",
            scalars={"status": "admitted", "request_id": request.request_id},
            ints={"req_pool_indices": np.array([row])},
        )

    def _leave(self) -> TraceEvent | None:
        if not self.running:
            return None
        row = self._one(*self.running)
        request = self.running.pop(row)
        self.untold.discard(row)
        held = set().union(*(other.slots for other in self.running.values())) if self.running else set()
        slots = [slot for slot in request.slots if slot not in held]
        self.free.extend(slots)
        self.gone.append(request)
        return self._all_groups("free", slots, request_id=request.request_id, row=row)

    def _find_halves(self, given: list[int]) -> None:
        """Give each full slot an SWA slot that no other has; what nobody reads any more gives its own back."""
        for index, lut in enumerate(self.luts):
            group = next(n for n, group in enumerate(self.header.groups) if group.lut == index)
            slots = self.header.groups[group].num_slots
            used = {slot for request in self.running.values() for slot in request.slots[max(0, request.done - 12) :]}
            idle = [full for full in np.flatnonzero(lut).tolist() if full not in used]
            if np.count_nonzero(lut) > slots // 2 and idle:
                self.queue.append(
                    self._slot_event("free", [s for s in lut[idle].tolist() if 0 < s < slots], group=group)
                )
                lut[idle] = 0
                self.moved += [(index, full, 0) for full in idle]
            for full in given:
                if full < len(lut) and (not lut[full] or self._fussy(0.1)):
                    empty = np.setdiff1d(np.arange(1, slots), lut)
                    lut[full] = self._one(*empty) if len(empty) else 0
                    self.moved.append((index, full, int(lut[full])))

    def _forward(self) -> TraceEvent:
        rng, runner = self.rng, 0
        if len(self.header.runners) > 1 and rng.random() < 0.3:
            runner = 1
        batch = []
        for row, request in self.running.items():
            done = request.drafted if runner else request.done
            left = (request.done if runner else len(request.tokens)) - done
            if left > 0 and rng.random() < 0.8:
                batch.append([row, request, done, int(rng.integers(1, left + 1)) if rng.random() < 0.5 else left])
        rng.shuffle(batch)
        ids, positions, slots, tables, truths = [], [], [], [], []
        rows, request_ids, prefix, extend, truth_lens, sampled = [], [], [], [], [], []
        given: list[int] = []
        for row, request, done, count in batch:
            count = min(count, len(self.free), WIDTH - done)
            for position in range(done, done + count):
                if not runner and position >= len(request.slots):
                    request.slots.append(self.free.pop(int(rng.integers(len(self.free)))))
                    given.append(request.slots[-1])
                slots.append(request.slots[position])
                token = position + runner
                ids.append(request.tokens[token] if token < len(request.tokens) else 0)
                positions.append(position)
            if given:
                self._find_halves(given)
                self.queue.append(self._all_groups("alloc", given, request_id=request.request_id, row=row))
                given = []
            if done and (row in self.untold or rng.random() < 0.05):
                tables += [(n, row, 0, request.slots[:done]) for n in range(len(self.header.tables))]
            if self.header.truth_table is not None:
                width = self.header.truth_table.width
                new = row in self.untold or done == 0
                truths += [(row, p, token) for p, token in enumerate(request.tokens[:width]) if new or p >= done]
            self.untold.discard(row)
            rows.append(row)
            request_ids.append(request.request_id)
            prefix.append(done)
            extend.append(count)
            truth_lens.append(len(request.tokens))
            ends = not runner and done + count == len(request.tokens)
            sampled.append(int(ends and len(request.tokens) < WIDTH - 1))
        event = TraceEvent(
            kind="forward",
            time_ns=1000 * self.number,
            scalars={"forward": self.number, "runner": runner, "mode": self._mode()},
        )
        self.number += 1
        tokens = rng.integers(0, 5, sum(sampled))
        event.ints |= {
            "req_pool_indices": np.array(rows, np.int64),
            "request_ids": np.array(request_ids, np.int64),
            "prefix_lens": np.array(prefix, np.int64),
            "extend_lens": np.array(extend, np.int64),
            "truth_lens": np.array(truth_lens if self.header.truth_table is not None else [], np.int64),
            "sampled_lens": np.array(sampled, np.int64),
            "sampled_tokens": tokens,
            "input_ids": np.array(ids, np.int64),
            "positions": np.array(positions, np.int64),
        }
        at = 0
        for (_, request, done, _), count, more in zip(batch, extend, sampled, strict=True):
            if runner:
                request.drafted = done + count
            else:
                request.done = done + count
                if more:
                    request.tokens.append(int(tokens[at]))
                    at += 1
                if self._fussy(0.1) and request.done > 1:  # rejected drafts: it goes on from before
                    request.done -= 1
                    request.drafted = min(request.drafted, request.done)
        self._disturb(event)
        padding = int(rng.integers(0, 3)) if rng.random() < 0.3 else 0
        live = [slot for request in self.running.values() for slot in request.slots] or [0]
        for _ in range(padding):
            slots.append(self._one(*live) if self._fussy(0.3) else self._one(0, -1))
        event.ints["input_ids"] = np.append(event.ints["input_ids"], np.zeros(padding, np.int64))
        event.ints["positions"] = np.append(event.ints["positions"], np.zeros(padding, np.int64))
        if padding and rng.random() < 0.5:
            for name in ("req_pool_indices", "prefix_lens", "extend_lens"):
                event.ints[name] = np.append(event.ints[name], int(name == "extend_lens"))
            event.ints["request_ids"] = np.append(event.ints["request_ids"], -1)
            for name in ("truth_lens", "sampled_lens"):
                if len(event.ints[name]) or name == "sampled_lens":
                    event.ints[name] = np.append(event.ints[name], 0)
        if slots and self._fussy(0.2):
            slots[int(rng.integers(len(slots)))] = self._one(*live, SLOTS + 1, -1, 0)
        loc = np.array(slots, np.int64)
        event.ints["out_cache_loc"] = np.concatenate([loc] * len(self.header.tables))
        self._table_changes(event, tables)
        self._truth_changes(event, truths)
        self._lut_changes(event)
        self._kv_changes(event, runner)
        widths = sum(stream.capture_bytes for _, stream in self.header.streams(runner))
        event.bytes["kv_bytes"] = self._bytes(widths * len(slots))
        self.queue.append(event)
        return self.queue.pop(0)

    def _mode(self) -> str:
        return ("extend", "decode", "mixed", "target_verify", "draft_extend")[int(self.rng.integers(5))]

    def _disturb(self, event: TraceEvent) -> None:
        """Make the batch one that no scheduler would run."""
        bs = len(event.ints["req_pool_indices"])
        if not bs:
            return
        r = int(self.rng.integers(bs))
        if self._fussy(0.1):
            event.ints["request_ids"][r] = self._one(-1, 100, 101)
        if self._fussy(0.1):
            event.ints["req_pool_indices"][r] = self._one(0, -1, ROWS, *range(1, ROWS))
        if self._fussy(0.15):
            event.ints["prefix_lens"][r] = self._one(-3, 0, 1, WIDTH, WIDTH + 9, 1 << 61, int(self.rng.integers(WIDTH)))
        if self._fussy(0.1) and len(event.ints["positions"]):
            event.ints["positions"][int(self.rng.integers(len(event.ints["positions"])))] += 1
        if self._fussy(0.1) and len(event.ints["input_ids"]):
            event.ints["input_ids"][int(self.rng.integers(len(event.ints["input_ids"])))] += 1
        lens = event.ints["truth_lens"]
        if self._fussy(0.2):
            event.ints["truth_lens"] = np.zeros(0, np.int64)
        elif self._fussy(0.3) and len(lens):
            lens[r] = self._one(-5, 0, 1, int(lens[r]) - 2, WIDTH + 3, 1 << 62, (1 << 63) - 1)
        if event.ints["req_pool_indices"][r] == 0:  # takes no tokens: what is left of them is padding
            event.ints["sampled_tokens"] = event.ints["sampled_tokens"][:0]
            event.ints["sampled_lens"] = event.ints["sampled_lens"][:0]


EVENTS = 130
FUSS = (0.0, 0.05, 0.2, 0.5, 1.0)


def write(path: Path, seed: int, shape: str) -> float:
    """Write a history; return how much was disturbed."""
    rng = np.random.default_rng([seed, 5])
    made = header(shape, told=SLOT_HISTORIES[seed % 3], truth=rng.random() < 0.85, oracle=rng.random() < 0.2)
    fuss = FUSS[int(rng.integers(len(FUSS)))]
    engine = UnrulyEngine(made, seed=seed, fuss=fuss)
    with TraceWriter(path, made) as writer:
        for _ in range(EVENTS):
            event = engine.event()
            assert writer.append(event), event.problem()
    return fuss
