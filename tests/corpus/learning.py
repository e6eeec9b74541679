"""Learns from known bugs how likely each kind is: what analysis/incidents/learnt.py reads, and what tests and pages hold against it."""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

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
FOLDS: Final = 10


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
    weights, usual, own, another = _fit(*map(torch.from_numpy, (has, sure, unsure, of)))
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
    """Return the known bugs without a tenth of them, in which this one is, and what was learnt from them."""
    numbers = (n for n, row in enumerate(known_bugs().rows) if row["name"] == name)
    return _fold(next(numbers, 0) % FOLDS)


def before(number: int, rows: Iterable[dict[str, Any]]) -> KnownBugs:
    """Return the bugs of `rows` of the rounds before one, those of the lab among them, and what was learnt from them."""
    bugs = load()
    mine = tuple(row for row in rows if row["name"] not in bugs or bugs[row["name"]].held_out < number)
    return KnownBugs(rows=mine, learnt=learn(mine))


def _shares(mine: Sequence[str], kinds: Sequence[str]) -> np.ndarray:
    shares = np.array([0.0 if kind not in mine else 1.0 if kind == mine[0] else ANOTHER_KIND for kind in kinds])
    return shares / shares.sum()
