"""The matrix as a table: for the terminal, and as the page docs/results/fault-matrix.md."""

import datetime
from typing import Final

from .claims import Claim
from .results import CLEAN, build_id

HEADINGS: Final = (
    "fault",
    "runs",
    "injected",
    "effect",
    "detected",
    "in time",
    "max delay",
    "false pos.",
    "first seen by",
)
_MOST_NAMES: Final = 4

_HEAD: Final = """# The fault matrix

Made by

    {command}

on {date}, with kvcanary {build}: {seeds:,} seeds a fault, taken in turns over the configurations that have its
mechanism, and {clean_seeds:,} clean runs over all configurations. `kvcanary lab matrix --seeds 20` makes a smaller one in
minutes; how to read it, and what each fault does, is in [fault-lab.md](fault-lab.md).

- **effect**: trials in which some forward, or a sweep, read or was fed something wrong. That is known from the engine
  itself, without the replay.
- **in time**: trials in which the fault was reported no later than in that forward. A delay counts forwards from the
  effect to the first report; it is negative where the history checks see a fault before anything wrong is read.
- **false pos.**: trials with a report before the fault happened, or of something that is no fault.

"""


def cells(claim: Claim) -> list[str]:
    """Return a claim's row of the table."""
    by = [f"{name} {count}" for name, count in claim.by.items()]
    if len(by) > _MOST_NAMES:
        by = [*by[:_MOST_NAMES], f"and {len(by) - _MOST_NAMES} more"]
    nothing = claim.benign
    return [
        claim.fault,
        f"{claim.runs:,}",
        "" if claim.fault == CLEAN else f"{claim.injected:,}",
        f"{claim.effects:,}",
        "" if nothing else f"{claim.detected:,}",
        "" if nothing else f"{claim.in_time:,}",
        "" if claim.max_delay is None else f"{claim.max_delay:,}",
        f"{claim.false_positives:,}",
        ", ".join(by),
    ]


def matrix_markdown(claims: list[Claim], *, command: str, seeds: int, clean_seeds: int) -> str:
    """Return the page; `command` is what makes it."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    text = _HEAD.format(command=command, date=date, build=build_id(), seeds=seeds, clean_seeds=clean_seeds)
    text += _line(HEADINGS) + _line(["---", *["---:"] * (len(HEADINGS) - 2), "---"])
    text += "".join(_line(cells(claim)) for claim in claims)
    failures = [failure for claim in claims for failure in claim.failures]
    if failures:
        text += "\n## What contradicts the claims\n\n" + "".join(f"- {failure}\n" for failure in failures)
    return text


def _line(values: "list[str] | tuple[str, ...]") -> str:
    return "| " + " | ".join(values) + " |\n"
