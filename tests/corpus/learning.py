"""Learns from known bugs how likely each kind is: what analysis/incidents/learnt.py reads, and what tests and pages hold against it."""

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from bugs import load
from kvcanary.analysis.incidents.alike import ANOTHER_KIND, KnownBugs, known_bugs
from kvcanary.analysis.incidents.learnt import USUAL, LearntKinds, said_features
from kvcanary.analysis.incidents.rules import RULES
from kvcanary.analysis.incidents.seen.likely import CERTAIN
from run import FIRST_TRY

# How much less is made of a feature than the bugs at hand would, chosen by how well the bugs of rounds 0 to n-1 told those of
# round n, for each n from 20 to 43.
_LESS: Final = 1e-3
_LESS_OF_RULES: Final = 0.3e-3  # of what rules say of single kinds
FOLDS: Final = 5
BRANCH: Final = "branch: "
CODED: Final = ("observed: ", BRANCH, "likely ")


def learn(rows: Sequence[dict[str, Any]]) -> LearntKinds:
    """Return what bugs say of each kind: by their traits, and by what rules said of them at first."""
    said = first_tries()
    kinds = tuple(RULES)
    traits = sorted({trait for row in rows for trait in row["traits"]})
    columns = {trait: n for n, trait in enumerate(traits)}
    has = np.zeros((len(rows), len(traits)))
    for n, row in enumerate(rows):
        has[n, [columns[trait] for trait in row["traits"]]] = 1
    of = np.array([_shares(row["kinds"], kinds) for row in rows])
    sure, unsure = np.zeros_like(of), np.zeros_like(of)
    for n, row in enumerate(rows):
        kind, score = said.get(row["name"], ("", 0.0))
        if kind in kinds:
            (sure if score >= CERTAIN else unsure)[n, kinds.index(kind)] = 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more are slower, where others run beside it
    weights, usual, own, another = _fit(*map(torch.from_numpy, (has, sure, unsure, of)))
    torch.set_num_threads(threads)
    features = {USUAL: usual, **dict(zip(traits, weights, strict=True))}
    for n, kind in enumerate(kinds):
        (surely, alone), here = own[:, n], np.eye(len(kinds))[n]
        both, more = said_features(kind, sure=False), said_features(kind, sure=True)
        features |= dict.fromkeys(both, alone * here + another[n])
        features |= dict.fromkeys(more - both, (surely - alone) * here)
    return LearntKinds(kinds=kinds, features=tuple(features), weights=np.stack([*features.values()]))


def _fit(has: torch.Tensor, sure: torch.Tensor, unsure: torch.Tensor, of: torch.Tensor) -> tuple[Any, ...]:
    """Fit a multinomial regression; return weights `[traits, kinds]`, `[kinds]` of all, of a kind that rules say, sure and not,
    `[2, kinds]`, and of one that rules say for another, `[said, kinds]`.
    """
    kinds = of.shape[1]
    shapes = (has.shape[1], kinds), (kinds,), (2,), (kinds,), (kinds, kinds)
    parts = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights, usual, own, of_kind, another = parts
    optimizer = torch.optim.LBFGS(parts, max_iter=120, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = has @ weights + usual + sure * (own[0] + of_kind) + unsure * own[1] + (sure + unsure) @ another
        error = -(of * torch.log_softmax(logits, dim=1)).sum(dim=1).mean()
        less = _LESS * ((weights**2).sum() + 0.1 * (usual**2).sum()) + 0.1 * _LESS * (own**2).sum()
        error = error + less + _LESS_OF_RULES * ((of_kind**2).sum() + (another**2).sum())
        error.backward()
        return error

    optimizer.step(loss)
    of_rules = torch.stack([own[0] + of_kind, own[1].expand(kinds)])
    return tuple(part.detach().numpy() for part in (weights, usual, of_rules, another))


def first_tries() -> dict[str, tuple[str, float]]:
    """Return the kind, with its score, that rules said of each bug that was held out, before anybody had seen it."""
    return {name: (first["kind"], first["score"]) for name, first in json.loads(FIRST_TRY.read_text()).items()}


@functools.cache
def _fold(number: int) -> KnownBugs:
    rows = tuple(row for n, row in enumerate(known_bugs().rows) if n % FOLDS != number)
    return KnownBugs(rows=rows, learnt=learn(rows))


def others(name: str) -> KnownBugs:
    """Return the known bugs, without a fifth of them in which this one is if it is one, and what was learnt from them."""
    number = next((n for n, row in enumerate(known_bugs().rows) if row["name"] == name), None)
    return known_bugs() if number is None else _fold(number % FOLDS)


class Tried(NamedTuple):
    """A bug that was held out: its round, kind and score by the rules of its day, kind and score with what was known before it."""

    held_out: int
    kinds: tuple[str, ...]
    by_rules: str
    rules_score: float
    kind: str
    score: float


def walk(first_round: int, *, plain: bool = False, engines: bool = False) -> list[Tried]:
    """Return what is said of each bug that was held out, and that rules said something of, by what the rounds before it taught.

    With `engines` by what all bugs of the other engines taught. Its traits are those of today; `plain` leaves out those that were
    coded with the corpus at hand.
    """
    bugs, said, found = load(), json.loads(FIRST_TRY.read_text()), []
    rows = [row for row in known_bugs().rows if row["tracker"] == "" or row["name"] in bugs]
    if plain:
        rows = [row | {"traits": [t for t in row["traits"] if not t.startswith(CODED)]} for row in rows]
    round_of = {row["name"]: bugs[row["name"]].held_out if row["name"] in bugs else 0 for row in rows}
    engine_of = {row["name"]: bugs[row["name"]].engine if row["name"] in bugs else "" for row in rows}
    part_of: dict[str, Any] = engine_of if engines else round_of
    for part in sorted({part_of[name] for name, number in round_of.items() if number >= first_round}):
        earlier = tuple(
            row for row in rows if (part_of[row["name"]] != part if engines else part_of[row["name"]] < part)
        )
        known = KnownBugs(rows=earlier, learnt=learn(earlier))
        for row in rows:
            first, number = said.get(row["name"]), round_of[row["name"]]
            if part_of[row["name"]] != part or number < first_round or first is None or not first["kind"]:
                continue
            branch = next((t.removeprefix(BRANCH) for t in row["traits"] if t.startswith(BRANCH)), "")
            best = first["kind"] if first["kind"] in RULES else ""
            kind, score = known.likeliest(frozenset(row["traits"]), best, first["score"], branch)[0]
            kinds = tuple(first.get("kinds", row["kinds"]))
            found.append(Tried(number, kinds, first["kind"], first["score"], kind, score))
    return found


def reliability(found: Iterable[Tried]) -> list[str]:
    """Return a table of what was said, with what share of it was right."""
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for one in found:
        bins[min(9, int(one.score * 10))].append((one.score, one.kind in one.kinds))
    lines = ["| confidence | on average | right | bugs |", "| --- | ---: | ---: | ---: |"]
    for low, mine in sorted(bins.items()):
        score, right = (sum(one[i] for one in mine) / len(mine) for i in range(2))
        lines.append(f"| {low / 10:.1f} to {(low + 1) / 10:.1f} | {score:.2f} | {right:.2f} | {len(mine)} |")
    return lines


def _shares(mine: Sequence[str], kinds: Sequence[str]) -> np.ndarray:
    shares = np.array([0.0 if kind not in mine else 1.0 if kind == mine[0] else ANOTHER_KIND for kind in kinds])
    return shares / shares.sum()
