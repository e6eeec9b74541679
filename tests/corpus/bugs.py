"""What a bug of the corpus is, and how its patch says when the engine reads the damage."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLANTED = "planted"  # by engine: what the rules were written with, and a file for each round of what was held out
# Called by a patch right before the first forward that reads the damage; says it once.
Fired = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A public bug, made anew by `patch`, which gets `fired`.

    `tracker` is its number there, `origin` the engine that had it, `engine` and `setup` what it is run on here; `kinds`
    are the kinds that are right, the exact one first; `recorded` says whether the adapter records what the bug touches;
    `reads` is the first forward that reads the damage where a mark cannot say it; `late` says why it is found later than
    that, if it is.
    """

    name: str
    tracker: str
    origin: str
    engine: str
    setup: str
    kinds: tuple[str, ...]
    recorded: bool
    reads: int
    late: str
    mechanism: str
    patch: Callable[[Fired], None]

    @property
    def held_out(self) -> int:
        """The round in which it was recorded before any rule was run on it; 0 if the rules were written with it at hand."""
        _, _, number = self.patch.__module__.partition("round_")
        return int(number or 0)

    @property
    def trace(self) -> str:
        """The name of its trace in data/corpus."""
        return f"{self.engine}-{self.name}"


BUGS: dict[str, Bug] = {}


def load(engine: str = "") -> dict[str, Bug]:
    """Return all bugs, or those of an engine, by the names of their traces."""
    for path in sorted((Path(__file__).parent / PLANTED).glob(f"{engine or '*'}/*.py")):
        importlib.import_module(f"{PLANTED}.{path.parent.name}.{path.stem}")
    return BUGS


# Recorded with SGLang 0.5.16 on an H200: the attention that runs on the CPU has no drafts.
H200 = "h200"


def bug(
    tracker: str, setup: str, *kinds: str, origin: str = "", recorded: bool = True, reads: int = -1, late: str = ""
) -> Callable[[Callable[[Fired], None]], Bug]:
    """Make a bug of a function that patches the engine; its docstring is the mechanism."""

    def make(patch: Callable[[Fired], None]) -> Bug:
        engine = patch.__module__.split(".")[1]
        made = Bug(
            name=patch.__name__,
            tracker=tracker,
            origin=origin or engine,
            engine=engine,
            setup=setup,
            kinds=kinds,
            recorded=recorded,
            reads=reads,
            late=late,
            mechanism=" ".join((patch.__doc__ or "").split()),
            patch=patch,
        )
        BUGS[made.trace] = made
        return made

    return make


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Put a function in the place of `owner.name`; it gets what stood there before its other arguments."""

    def put(function: Callable[..., Any]) -> None:
        before = getattr(owner, name)

        @functools.wraps(before)
        def instead(*args: Any, **kwargs: Any) -> Any:
            return function(before, *args, **kwargs)

        setattr(owner, name, instead)

    return put


def link(tracker: str) -> str:
    """Return the address of a tracker's thread, `owner/repository#number`."""
    repository, _, number = tracker.partition("#")
    return f"https://github.com/{repository}/issues/{number}"
