"""What differs beside tokens, tables and leading bytes: states, windows, values, identities, and bytes of all layers."""

import dataclasses

import pytest
from kvcanary.analysis.diff.compare import diff_traces
from kvcanary.analysis.diff.settings import DiffSettings
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.replayer.lab import trial as trials
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial

from ...support.places import DATA

CORPUS = DATA / "corpus"
ROUNDED = DiffSettings(kv_tolerance=1e-5)


def record(config, path, *, requests=None, recorder=None, seed=3, **changes):
    configuration = CONFIGURATIONS[config]
    # without forks, whose answers depend on the schedule
    configuration = dataclasses.replace(configuration, workload={**configuration.workload, "fork_rate": 0.0})
    engine = dataclasses.replace(configuration.engine_config(seed), noise=False, **changes)
    specs = configuration.requests(seed) if requests is None else requests
    with SimulatedEngine(engine, specs, path, **(recorder or {})) as running:
        running.run()
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    made = {}

    def get(config):
        if config not in made:
            made[config] = record(config, folder / f"{config}.arrow")
        return made[config]

    return get


@pytest.mark.parametrize(
    ("config", "changes", "what", "least"),
    [
        ("recurrent", {"free_order": "shuffled"}, "states", 300),
        ("recurrent", {"chunk_tokens": 20}, "states", 300),
        ("recurrent", {"prefix_cache": False}, "states", 300),
        ("layers", {"free_order": "shuffled"}, "layers", 10),
        ("layers", {"chunk_tokens": 20, "max_running": 3}, "layers", 10),
        ("told_reads", {"free_order": "shuffled"}, "windows", 300),
        ("told_reads", {"max_running": 3}, "windows", 300),
        ("adapters", {"free_order": "shuffled", "max_running": 3}, "identities", 20),
        ("adapters", {"prefix_cache": False}, "identities", 20),
    ],
)
def test_other_slots_and_schedules_are_no_difference(config, changes, what, least, clean, tmp_path):
    result = diff_traces(clean(config), record(config, tmp_path / "b.arrow", **changes))
    assert result.verdict == "same", result.requests[:2]
    assert result.compared[what] >= least
    assert not [note for note in result.notes if "since only" in note]


@pytest.mark.parametrize(
    ("setup", "bug", "settings", "counts", "place", "words"),
    [
        (
            "vllm-clean-delta-preempt",
            "vllm-resumed_request_is_known_by_its_old_column",
            DiffSettings(),
            {"state": 1},
            (63, 36),
            "the recurrent state behind position 63 in mamba differs: A read 7c44ad07ed03d563, B read f5cb192ededcd2b3",
        ),
        (
            "sglang-clean-recurrent-chunks",
            "sglang-chunks_state_kept_before_it_was_computed",
            DiffSettings(),
            {"state": 1},
            (31, 15),
            "differs: A read f0163164084c0e1f, B read 03a8a8fab4d354e1",
        ),
        (
            "transformers-clean-hybrid",
            "transformers-window_has_one_too_many",
            ROUNDED,
            {"window": 6},
            (39, 1),
            "computing position 39 in pool sliding_attention: A reads its window, B positions 6 to 38",
        ),
        (
            "sglang-clean-llama-salts",
            "sglang-salt_is_carried_and_never_delivered",
            ROUNDED,
            {"identity": 3, "hit": 3, "schedule": 4},
            (0, 24),
            "the KV of position 0 was computed with salt 0ae51583da67f6aa in A, salt 39efc7d698d520cc in B",
        ),
    ],
)
def test_real_engines_differ_in_that_alone(setup, bug, settings, counts, place, words):
    result = diff_traces(CORPUS / f"{setup}.arrow", CORPUS / f"{bug}.arrow", settings=settings)
    assert result.counts == counts
    assert (result.first.position, result.first.b_forward) == place
    assert words in result.first.words


@pytest.mark.parametrize(
    ("setup", "bug", "first"),
    [
        ("sglang-clean-llama-weights", "sglang-weights_changed_cache_kept", "weights"),
        ("sglang-clean-llama-lora", "sglang-buffer_of_an_adapter_is_found_by_its_name", "adapter"),
        ("sglang-clean-llama-lora", "sglang-key_of_what_is_kept_has_no_adapter", "no adapter"),
    ],
)
def test_what_kv_was_computed_with_comes_before_what_came_of_it(setup, bug, first):
    result = diff_traces(CORPUS / f"{setup}.arrow", CORPUS / f"{bug}.arrow")
    assert result.first.kind == "identity"
    assert result.first.a.startswith(first)
    assert not result.hint


def broken(fault, config, path, monkeypatch):
    quiet = {**CONFIGURATIONS[config].engine, "noise": False}
    monkeypatch.setitem(trials.CONFIGURATIONS, config, dataclasses.replace(trials.CONFIGURATIONS[config], engine=quiet))
    for seed in range(12):
        pair = [path / f"{seed}{side}.arrow" for side in "ab"]
        if run_trial(Trial(fault=FAULTS[fault], config=config, seed=seed), pair[1]).effect is not None:
            run_trial(Trial(fault=None, config=config, seed=seed), pair[0])
            return pair
    raise AssertionError(f"{fault} had no effect")


@pytest.mark.parametrize(
    ("fault", "config", "kind", "words"),
    [
        ("late_layer_overwritten", "layers", "layer_changed", "changed in a later layer after they were written"),
        ("nan_written", "layers", "values", "none in A, NaN in a row of "),
        ("window_read_wrong", "told_reads", "window", "A reads its window, B positions"),
        ("state_restored_for_other_prefix", "recurrent", "state", "the recurrent state behind position"),
        ("adapter_not_in_key", "adapters", "identity", "was computed with"),
    ],
)
def test_faults_that_show_nowhere_else(fault, config, kind, words, tmp_path, monkeypatch):
    good, bad = broken(fault, config, tmp_path, monkeypatch)
    result = diff_traces(good, bad)
    assert set(result.counts) - {"hit", "schedule"} == {kind}
    assert words in result.first.words
    back = diff_traces(bad, good)
    assert back.verdict == "different"
    assert result.first.position in {found.position for request in back.requests for found in request}
