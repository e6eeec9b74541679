"""A fault as a value, and the bench on which it breaks a running engine.

A fault acts on the engine's state or replaces one of its decisions, as the real bug did. It never edits the trace or
what the recorder is given: it sees the broken engine as it would see a real one.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from ...recorder.engines.simulated.batch import Batch
from ...recorder.engines.simulated.engine import SimulatedEngine
from ...recorder.engines.simulated.pd_pair import PdPair
from ...recorder.engines.simulated.pools import TARGET
from ...recorder.engines.simulated.requests import Request
from ...recorder.process.injection import MARK_NOTE
from .effect import Clock, Probe
from .effect import around as around  # which every fault needs

Act = Callable[..., bool | None]


@dataclass(eq=False)
class Bench:
    """One engine under test, or a prefill/decode pair, and the moment from which its fault may happen."""

    fault: str
    engine: SimulatedEngine  # of a pair the prefill side
    probe: Probe
    clock: Clock
    random: np.random.Generator  # draws the moment and whatever else a fault chooses
    _: KW_ONLY
    starts_at: int  # forwards that must have begun, on both sides, before the fault may happen
    pair: PdPair | None = None
    injected_at: int = -1  # number of the forward that came next when the fault happened first, -1 before
    injections: int = 0
    label: dict[str, object] = field(default_factory=dict)  # what the first mark says
    _acts: list[Callable[[], bool]] = field(default_factory=list)

    @property
    def started(self) -> bool:
        """Whether the moment has come."""
        return self.clock.now >= self.starts_at

    @property
    def due(self) -> bool:
        """Whether the moment has come, and the fault has not happened yet."""
        return self.started and not self.injections

    def inject(
        self,
        *,
        request: Request | None = None,
        slot: int = -1,
        position: int = -1,
        group: int = -1,
        engine: SimulatedEngine | None = None,
        **labels: object,
    ) -> None:
        """Say in the trace, of a pair in both, that the fault happens now; a systematic fault says so the first time."""
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
            "row": request.row if request is not None else -1,
            "slot": slot,
            "position": position,
            "group": group,
            **labels,
        }
        for side in [self.engine] if self.pair is None else [self.pair.prefill, self.pair.decode]:
            side.recorder.mark(MARK_NOTE, labels=self.label)

    def between_steps(self, candidates: Callable[[], Sequence[Any]] | None = None) -> Callable[[Act], Act]:
        """Call the function below, with one of `candidates()` if there are any, after each step until it returns no False."""

        def register(act: Act) -> Act:
            def tried() -> bool:
                if candidates is None:
                    return act() is not False
                found = candidates()
                return bool(found) and act(self.pick(found)) is not False

            self._acts.append(tried)
            return act

        return register

    def stepped(self) -> None:
        """Let the fault act between two steps; the lab calls it."""
        if self.started:
            self._acts = [act for act in self._acts if not act()]

    def attention_victim(
        self, modes: tuple[str, ...], *, behind: int, labels: Callable[[int], dict[str, object]]
    ) -> list[int]:
        """Return a list that holds the victim's place in the batch while the one forward runs that is to be broken.

        It is the target's, in one of `modes`, the victim's prefix longer than `behind`; `labels` makes the mark's labels of it.
        """

        def victim(batch: Batch, *_: Any) -> int | None:
            if not self.due or batch.runner != TARGET or batch.mode not in modes:
                return None
            found = np.flatnonzero(batch.prefix_lens[: len(batch.requests)] > behind).tolist()
            if not found:
                return None
            index: int = self.pick(found)
            self.inject(request=batch.requests[index], **labels(int(batch.prefix_lens[index])))  # type: ignore[arg-type]
            self.probe.note("attention", request=batch.requests[index])
            return index

        return while_inside(self.engine.runner, "run", victim)

    def pick(self, candidates: Sequence[Any]) -> Any:
        """Return one of the candidates."""
        return candidates[int(self.random.integers(len(candidates)))]


def while_inside(owner: object, name: str, enter: Callable[..., Any]) -> list[Any]:
    """Return a list that holds what `enter` made of a method's arguments while that method runs, unless it made None."""
    inside: list[Any] = []

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        entered = enter(*args, **kwargs)
        inside[:] = [] if entered is None else [entered]
        result = original(*args, **kwargs)
        inside.clear()
        return result

    around(owner, name)(call)
    return inside


def unchecked_pools(engine: SimulatedEngine) -> None:
    """Let all of an engine's allocators take back whatever they are given, as a real free list does."""
    swa = engine.memory.swa
    for allocator in [engine.memory.allocator, *([swa.pages] if swa is not None else [])]:
        around(allocator, "check_free")(lambda _check, _pages: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of the lab; `fault` makes one of a function."""

    name: str  # as the commands take it
    summary: str
    reference: str  # where it was seen: S sgl-project/sglang, V vllm-project/vllm, or whatever the name says
    configs: tuple[str, ...]  # the engine configurations in which its mechanism exists
    arm: Callable[[Bench], None]  # prepares a bench, so that the fault happens at its moment
    benign: bool = False  # it is no fault, and nothing may be reported
    family: str = ""  # the module that it stands in
    warm_up: tuple[int, int] = (10, 50)  # forwards between which the moment is drawn


def fault(
    *, reference: str, configs: tuple[str, ...], benign: bool = False, warm_up: tuple[int, int] = (10, 50)
) -> Callable[[Callable[[Bench], None]], Fault]:
    """Make a `Fault` of the function below, which arms it: its name, and the first line of its docstring."""

    def made(arm: Callable[[Bench], None]) -> Fault:
        summary = (arm.__doc__ or "").partition("\n")[0].removesuffix(".")
        name, family = arm.__name__, arm.__module__.rpartition(".")[2]
        said = {"reference": reference, "summary": summary[:1].lower() + summary[1:], "family": family}
        return Fault(name=name, configs=configs, arm=arm, benign=benign, warm_up=warm_up, **said)

    return made
