"""The fault lab's faults: the replay finds exactly the rows that the published canary finds online."""

from pathlib import Path

from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.faults import FAULTS

from .published_sim.lab import run_lab

# Half of a transfer lands in slots that were never written, and no canary record with it.
LANDS_UNTOLD = {"failed_load_counted_loaded"}
# Of what the canary does not look at: what attention got, what was handed in, which positions a ring reads, whose KV it is, recurrent state,
# layers behind the first.
UNSEEN = {name for name in FAULTS if name.startswith("attention_")}
UNSEEN |= {"adapter_not_in_key", "state_restored_for_other_prefix", "kv_write_damaged", "window_read_wrong"}
UNSEEN |= {"late_layer_overwritten", "nan_written"}


def test_replay_finds_the_published_rows(tmp_path: Path, conformance_cases: int) -> None:
    tried, happened, with_rows = set(), set(), set()
    # A smoke run takes every other fault; make fuzz each forty times.
    times = conformance_cases // 500
    for case in range(times * len(FAULTS)) if times > 1 else range(0, len(FAULTS), 2):
        number, seed = case % len(FAULTS), case // len(FAULTS)
        name = list(FAULTS)[number]
        config = FAULTS[name].configs[(seed + number) % len(FAULTS[name].configs)]
        runs, injected = run_lab(FAULTS[name], config, seed, tmp_path / str(case))
        untold = name in LANDS_UNTOLD and CONFIGURATIONS[config].pair is not None
        try:
            for found in runs:
                found.assert_same(kv_of_blank_slots=not untold)
                assert not (FAULTS[name].benign and found.seen.rows)
        except AssertionError as error:
            error.add_note(f"fault {name} in {config}, seed {seed}")
            raise
        if injected:
            happened.add(name)
        if any(found.seen.rows for found in runs):
            with_rows.add(name)
        tried.add(name)
    assert len(happened) > 0.7 * len(tried)
    least = 0.5 if times > 1 else 0.4  # one seed of each shows less than forty
    assert len(with_rows - UNSEEN) > least * len(tried - UNSEEN), sorted(tried - with_rows)
