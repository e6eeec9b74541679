"""Each rule on a trial of its fault: the right kind, once, with words and evidence that hold."""

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kvcanary.analysis import build_store, open_report
from kvcanary.analysis.incidents import gathering
from kvcanary.analysis.incidents.alike import known_bugs
from kvcanary.analysis.incidents.cluster import Cluster
from kvcanary.analysis.incidents.finding import find_incidents, write_incidents
from kvcanary.analysis.incidents.rules import RULES, UNKNOWN
from kvcanary.analysis.incidents.sign import BRANCHES
from kvcanary.analysis.store.sources import find_sources

from .conftest import replay_all

# kind: the lab's fault, its configuration, and a seed in which it has an effect
TRIALS = {
    "kv_changed": ("kv_used", "mha_page16", 2),
    "kv_write_lost": ("kv_write_lost", "mha_page16", 3),
    "kv_write_damaged": ("kv_write_damaged", "submitted", 3),
    "groups_alias": ("groups_alias", "eagle", 3),
    "req_to_token": ("req_to_token", "mha_page16", 3),
    "row_reassigned_in_flight": ("row_reassigned_in_flight", "mha_page16", 2),
    "resume_overwrites_tail": ("resume_overwrites_tail", "mha_page16", 2),
    "double_free": ("double_free", "mha_page16", 2),
    "free_too_early": ("free_too_early", "mha_page16", 2),
    "page_given_twice": ("page_given_twice", "mha_page16", 3),
    "page_leaked": ("page_leaked", "mha", 3),
    "commit_beyond_allocation": ("commit_beyond_allocation", "mha", 1),
    "radix_insert_then_free": ("radix_insert_then_free", "mha", 3),
    "hit_before_written": ("hit_before_written", "twins", 1),
    "tokens_truncated_hash_kept": ("tokens_truncated_hash_kept", "mla", 3),
    "identity_not_in_key": ("adapter_not_in_key", "adapters", 2),
    "state_restored_for_other_prefix": ("state_restored_for_other_prefix", "recurrent", 2),
    "layer_changed": ("late_layer_overwritten", "layers", 2),
    "bad_values_written": ("nan_written", "layers", 2),
    "eviction_of_locked_page": ("eviction_of_locked_page", "mha_page16", 2),
    "fork_copy_missing": ("fork_copy_missing", "forks", 2),
    "stale_swa_mapping": ("stale_swa_mapping", "dsv4", 3),
    "swa_window_off_by_one": ("swa_window_off_by_one", "dsv4", 3),
    "window_read_wrong": ("window_read_wrong", "told_reads", 3),
    "draft_position_plus_one": ("draft_position_plus_one", "eagle", 3),
    "slot_mapping": ("slot_mapping", "mha_page16", 1),
    "seq_len_backwards": ("seq_len_backwards", "mha", 3),
    "next_token_swap": ("next_token_swap", "mla", 3),
    "chunk_tail_predicted_token": ("chunk_tail_predicted_token", "eagle", 3),
    "async_resume_wrong_input": ("async_resume_wrong_input", "mixed", 3),
    "pad_slot_wraps": ("pad_slot_wraps", "mha", 1),
    "pad_rows_keep_last_blocks": ("pad_rows_keep_last_blocks", "mla", 3),
    "future_map_overrun": ("future_map_overrun", "overlap_swa", 3),
    "abort_frees_during_transfer": ("abort_frees_during_transfer", "pd_swa", 3),
    "transfer_wrong_stride": ("transfer_wrong_stride", "pd", 1),
    "attention_table_overwritten": ("attention_table_overwritten", "mha_page16", 3),
    "attention_seq_len_wrong": ("attention_prefix_lost", "mha", 3),
    "failed_load_counted_loaded": ("failed_load_counted_loaded", "pd", 3),
    "stored_wrong": ("stored_wrong", "host", 1),
    "layout_misread": ("layout_misread", "host", 1),
    "load_of_other_prefix": ("load_of_other_prefix", "host", 1),
}


@pytest.fixture(scope="module")
def any_report(tried):
    """A session over some report's store."""
    trial = tried(*TRIALS["kv_changed"])
    report, [trace] = trial.reports[0], trial.traces
    write_incidents(report, find_incidents(report, [trace]))
    build_store(find_sources([report], trace=trace)[0])
    with open_report(report, trace=trace) as session:
        assert session.stored
        yield session


# Kinds that no fault of the lab makes: tests/corpus has traces of bugs that do.
IN_THE_CORPUS = {
    *("stale_prefix_hit", "scheduled_after_retraction", "shared_page_written", "prefix_not_computed"),
    *("host_copy_overwritten", "copy_failed", "position_off", "cache_kept_over_new_weights"),
}
# ... and those that only a load shows that goes on beside the forwards: test_copies.py, and vLLM's conformance runs.
BESIDE_FORWARDS = {"load_landed_elsewhere", "read_before_landed"}
# ... and that of bytes that a model computes, which the simulated engine has not: test_token_bytes.py, test_model_bytes.py.
OF_A_MODEL = {"computed_with_other_weights", "not_of_the_model"}


def test_every_rule_has_its_like_named():
    page = Path(__file__).parents[3] / "docs" / "reference" / "incidents.md"
    rows = [
        line.split("|") for line in page.read_text().splitlines() if line.startswith("| `") and line.count("|") == 5
    ]
    likes = {row[1].strip(" `"): set(re.findall(r"`(\w+)`", row[4])) for row in rows}
    assert likes.keys() == {*RULES, UNKNOWN}
    assert {kind for kind, named in likes.items() if not named & RULES.keys() - {kind}} == {UNKNOWN}


def test_every_rule_has_a_trial():
    assert set(TRIALS) | IN_THE_CORPUS | BESIDE_FORWARDS | OF_A_MODEL == set(RULES)
    assert all(rule.branch in BRANCHES for rule in RULES.values())
    assert all(rule.kind == kind and rule.title and "(" in rule.mechanism for kind, rule in RULES.items())


@pytest.fixture(scope="module", params=TRIALS)
def found(request, tried):
    """A kind, its trial, and the incidents of each of its reports, found once: a kind's tests come one after another."""
    trial = tried(*TRIALS[request.param])
    rows = [find_incidents(report, [trace]).rows for report, trace in zip(trial.reports, trial.traces, strict=True)]
    return request.param, trial, rows


@pytest.mark.one_in(3)
def test_a_fault_is_one_incident_of_its_kind(found, any_report):
    kind, trial, by_report = found
    rows = [row for rows in by_report for row in rows]
    row = min(rows, key=lambda row: row["time_ns"])
    assert [row["kind"] for row in rows] == [kind]
    assert row["score"] >= 0.3  # of some kinds few bugs are known; the rules alone are not unsure:
    alone = known_bugs().without(RULES)
    by_rules = [
        one
        for report, trace in zip(trial.reports, trial.traces, strict=True)
        for one in find_incidents(report, [trace], known=alone).rows
    ]
    assert min(by_rules, key=lambda one: one["time_ns"])["confidence"] != "low"
    assert row["alternatives"][0] == kind
    assert row["alternative_scores"] == sorted(row["alternative_scores"], reverse=True)
    assert row["first_forward"] <= row["last_forward"]
    assert re.search(r"\d", row["sentence"])
    for query in row["evidence"]:  # what its queries are made of, any report can answer, if only with nothing
        any_report.sql(query)


@pytest.mark.one_in(3)
def test_no_diagnosis_rests_on_the_words_of_a_finding(found, tmp_path):
    _, trial, by_report = found
    for number, (report, trace) in enumerate(zip(trial.reports, trial.traces, strict=True)):
        scrambled = tmp_path / str(number)
        shutil.copytree(report, scrambled)
        table = pq.read_table(report / "findings.parquet")
        if not table.num_rows:
            continue
        words = pa.array([f"words {n}" for n in range(table.num_rows)], pa.utf8())
        at = table.column_names.index("detail")
        pq.write_table(table.set_column(at, "detail", words), scrambled / "findings.parquet")
        # A rule goes by the findings alone where the trace is not at hand.
        for traces, before in (([trace], by_report[number]), ([], find_incidents(report, []).rows)):
            after = find_incidents(scrambled, traces).rows
            # The sentence quotes the words.
            assert [row | {"sentence": ""} for row in after] == [row | {"sentence": ""} for row in before]


@pytest.mark.parametrize("kind", ["double_free", "next_token_swap"])
def test_the_evidence_of_an_incident_proves_it(tried, kind):
    trial = tried(*TRIALS[kind])
    report, [trace] = trial.reports[0], trial.traces
    found = find_incidents(report, [trace])
    write_incidents(report, found)
    [row] = found.rows
    with open_report(report, trace=trace) as session:
        assert session.sql("select kind, sentence from incidents").to_pylist() == [
            {"kind": kind, "sentence": row["sentence"]}
        ]
        answered = {query: session.sql(query).num_rows for query in row["evidence"]}
        empty = {query for query, rows in answered.items() if not rows}
        # An incident has violations or findings; not each has both.
        assert empty <= {query for query in answered if "incident_findings" in query or "incident_violations" in query}
        assert len(answered) >= 5


@pytest.mark.parametrize("fault", ["kv_used", "req_to_token"])
def test_the_sentence_names_what_the_lab_broke(tried, fault):
    trial = tried(fault, "mha_page16", {"kv_used": 2, "req_to_token": 3}[fault])
    [row] = find_incidents(trial.reports[0], trial.traces).rows
    assert f"slot {trial.label['slot']} " in row["sentence"]
    assert f"position {trial.label['position']}" in row["sentence"]


@pytest.mark.parametrize("kind", ["kv_changed", "double_free", "draft_position_plus_one"])
def test_the_marks_of_the_lab_change_nothing(tried, tried_without_marks, kind):
    marked, bare = tried(*TRIALS[kind]), tried_without_marks(*TRIALS[kind])

    def what(trial):
        found = find_incidents(trial.reports[0], trial.traces).rows
        # The mark is an event, so that the numbers of those behind it differ; all else must not.
        keys = ("kind", "score", "alternatives", "first_forward", "last_forward", "requests", "slots", "violations")
        return [{key: row[key] for key in keys} for row in found]

    assert what(bare) == what(marked)


@pytest.mark.parametrize("fault", ["dedup_remap", "duplicate_prompt_numerics"])
def test_what_is_no_fault_is_no_incident(tried, fault):
    trial = tried(fault, "twins", 1)
    assert find_incidents(trial.reports[0], trial.traces).rows == []


def test_without_the_trace_the_kind_is_less_certain(tried):
    trial = tried(*TRIALS["page_given_twice"])
    [row] = find_incidents(trial.reports[0], []).rows
    assert row["violations"] + row["findings"] > 0
    trial = tried(*TRIALS["req_to_token"])
    [with_trace] = find_incidents(trial.reports[0], trial.traces).rows
    [without] = find_incidents(trial.reports[0], []).rows
    assert without["kind"] == with_trace["kind"] == "req_to_token"
    assert without["score"] < with_trace["score"]


def test_a_row_that_names_what_was_joined_for_ones_own_is_not_stale(tried):
    """A draft model reads a page that its request took over from the cache in the place of the one it had computed."""
    trial = tried("tokens_truncated_hash_kept", "eagle", 7)
    first = find_incidents(trial.reports[0], trial.traces).rows[0]
    assert first["kind"] == "tokens_truncated_hash_kept", first["sentence"]


def test_a_write_over_ones_own_slot_needs_no_recorded_allocation(tmp_path, monkeypatch):
    """With a KV connector vLLM's allocations are not recorded: the slots that were written before say enough."""
    trace = Path(__file__).parents[3] / "data" / "corpus" / "vllm-chunk_gets_first_blocks.arrow"
    replay_all([trace], [tmp_path / "report"])
    monkeypatch.setattr(gathering._Gathering, "_note", lambda *_: None)
    monkeypatch.setattr(Cluster, "complete", property(lambda _: False))
    first = find_incidents(tmp_path / "report", [trace]).rows[0]
    assert (first["kind"], first["confidence"]) == ("slot_mapping", "high"), first["sentence"]
