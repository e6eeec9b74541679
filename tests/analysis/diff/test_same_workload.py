"""The same workload under other settings is the same: slots, chunks, batches and the cache are no difference."""

import dataclasses

import pytest
from kvcanary.analysis.diff.compare import diff_traces
from kvcanary.analysis.diff.settings import KINDS, DiffSettings, NotComparableError
from kvcanary.analysis.errors import AnalysisError
from kvcanary.recorder.capture.privacy import Privacy
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.trace.recordings import one_recording
from kvcanary.replayer.lab.configurations import CONFIGURATIONS

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

SLOWER = ("overlap_swa", "sweeps_eagle", "host")
STRICT = DiffSettings(kinds=frozenset(KINDS))


def record(config, path, *, recorder=None, **changes):
    configuration = CONFIGURATIONS[config]
    engine = dataclasses.replace(configuration.engine_config(3), noise=False, **changes)
    with SimulatedEngine(engine, configuration.requests(3), path, **(recorder or {})) as running:
        running.run()
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("same")
    made = {}

    def get(config):
        if config not in made:
            made[config] = record(config, folder / f"{config}.arrow")
        return made[config]

    return get


@pytest.mark.parametrize(("config", "order"), [("mha", "fifo"), ("swa", "shuffled"), ("eagle", "shuffled")])
def test_another_allocation_order_is_no_difference_at_all(config, order, recorded, tmp_path):
    result = diff_traces(recorded(config), record(config, tmp_path / "b.arrow", free_order=order), settings=STRICT)
    assert result.verdict == "same"
    assert result.timing.same
    assert result.pairing.pairs == 24
    assert min(result.compared[what] for what in ("tokens", "sampled", "kv")) > 300


OTHER_SCHEDULES = [
    ("mha", {"chunk_tokens": 20}),
    ("mha", {"mixed": True}),
    ("mha", {"prefix_cache": False}),
    ("tight", {"max_running": 3}),
    ("swa", {"page_size": 8, "num_pages": 65}),
    ("overlap_swa", {"max_running": 3, "overlap": False}),
    ("eagle_swa", {"chunk_tokens": 20, "num_pages": 60}),
    ("sweeps_eagle", {"max_running": 3, "sweep_interval": 0}),
    ("host", {"num_pages": 60}),
]


def pytest_generate_tests(metafunc):
    if {"config", "changes"} <= set(metafunc.fixturenames):
        everything = metafunc.config.getoption("--conformance-cases") > 500  # make fuzz
        cases = [case for case in OTHER_SCHEDULES if everything or case[0] not in SLOWER]
        metafunc.parametrize(("config", "changes"), cases)


def test_other_chunks_and_batches_differ_in_timing_only(config, changes, recorded, tmp_path):
    other = record(config, tmp_path / "b.arrow", **changes)
    result = diff_traces(recorded(config), other)
    assert result.verdict == "same", result.requests[:2]
    assert not result.timing.same
    assert set(result.counts) <= {"hit", "schedule"}
    assert result.timing.words()
    assert result.compared["tokens"] > 900


def test_timing_counts_when_asked(recorded, tmp_path):
    other = record("mha", tmp_path / "b.arrow", chunk_tokens=20)
    strict = diff_traces(recorded("mha"), other, settings=STRICT)
    assert strict.verdict == "different"
    assert {d.kind for request in strict.requests for d in request} == {"hit", "schedule"}
    assert "chunks" in strict.requests[0][0].a + strict.requests[-1][-1].a


def test_numeric_noise_is_a_difference_of_bytes_only(recorded, tmp_path):
    noisy = record("mha", tmp_path / "b.arrow")
    configuration = CONFIGURATIONS["mha"]
    with SimulatedEngine(configuration.engine_config(3), configuration.requests(3), tmp_path / "c.arrow") as engine:
        engine.run()
    assert diff_traces(recorded("mha"), noisy).verdict == "same"
    result = diff_traces(recorded("mha"), tmp_path / "c.arrow")
    assert set(result.counts) == {"kv"}
    assert diff_traces(recorded("mha"), tmp_path / "c.arrow", settings=DiffSettings(kv=False)).verdict == "same"


def test_other_ids_are_aligned_by_prompt(recorded, tmp_path):
    # Another seed of the engine: other request ids, which the content sampler does not look at.
    first = record("mha", tmp_path / "a.arrow", sampler="content")
    second = record("mha", tmp_path / "b.arrow", sampler="content", seed=3 + (1 << 32))
    result = diff_traces(first, second, settings=DiffSettings(align="prompt"))
    assert result.pairing.by == "prompt"
    assert result.pairing.pairs == 24
    assert result.verdict == "same"


def test_hashes_by_another_salt_are_not_comparable(tmp_path):
    salts = {"a": bytes(16), "b": bytes(16), "other": bytes(range(16))}
    made = {
        name: record("mha", tmp_path / f"{name}.arrow", recorder={"privacy": Privacy(salt)})
        for name, salt in salts.items()
    }
    assert diff_traces(made["a"], made["b"]).verdict == "same"
    for align in ("auto", "id"):
        with pytest.raises(NotComparableError, match="different salts"):
            diff_traces(made["a"], made["other"], settings=DiffSettings(align=align))


def test_a_recording_in_segments_is_one_trace(recorded, tmp_path):
    folder = tmp_path / "cut"
    folder.mkdir()
    record("mha", folder / "trace.arrow", recorder={"segment_bytes": 60_000, "flush_bytes": 20_000})
    segments = sorted(folder.glob("*.arrow"))
    assert len(segments) > 2
    assert one_recording(folder / "trace.arrow") == one_recording(folder) == tuple(segments)
    result = diff_traces(recorded("mha"), folder, settings=STRICT)
    assert result.verdict == "same"
    assert result.compared == diff_traces(recorded("mha"), recorded("mha")).compared
    with pytest.raises(NotComparableError, match="segment 1 of a recording"):
        diff_traces(recorded("mha"), segments[1])
    for side in ((recorded("mha"), segments[0]), (segments[0], recorded("mha"))):
        first = diff_traces(*side)  # of a recording that goes on, nothing is missing
        assert (first.verdict, first.requests) == ("inconclusive", ())
        assert "goes on" in first.doubts[0]
    segments[1].unlink()
    assert diff_traces(recorded("mha"), folder).verdict != "same"
    with pytest.raises(AnalysisError, match="holds 2 recordings"):
        record("mha", folder / "other.arrow")
        diff_traces(recorded("mha"), folder)
