"""A fault of the lab makes its trace differ from the clean one, no later than in the first forward that it hurts."""

import dataclasses

import pytest
from kvcanary.analysis.diff.compare import diff_traces
from kvcanary.analysis.diff.result import EQUAL_UP_TO_HERE
from kvcanary.analysis.diff.settings import DiffSettings
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.replayer.lab import trial as trials
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

# A leaked page is nobody's: no request reads or writes otherwise. The replay's slot_leaked sees it, a comparison cannot.
UNSEEN = {"page_leaked"}
# one of each family, and those that show in a way of their own; the others are tried by make fuzz
ALWAYS = (
    "kv_unused_cache",
    "req_to_token",
    "attention_prefix_lost",
    "draft_position_plus_one",
    "transfer_wrong_stride",
    "late_layer_overwritten",
    "nan_written",
    "state_restored_for_other_prefix",
    "window_read_wrong",
    "adapter_not_in_key",
)
SHOWS = {
    "kv_used": "kv_changed",
    "kv_unused_cache": "kv_changed",
    "req_to_token": "table",
    "row_reassigned_in_flight": "table",
    "draft_position_plus_one": "position",
    "next_token_swap": "sampled",
    "attention_prefix_lost": "kv",
    "late_layer_overwritten": "layer_changed",
    "nan_written": "values",
    "state_restored_for_other_prefix": "state",
    "window_read_wrong": "window",
    "adapter_not_in_key": "identity",
}
NAMES = [name for name, fault in FAULTS.items() if not fault.benign and name not in UNSEEN]


@pytest.fixture
def quiet(monkeypatch):
    """The lab's configurations without numeric noise, so that equal prompts have equal bytes."""
    for name, configuration in trials.CONFIGURATIONS.items():
        engine = {**configuration.engine, "noise": False}
        monkeypatch.setitem(trials.CONFIGURATIONS, name, dataclasses.replace(configuration, engine=engine))


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--conformance-cases") > 500  # make fuzz
        metafunc.parametrize("name", [name for name in NAMES if everything or name in ALWAYS])


def test_the_first_divergence_is_there_before_the_first_harm(name, quiet, tmp_path):
    fault = FAULTS[name]
    for seed in range(12):
        config = fault.configs[seed % len(fault.configs)]
        folder = tmp_path / str(seed)
        folder.mkdir()
        pair = config.startswith("pd")
        broken = run_trial(Trial(fault=fault, config=config, seed=seed), folder / ("b" if pair else "b.arrow"))
        if broken.effect is not None:
            break
    assert broken.effect is not None
    clean = run_trial(Trial(fault=None, config=config, seed=seed), folder / ("a" if pair else "a.arrow"))
    first = []
    for ticks, a, b in zip(broken.ticks, clean.traces, broken.traces, strict=True):
        result = diff_traces(a, b)
        found = result.first
        if found is not None:
            # what was computed differs, and not what it was computed from
            assert result.hint == (EQUAL_UP_TO_HERE if found.kind in ("kv", "layer", "sampled") else "")
            assert found.words
            first.append((ticks[found.b_forward], found.kind))
    assert first, "no difference"
    tick, kind = min(first)
    assert tick <= broken.effect.tick
    assert kind == SHOWS.get(name, kind)


def test_what_is_no_fault_is_no_difference(quiet, tmp_path):
    fault = FAULTS["dedup_remap"]
    config = fault.configs[0]
    harmless = run_trial(Trial(fault=fault, config=config, seed=0), tmp_path / "b.arrow")
    assert harmless.injected_forward >= 0
    clean = run_trial(Trial(fault=None, config=config, seed=0), tmp_path / "a.arrow")
    assert diff_traces(clean.traces[0], harmless.traces[0]).verdict == "same"


def test_the_same_fault_in_both_is_no_difference(tmp_path):
    for name in ("a", "b"):
        run_trial(Trial(fault=FAULTS["req_to_token"], config="mha", seed=0), tmp_path / f"{name}.arrow")
    assert diff_traces(tmp_path / "a.arrow", tmp_path / "b.arrow").verdict == "same"


def test_kinds_that_do_not_count_are_still_told(tmp_path):
    run_trial(Trial(fault=None, config="mha", seed=0), tmp_path / "a.arrow")
    run_trial(Trial(fault=FAULTS["kv_used"], config="mha", seed=0), tmp_path / "b.arrow")
    result = diff_traces(tmp_path / "a.arrow", tmp_path / "b.arrow", settings=DiffSettings(kinds=frozenset({"table"})))
    assert result.verdict == "same"
    assert result.counts["kv_changed"] == 1


def test_a_slot_of_a_request_that_only_one_trace_has_is_told_too(tmp_path):
    configuration = trials.CONFIGURATIONS["mha"]
    with SimulatedEngine(
        configuration.engine_config(0), list(configuration.requests(0))[:2], tmp_path / "a.arrow"
    ) as engine:
        engine.run()
    run_trial(Trial(fault=FAULTS["kv_used"], config="mha", seed=0), tmp_path / "b.arrow")
    result = diff_traces(tmp_path / "a.arrow", tmp_path / "b.arrow")
    nobody = [request[0] for request in result.requests if not request[0].request and not request[0].partner]
    assert [divergence.kind for divergence in nobody] == ["kv_changed"]
    assert "a slot of no request of both traces" in nobody[0].words
    assert result.counts["missing"] == 22
