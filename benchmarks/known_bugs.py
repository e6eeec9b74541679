"""Measure what known bugs add to rules, round by round of the bugs that were held out: with those of earlier rounds alone.

    python benchmarks/known_bugs.py [--first-round 12] [--plain]

Each round's first tries (data/corpus/held-out.json) are what the rules of that day said. Each is held against what the bugs of
earlier rounds, and those that the rules were written with, say by what they look like. --plain leaves out the traits that
were coded with the corpus at hand, later rounds among them: without them the figures are too low, with them too high.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "corpus"))

from bugs import load  # noqa: E402
from kvcanary.analysis.incidents.alike import KnownBugs, known_bugs  # noqa: E402
from kvcanary.analysis.incidents.seen.likely import CERTAIN  # noqa: E402

CODED = ("observed: ", "branch: ", "likely ")


def main() -> None:
    """Print how often a kind is right that rules and known bugs say, and that one of them says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-round", type=int, default=12)
    parser.add_argument("--plain", action="store_true", help="leave out traits that were coded with the corpus at hand")
    options = parser.parse_args()
    bugs, said = load(), json.loads((ROOT / "data" / "corpus" / "held-out.json").read_text())
    rows = {row["name"]: row for row in known_bugs().rows if row["name"] in bugs}
    if options.plain:
        for row in rows.values():
            row["traits"] = [trait for trait in row["traits"] if not trait.startswith(CODED)]
    found: Counter[tuple[str, str]] = Counter()
    for number in range(options.first_round, max(bug.held_out for bug in bugs.values()) + 1):
        earlier = KnownBugs(rows=tuple(row for name, row in rows.items() if bugs[name].held_out < number))
        for name, row in rows.items():
            first = said.get(name)
            if bugs[name].held_out != number or first is None or not first["kind"]:
                continue
            kinds = first.get("kinds", row["kinds"])
            shares = earlier.shares(earlier.closest(frozenset(row["traits"])))
            theirs = next(iter(shares))
            sure = first["score"] >= CERTAIN
            agree = shares.get(first["kind"], 0.0) >= shares[theirs]
            case = ("rules are sure, " if sure else "no rule is sure, ") + ("they agree" if agree else "they differ")
            found[case, "all"] += 1
            found[case, "rules"] += first["kind"] in kinds
            found[case, "known bugs"] += theirs in kinds
    print(f"rounds from {options.first_round} on{', plain traits' if options.plain else ''}: right of all")
    for case in sorted({case for case, _ in found}):
        total = found[case, "all"]
        shown = ", ".join(
            f"{who} {found[case, who]} ({found[case, who] / total:.0%})" for who in ("rules", "known bugs")
        )
        print(f"  {case}: {total}; {shown}")


if __name__ == "__main__":
    main()
