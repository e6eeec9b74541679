"""A fault as a value, and the bench on which it breaks a running engine.

A fault acts on the engine's state or replaces one of its decisions, as the real bug did. It never edits the trace or
what the recorder is given: it sees the broken engine as it would see a real one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...recorder.engines.simulated.engine import SimulatedEngine
from ...recorder.engines.simulated.pd_pair import PdPair
from ...recorder.engines.simulated.pools import PageAllocator
from ...recorder.engines.simulated.requests import Request
from .effect import Clock, Probe

MARK_NOTE: Final = "fault injected"


class Bench:
    """One engine under test, or a prefill/decode pair, and the moment from which its fault may happen.

    Attributes:
        engine: the running engine; of a pair the prefill side.
        pair: the pair, if it is one.
        random: draws the moment and whatever else a fault chooses.
        starts_at: how many forwards must have begun, on both sides, before the fault may happen.
        injected_at: number of the forward that came next when the fault happened first, -1 before.
        injections: how often it happened.
        label: what the first mark says.
    """

    def __init__(
        self,
        fault: str,
        engine: SimulatedEngine,
        probe: Probe,
        clock: Clock,
        random: np.random.Generator,
        *,
        starts_at: int,
        pair: PdPair | None = None,
    ) -> None:
        self.fault = fault
        self.engine = engine
        self.pair = pair
        self.random = random
        self.starts_at = starts_at
        self.injected_at = -1
        self.injections = 0
        self.label: dict[str, object] = {}
        self._clock = clock
        self._probe = probe
        self._acts: list[Callable[[], bool]] = []

    @property
    def started(self) -> bool:
        """Whether the moment has come."""
        return self._clock.now >= self.starts_at

    @property
    def due(self) -> bool:
        """Whether the moment has come, and the fault has not happened yet."""
        return self.started and not self.injections

    def inject(
        self,
        *,
        request: Request | None = None,
        row: int = -1,
        slot: int = -1,
        position: int = -1,
        group: int = -1,
        engine: SimulatedEngine | None = None,
        **labels: object,
    ) -> None:
        """Say in the trace, as ground truth, that the fault happens now; a systematic fault says so the first time.

        `engine` is the side that it happens on, where not `self.engine`; the mark's "forward" is the one that comes
        next there. Both traces of a pair get the mark.
        """
        self.injections += 1
        if self.injections > 1:
            return
        where = engine or self.engine
        self.injected_at = where.recorder.next_forward
        self.label = {
            "fault": self.fault,
            "side": where.config.role,
            "forward": self.injected_at,
            "request": request.name if request is not None else "",
            "row": request.row if request is not None and row < 0 else row,
            "slot": slot,
            "position": position,
            "group": group,
            **labels,
        }
        for side in [self.engine] if self.pair is None else [self.pair.prefill, self.pair.decode]:
            side.recorder.mark(MARK_NOTE, labels=self.label)

    def between_steps(self, act: Callable[[], bool]) -> None:
        """Call `act` after every step from the moment on, until it returns True."""
        self._acts.append(act)

    def stepped(self) -> None:
        """Let the fault act between two steps; the lab calls it."""
        if self.started:
            self._acts = [act for act in self._acts if not act()]

    def note_effect(self, kind: str, *, request: Request | None = None, slot: int = -1, group: int = -1) -> None:
        """Say that the fault has its effect now; for one that no forward can read."""
        self._probe.note(kind, request=request, slot=slot, group=group)

    def pick(self, candidates: Sequence[Any]) -> Any:
        """Return one of the candidates."""
        return candidates[int(self.random.integers(len(candidates)))]


def around(owner: object, name: str, call: Callable[..., Any]) -> None:
    """Put `call(original, *args, **kwargs)` in the place of a method of one object."""
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, replaced)


def unchecked(*allocators: PageAllocator) -> None:
    """Let allocators take back whatever they are given, as a real free list does."""
    for allocator in allocators:
        around(allocator, "check_free", lambda _check, _pages: None)


def unchecked_pools(engine: SimulatedEngine) -> None:
    """Let all of an engine's allocators take back whatever they are given."""
    unchecked(engine.memory.allocator)
    if engine.memory.swa is not None:
        unchecked(engine.memory.swa.pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of the lab; `fault` makes one of a function.

    Attributes:
        name: as the commands take it.
        summary: one sentence.
        reference: where it was seen: S sgl-project/sglang, V vllm-project/vllm, or whatever the name says.
        configs: names of the engine configurations in which its mechanism exists.
        arm: prepares a bench, so that the fault happens at its moment.
        benign: whether it is no fault, and nothing may be reported.
        family: the module that it stands in.
        warm_up: forwards `(first, last)` between which the moment is drawn.
    """

    name: str
    summary: str
    reference: str
    configs: tuple[str, ...]
    arm: Callable[[Bench], None]
    benign: bool = False
    family: str = ""
    warm_up: tuple[int, int] = (10, 50)


def fault(
    *, reference: str, configs: tuple[str, ...], benign: bool = False, warm_up: tuple[int, int] = (10, 50)
) -> Callable[[Callable[[Bench], None]], Fault]:
    """Make a `Fault` of the function below, which arms it: its name, and the first line of its docstring."""

    def made(arm: Callable[[Bench], None]) -> Fault:
        summary = (arm.__doc__ or "").partition("\n")[0].removesuffix(".")
        return Fault(
            name=arm.__name__,
            summary=summary[:1].lower() + summary[1:],
            reference=reference,
            configs=configs,
            arm=arm,
            benign=benign,
            family=arm.__module__.rpartition(".")[2],
            warm_up=warm_up,
        )

    return made
