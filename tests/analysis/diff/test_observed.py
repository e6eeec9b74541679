"""What differs beside tokens, tables and leading bytes: states, windows, values, identities, and bytes of all layers."""

import dataclasses

import numpy as np
import pytest
from kvcanary.analysis.diff.comparability import plan_comparison
from kvcanary.analysis.diff.compare import diff_traces
from kvcanary.analysis.diff.identities import identity_pieces
from kvcanary.analysis.diff.settings import DiffSettings
from kvcanary.recorder.capture.privacy import Privacy
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.trace.header import EngineInfo, PoolGroup, StatePool, StateTable, TraceHeader
from kvcanary.recorder.trace.schema import IDENTITY_KINDS
from kvcanary.replayer.lab import trial as trials
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.faults import FAULTS, kv_bytes
from kvcanary.replayer.lab.trial import Trial, run_trial

from ...support.places import DATA

pytestmark = pytest.mark.one_in(3)  # make fuzz goes through all

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
        ("vllm-clean-llama-embeds", "vllm-embeddings_are_left_out_of_the_key", "media"),
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


class Zeroing:
    """A layer's words `[slots, words]`, of which a slot becomes all zeros when anything is written to one."""

    def __init__(self, words):
        self.words = words

    def __setitem__(self, place, value):
        self.words[place[0]] = 0


def test_a_row_of_zeros_counts_once_the_other_trace_had_seen_as_many_rows(tmp_path, monkeypatch):
    late_layer = kv_bytes._late_layer
    monkeypatch.setattr(kv_bytes, "_late_layer", lambda *given: Zeroing(late_layer(*given)))
    good, bad = broken("nan_written", "layers", tmp_path, monkeypatch)
    result = diff_traces(good, bad)
    assert result.counts == {"values": 1}
    assert "none in A, zeros in a row of " in result.first.words
    back = diff_traces(bad, good)
    assert (back.counts, back.first.position) == ({"values": 1}, result.first.position)


def test_of_a_group_without_a_window_nobody_says_that_it_was_looked_at():
    pair = CORPUS / "vllm-clean-hybrid.arrow", CORPUS / "vllm-layers_of_full_attention_get_the_window.arrow"
    result = diff_traces(*pair)
    assert "window" not in result.counts
    assert (result.first.kind, result.first.b_forward, bool(result.hint)) == ("kv", 1, True)


def test_a_nan_of_a_real_engine_is_found_where_it_was_written():
    pair = CORPUS / "vllm-clean-delta.arrow", CORPUS / "vllm-state_of_a_block_that_is_not_there_yet.arrow"
    result = diff_traces(*pair, settings=DiffSettings(kinds=frozenset({"values"})))
    assert (
        result.first.words == "computing position 96 in pool full: none in A, NaN in a row of V, first in layer 3 in B"
    )


@pytest.mark.parametrize(
    ("fault", "config", "without", "kind", "note"),
    [
        ("nan_written", "layers", {"sampled_layers": 0}, "values", "NaN, infinities and rows of zeros"),
        ("late_layer_overwritten", "layers", {"sampled_layers": 0}, "layer_changed", "KV bytes of later layers"),
        ("window_read_wrong", "told_reads", {"reads_given": False}, "window", "positions that windows read"),
    ],
)
def test_what_only_one_trace_saw_is_compared_with_nothing(fault, config, without, kind, note, tmp_path, monkeypatch):
    _, bad = broken(fault, config, tmp_path, monkeypatch)
    seed = int(bad.stem[:-1])
    engine = dataclasses.replace(CONFIGURATIONS[config].engine_config(seed), noise=False, **without)
    good = tmp_path / "good.arrow"
    with SimulatedEngine(engine, CONFIGURATIONS[config].requests(seed), good) as running:
        running.run()
    for pair, side in (((good, bad), "B"), ((bad, good), "A")):
        result = diff_traces(*pair)
        assert kind not in result.counts
        assert f"{note} are not compared, since only {side} recorded them" in result.notes


def test_hashes_of_states_know_no_tolerance():
    pair = CORPUS / "vllm-clean-delta-preempt.arrow", CORPUS / "vllm-resumed_request_is_known_by_its_old_column.arrow"
    for settings, said in ((ROUNDED, ["--kv-tolerance"]), (DiffSettings(kv=False), [])):
        result = diff_traces(*pair, settings=settings)
        assert result.verdict == "same"
        assert "states" not in result.compared
        assert [word for word in said if any(word in note for note in result.notes)] == said


POOL = StatePool(name="mamba", num_slots=9, layer=1, num_layers=2, hashed_bytes=64, zeros=5)
HEADER = TraceHeader(
    groups=(PoolGroup(name="full", num_slots=9, streams=()),), tables=(StateTable(rows=2, width=9),), states=(POOL,)
)


@pytest.mark.parametrize(
    ("changes", "pairs", "note"),
    [
        ({}, 1, ""),
        ({"states": (dataclasses.replace(POOL, num_slots=20),)}, 1, ""),
        ({"states": ()}, 0, "since only A recorded them"),
        ({"states": (dataclasses.replace(POOL, hashed_bytes=0),)}, 0, "since only A recorded them"),
        ({"states": (dataclasses.replace(POOL, hashed_bytes=32),)}, 0, "of 1 pools in A and 1 in B 0 are compared"),
        ({"states": (dataclasses.replace(POOL, zeros=6),)}, 0, "recorded in another format"),
        ({"states": (dataclasses.replace(POOL, zeros=0),), "format_minor": 7}, 0, "recorded in another format"),
        ({"engine": EngineInfo(name="other")}, 0, "A and B are other engines"),
        ({"salt_id": "1"}, 0, "different salts"),
    ],
)
def test_which_hashes_of_states_mean_the_same(changes, pairs, note):
    plan = plan_comparison(HEADER, dataclasses.replace(HEADER, **changes), DiffSettings())
    assert [len(side) for side in plan.states] == [pairs, pairs]
    assert not note or any(note in one for one in plan.notes)


def requests(rename):
    configuration = CONFIGURATIONS["adapters"]
    return [
        dataclasses.replace(spec, adapter=rename(n, spec.adapter)) for n, spec in enumerate(configuration.requests(3))
    ]


def test_adapters_of_other_names_are_the_same_where_requests_have_them_together(clean, tmp_path):
    renamed = record("adapters", tmp_path / "b.arrow", requests=requests(lambda _, name: name and f"run-2-{name}"))
    result = diff_traces(clean("adapters"), renamed)
    assert result.verdict == "same", result.requests[:1]
    assert any("2 values of adapter are called otherwise" in note for note in result.notes)
    specs = requests(lambda _, name: name)
    odd = next(n for n, spec in enumerate(specs) if spec.adapter == "adapter-1")
    for other, said in (("run-2-adapter-2", "adapter "), ("", "no adapter")):
        given = requests(lambda n, name, to=other: to if n == odd else name and f"run-2-{name}")
        path = record("adapters", tmp_path / f"{said}.arrow", requests=given)
        differing = diff_traces(clean("adapters"), path, settings=DiffSettings(kinds=frozenset({"identity"})))
        assert differing.num_different == 1
        assert differing.first.position == 0
        assert differing.first.b.startswith(said)


def test_identities_hashed_with_other_salts_are_not_compared(tmp_path):
    salts = {"a": bytes(16), "b": bytes(16), "c": bytes(range(16))}
    made = {
        name: record(
            "adapters", tmp_path / f"{name}.arrow", recorder={"privacy": Privacy(salt, tokens=False, names=True)}
        )
        for name, salt in salts.items()
    }
    same, other = diff_traces(made["a"], made["b"]), diff_traces(made["a"], made["c"])
    assert (same.verdict, other.verdict) == ("same", "same")
    assert same.compared["identities"] > 20
    assert "identities" not in other.compared
    assert any("hashed with other salts" in note for note in other.notes)


def test_media_fill_the_positions_that_they_are_declared_for():
    media, salt = IDENTITY_KINDS.index("media"), IDENTITY_KINDS.index("salt")
    values = np.array([(salt, 0, 0, 9), (media, 0, 0, 0), (media, 4, 3, 7), (media, 9, 1, 8)], np.int64)
    assert identity_pieces(values, salt, 2, 6) == [(2, (1, 9))]
    assert identity_pieces(values, media, 0, 12) == [(0, (1, 0)), (4, (1, 7)), (7, (1, 0)), (9, (1, 8)), (10, (1, 0))]
    assert identity_pieces(values, media, 5, 8) == [(5, (1, 7)), (7, (1, 0))]
    assert identity_pieces(values, IDENTITY_KINDS.index("weights"), 0, 12) == [(0, (0, 0))]
    assert identity_pieces(values[:0], media, 3, 12) == [(3, (0, 0))]
