"""One walk over one trace, which records facts that do not depend on slots, chunks or batches."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array
from ...recorder.state.forward import Forward, UnusableEventError, read_forward
from ...recorder.state.tables import StateTables
from ...recorder.state.writes import KvChanges
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView, TraceGap
from ...recorder.trace.schema import PHASE_AFTER, PHASE_BEFORE, SLOTS_LISTED
from ...replayer.run.streams import SegmentStream
from .comparability import ComparisonPlan
from .facts import DRAFT, GUESS, SETTLED, Sinks, WrittenTokens
from .identities import UNKNOWN_IDENTITY, Identities
from .names import NEVER, PADDED, UNKNOWN, Reading, SlotNames, through, token_words
from .observed import Observed
from .slot_traffic import SlotTraffic

PENDING_FORWARDS: Final = 1024  # forwards whose sampled tokens may still come
NO_ROUND: Final = -1
_STATES: Final = {
    int(NEVER): "never written",
    int(PADDED): "written by padding",
    int(UNKNOWN): "received for somebody else",
}
LOST_ROUND: Final = -2  # of guesses that a loss left without a beginning: compared with nothing


@dataclass(slots=True, kw_only=True)
class TraceTotals:
    """What is known of a trace as a whole after its walk."""

    forwards: int = 0
    tokens: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    complete: bool = False
    late_samples: bool = False
    assumed: int = 0
    windows_seen: bool = False
    doubts: list[str] = field(default_factory=list)
    first_ns: int = 0
    last_ns: int = 0

    def to_json(self) -> dict[str, int | float | bool]:
        """Return plain JSON values."""
        counts = {"forwards": self.forwards, "tokens": self.tokens, "complete": self.complete}
        return {**counts, "assumed_slots": self.assumed, "seconds": (self.last_ns - self.first_ns) / 1e9}


class TraceWalk:
    """Walks one trace. Memory: the tables, some 33 bytes a slot, a batch of events, a line a request not ended."""

    def __init__(self, header: TraceHeader, plan: ComparisonPlan, side: int, sinks: Sinks) -> None:
        self.summary = TraceTotals()
        self._header = header
        self._groups = plan.groups[side]
        self._sinks = sinks
        self._kv = plan.kv
        self._tables = StateTables(header, backend="cpu")
        pools = [header.groups[group.index] for group in self._groups]
        tables = [header.tables[pool.table] for pool in pools]
        sizes = [(p.num_slots, p.host_num_slots, t.rows, t.width) for p, t in zip(pools, tables, strict=True)]
        self._names = [SlotNames(*size) for size in sizes]
        self._traffic = SlotTraffic(header, self._groups, self._names, sinks, kv=plan.kv, sends=plan.hand_over)
        self._observed = Observed(header, self._groups, plan.states[side], sinks)
        self._identities = Identities(sinks, self._names, others=plan.same_engine)
        self._on = {
            "request": self._request,
            "status": self._status,
            "sample": self._sample,
            "loss": self._loss,
            "sweep": self._traffic.sweep,
            "transfer": self._traffic.transfer,
            "kv_copy": self._traffic.kv_copy,
        }
        self._continues = False  # the last event says that a segment follows
        self._losses = 0
        self._written = [0] * len(header.runners)  # tokens, by runner
        self._forgot = False  # truth tokens below 0 are those that a loss took away
        # Tokens of the prompt, of requests that have not ended; -2 once it is recorded.
        self._prompts: dict[int, int] = {}
        self._settled: dict[tuple[int, int], int] = {}  # (runner, row): where guessing begins
        self._unsampled: OrderedDict[int, tuple[Int64Array, Int64Array]] = OrderedDict()

    def walk(self, files: Sequence[Path], on_batch: Callable[[int], None]) -> None:
        """Record the facts of a recording's files; `on_batch` gets the bytes read."""
        segments = SegmentStream(files)
        for item in segments.stream():
            if isinstance(item, TraceGap):
                self.summary.doubts.append(item.cause)
                if item.missing_events != 0:
                    self._losses += 1
                    self._forget()
                continue
            for view in item:
                self._event(view)
            on_batch(segments.bytes_done + item.end_byte)
        if self._continues:
            self.summary.doubts.append(
                f"{files[-1].name}: the recording goes on in a segment that is not here; compare whole recordings"
            )
        self.summary.complete = segments.complete
        self.summary.assumed = sum(names.assumed for names in self._names)

    def _event(self, view: EventView) -> None:
        summary = self.summary
        self._continues = view.kind == "segment"
        summary.first_ns = summary.first_ns or view.time_ns
        summary.last_ns = max(summary.last_ns, view.time_ns)
        try:
            if view.kind == "forward":
                self._forward(view)
            else:
                self._tables.apply_changes(view)
                if view.kind in self._on:
                    self._on[view.kind](view)
        except UnusableEventError as error:
            summary.doubts.append(f"event {view.number} ({view.kind}) contradicts itself: {error}; left out")
            self._losses += 1
            self._forget()

    def _forget(self) -> None:
        self._forgot = True
        self._tables.forget()
        self._identities.forget()
        self._settled.clear()
        for names in self._names:
            names.forget()

    # --- forwards

    def _forward(self, view: EventView) -> None:
        self._tables.apply_changes(view)
        forward = read_forward(view, self._header)
        changes = KvChanges(view, self._header, forward.runner)
        self._traffic.changes(changes, view, PHASE_BEFORE, forward.runner)
        summary = self.summary
        summary.forwards += 1
        summary.modes[forward.mode] = summary.modes.get(forward.mode, 0) + 1
        extend = np.where(forward.req_pool_indices == 0, 0, np.maximum(forward.extend_lens, 0))
        self._observed.forward(forward, extend, self._written[forward.runner])
        if any(self._header.groups[group.index].runner == forward.runner for group in self._groups):
            sliding = sum(g.runner == forward.runner and g.window > 0 for g in self._header.groups)
            windows_seen = 0 < sliding <= int(view.scalar("window_watched"))
            summary.windows_seen |= windows_seen
            self._follow(forward, extend, windows_seen=windows_seen)
        summary.tokens += int(extend.sum())
        self._written[forward.runner] += int(extend.sum())
        self._traffic.changes(changes, view, PHASE_AFTER, forward.runner)
        self._tables.apply_forward(forward)
        if forward.runner == 0:
            self._samples_of(forward, extend)

    def _follow(self, forward: Forward, extend: Int64Array, *, windows_seen: bool) -> None:
        height = min(table.shape[0] for table in self._tables.req_to_token)
        width = min(table.shape[1] for table in self._tables.req_to_token)
        rows, ids = forward.req_pool_indices, forward.request_ids
        # Only what a block table can hold is followed; a row outside of it is a finding of the replay.
        usable = (rows > 0) & (rows < height) & (ids != -1) & (forward.prefix_lens + extend <= width) & (extend > 0)
        usable &= forward.prefix_lens >= 0
        token_of = np.repeat(usable, extend)
        chosen = np.flatnonzero(token_of)
        real = int(extend.sum())
        who = np.flatnonzero(usable)
        rows, ids, prefix, extend = rows[who], ids[who], forward.prefix_lens[who], extend[who]
        tokens, fed = forward.input_ids[chosen], forward.positions[chosen]
        request = np.repeat(np.arange(len(who)), extend)
        position = np.repeat(prefix - (np.cumsum(extend) - extend), extend) + np.arange(len(chosen))
        words = token_words(tokens, fed)
        drafting = forward.runner != 0 and forward.mode == "decode"
        upto = self._rounds(forward, rows, prefix, extend, drafting)
        self._prompt_hashes(forward, ids)
        guess = np.full(len(chosen), DRAFT if drafting else SETTLED, np.int64)
        if forward.mode == "target_verify":
            guess[position > prefix[request]] = GUESS
        numbers = self._identities.of(forward)[who]
        self._follow_identities(forward, rows, ids, prefix, extend, numbers)
        tokens_of = WrittenTokens(chosen=chosen, ids=ids[request], position=position, guess=guess)
        reads, misreads = np.zeros((2, len(chosen)), np.uint64)
        unsure = np.zeros(len(chosen), np.bool_)
        for k, group in enumerate(self._groups):
            pool = self._header.groups[group.index]
            if pool.runner != forward.runner:
                continue
            names, table = self._names[k], self._tables.req_to_token[pool.table]
            lut = self._tables.luts[pool.lut] if pool.lut >= 0 else None
            self._learn(names, forward, who, table, lut, group.window or 0)
            written = through(lut, forward.out_cache_loc[pool.table], -1)
            reading = names.read(
                rows,
                ids,
                prefix,
                extend,
                words,
                table=table,
                lut=lut,
                window=group.window,
                upto=upto if drafting else None,
                written=None if pool.reads_before_write else written[chosen],
            )
            factor = np.uint64(2 * k + 3)
            reads = reads * factor + reading.reads
            misreads = misreads * factor + reading.misreads
            unsure |= reading.unsure
            names.write(written[chosen], reading.names, ids[request], position, numbers[request])
            names.spoil(written[real:], PADDED)
            self._note_misreads(forward, group.index, names, ids, reading)
            names.wrote(rows, prefix, extend, reading.names)
            if self._kv and group.streams:
                self._written_bytes(k, forward, written, tokens_of)
            self._observed.wrote(k, forward, written, tokens_of)
        event, number = forward.event, forward.forward
        where = (ids[request], forward.runner, position, event, number, guess)
        rounds = upto[request] if drafting else np.full(len(chosen), NO_ROUND, np.int64)
        self._sinks.add("tokens", *where, rounds, tokens, fed, reads, misreads, unsure)
        seen = self._losses, int(windows_seen), self._written[forward.runner]
        self._sinks.add("batches", ids, forward.runner, event, number, forward.mode, prefix, extend, *seen)

    def _follow_identities(
        self,
        forward: Forward,
        rows: Int64Array,
        ids: Int64Array,
        prefix: Int64Array,
        extend: Int64Array,
        numbers: Int64Array,
    ) -> None:
        """Follow what positions of the target are computed with; those that were there before, by the slots that lead there."""
        places = [k for k, group in enumerate(self._groups) if self._header.groups[group.index].runner == 0]
        if forward.runner or not places:
            return
        k = min(places, key=lambda place: self._groups[place].window > 0)  # a full group, where there is one
        pool = self._header.groups[self._groups[k].index]
        table, lut = self._tables.req_to_token[pool.table], self._tables.luts[pool.lut] if pool.lut >= 0 else None
        writers = self._names[k].writers[0]

        def cached(r: int, start: int, stop: int) -> Int64Array:
            slots = through(lut, table[rows[r], start:stop].astype(np.int64), 0)
            inside = (slots > 0) & (slots < len(writers))
            if pool.window:
                inside &= np.arange(start, stop) >= prefix[r] - pool.window
            return np.where(inside, writers[np.where(inside, slots, 0), 2], UNKNOWN_IDENTITY)

        ends = prefix + (1 if forward.mode == "target_verify" else extend)
        self._identities.follow(ids, prefix, ends, numbers, cached)

    def _rounds(
        self, forward: Forward, rows: Int64Array, prefix: Int64Array, extend: Int64Array, drafting: bool
    ) -> Int64Array:
        """Return where each request's guessing began, `[bs]`: behind what its runner computed last for good."""
        ends = (prefix + extend).tolist()
        if not drafting:
            for row, end in zip(rows.tolist(), ends, strict=True):
                self._settled[forward.runner, row] = end
            return prefix
        unknown = LOST_ROUND if self._losses else NO_ROUND
        found = [self._settled.get((forward.runner, row), unknown) for row in rows.tolist()]
        return np.array(found, np.int64)

    def _learn(
        self,
        names: SlotNames,
        forward: Forward,
        who: Int64Array,
        table: npt.NDArray[np.int32],
        lut: Int64Array | None,
        window: int,
    ) -> None:
        """Name what each row should lead to, where a request begins with more than it has computed on that row."""
        offset = self._header.runners[forward.runner].token_offset
        for r in who.tolist():
            row, prefix = int(forward.req_pool_indices[r]), int(forward.prefix_lens[r])
            names.admit(row, int(forward.request_ids[r]))
            if names.own_len[row] >= prefix:
                continue
            tokens = self._truth(forward, r, offset)
            if tokens is not None:
                unknown = np.flatnonzero(tokens[:prefix] < 0)  # what a loss took away
                names.expect(row, tokens[: unknown[0]] if len(unknown) else tokens, prefix)
            start = max(int(names.own_len[row]), prefix - window if window else 0)
            if start < prefix:
                names.trust(row, through(lut, table[row, start:prefix].astype(np.int64), 0), start)

    def _truth(self, forward: Forward, r: int, offset: int = 0) -> Int64Array | None:
        """Return the truth tokens of a forward's request from `offset` on, None if they are not known."""
        truth, lens, row = self._tables.truth, forward.truth_lens, int(forward.req_pool_indices[r])
        if truth is None or lens is None or row >= len(truth):
            return None
        return truth[row, offset : min(int(lens[r]), truth.shape[1])].astype(np.int64)

    def _prompt_hashes(self, forward: Forward, ids: Int64Array) -> None:
        if forward.runner != 0:
            return
        by_id = dict(zip(forward.request_ids.tolist(), range(len(forward.request_ids)), strict=True))
        for request_id in ids.tolist():
            length = self._prompts.get(request_id, -1)
            if length == -2:
                continue
            r = by_id[request_id]
            tokens = self._truth(forward, r)
            if tokens is None and int(forward.prefix_lens[r]) == 0 and length >= 0:  # fed at once, or as far as it was
                first = int(np.maximum(forward.extend_lens[:r], 0).sum())
                tokens = forward.input_ids[first : first + int(forward.extend_lens[r])]
            tokens = np.empty(0, np.int64) if tokens is None else tokens
            if length < 0:
                length = len(tokens)
            lost = self._forgot and bool((tokens[: max(0, length)] < 0).any())
            if 0 < length <= len(tokens) and not lost:
                words = token_words(tokens[:length], np.arange(length, dtype=np.int64))
                self._sinks.add("prompts", [request_id], words.sum(dtype=np.uint64, keepdims=True), forward.event)
                self._prompts[request_id] = -2

    def _note_misreads(self, forward: Forward, group: int, names: SlotNames, ids: Int64Array, reading: Reading) -> None:
        for r in np.flatnonzero(reading.wrong >= 0).tolist():
            slot = int(reading.wrong_slot[r])
            inside = 0 <= slot < len(names.names)
            writer, at = names.writers[0][slot, :2].tolist() if inside else (-1, -1)
            state = "outside of the pool" if not inside else _STATES.get(int(names.names[slot]), "")
            where = ([int(ids[r])], forward.runner, forward.event, group, int(reading.wrong[r]), slot)
            self._sinks.add("misreads", *where, writer, at, state)

    def _written_bytes(self, k: int, forward: Forward, written: Int64Array, tokens: WrittenTokens) -> None:
        group, stored = self._groups[k], written[tokens.chosen] > 0
        which = tokens.chosen[stored]
        parts = [forward.kv_bytes[s][which, :w] for s, w in zip(group.streams, group.capture_bytes, strict=True)]
        content = np.concatenate(parts, axis=1)
        where = (tokens.ids[stored], k, tokens.position[stored], forward.event, forward.forward, tokens.guess[stored])
        self._sinks.add("kv", *where, content)
        self._traffic.wrote(k, written[which], content)

    # --- samples

    def _samples_of(self, forward: Forward, extend: Int64Array) -> None:
        begin = forward.prefix_lens + (1 if forward.mode == "target_verify" else extend)
        if len(forward.sampled_tokens):
            sampled = forward.sampled_lens, forward.sampled_tokens
            self._take_samples(forward.request_ids, begin, *sampled, forward.event, forward.forward)
            return
        self._unsampled[forward.forward] = (forward.request_ids, begin)
        while len(self._unsampled) > PENDING_FORWARDS:
            self._unsampled.popitem(last=False)

    def _take_samples(
        self, ids: Int64Array, begin: Int64Array, lens: Int64Array, tokens: Int64Array, event: int, number: int
    ) -> None:
        at = np.repeat(begin - (np.cumsum(lens) - lens), lens) + np.arange(len(tokens))
        real = np.repeat(ids != -1, lens)
        self._sinks.add("samples", np.repeat(ids, lens)[real], at[real], event, number, tokens[real])

    def _sample(self, view: EventView) -> None:
        self.summary.late_samples = True
        number = int(view.scalar("forward"))
        known = self._unsampled.pop(number, None)
        lens, tokens = view.ints("sampled_lens"), view.ints("sampled_tokens")
        if known is None or len(known[0]) != len(lens) or bool((lens < 0).any()) or int(lens.sum()) != len(tokens):
            return
        self._take_samples(*known, lens, tokens, view.number, number)

    # --- what happens between forwards

    def _request(self, view: EventView) -> None:
        request_id, length = int(view.scalar("request_id")), int(view.scalar("prompt_len"))
        self._prompts.setdefault(request_id, length)
        self._identities.request(view)
        name, room = str(view.scalar("name")), int(view.scalar("room"))
        self._sinks.add("requests", [request_id], [name], room, length, view.number)

    def _status(self, view: EventView) -> None:
        request_id, status = int(view.scalar("request_id")), str(view.scalar("status"))
        self._sinks.add("statuses", [request_id], view.number, status, self._losses)
        if status in ("finished", "aborted"):
            self._identities.ended(request_id)
            self._prompts.pop(request_id, None)

    def _loss(self, view: EventView) -> None:
        lost = int(view.scalar("lost_events"))
        self._losses += 1
        self._settled.clear()  # what came after may have been settled, too
        self._identities.forget()
        self.summary.doubts.append(str(view.scalar("note")) or f"{lost} events lost while recording")
        if view.scalar("status") == SLOTS_LISTED:
            self._traffic.lost(view)
            for names in self._names:
                names.own_len.fill(0)  # a row's last guesses may have been rejected since
        else:
            self._forget()
            self._tables.apply_changes(view)
