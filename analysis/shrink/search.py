"""Delta debugging over a trace: requests, then events, then requests of single forwards, for as long as there is time."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from ...recorder.trace.event import TraceEvent
from .cutting import Cutter
from .parts import ADDED_EVENT, NOBODY, Part, members_of
from .proof import Judge, Shown

# What can be left out of a whole trace at once: columns, and what the header then no longer speaks of.
_WITHOUT: Final[dict[str, tuple[tuple[str, ...], dict[str, Any]]]] = {
    "bytes": (("kv_", "value_"), {}),
    "truth": (("truth_",), {"truth_table": None}),
    "attention": (("attention_", "window_"), {}),
    "states": (("recurrent_",), {"states": ()}),
}

Some = TypeVar("Some")
Unit = tuple[int, int]  # an event's number in the whole trace, and a member of it


@dataclass(slots=True, kw_only=True)
class Search:
    """The smallest part so far that shows the incident; `try_without` makes it smaller, or leaves it as it is.

    `until` is when to stop, by `time.monotonic`; `told` is called after each trial.
    """

    judge: Judge
    best: Part
    shown: Shown
    until: float
    told: Callable[[str, "Search"], None] = lambda *_: None
    stopped: str = field(default="", init=False)

    def run(self) -> None:
        """Make the part smaller until nothing more can go, or the time is over, or Ctrl-C; `stopped` says which."""
        try:
            if self.best.header.oracle is not None:
                part = Part(replace(self.best.header, oracle=None), self.best.events, self.best.numbers)
                if (shown := self.judge.without_oracle(part)) is None:
                    return
                self.best, self.shown = part, shown
            for name in _WITHOUT:
                part = without(self.best, name)
                if part.size() < self.best.size():
                    self._offer(name, part)
            size = -1
            while size != len(self.units()):
                size = len(self.units())
                self._minimize("requests", lambda unit: unit[1])
                self._minimize("events", lambda unit: unit[0])
                self._minimize("entries", lambda unit: unit)
        except TimeoutError:
            self.stopped = "the time was over"
        except KeyboardInterrupt:
            self.stopped = "interrupted"

    def units(self) -> list[Unit]:
        """Return what could still be left out."""
        return list(units_of(self.best))

    def _minimize(self, what: str, together: Callable[[Unit], Any]) -> None:
        """Leave out as many units as can go, as `leave_out` does.

        Units that are the same to `together` go, or stay, together.
        """
        found: dict[Any, list[Unit]] = {}
        for unit in self.units():
            found.setdefault(together(unit), []).append(unit)
        leave_out(list(found.values()), lambda groups: self._offer(what, self._without_units(groups)))

    def _without_units(self, groups: Sequence[Sequence[Unit]]) -> Part:
        dropped = {unit for group in groups for unit in group}
        kept = [unit for unit in self.units() if unit not in dropped]
        requests = frozenset(member for _, member in kept)
        cutter = Cutter(self.best.header, lambda number, member, _: (number, member) not in dropped, requests)
        return cutter.cut(self.best.views())

    def _offer(self, what: str, part: Part) -> bool:
        """Take a smaller part if it shows the incident."""
        if time.monotonic() > self.until:
            raise TimeoutError
        if not part.events:
            return False
        shown = self.judge.shows(part)
        if shown is not None:
            self.best, self.shown = part, shown
        self.told(what, self)
        return shown is not None


def leave_out(groups: list[Some], drop: Callable[[Sequence[Some]], bool]) -> None:
    """Leave out halves, quarters and so on of what is left, as delta debugging does; single ones until none can go.

    `drop` tries it without some, and says whether they are gone, as `groups` then has it too.
    """
    size = max(1, len(groups) // 2)
    while groups:
        at, before = 0, len(groups)
        while at < len(groups):
            if drop(groups[at : at + size]):
                del groups[at : at + size]
            else:
                at += size
        if size == 1 and len(groups) == before:
            return
        size = max(1, size // 2)


def units_of(part: Part) -> Iterator[Unit]:
    """Yield an event's number and each member of it that may be left out."""
    for view, number in part.views():
        if number == ADDED_EVENT or view.kind in ("request", "loss"):
            continue
        yield from ((number, member) for member in (members_of(view) if view.kind != "sample" else [NOBODY]))


def without(part: Part, what: str) -> Part:
    """Return a part without its KV bytes, truth tokens, what attention got, or recurrent states."""
    prefixes, changes = _WITHOUT[what]
    header = replace(part.header, **changes)
    if what == "bytes":
        header = replace(header, groups=tuple(replace(group, streams=()) for group in header.groups))
    return Part(header, [_without(event, prefixes) for event in part.events], part.numbers)


def _without(event: TraceEvent, prefixes: tuple[str, ...]) -> TraceEvent:
    ints = {name: values for name, values in event.ints.items() if not name.startswith(prefixes)}
    data = {name: values for name, values in event.bytes.items() if not name.startswith(prefixes)}
    scalars = {name: value for name, value in event.scalars.items() if not name.startswith(prefixes)}
    return TraceEvent(kind=event.kind, time_ns=event.time_ns, scalars=scalars, ints=ints, bytes=data)
