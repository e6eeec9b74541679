"""Drives an engine through its adapter, healthy and with faults, and says what its recording shows and what it does not.

The engine comes as a factory that gets the trace's path; what it makes has `add(name, prompt, new_tokens)`, `step()`, which
says whether anything is left, and `close()`. If the engine calls `on_inputs(inputs)` in each forward with the tensors that its model
is about to get, before the recorder looks, faults are planted there; each method `fault_NAME()` is a fault of its own: it returns
whether it found an occasion, and is asked before each step until it has.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...recorder.trace.reader import read_trace
from ..report.summary import Summary, Verdict
from ..run.replay import replay
from ..run.settings import ReplaySettings
from .adapter_faults import INPUT_FAULTS, InputFault, StepInputs

Factory = Callable[[Path], Any]
REQUESTS: Final = 12
FIRST_FAULT: Final = 3  # the forward from which on a fault looks for an occasion: some requests have a prefix by then
MOST_STEPS: Final = 5_000
OWN: Final = "fault_"  # how the engine's own faults begin

# What a recording may have, by the replay's rows of what was watched, and what is not found without it.
_WITHOUT: Final = {
    "truth": "a wrong token in the input or the cache is seen only where the engine sampled it: pass truth (tokens)",
    "slot_history": "slots freed too early, given out twice or leaked are not seen: record alloc, free, evict, or pass blocks",
    "attention": "a wrong length or table that attention alone gets is not seen: pass seq_lens, or AttentionInput",
    "bytes": "overwritten K or V is not seen: pass kv_sources",
    "bytes_watched": "bytes that nobody wrote are not seen: set kv_watch_every",
    "submitted": "damage within the forward that writes a slot is not seen: pass submitted to after_forward",
    "layers": "damage to K and V is not seen: pass kv_sources",
}
_EVENTS: Final = {
    "request": ("requests", "findings cannot name them: call request()"),
    "status": ("request_status", "leaks and rows that two requests have are not seen: call request_status()"),
    "sweep": ("cache_walks", "damage in the prefix cache is seen only when a request hits it: call sweep()"),
}


class EngineError(Exception):
    """The engine, or what drives it, failed without a fault; `str()` says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One thing that a recording may have: "yes", "in part" or "no"; if not yes, what is missing or not found without it."""

    what: str
    recorded: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run and what the replay of its trace says; `fault` is empty for a healthy one.

    `planted` is the forward in which the fault was done, -1 if there was no occasion; `seen` the first forward that is found wrong.
    """

    fault: str
    seed: int
    forwards: int
    verdict: str
    planted: int = -1
    what: str = ""
    seen: int = -1
    found_by: dict[str, int] = field(default_factory=dict)
    first: str = ""
    doubts: tuple[str, ...] = ()
    engine_failed: str = ""

    @property
    def found(self) -> bool:
        """Whether what was planted was found, and not before."""
        return self.planted >= 0 and self.verdict == Verdict.CORRUPT.value and self.seen >= self.planted


@dataclass(slots=True, kw_only=True)
class AdapterReport:
    """What became of an adapter: its healthy runs, what they recorded, the faults, and those that could not be tried."""

    engine: str = ""
    healthy: list[Trial] = field(default_factory=list)
    recorded: list[Recorded] = field(default_factory=list)
    faults: list[Trial] = field(default_factory=list)
    not_judged: dict[str, str] = field(default_factory=dict)

    @property
    def false_findings(self) -> dict[str, int]:
        """What was found in healthy runs, by name."""
        return dict(sum((Counter(trial.found_by) for trial in self.healthy), Counter[str]()))

    @property
    def missed(self) -> list[str]:
        """Faults that were planted and not found."""
        return [trial.fault for trial in self.faults if trial.planted >= 0 and not trial.found]

    def why_missed(self, trial: Trial) -> str:
        """Return what was done and not found, and what the trace lacks to show it."""
        shows_in = next((fault.shows_in for fault in INPUT_FAULTS if fault.name == trial.fault), "")
        lacks = [entry for entry in self.recorded if entry.what == shows_in and entry.recorded != "yes"]
        early = ", but something was found before it" if 0 <= trial.seen < trial.planted else ""
        return f"{trial.what}{early}" + "".join(f"; {entry.what}: {entry.detail}" for entry in lacks)

    @property
    def verdict(self) -> str:
        """One of "conforms", "does not conform", and "inconclusive": nothing was wrong, and too little was tried to say so."""
        if self.false_findings or self.missed:
            return "does not conform"
        tried = any(trial.planted >= 0 for trial in self.faults)
        clean = all(trial.verdict == Verdict.CLEAN.value for trial in self.healthy)
        return "conforms" if tried and clean else "inconclusive"

    @property
    def exit_code(self) -> int:
        """0 it conforms, 1 it does not, 125 inconclusive."""
        return {"conforms": 0, "does not conform": 1}.get(self.verdict, 125)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = {"verdict": self.verdict, "exit_code": self.exit_code, "false_findings": self.false_findings}
        faults = [{**asdict(trial), "found": trial.found} for trial in self.faults]
        return {**asdict(self), **values, "missed": self.missed, "faults": faults}


def check_adapter(
    factory: Factory, folder: Path, *, seeds: int, on_trial: Callable[[str], None] = lambda _: None
) -> AdapterReport:
    """Run an engine healthy with each seed, and once with each fault; traces go to `folder`.

    Raises:
        EngineError: it fails without a fault.
    """
    report, offered, own = AdapterReport(), set[str](), list[str]()
    for seed in range(seeds):
        on_trial(f"healthy, seed {seed}")
        trial, summary, engine, keys = _run(factory, folder / f"healthy-{seed}.arrow", seed)
        if trial.engine_failed:
            raise EngineError(trial.engine_failed)
        report.healthy.append(trial)
        offered |= keys
        own = [name for name in dir(engine) if name.startswith(OWN)]
        report.engine = f"{summary.header.engine.name} {summary.header.engine.version}".strip()
        report.recorded = list(_recorded(summary, folder / f"healthy-{seed}.arrow"))
    for fault in INPUT_FAULTS:
        if lacks := [need for need in fault.needs if need not in offered]:
            report.not_judged[fault.name] = f"on_inputs() shows no {', '.join(lacks)}" if offered else "no on_inputs()"
            continue
        _try(factory, folder, fault.name, fault, seeds, report, on_trial)
    for name in own:
        _try(factory, folder, name.removeprefix(OWN), name, seeds, report, on_trial)
    return report


def _try(
    factory: Factory,
    folder: Path,
    name: str,
    fault: InputFault | str,
    seeds: int,
    report: AdapterReport,
    on_trial: Callable[[str], None],
) -> None:
    """Add the run with a fault to the report: with the first seed that gives it an occasion."""
    for seed in range(seeds):
        on_trial(name)
        trial, *_ = _run(factory, folder / f"{name}.arrow", seed, name, fault)
        if trial.planted >= 0 and not trial.found and trial.engine_failed and trial.forwards <= trial.planted:
            report.not_judged[name] = f"the engine itself stopped, before another forward: {trial.engine_failed}"
            return
        if trial.planted >= 0:
            report.faults.append(trial)
            return
    report.not_judged[name] = "no occasion"


def _run(
    factory: Factory, trace: Path, seed: int, name: str = "", fault: InputFault | str | None = None
) -> tuple[Trial, Summary, Any, set[str]]:
    """Serve a workload, with a fault in it, and judge the trace; return also which inputs were shown."""
    trace.unlink(missing_ok=True)
    offered = set[str]()
    forwards, planted, what, failed = 0, -1, "", ""
    try:
        engine = factory(trace)
    except Exception as error:
        raise EngineError(f"the factory failed: {_described(error)}{way_out(error)}") from error

    def on_inputs(given: dict[str, Any]) -> None:
        nonlocal forwards, planted, what
        offered.update(given, ["table"] if "block_tables" in given or {"req_to_token", "rows"} <= given.keys() else [])
        if isinstance(fault, InputFault) and planted < 0 and forwards >= FIRST_FAULT:
            what = fault.plant(StepInputs(given))
            planted = forwards if what else -1
        forwards += 1

    engine.on_inputs = on_inputs
    steps = 0
    try:
        for _ in _served(engine, seed):
            steps += 1
            if isinstance(fault, str) and planted < 0 and steps >= FIRST_FAULT and getattr(engine, fault)():
                planted, what = forwards or steps, fault
    except Exception as error:  # noqa: BLE001  # an engine may well fall over a fault; without one it is reported
        failed = _described(error)
    try:
        engine.close()
    except Exception as error:  # noqa: BLE001  # as above
        failed = failed or _described(error)
    if not trace.exists():
        raise EngineError(
            f"the engine wrote no trace to the path that it was given; {failed or 'attach the adapter there'}"
        )
    summary = replay(trace, settings=ReplaySettings(), report=None)
    first = summary.first_finding or {}
    seen = [summary.first_violation_forward] if summary.violations else []
    if first:
        # What is found between two forwards bears the number of the one before, and so does what was planted behind that.
        behind = (
            isinstance(fault, str) and first["forward"] == planted - 1 and not _in_forward(trace, int(first["event"]))
        )
        seen.append(int(first["forward"]) + behind)
    trial = Trial(
        fault=name,
        seed=seed,
        forwards=summary.forwards,
        verdict=summary.verdict.value,
        planted=planted,
        what=what,
        seen=min(seen, default=-1),
        found_by={**summary.violations_by_reason, **summary.findings_by_kind},
        first=str(first.get("detail", "")),
        doubts=(*summary.doubts, *summary.losses),
        engine_failed=failed,
    )
    return trial, summary, engine, offered


def _in_forward(trace: Path, number: int) -> bool:
    """Whether the event of that number is a forward."""
    return any(event.kind == "forward" for event in read_trace(trace) if event.number == number)


def _served(engine: Any, seed: int) -> Iterator[None]:
    """Have an engine serve requests: some share prefixes, some are equal, some as long as they may be; yield before each step."""
    rng = np.random.default_rng(seed)
    vocab, most = int(getattr(engine, "vocab_size", 64)), int(getattr(engine, "max_len", 64))
    shared = rng.integers(1, vocab, most).tolist()
    prompts = [shared[:1], shared[: most - 2], shared[: most // 2], shared[: most // 2]]
    while len(prompts) < REQUESTS:
        tail = rng.integers(1, vocab, rng.integers(1, max(most // 4, 2))).tolist()
        prompts.append(shared[: rng.choice([0, 0, most // 4, most // 3])] + tail)
    order = rng.permutation(len(prompts)).tolist()
    left = True
    for step in range(MOST_STEPS):
        for number in order[2 * step : 2 * step + 2]:
            new_tokens = int(rng.integers(1, min(12, most - len(prompts[number])) + 1))
            engine.add(f"request-{number}", prompts[number], new_tokens)
        if not left and 2 * step >= len(prompts):
            return
        yield
        left = bool(engine.step())
    raise EngineError(
        f"{REQUESTS} requests had not ended after {MOST_STEPS:,} steps: step() says whether anything is left"
    )


def way_out(error: BaseException) -> str:
    """Return what helps against an import that fails, to be said behind it; "" for other errors."""
    return (
        "; run this in the engine's environment, or name its folder in PYTHONPATH"
        if isinstance(error, ImportError)
        else ""
    )


def _described(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {error}{where}"


def _recorded(summary: Summary, trace: Path) -> Iterator[Recorded]:
    """Yield what a healthy run recorded, and what it did not."""
    for kind, (what, detail) in _EVENTS.items():
        yield _entry(what, summary.events.get(kind, 0) > 0, detail)
    sampled = any(len(event.ints("sampled_tokens")) for event in read_trace(trace))
    detail = "a token that is fed and was not sampled is not seen: pass sampled_tokens to after_forward"
    yield _entry("sampled_tokens", sampled, detail)
    if any("history is derived" in note for note in summary.header.notes):
        yield _entry("observed_history", False, "the slot history is derived from what the engine shows")
    rows = [row for row in summary.coverage if row.what in _WITHOUT]
    for what in dict.fromkeys(row.what for row in rows):
        mine = [row for row in rows if row.what == what]
        words = [row.words for row in mine if row.words]
        if not any(row.watched for row in mine):
            yield _entry(what, False, _WITHOUT[what])
        else:
            yield Recorded(
                what=what, recorded="in part" if words else "yes", detail="not " + "; ".join(words) if words else ""
            )


def _entry(what: str, recorded: bool, otherwise: str) -> Recorded:
    return Recorded(what=what, recorded="yes" if recorded else "no", detail="" if recorded else otherwise)
