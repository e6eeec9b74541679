"""The walk over a trace's batches: every whole one is given, everything else is reported as a gap."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from .batch import CUT, LIVE, TraceBatch, TraceGap
from .decode import BatchDecoder, DamagedBatchError, claimed_events
from .framing import PREFIX_BYTES, RECORD_BATCH, Frame, FramingError, find_frames, read_frame
from .header import TraceHeader
from .schema import MAX_SEARCHED
from .tail_reader import TailReader
from .trace_bytes import TraceBytes


@dataclass(kw_only=True)
class Walk:
    """One pass over the messages. A message that cannot be used goes to `_damage` until the next good batch (or the
    end) shows how many events are gone with it; the search for that batch goes over every byte behind the damage and
    trusts no length in it.
    """

    source: TraceBytes
    schema: pa.Schema
    header: TraceHeader
    name: str
    position: int
    limit: int
    listed: int | None  # batches, by a right footer
    tail: TailReader | None
    being_written: Callable[[], bool]
    since_closed: Callable[[], tuple[int, int] | None] | None = None  # batches and end by a footer that came meanwhile
    unchecked: Callable[[Frame], None] | None = None  # is given batches whose KV bytes are left in the file
    _given: int = 0
    _from_tail: int = 0
    _batches: int = 0
    _damage: list[str] = field(default_factory=list)
    _searched: int = 0  # bytes of messages that were tried behind damage; they may lie over one another
    _torn: bool = False

    def __post_init__(self) -> None:
        # Who follows a file beside an engine keeps to one core.
        self._decoder = BatchDecoder(
            self.source, self.schema, ahead=self.since_closed is None, unchecked=self.unchecked
        )
        self._closed = self.listed is not None
        self._scan = self.position  # behind the start of the last good batch, whose claimed end may be wrong
        self._expected = self.header.first_event
        segment = self.header.segment
        self._engine_events: int | None = 0 if segment is None else segment.engine_events

    def run(self) -> Iterator[TraceBatch | TraceGap | None]:
        """Yield batches and gaps, to the end of the file.

        With `since_closed` the walk follows a file that is being written: None says that all there is so far was given.
        """
        try:
            yield from self._run()
        finally:
            self._decoder.close()

    def _run(self) -> Iterator[TraceBatch | TraceGap | None]:
        while True:
            self._notice_a_cut()
            batch = None
            try:
                while self._has_nothing_yet():
                    yield None
                frame = self._decoder.frame(self.position, self.limit)
                if frame is not None:
                    batch = self._decode(frame)
                elif self._at_end(self.position):
                    break
                else:
                    self._note(f"batch {self._batches}: an end mark stands at byte {self.position}, too early")
            except FramingError as error:
                # A file that ends right behind a batch is torn too: its end-of-stream mark is missing.
                self._note(f"batch {self._batches}: {error}", torn=error.torn)
            if batch is None:
                self._batches += 1
                batch = self._resume()
            if batch is None:
                yield from self._give_tail()
                yield self._last_gap()
                return
            yield from self._give(batch)
            self.position = batch.end_byte
        if not self._closed:
            cause = "every event was read, but the footer is torn or damaged, so other Arrow readers refuse the file"
            yield self._gap(0, "torn", cause, recover=True)

    def _has_nothing_yet(self) -> bool:
        """Whether no whole message stands at the position of a file that is followed, and its writer is at work."""
        if self.since_closed is None or self._closed:
            return False
        live = self.being_written()  # asked first: the size then holds all that a writer wrote that has ended
        self.limit = max(self.limit, self.source.size())
        try:
            at_end_mark = read_frame(self.source, self.position, self.limit) is None
        except FramingError as error:
            return live and error.torn
        if at_end_mark and not live and (closed := self.since_closed()):
            self.listed, self.limit = closed
            self._closed = True
        return at_end_mark and live

    def header_gap(self, damage: str) -> TraceGap:
        """Return the gap that says that the beginning of the file is damaged, and that no event is missing for it."""
        return self._gap(0, "damaged", f"{damage}; no event is missing for it", recover=True)

    def _at_end(self, position: int) -> bool:
        """Whether an end mark is the true one: nothing but the footer follows."""
        if self._closed:
            return position + PREFIX_BYTES == self.limit
        return all(frame.kind != RECORD_BATCH for frame in find_frames(self.source, position + 8, self.limit))

    def _notice_a_cut(self) -> None:
        """A file that was cut short since it was opened ends where it ends now."""
        size = self.source.size()
        if size < self.limit:
            self.limit = size
            self._closed = False
            self._torn = self._torn or not self._damage

    def _decode(self, frame: Frame) -> TraceBatch | None:
        where = f"batch {self._batches}"
        if frame.kind != RECORD_BATCH:
            self._note(f"{where}: a message of kind {frame.kind} stands in its place")
            return None
        try:
            batch = self._decoder.batch(frame, self.limit)
        except DamagedBatchError as error:
            claim = claimed_events(frame)
            says = f" (it says events {claim[0]}-{claim[0] + claim[1] - 1})" if claim and claim[1] else ""
            self._note(f"{where} {error}{says}", torn=error.torn)
            return None
        self._scan = frame.start + PREFIX_BYTES
        return batch

    def _resume(self) -> TraceBatch | None:
        self._notice_a_cut()
        for frame in find_frames(self.source, self._scan, self.limit):
            if frame.kind != RECORD_BATCH or frame.start == self.position:
                continue
            claim = claimed_events(frame)
            if claim is None or not claim[1] or claim[0] < self._expected:
                continue
            self._searched += frame.end - frame.start
            if self._searched > MAX_SEARCHED * self.source.held_bytes():
                self._note(f"the search for the next whole batch was given up at byte {frame.start}")
                return None
            batch = self._decode(frame)
            if batch is not None:
                return batch
            self._batches += 1
        return None

    def _give(self, batch: TraceBatch) -> Iterator[TraceBatch | TraceGap]:
        number = self._batches
        self._batches += 1
        if batch.num_events == 0:
            yield self._gap(0, "numbering", f"batch {number} holds no events, which no recorder writes")
            return
        missing = batch.first_event - self._expected
        begins = f"batch {number} begins with event {batch.first_event}, expected {self._expected}"
        if missing < 0:
            cause = f"{begins}: its {batch.num_events} events are given twice or out of order and are left out"
            yield self._gap(0, "numbering", cause)
            return
        if missing or self._damage:
            kind = "damaged" if self._damage else "numbering"
            cause = self._take_damage() or begins
            lost = "no event is missing" if not missing else f"{_events(self._expected, missing)} left out"
            yield self._gap(missing, kind, f"{cause}; {lost}", recover=True)
        self._expected = batch.first_event + batch.num_events
        self._engine_events = batch.engine_events
        self._given += 1
        yield batch

    def _give_tail(self) -> Iterator[TraceBatch | TraceGap]:
        """Yield what the recording process had not flushed, from the tail that it left."""
        if self._closed or self.being_written():
            self.tail = None
        if self.tail is None or self._engine_events is None:
            return
        for item in self.tail.batches(self._engine_events, self._expected, self.schema):
            yield item
            if isinstance(item, TraceBatch):
                self._expected = item.first_event + item.num_events
                self._from_tail += item.num_events

    def _last_gap(self) -> TraceGap:
        if self._torn and not self._closed:
            self._damage.clear()
            return self._end_of_a_torn_file()
        cause = self._take_damage()
        if self._given == self.listed:  # only the end mark, or a length in the last batch
            return self._gap(0, "damaged", f"{cause}; no event is missing", recover=True)
        return self._gap(None, "damaged", f"{cause}; events from {self._expected} on are left out", recover=True)

    def _end_of_a_torn_file(self) -> TraceGap:
        before = self._expected - self.header.first_event
        if self.being_written():
            cause = f"it is being written; the {before} events that are in it so far were read"
            return self._gap(None, "torn", cause, ends=LIVE)
        if self.tail is not None and self.tail.whole:
            cause = (
                f"the recording was cut behind its {before} events: the recording process was killed or crashed; all that "
                f"it had recorded was read, {self._from_tail} events of it from what it had not written into the trace yet"
            )
            return self._gap(0, "torn", cause, ends=CUT)
        kept = f"the {before} events before it were read" if before else "no event was flushed before"
        cause = f"torn at byte {self.limit}: the recording process was killed or the file was cut; {kept}, how many are lost is unknown"
        return self._gap(None, "torn", cause, recover=True, ends=CUT)

    def _note(self, text: str, *, torn: bool = False) -> None:
        self._torn = torn and not self._damage
        self._damage.append(text)

    def _take_damage(self) -> str:
        cause = "; ".join(self._damage[:3])
        if len(self._damage) > 3:
            cause += f"; and {len(self._damage) - 3} more"
        self._damage.clear()
        return cause

    def _gap(self, missing: int | None, kind: str, cause: str, *, recover: bool = False, ends: str = "") -> TraceGap:
        return TraceGap(
            after_event=self._expected - 1,
            missing_events=missing,
            kind=kind,
            cause=f"{self.name}: {cause}",
            advice=f"run kvcanary recover {shlex.quote(self.name)}" if recover else "",
            ends=ends,
        )


def _events(first: int, count: int) -> str:
    return f"event {first}" if count == 1 else f"events {first}-{first + count - 1}"
