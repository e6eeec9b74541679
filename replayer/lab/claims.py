"""What the matrix claims, fault by fault, whether its rows bear it out, and all of it as the page docs/results/fault-matrix.md."""

import datetime
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

from .faults import FAULTS
from .matrix import CLEAN, Row, build_id

HEADINGS: Final = [
    *("fault", "runs", "injected", "effect", "detected", "in time", "max delay", "false pos."),
    "first seen by",
]
_MOST_NAMES: Final = 4

_HEAD: Final = """# The fault matrix

Made by

    {command}

on {date}, with kvcanary {build}: {seeds:,} seeds a fault, taken in turns over the configurations that have its
mechanism, and {clean_seeds:,} clean runs over all configurations. `kvcanary lab matrix --seeds 20` makes a smaller one in
minutes; how to read it, and what each fault does, is in [fault-lab.md](../guide/fault-lab.md).

- **effect**: trials in which some forward, or a sweep, read or was fed something wrong. That is known from the engine
  itself, without the replay.
- **in time**: trials in which the fault was reported no later than in that forward. A delay counts forwards from the
  effect to the first report; it is negative where the history checks see a fault before anything wrong is read.
- **false pos.**: trials with a report before the fault happened, or of something that is no fault.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One fault's rows, counted."""

    fault: str
    benign: bool
    reference: str
    summary: str
    configs: tuple[str, ...]
    runs: int
    injected: int
    effects: int
    detected: int
    in_time: int  # effects that were detected no later than in the first forward that reads the damage
    max_delay: int | None
    by: dict[str, int]  # first detections by what made them
    false_positives: int
    failures: tuple[str, ...]  # what contradicts the claim, in words

    @property
    def holds(self) -> bool:
        """Whether nothing contradicts the claim."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "holds": self.holds}


def make_claims(rows: list[Row]) -> list[Claim]:
    """Return one claim a fault, in the catalogue's order, the clean runs last."""
    found = {row.fault for row in rows}
    return [_claim(name, [r for r in rows if r.fault == name]) for name in [*FAULTS, CLEAN] if name in found]


def in_short(name: str) -> str:
    """Return a detection's name without the launch's half and endpoint: many of them say the same."""
    reasons, _, launch = name.partition(" ")
    if not launch:
        return name
    short = "+".join(reason.removeprefix("VERIFY_").lower() for reason in reasons.split("+"))
    return f"{launch.split('_')[0]} {short}"


def _claim(name: str, rows: list[Row]) -> Claim:
    fault = FAULTS.get(name)
    effects = [row for row in rows if row.effect]
    delays = [row.delay for row in effects if row.delay is not None]
    return Claim(
        fault=name,
        benign=fault is None or fault.benign,
        reference=fault.reference if fault is not None else "",
        summary=fault.summary if fault is not None else "no fault at all",
        configs=tuple(sorted({row.config for row in rows})),
        runs=len(rows),
        injected=sum(row.injected for row in rows),
        effects=len(effects),
        detected=sum(row.detected for row in effects),
        in_time=sum(delay <= 0 for delay in delays),
        max_delay=max(delays, default=None),
        by=dict(Counter(in_short(row.detected_by) for row in rows if row.detected).most_common()),
        false_positives=sum(bool(row.false_positive) for row in rows),
        failures=tuple(text for row in rows for text in _failures(row)),
    )


def _failures(row: Row) -> list[str]:
    found, effect = [], "" if row.error else row.effect
    if row.error:
        found.append(f"the lab failed: {row.error}")
    elif row.false_positive:
        found.append(f"reported without reason: {row.false_positive}")
    if effect and (row.fault == CLEAN or FAULTS[row.fault].benign):
        found.append(f"forward {row.effect_forward} had wrong {effect}, though nothing was broken")
    elif effect and not row.detected:
        found.append(f"wrong {effect} in forward {row.effect_forward}, not detected")
    elif effect and row.delay is not None and row.delay > 0:
        found.append(f"wrong {effect} in forward {row.effect_forward}, detected in {row.first_detection_forward}")
    return [f"{row.fault} on {row.config}, seed {row.seed}: {text}" for text in found]


def cells(claim: Claim) -> list[str]:
    """Return a claim's row of the table."""
    by = [f"{name} {count}" for name, count in claim.by.items()]
    if len(by) > _MOST_NAMES:
        by = [*by[:_MOST_NAMES], f"and {len(by) - _MOST_NAMES} more"]
    return [
        claim.fault,
        f"{claim.runs:,}",
        "" if claim.fault == CLEAN else f"{claim.injected:,}",
        f"{claim.effects:,}",
        "" if claim.benign else f"{claim.detected:,}",
        "" if claim.benign else f"{claim.in_time:,}",
        "" if claim.max_delay is None else f"{claim.max_delay:,}",
        f"{claim.false_positives:,}",
        ", ".join(by),
    ]


def matrix_markdown(claims: list[Claim], *, command: str, seeds: int, clean_seeds: int) -> str:
    """Return the page; `command` is what makes it."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    text = _HEAD.format(command=command, date=date, build=build_id(), seeds=seeds, clean_seeds=clean_seeds)
    table = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 2), "---"], *map(cells, claims)]
    text += "".join(f"| {' | '.join(values)} |\n" for values in table)
    failures = [failure for claim in claims for failure in claim.failures]
    if failures:
        text += "\n## What contradicts the claims\n\n" + "".join(f"- {failure}\n" for failure in failures)
    return text
