"""What a check declares of the faster ways of replaying holds; one that declares nothing is stepped, and loses nothing."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.recorder.capture.host_arrays import CopyEnds
from kvcanary.replayer import checks
from kvcanary.replayer.checks import CHECK_NAMES, Covered
from kvcanary.replayer.executors import executors
from kvcanary.replayer.executors.incremental.compiled_pass import CompiledPass
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ...support.both_ways import check
from ...support.engines.ring import Ring
from ...support.places import DATA
from ...support.raw_traces import cut, read_raw, write_raw
from .fires_everywhere import NAME, FiresEverywhere
from .scene import SLOTS, Part, Scene

pytestmark = [pytest.mark.usefixtures("pass_from_the_start"), pytest.mark.one_in(2)]  # make fuzz goes through all

SCRIPT = Path(__file__).with_name("fires_everywhere.py")
# Faults of the lab that every check but one fires for, and on which engine.
FIRES = {
    "row_reassigned_in_flight": (
        "mha",
        {"hit_differs", "hit_never_written", "read_of_foreign_slot", "row_reassigned", "write_to_foreign_slot"},
    ),
    "double_free": ("mha", {"foreign_slot_freed", "slot_double_allocated", "slot_freed_twice"}),
    "page_given_twice": ("mha", {"read_after_free"}),
    "page_leaked": ("mha", {"slot_leaked"}),
    "slot_mapping": ("mha", {"table_entry_differs"}),
    "kv_write_lost": ("mha", {"write_lost"}),
    "kv_write_damaged": ("submitted", {"write_damaged"}),
    "pad_rows_keep_last_blocks": ("mha", {"padded_write"}),
    "seq_len_backwards": ("mha", {"seq_len_backwards", "input_not_truth"}),
    "swa_window_off_by_one": ("swa", {"swa_mapping_stale"}),
    "abort_frees_during_transfer": ("pd", {"freed_during_transfer"}),
    "attention_table_overwritten": ("mha", {"attention_slots"}),
    "attention_seq_len_off_by_one": ("mha", {"attention_lens"}),
    "adapter_not_in_key": ("adapters", {"identity"}),
    "state_restored_for_other_prefix": ("recurrent", {"state_differs"}),
    "late_layer_overwritten": ("layers", {"layer_changed"}),
    "nan_written": ("layers", {"bad_values"}),
    "future_map_overrun": ("overlap", {"input_not_sampled"}),
}


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The check that fires everywhere is one of the checks, whose names these are."""
    names = (*CHECK_NAMES, NAME)
    monkeypatch.setitem(checks.CHECKS, NAME, FiresEverywhere)
    monkeypatch.setattr(executors, "CHECK_NAMES", names)
    return names


def found(trace: Path, folder: Path, names: tuple[str, ...], **settings: str) -> list[dict]:
    folder.mkdir()
    summary = replay(trace, settings=ReplaySettings(checks=names, **settings), report=folder)
    assert summary.violations == 0
    return pq.read_table(folder / "findings.parquet").to_pylist()


def test_a_check_that_declares_nothing_finds_the_same_whatever_replays_it(
    added: tuple[str, ...], tmp_path: Path
) -> None:
    header, events = read_raw(DATA / "simulated" / "clean_eagle.arrow")
    trace = write_raw(tmp_path / "t.arrow", header, events[:60])
    expected = found(trace, tmp_path / "stepwise", added, executor="stepwise")
    forwards = sum(event.kind == "forward" for event in events[:60])
    assert len({row["forward"] for row in expected}) == forwards > 10
    assert {row["detail"] for row in expected} >= {"alloc", "status"}
    assert found(trace, tmp_path / "interval", added, executor="interval") == expected
    assert found(trace, tmp_path / "device", added, device="interpreter") == expected


def test_processes_beside_one_another_find_the_same(tmp_path: Path) -> None:
    (tmp_path / "cut").mkdir()
    cut(DATA / "clean_llama.arrow", tmp_path / "cut" / "t.arrow", seed=1, least=100, most=200)
    rows = []
    for ways in (("--executor", "stepwise", "--jobs", "1"), ("--jobs", "1"), ("--jobs", "2")):
        report = tmp_path / "".join(ways)
        ran = subprocess.run(
            [sys.executable, SCRIPT, tmp_path / "cut", *ways, "--report", report],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 1, ran.stderr
        (table,) = report.rglob("findings.parquet")
        rows.append(pq.read_table(table).to_pylist())
    assert len({row["forward"] for row in rows[0]}) > 50
    assert rows[1] == rows[0]
    assert rows[2] == rows[0]


@pytest.mark.parametrize("ways", list(Covered))
def test_a_check_is_called_as_it_declares(
    ways: Covered, added: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FiresEverywhere, "covered", ways)
    taken = []
    run = CompiledPass.run
    monkeypatch.setattr(CompiledPass, "run", lambda self, batch, at: taken.append(at) or run(self, batch, at))
    rows = found(DATA / "clean_llama.arrow", tmp_path / "r", added)
    assert bool(taken) == (ways is Covered.COMPILED)
    assert bool(rows) == (ways is not Covered.COMPILED)
    whole = found(DATA / "clean_llama.arrow", tmp_path / "whole", added, executor="stepwise")
    reads = [sum(row["count"] for row in some) for some in (rows, whole)]
    assert (reads[0] == reads[1]) == (ways is Covered.NOTHING)


@pytest.mark.parametrize("fault", FIRES)
@pytest.mark.one_in(4)
def test_a_check_that_fires_finds_the_same_past_the_compiled_pass(fault: str, tmp_path: Path) -> None:
    config, kinds = FIRES[fault]
    outcome = run_trial(Trial(fault=FAULTS[fault], config=config, seed=0), tmp_path / "trace")
    replays = check([[trace] for trace in outcome.traces], tmp_path, incidents=False)
    tables = [one.table("findings") for one in replays]
    assert kinds <= {kind for table in tables if table is not None for kind in table["kind"].to_pylist()}


def test_so_do_those_that_no_fault_of_the_lab_is_for(scene: Scene, tmp_path: Path) -> None:
    scene.start(7, 1, [3, 4, 5])
    scene.transfer("start", "send", [6, 7])
    scene.alloc(8, [7, SLOTS])
    scene.alloc(8, [9], "shared")
    scene.alloc(8, [10, 10])
    scene.status(8, "admitted", 2)
    scene.forward(Part(request=8, row=2, prefix=0, slots=(7, 7)))
    scene.forward(Part(request=8, row=2, prefix=2, slots=(0,)))
    for prefix in (3, 4):
        scene.forward(Part(request=8, row=2, prefix=prefix, slots=(10 + prefix,)))
    scene.forward(Part(request=9, row=3, prefix=0, slots=(20, 21)), shift=1)
    for count in (4, 0):  # a load that has not landed, and has later
        before, ends = np.full(1, 5), [np.full(1, hashed) for hashed in (6, 5 + (not count))]
        ends = CopyEnds(*ends, before=before, landed=np.full(1, -1))
        scene.recorder.kv_copy(group=0, src=[4], dst=[40], count=[count], src_tier=1, ends=ends)
    scene.recorder.close()
    ring = Ring(tmp_path / "ring.arrow")
    ring.forward(9)
    ring.forward(1, shift=2)
    ring.recorder.close()
    fires = {"transfer_not_held", "wrong_window", "slot_out_of_pool", "free_slot_shared", "slot_written_twice"}
    fires |= {"padding_slot_read", "copy_differs", "load_landed_late", "position_not_place"}
    found = [
        check([path], tmp_path / path.stem, incidents=False)[0].table("findings") for path in (scene.path, ring.path)
    ]
    assert fires <= {kind for table in found for kind in table["kind"].to_pylist()}
    fires |= {"token_bytes"}  # of bytes that a model computes, which the simulated engine has not: test_token_bytes.py
    fires |= {"failed_load_read"}  # of traces without a history: test_transfer_slots.py
    fires |= {"attention_output"}  # of what attention gives, which the simulated engine has not: test_attention.py
    fires |= {"computed_otherwise"}  # of adapters, which the simulated engine has not: test_identity.py
    fires |= {"oracle_token"}  # of what a real engine samples: tests/recorder/test_oracle_sampling.py
    assert set(CHECK_NAMES) == fires.union(*(kinds for _, kinds in FIRES.values()))


def test_every_check_says_by_what_it_is_covered() -> None:
    assert {name for name in CHECK_NAMES if "covered" not in vars(checks.CHECKS[name])} == set()
