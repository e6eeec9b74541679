"""Measure what known bugs add to rules, round by round of the bugs that were held out: with those of earlier rounds alone.

    python benchmarks/known_bugs.py [--first-round 20] [--plain] [--engines]

Each round's first tries (data/corpus/held-out.json) are what the rules of that day said. From the bugs of earlier rounds, and
those that the rules were written with, it is learnt how likely each kind is by what a bug looks like and by what rules say of it.
With --engines from all bugs of the other engines, whatever their round. --plain leaves out the traits that were coded with the corpus at hand, later rounds among them: without them the figures are too
low, with them too high.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "corpus"))

from kvcanary.analysis.incidents.seen.likely import CERTAIN  # noqa: E402
from learning import reliability, walk  # noqa: E402


def main() -> None:
    """Print how often a kind is right that rules say, and that is likeliest, and whether a confidence means what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-round", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="leave out traits that were coded with the corpus at hand")
    parser.add_argument("--engines", action="store_true", help="learn each engine's from all the others'")
    options = parser.parse_args()
    found = walk(options.first_round, plain=options.plain, engines=options.engines)
    print(
        f"rounds from {options.first_round} on{', plain traits' if options.plain else ''}, {len(found)} bugs that were found"
    )
    for who, said in (
        ("rules of their day", [(one.by_rules, one.rules_score, one.kinds) for one in found]),
        ("with known bugs", [(one.kind, one.score, one.kinds) for one in found]),
    ):
        right = sum(kind in kinds for kind, _, kinds in said)
        sure = [kind in kinds for kind, score, kinds in said if score >= CERTAIN]
        wrong = f"said with {CERTAIN} or more {len(sure)}, {sure.count(False)} of them wrong"
        print(f"  {who}: right first {right} ({right / max(1, len(said)):.0%}); {wrong}")
    print("\n".join(reliability(found)))


if __name__ == "__main__":
    main()
