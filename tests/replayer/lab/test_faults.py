"""Every fault of the lab happens, does harm, and is seen no later than in the first forward that reads the damage."""

import re
from pathlib import Path

import pytest
from kvcanary.replayer.lab.claims import make_claims
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.matrix import CLEAN, try_one
from kvcanary.replayer.lab.trial import Trial, judge, run_trial

# Those that real engines had, and the published canary's own five.
KNOWN = [
    "req_to_token",
    "kv_used",
    "kv_unused_cache",
    "kv_post_forward",
    "next_token_swap",
    "row_reassigned_in_flight",
    "radix_insert_then_free",
    "stale_swa_mapping",
    "commit_beyond_allocation",
    "resume_overwrites_tail",
    "draft_position_plus_one",
    "chunk_tail_predicted_token",
    "future_map_overrun",
    "async_resume_wrong_input",
    "pad_slot_wraps",
    "pad_rows_keep_last_blocks",
    "groups_alias",
    "hit_before_written",
    "tokens_truncated_hash_kept",
    "abort_frees_during_transfer",
    "transfer_wrong_stride",
    "failed_load_counted_loaded",
    "stored_wrong",
    "layout_misread",
    "load_of_other_prefix",
    "attention_table_overwritten",
    "attention_prefix_lost",
    "dedup_remap",
    "duplicate_prompt_numerics",
]

# Where the first seeds find no occasion, or nobody reads the damage.
SEEDS = {"stale_swa_mapping": (0, 1, 2, 3)}
HARMFUL = [name for name, fault in FAULTS.items() if not fault.benign]
BENIGN = [name for name, fault in FAULTS.items() if fault.benign]


def tried(name):
    configs = FAULTS[name].configs
    for seed in SEEDS.get(name, (0, 1)):
        yield try_one((name, configs[seed % len(configs)], seed))


def tried_until_it_does_harm(name):
    rows = []
    for row in tried(name):
        rows.append(row)
        if row.effect:
            break
    return rows


def test_none_is_missing():
    assert set(KNOWN) <= set(FAULTS)
    for fault in FAULTS.values():
        assert fault.configs
        assert set(fault.configs) <= set(CONFIGURATIONS)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", HARMFUL)
def test_harm_is_seen_in_time(name):
    rows = tried_until_it_does_harm(name)  # make lab tries each twenty times
    assert not [row.error for row in rows if row.error]
    assert any(row.effect for row in rows), rows
    assert not make_claims(rows)[0].failures
    for row in rows:
        if row.effect:
            assert row.injected
            assert row.detected
            assert row.delay is not None
            assert row.delay <= 0


@pytest.mark.parametrize("name", BENIGN)
def test_no_fault_is_taken_for_one(name):
    rows = list(tried(name))
    assert any(row.injected for row in rows)
    assert not make_claims(rows)[0].failures
    assert not [row for row in rows if row.effect or row.detected or row.false_positive]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_clean_runs_are_clean_by_probe_and_by_replay(config):
    row = try_one((CLEAN, config, 7))
    assert not row.error
    assert row.forwards > 60
    assert not row.effect
    assert not row.false_positive
    assert make_claims([row])[0].holds


def test_the_page_names_them_all_and_its_example_works(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "guide" / "fault-lab.md").read_text()
    for fault in FAULTS.values():
        assert f"| `{fault.name}` | {fault.reference} |" in page
    scope = {"__name__": "page"}
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], scope)
    trial = Trial(fault=scope["forgotten_decode"], config="mha", seed=1)
    outcome = run_trial(trial, tmp_path / "trace.arrow")
    found = judge(trial, outcome)
    assert outcome.effect is not None
    assert found.first is not None
    assert found.first.tick <= outcome.effect.tick
