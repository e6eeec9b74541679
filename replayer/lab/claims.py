"""What the matrix claims, fault by fault, and whether its rows bear it out."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from .faults import FAULTS
from .results import CLEAN, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One fault's rows, counted.

    `in_time` are effects that were detected no later than in the first forward that reads the damage; `by` counts first
    detections by what made them; `failures` says, in words, what contradicts the claim.
    """

    fault: str
    benign: bool
    reference: str
    summary: str
    configs: tuple[str, ...]
    runs: int
    injected: int
    effects: int
    detected: int
    in_time: int
    max_delay: int | None
    by: dict[str, int]
    false_positives: int
    failures: tuple[str, ...]

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
    at = f"{row.fault} on {row.config}, seed {row.seed}"
    if row.error:
        return [f"{at}: the lab failed: {row.error}"]
    found = []
    if row.false_positive:
        found.append(f"{at}: reported without reason: {row.false_positive}")
    if row.effect and (row.fault == CLEAN or FAULTS[row.fault].benign):
        found.append(f"{at}: forward {row.effect_forward} had wrong {row.effect}, though nothing was broken")
    elif row.effect and not row.detected:
        found.append(f"{at}: wrong {row.effect} in forward {row.effect_forward}, not detected")
    elif row.delay is not None and row.delay > 0:
        found.append(
            f"{at}: wrong {row.effect} in forward {row.effect_forward}, detected in {row.first_detection_forward}"
        )
    return found
