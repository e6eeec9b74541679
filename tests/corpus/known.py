"""Writes what comes with analysis/incidents: what every bug of the corpus, and every fault of the lab, looks like, and what is learnt
from them.

    python tests/corpus/known.py            # both files
    python tests/corpus/known.py --learn    # known_bugs.parquet stays as it is

To be run where a bug came to the corpus, or what is seen of a cluster has changed.
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import incidents as bench  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from kvcanary.analysis.incidents.alike import KNOWN_BUGS, KNOWN_SCHEMA  # noqa: E402
from kvcanary.analysis.incidents.finding import Incidents  # noqa: E402
from kvcanary.analysis.incidents.learnt import LEARNT_KINDS  # noqa: E402
from kvcanary.analysis.incidents.seen.evidence import evidence_of  # noqa: E402
from kvcanary.analysis.incidents.seen.traits import traits_of  # noqa: E402
from learning import learn  # noqa: E402
from run import BUGS, DATA, look  # noqa: E402

LAB_SEEDS = 6  # of each fault
FIRST_LAB_SEED = 7_000  # other ones than are measured


def traits(found: Incidents) -> list[str]:
    """Return what the first incident looks like; nothing if there is none."""
    if not found.leads:
        return []
    lead = found.leads[0]
    return sorted(traits_of(lead.cluster, evidence_of(lead.cluster), lead.likely))


def of_corpus() -> list[dict[str, Any]]:
    """Return the bugs whose traces have an incident."""
    rows = []
    for bug in BUGS.values():
        reads, _, found, _ = look(DATA / f"{bug.trace}.arrow")
        if bug.recorded and max(reads, bug.reads) >= 0:
            rows.append({"name": bug.trace, "tracker": bug.tracker, "kinds": bug.kinds, "traits": traits(found)})
    return rows


def of_lab() -> list[dict[str, Any]]:
    """Return some trials of each fault."""
    keys = bench.plan_trials(
        faults=list(bench.ACCEPTED), configs=list(bench.CONFIGURATIONS), seeds=LAB_SEEDS, clean_seeds=0
    )
    rows = []
    for fault, config, seed in keys:
        _, sides = bench.incidents_of_trial((fault, config, seed + FIRST_LAB_SEED))
        kinds = bench.APART.get((fault, config), bench.ACCEPTED[fault])
        first = min((one for one in sides if one.rows), key=lambda one: int(one.rows[0]["time_ns"]), default=None)
        if first is not None:
            name = f"lab-{fault}-{config}-{seed}"
            rows.append({"name": name, "tracker": "", "kinds": kinds, "traits": traits(first)})
    return rows


def main() -> None:
    """Write the files."""
    if "--learn" not in sys.argv[1:]:
        found = [row for row in (*of_corpus(), *of_lab()) if row["traits"]]
        table = pa.Table.from_pylist(sorted(found, key=lambda row: row["name"]), schema=KNOWN_SCHEMA)
        pq.write_table(table, KNOWN_BUGS, compression="zstd")
    rows = pq.read_table(KNOWN_BUGS, schema=KNOWN_SCHEMA).to_pylist()
    learnt = learn(rows)
    learnt.write(LEARNT_KINDS)
    print(f"wrote {KNOWN_BUGS}, {LEARNT_KINDS}: {len(rows)} bugs, {len(learnt.features)} features")


if __name__ == "__main__":
    main()
