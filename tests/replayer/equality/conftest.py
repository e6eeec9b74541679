"""How much of the fault lab, and how many random histories, the equality tests go through."""

import pytest
from kvcanary.replayer.lab.faults import FAULTS

from ...support.places import DATA

NORMAL_CASES = 500
# In a normal run each test goes through the first few; make equality goes through forty times as many.
SEEDED = {"history_seed": 6, "engine_seed": 1, "pair_seed": 1}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tests of this folder their faults and seeds, one test each, so that they run side by side."""
    times = max(1, metafunc.config.getoption("--conformance-cases") // NORMAL_CASES)
    for name, count in SEEDED.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(count * times))
    if "recorded_trace" in metafunc.fixturenames:
        corpus = sorted((DATA / "corpus").glob("*.arrow"))
        # tests/corpus replays them all by the default executor. In a normal run every sixth is replayed by both.
        traces = sorted(path for path in DATA.rglob("*.arrow") if path.parent.parent.name != "simulated")
        traces = [path for path in traces if path not in corpus or times > 1 or corpus.index(path) % 6 == 1]
        metafunc.parametrize("recorded_trace", traces, ids=[path.stem for path in traces])
    if "lab_trial" in metafunc.fixturenames:
        trials = []
        # In a normal run every other fault, which takes long enough.
        chosen = list(enumerate(FAULTS.items()))[:: 2 if times == 1 else 1]
        for number, (fault, known) in chosen:
            for seed in range(times):
                trials.append((fault, known.configs[(number + seed) % len(known.configs)], seed))
        metafunc.parametrize("lab_trial", trials, ids=["-".join(map(str, trial)) for trial in trials])


@pytest.fixture(autouse=True)
def _pass_from_the_start(pass_from_the_start: None) -> None:
    """For every test of this folder."""
