"""Whatever executor replays a trace, the rows by forward, findings, summary and incidents are those of stepwise replay."""

from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial

from ...support.both_ways import WAYS, check
from ...support.engines.simulated_engines import Interference, random_config, random_pair, random_workload
from ...support.engines.toy_engine import FAULTS as TOY_FAULTS
from ...support.engines.toy_engine import SHAPES, ToyEngine
from ...support.places import DATA
from ...support.random_forwards import HEADER, forward, kv_copy
from ...support.raw_traces import bend, lasting, read_raw, write_raw

pytestmark = pytest.mark.one_in(5)  # make fuzz goes through all

PAIRS = sorted(path for path in (DATA / "simulated").iterdir() if path.is_dir())


@pytest.mark.one_in(10)
def test_recorded(recorded_trace: Path, tmp_path: Path) -> None:
    # tests/corpus finds the incidents of its traces; what merging does to rows, the other traces show.
    corpus = recorded_trace.parent == DATA / "corpus"
    check([recorded_trace], tmp_path, ways=("interval",) if corpus else tuple(WAYS), incidents=not corpus)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda path: path.name)
def test_recorded_pairs(pair: Path, tmp_path: Path) -> None:
    check([pair / "prefill.arrow", pair / "decode.arrow"], tmp_path)


@pytest.mark.one_in(10)
def test_lab(lab_trial: tuple[str, str, int], tmp_path: Path) -> None:
    fault, config, seed = lab_trial
    outcome = run_trial(Trial(fault=FAULTS[fault], config=config, seed=seed), tmp_path / "trace")
    check(outcome.traces, tmp_path)


def test_histories_that_no_engine_has(history_seed: int, tmp_path: Path) -> None:
    """Rows repeat, slots are shared, tables hold what is no slot: nearly all that is read is wrong."""
    kv_hash = ("none", "partial", "all")[history_seed % 3]
    rng = np.random.default_rng([history_seed, 17])
    trace = tmp_path / "t.arrow"
    with TraceWriter(trace, HEADER) as writer:
        for number in range(50):
            event = kv_copy(rng) if rng.random() < 0.1 else forward(rng, number)
            if history_seed % 2 and event.kind == "forward":
                event = lasting(event, rng)
            assert writer.append(event)
            if rng.random() < 0.2:
                writer.flush()
    (found,) = check([trace], tmp_path, incidents=kv_hash == "partial", kv_hash=kv_hash)
    assert found.summary.violations > 100


def test_toy_engines(history_seed: int, tmp_path: Path) -> None:
    shape = list(SHAPES)[history_seed % len(SHAPES)]
    fault = TOY_FAULTS[history_seed % len(TOY_FAULTS)]
    engine = ToyEngine(SHAPES[shape], seed=history_seed, fault=fault, forwards=30, fault_rate=0.2)
    trace = tmp_path / "t.arrow"
    with TraceWriter(trace, engine.header) as writer:
        for event in engine.events:
            assert writer.append(event)
    check([trace], tmp_path, incidents=False)


def test_bent_traces_of_engines(engine_seed: int, tmp_path: Path) -> None:
    """A random engine's trace, of which some events were dropped, moved or changed."""
    config = random_config(engine_seed)
    path = tmp_path / "trace.arrow"
    with SimulatedEngine(config, random_workload(engine_seed, config, requests=4), path) as engine:
        engine.run(Interference(engine_seed))
    bent = tmp_path / "bent.arrow"
    header, rows = read_raw(path)
    write_raw(bent, header, bend(rows, header, np.random.default_rng(engine_seed)))
    check([bent], tmp_path / "broken", incidents=engine_seed % 3 == 0)


@pytest.mark.long
def test_pairs_of_engines(pair_seed: int, tmp_path: Path) -> None:
    with random_pair(pair_seed, tmp_path, requests=3) as pair:
        while pair.step():
            pass
        paths = [pair.prefill_path, pair.decode_path]
    bent = []
    for number, path in enumerate(paths):
        header, rows = read_raw(path)
        rows = bend(rows, header, np.random.default_rng([pair_seed, number]))
        bent.append(write_raw(tmp_path / f"bent-{path.name}", header, rows))
    check(bent, tmp_path / "broken", incidents=False)
