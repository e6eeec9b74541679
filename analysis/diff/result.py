"""What a comparison found, in one value."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from .lane import LaneSummary
from .pairing import Pairing
from .timing import Timing

SAME, DIFFERENT, INCONCLUSIVE = "same", "different", "inconclusive"
EXIT_CODES: Final = {SAME: 0, DIFFERENT: 1, INCONCLUSIVE: 125}
MAX_LISTED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place where a request differs in one way; -1 where a field does not apply.

    `request` and `partner` are the request's names in A and in B, empty where there is none. `a` and `b` say what stands
    there, `words` says it in a sentence.
    """

    kind: str
    request: str
    partner: str
    runner: int
    position: int
    a_forward: int
    a_event: int
    b_forward: int
    b_event: int
    a: str
    b: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffResult:
    """The comparison of two traces. `first` is the first divergence of all; `requests` has one list a request that
    differs, in the order in which they do, each with the first divergence of each kind.
    """

    a: str
    b: str
    headers: tuple[dict[str, Any], dict[str, Any]]
    settings: dict[str, Any]
    pairing: Pairing
    lanes: tuple[LaneSummary, LaneSummary]
    compared: dict[str, int]
    counts: dict[str, int]
    counted: frozenset[str]
    num_different: int
    requests: tuple[tuple[Divergence, ...], ...]
    timing: Timing
    notes: tuple[str, ...]

    @property
    def first(self) -> Divergence | None:
        """The first divergence of all."""
        return self.requests[0][0] if self.requests else None

    @property
    def doubts(self) -> list[str]:
        """Why traces without a difference may yet differ."""
        doubts = []
        for name, lane in zip("AB", self.lanes, strict=True):
            doubts += [f"{name}: {doubt}" for doubt in lane.doubts[:5]]
            if len(lane.doubts) > 5:
                doubts.append(f"{name}: and {len(lane.doubts) - 5:,} more")
            if not lane.complete and not lane.doubts:
                doubts.append(f"{name} has no end: it was torn, or is still being written")
        if not any(self.compared.values()):
            doubts.append("nothing of the requests that both traces have could be compared")
        return doubts

    @property
    def verdict(self) -> str:
        """Different if anything that counts differs, inconclusive if anything is in doubt, else same."""
        if self.requests:
            return DIFFERENT
        return INCONCLUSIVE if self.doubts else SAME

    @property
    def exit_code(self) -> int:
        """0 same, 1 different, 125 inconclusive."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "a": {"trace": self.a, **self.headers[0], **_lane_json(self.lanes[0])},
            "b": {"trace": self.b, **self.headers[1], **_lane_json(self.lanes[1])},
            "settings": self.settings,
            "align": asdict(self.pairing),
            "compared": self.compared,
            "different_requests": self.num_different,
            "counts": self.counts,
            "first": None if self.first is None else asdict(self.first),
            "requests": [[asdict(divergence) for divergence in request] for request in self.requests[:MAX_LISTED]],
            "timing": self.timing.to_json(),
            "notes": list(self.notes),
            "doubts": self.doubts,
        }


def _lane_json(lane: LaneSummary) -> dict[str, Any]:
    return {
        "forwards": lane.forwards,
        "tokens": lane.tokens,
        "complete": lane.complete,
        "assumed_slots": lane.assumed,
        "seconds": (lane.last_ns - lane.first_ns) / 1e9,
    }
