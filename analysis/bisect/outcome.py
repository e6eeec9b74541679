"""What one trace, or one version, is: good, bad, or not to be judged."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final

VOTES: Final = ("majority", "any")


class Outcome(Enum):
    """Good, bad, or skipped, as `git bisect` calls them."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """An outcome, why in words, and what was seen: plain JSON values."""

    outcome: Outcome
    words: str
    seen: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "outcome": self.outcome.value}

    @classmethod
    def from_json(cls, raw: Any) -> "Judgement":
        """Return what `to_json` made; raise `ValueError` for anything else."""
        if not isinstance(raw, dict) or not isinstance(raw.get("words"), str) or not isinstance(raw.get("seen"), dict):
            raise ValueError("no judgement")  # noqa: TRY004  # whatever is wrong with a cached file is one error
        return cls(outcome=Outcome(raw.get("outcome")), words=raw["words"], seen=raw["seen"])


def vote(judgements: Sequence[Judgement], rule: str) -> Judgement:
    """Return what several traces of one version make of it.

    `rule` "any": bad if one is. "majority": as most of those that could be judged; a draw is bad, because a violation
    proves a fault and a clean trace does not prove that there is none. Without one that could be judged: skip.
    """
    bad = [j for j in judgements if j.outcome is Outcome.BAD]
    good = [j for j in judgements if j.outcome is Outcome.GOOD]
    if not bad and not good:
        words = judgements[0].words if judgements else "no trace"
        return Judgement(outcome=Outcome.SKIP, words=words)
    chosen = bad if bad and (rule == "any" or len(bad) >= len(good)) else good
    words = chosen[0].words if chosen else "no trace is good"
    if len(judgements) > 1:
        words += f"   ({len(bad)} bad, {len(good)} good, {len(judgements) - len(bad) - len(good)} not to be judged)"
    return Judgement(outcome=chosen[0].outcome, words=words, seen=chosen[0].seen)


def decided(judgements: Sequence[Judgement], rule: str, left: int) -> bool:
    """Whether `left` more trials could not change the vote."""
    bad = sum(j.outcome is Outcome.BAD for j in judgements)
    good = sum(j.outcome is Outcome.GOOD for j in judgements)
    if rule == "any":
        return bad > 0
    return (bad >= good + left and bad > 0) or good > bad + left
