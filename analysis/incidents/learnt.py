"""How likely each kind is, by what an incident looks like and what rules say of it: a regression, learnt from known bugs.

Of bugs that were held out it knows what the rules of their day said, before anybody had seen them: how far rules can be trusted
with what they have not been written with, and which kind it mostly was where they were wrong.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...kernels.arrays import Float64Array, Int16Array

# Made by `python tests/corpus/known.py`.
LEARNT_KINDS: Final = Path(__file__).with_name("learnt_kinds.parquet")
USUAL: Final = "usual"  # the feature that all have
_KINDS_KEY: Final = b"kvcanary.kinds"
_A_UNIT: Final = 1000  # weights are kept as thousandths


def said_features(kind: str, *, sure: bool) -> frozenset[str]:
    """Return the features of what rules say first, "" for nothing."""
    return frozenset({f"rules say: {kind}"} | ({f"rules are sure: {kind}"} if sure else set()) if kind else ())


@dataclass(frozen=True, kw_only=True)
class LearntKinds:
    """What each feature says for each of `kinds`: `weights`, `[features, kinds] float64`, in the order of `features`."""

    kinds: tuple[str, ...]
    features: tuple[str, ...]
    weights: Float64Array

    def chances(self, features: Iterable[str], without: Collection[str] = ()) -> dict[str, float]:
        """Return how likely each kind is, 0 to 1, the likeliest first; kinds that are left out are not among them."""
        known = {feature: n for n, feature in enumerate(self.features)}
        rows = [known[feature] for feature in {USUAL, *features} if feature in known]
        kept = [n for n, kind in enumerate(self.kinds) if kind not in without]
        total = self.weights[np.sort(rows)][:, kept].sum(axis=0)
        chances = np.exp(total - total.max(initial=0.0))
        chances /= chances.sum() or 1.0
        order = np.argsort(-chances, kind="stable")
        return {self.kinds[kept[n]]: float(chances[n]) for n in order.tolist()}

    def write(self, path: Path) -> None:
        """Write a file of it."""
        units = np.rint(self.weights * _A_UNIT).astype(np.int16)
        columns = {
            "feature": pa.array(self.features, pa.utf8()),
            "weights": pa.FixedSizeListArray.from_arrays(pa.array(units.ravel()), len(self.kinds)),
        }
        table = pa.table(columns).replace_schema_metadata({_KINDS_KEY: json.dumps(self.kinds)})
        pq.write_table(table, path, compression="zstd")


@cache
def learnt_kinds() -> LearntKinds:
    """Return what comes with this package."""
    table = pq.read_table(LEARNT_KINDS)
    kinds = tuple(json.loads(table.schema.metadata[_KINDS_KEY]))
    units: Int16Array = np.asarray(table["weights"].combine_chunks().flatten())
    return LearntKinds(
        kinds=kinds,
        features=tuple(table["feature"].to_pylist()),
        weights=units.reshape(-1, len(kinds)).astype(np.float64) / _A_UNIT,
    )
