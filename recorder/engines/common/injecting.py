"""Faults put into a running engine on purpose: what `kvcanary inject` asks for, once, with its ground truth in the trace.

Nothing here runs unless `kvcanary inject` asked for it. A fault damages what the engine computes, and so what it answers.
"""

import logging
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.ops.hash.kv_source import KvSource
from ...capture.forward_input import CopiedForward, ForwardInput
from ...capture.host_arrays import own_int64
from ...capture.recorder import Recorder
from ...process.injection import MARK_NOTE, SEEN_BY, Injection

logger = logging.getLogger("kvcanary")

Undo = Callable[[], None]


def put_entry(table: Any, place: Any, value: int) -> Undo:
    """Change an entry of a table; return what puts it back."""
    held = int(table[place])
    table[place] = value
    return lambda: operator.setitem(table, place, held)


@contextmanager
def undone(undo: Undo | None) -> Iterator[Undo]:
    """Give what puts an entry back, or does nothing; done at once if what stands inside raises."""
    undo = undo or (lambda: None)
    try:
        yield undo
    except BaseException:
        undo()
        raise


class Injector:
    """Waits for the moment of one fault, draws its place, and leaves its mark. `recorder` is whose forwards are counted."""

    def __init__(self, injection: Injection, recorder: Any) -> None:
        self.fault = injection.fault
        self.done = False
        self.first_forward: int | None = None  # of the step that samples, if that is several; None: the last one begun
        self._injection = injection
        self._recorder = recorder
        self._random = random.Random(injection.seed)  # noqa: S311  # draws a place
        logger.warning("kvcanary: ON PURPOSE, %s will be injected: outputs will be wrong", injection)

    def due(self, forward: int) -> bool:
        """Say whether a forward may have the fault."""
        return not self.done and forward >= self._injection.at

    def wants(self, name: str) -> bool:
        """Say whether a request may have it."""
        return self._injection.request in ("", name)

    def pick(self, candidates: Sequence[Any]) -> Any:
        """Return one of the candidates."""
        return candidates[self._random.randrange(len(candidates))]

    def mark(self, forward: int, request_ids: Sequence[int], **labels: Any) -> None:
        """Say in the trace that the fault happens now: in `forward`, to these requests."""
        self.done = True
        labels |= {key: self._recorder.shown_name(labels[key]) for key in ("request", "other") if key in labels}
        said = {"fault": self.fault, "forward": forward, "request_ids": list(request_ids), **labels}
        logger.warning("kvcanary: ON PURPOSE, injected: %s", said)
        self._recorder.mark(MARK_NOTE, {**said, "seen_by": list(SEEN_BY[self.fault]), "seed": self._injection.seed})

    def swap(self, names: Sequence[str], request_ids: Sequence[int], tokens: Int64Array) -> None:
        """Swap two requests' sampled tokens in place, if it is time and there are two that differ; `[n]` all."""
        last = int(self._recorder.next_forward) - 1
        forward = last if self.first_forward is None else self.first_forward
        if self.fault != "next_token_swap" or not self.due(last):
            return
        rows = range(len(names))
        pairs = [(a, b) for a in rows if self.wants(names[a]) for b in rows if tokens[a] != tokens[b]]
        if pairs:
            a, b = self.pick(pairs)
            tokens[[a, b]] = tokens[[b, a]]
            self.mark(forward, [request_ids[a], request_ids[b]], request=names[a], other=names[b])

    def redirects(self) -> bool:
        """Say whether the next forward may have an entry that points elsewhere."""
        return self.fault == "req_to_token" and self.due(int(self._recorder.next_forward))

    def redirect(
        self,
        names: Sequence[str],
        request_ids: Sequence[int],
        cells: Sequence[tuple[int, int, int]],
        size: int,
        point: Callable[[int, int, int], Undo],
        group: int = 0,
    ) -> Undo | None:
        """Let one entry of a block table point elsewhere; return what puts it back, None if nothing was done.

        `cells` are `(request in the batch, column, block)` of all that the forward reads and does not write, `size` the slots
        of a block; `point(request, column, block)` changes the engine's own table.
        """
        forward = int(self._recorder.next_forward)
        # Another block of another column: what lies there cannot be the same tokens at the same positions.
        at = {(column, block) for _, column, block in cells}
        mine = [cell for cell in cells if self.wants(names[cell[0]])]
        self._random.shuffle(mine)
        for request, column, block in mine:
            others = sorted({b for c, b in at if c != column and b not in (0, block) and (column, b) not in at})
            if others:
                wrong = self.pick(others)
                place = {"position": column * size, "slot": wrong * size, "count": size, "group": group}
                self.mark(forward, [request_ids[request]], request=names[request], instead_of=block * size, **place)
                return point(request, column, wrong)
        return None


class InjectingRecorder(Recorder):
    """A recorder that flips a byte of the engine's KV at the moment that its injector waits for."""

    def __init__(self, *args: Any, injection: Injection, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.injector = Injector(injection, self)
        self._names: dict[int, str] = {}  # of the requests that may have the fault, until it has happened
        self._last: CopiedForward | None = None

    def request(self, *, request_id: int, name: str = "", **said: Any) -> None:
        """As `Recorder.request`; a fault may be for this request."""
        if not self.injector.done and self.injector.wants(name):
            self._names[request_id] = name
        super().request(request_id=request_id, name=name, **said)

    def before_forward(self, given: ForwardInput) -> None:
        """As `Recorder.before_forward`; before it a byte of what the last one wrote may be flipped, then one that is read."""
        last, self._last = self._last, None
        if last is not None and self._now_due("kv_post_forward", last.number):
            # Behind that forward, of a request that goes on: what nobody reads again nobody can find.
            live = np.isin(last.request_ids, own_int64(given.request_ids)) & (last.runner == given.runner)
            rows = np.repeat(np.where(live, last.rows, 0), last.new_lens)
            written = [slots[: rows.size] for slots in last.out_cache_loc]
            self._flip_one(last, self.next_forward, written, [rows] * len(written), but=())
        super().before_forward(given)
        forward = self._pending
        if forward is not None and self._now_due("kv_used", forward.number):
            read = [runs.values for runs in forward.reads]
            places = [np.repeat(runs.rows, runs.counts) for runs in forward.reads]
            self._flip_one(forward, forward.number, read, places, but=forward.written)

    def after_forward(self, **what: Any) -> None:
        """As `Recorder.after_forward`; what it has written may be damaged when the next one begins."""
        self._last = self._pending
        super().after_forward(**what)

    def sweep(self, *, groups: Any, slots: Any, locked: Any, **what: Any) -> None:
        """As `Recorder.sweep`; before it a byte of a slot that the prefix cache alone holds may be flipped."""
        if self._now_due("kv_unused_cache", self.next_forward - 1):
            unlocked, of = ~np.asarray(locked, np.bool_), np.broadcast_to(groups, np.shape(slots))
            mine = [n for n in np.unique(of).tolist() if self._stored(n)]
            free = np.asarray(slots)[unlocked & np.isin(of, mine[:1])]
            free = free[free > 0]
            if len(free) and mine:
                self._flip(self.next_forward - 1, mine[0], int(self.injector.pick(free.tolist())), (), "")
        super().sweep(groups=groups, slots=slots, locked=locked, **what)

    def _now_due(self, fault: str, forward: int) -> bool:
        return self.injector.fault == fault and not self._off and self.injector.due(forward)

    def _stored(self, group: int) -> list[int]:
        """Return the streams of a group whose bytes lie in the pool and can be flipped; none of a group behind a table."""
        kv = self.kv[group]
        streams = enumerate(zip(kv.group.streams, kv.sources, strict=True))
        mine = [n for n, (stream, source) in streams if stream.origin == "stored" and isinstance(source, KvSource)]
        return mine if kv.group.lut < 0 else []

    def _flip_one(
        self, forward: CopiedForward, number: int, slots: Sequence[Int64Array], rows: Sequence[Int64Array], but: Any
    ) -> None:
        """Flip a byte of one of `slots`, by table `[n]`, which belong to `rows` `[n]`, leaving out those of `but`."""
        ids = dict(zip(forward.rows.tolist(), forward.request_ids.tolist(), strict=True))
        out = {slot for written in but for slot in written.tolist()}
        for group, kv in enumerate(self.kv):
            if kv.group.runner != forward.runner or not self._stored(group):
                continue
            found = zip(rows[kv.group.table].tolist(), slots[kv.group.table].tolist(), strict=True)
            named = [(row, slot) for row, slot in found if slot > 0 and slot not in out]
            wanted = [(row, slot) for row, slot in named if row and ids[row] in self._names]
            if wanted:
                row, slot = self.injector.pick(wanted)
                self._flip(number, group, slot, (ids[row],), self._names[ids[row]])
                return

    def _flip(self, forward: int, group: int, slot: int, request_ids: Sequence[int], name: str) -> None:
        stream = self._stored(group)[0]
        kv, source = self.kv[group], self.kv[group].sources[stream]
        if not isinstance(source, KvSource):  # `_stored` leaves them out
            return
        row, offset = divmod(slot - kv.group.slot_shift, source.page_size)
        half, layer = kv.group.streams[stream].half, kv.group.streams[stream].layer
        place = {"slot": slot, "count": 1, "group": group, "half": half, "layer": layer}
        self.injector.mark(forward, request_ids, request=name, **place)
        source.tensor[row, offset * source.bytes_per_token] ^= 0xFF


def injector_of(recorder: Any, injection: Injection | None) -> Injector | None:
    """Return a recorder's injector; None without a fault to inject, and of one that records beside the device."""
    found: Injector | None = None if injection is None else getattr(recorder, "injector", None)
    return found


def check_injector(recorder: Any, injection: Injection | None) -> None:
    """Say in the log that a fault was asked for which this recorder cannot inject."""
    if injection is not None and injector_of(recorder, injection) is None:
        logger.error(
            "kvcanary: %s is not injected: faults are injected on the CPU alone; run the engine there", injection
        )


def recorder_class(injection: Injection | None) -> Callable[..., Recorder]:
    """Return what makes a recorder: of an engine into which a fault is injected, one that can flip bytes."""
    if injection is None:
        return Recorder
    return lambda *args, **kwargs: InjectingRecorder(*args, injection=injection, **kwargs)
