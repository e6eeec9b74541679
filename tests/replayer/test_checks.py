"""History checks over random engines: exact on wrong inputs, silent on clean engines and after gaps; the choice of them.

Each check by itself, with its evidence and its exceptions, is in `checks/`.
"""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kvcanary.recorder.trace.schema import IDENTITY_KINDS, WRITTEN_VALUES
from kvcanary.replayer.checks import CHECK_NAMES, CHECKS, FINDING_KINDS
from kvcanary.replayer.checks.copies import LOADS
from kvcanary.replayer.checks.recurrent import SAID
from kvcanary.replayer.report.findings import FINDING_CAUSES, NO_ADAPTER
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.engines.toy_engine import FAULTS, SHAPES, ToyEngine, record
from ..support.places import DOCS
from ..support.raw_traces import write_in_batches

PAGE = DOCS / "reference" / "checks.md"


def findings(trace: Path, folder: Path, **settings) -> list[dict]:
    folder.mkdir(exist_ok=True)
    replay(trace, settings=ReplaySettings(**settings), report=folder)
    return pq.read_table(folder / "findings.parquet").to_pylist()


@pytest.mark.parametrize("shape", ["full", "swa"])
def test_every_wrong_input_token_is_found_in_its_own_forward(shape: str, tmp_path: Path) -> None:
    sampled = 0
    for seed in range(8):
        engine = ToyEngine(SHAPES[shape], seed=seed, fault="token", forwards=40)
        rows = findings(record(engine, tmp_path / f"{seed}.arrow"), tmp_path / str(seed))
        expected = []
        for number, (event, shot) in enumerate(zip(engine.events, engine.snapshots, strict=True)):
            at = 0
            for r, row in enumerate(shot.rows):
                for i in range(shot.extend[r]):
                    position = int(shot.prefix[r] + i)
                    if shot.ids[at] != shot.truth[row, position]:
                        expected.append((number, int(event.ints["request_ids"][r]), position, int(shot.slots[at])))
                    at += 1
        found = [
            (row["forward"], row["request_id"], row["position"], row["slot"])
            for row in rows
            if row["kind"] == "input_not_truth"
        ]
        assert found == expected
        assert expected
        also = {(row["forward"], row["position"]) for row in rows if row["kind"] == "input_not_sampled"}
        assert also <= {(forward, position) for forward, _, position, _ in expected}
        sampled += len(also)
    assert sampled


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "token"])
@pytest.mark.parametrize("shape", ["full", "swa"])
def test_other_faults_feed_the_right_tokens(shape: str, fault: str, tmp_path: Path) -> None:
    for seed in range(4):
        engine = ToyEngine(SHAPES[shape], seed=seed, fault=fault, forwards=30)
        trace = record(engine, tmp_path / f"{seed}.arrow")
        assert findings(trace, tmp_path / str(seed), checks=("input_not_truth", "input_not_sampled")) == []


def test_clean_engines_that_tell_nothing_of_slots_have_no_finding(tmp_path: Path) -> None:
    for number, shape in enumerate(SHAPES.values()):
        engine = ToyEngine(shape, seed=number, forwards=40)
        assert findings(record(engine, tmp_path / f"{number}.arrow"), tmp_path / str(number)) == []


def test_sampled_tokens_alone_are_enough(tmp_path: Path) -> None:
    """Without truth tokens in the trace, sampled(t) = input(t + 1) still holds the engine to its own word."""
    engine = ToyEngine(SHAPES["full"], seed=3, fault="token", forwards=60, fault_rate=0.6)
    for event in engine.events:
        for name in ("truth_lens", "truth_row", "truth_start", "truth_count", "truth_tokens"):
            event.ints.pop(name)
    rows = findings(record(engine, tmp_path / "t.arrow"), tmp_path / "r")
    assert {row["kind"] for row in rows} == {"input_not_sampled"}
    assert {row["forward"] for row in rows} <= set(engine.faulty_forwards)


def test_a_gap_forgets_what_was_sampled(tmp_path: Path) -> None:
    for seed in range(4):
        engine = ToyEngine(SHAPES["full"], seed=seed, forwards=30)
        path = tmp_path / f"{seed}.arrow"
        ends = write_in_batches(path, engine.header, engine.events, flush_every=3)
        data = bytearray(path.read_bytes())
        data[(ends[3] + ends[4]) // 2] ^= 0x10
        path.write_bytes(data)
        assert findings(path, tmp_path / str(seed)) == []


def test_every_check_is_named_after_its_finding_and_says_what_it_holds() -> None:
    lines = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    told = {row[1].strip(" `"): [cell.strip() for cell in row[2:5]] for row in lines if len(row) == 7}
    for name, check in CHECKS.items():
        assert check.__doc__, name
        assert all(told[name]), (name, "its invariant, evidence and legitimate exceptions")
        assert check.kind == name
        assert check.finds == FINDING_KINDS[name]
    assert tuple(CHECKS) == CHECK_NAMES


def test_checks_that_need_the_promise_are_silent_without_it_on_the_page() -> None:
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    without = {row[1].strip(" `"): row[-2].strip() for row in rows}
    for words, needs in (("silent", "complete"), ("the same with `allocator`, else silent", "allocator")):
        named = {n for n, said in without.items() if said == words}
        assert named == {n for n, c in CHECKS.items() if c.needs == needs} - {"slot_leaked"}
    assert CHECKS["slot_leaked"].needs == "allocator"  # for a part of what it finds
    assert without["slot_leaked"].startswith("if what allocators do is recorded: only ")


def test_every_cause_is_known_and_documented() -> None:
    """A code that a check spells otherwise than the list would be read by no rule."""
    root = Path(__file__).parents[2]
    used = {
        code
        for path in (root / "replayer").rglob("*.py")
        for call in re.findall(r"\bCause\(([^()]*)", path.read_text())
        for code in re.findall(r'"(\w+)"', call)
    }
    used |= (
        {f"other_{kind}" for kind in IDENTITY_KINDS} | set(SAID) | set(LOADS) | set(WRITTEN_VALUES) | set(NO_ADAPTER)
    )  # what differs is the name of the code
    assert used == set(FINDING_CAUSES)
    page = (root / "docs" / "reference" / "replay.md").read_text()
    assert {code for code in FINDING_CAUSES if f"`{code}`" not in page} == set()


def test_the_page_about_checks_has_a_row_for_each() -> None:
    page = PAGE.read_text()
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == list(CHECK_NAMES)


def test_checks_can_be_chosen(tmp_path: Path) -> None:
    engine = ToyEngine(SHAPES["full"], seed=3, fault="token", forwards=60, fault_rate=0.6)
    trace = record(engine, tmp_path / "t.arrow")
    both = {"input_not_truth", "input_not_sampled"}
    assert both <= set(CHECK_NAMES)
    assert {row["kind"] for row in findings(trace, tmp_path / "all")} == both
    assert findings(trace, tmp_path / "none", checks=()) == []
    (only,) = {row["kind"] for row in findings(trace, tmp_path / "one", checks=("input_not_truth",))}
    assert only == "input_not_truth"


def test_the_option_names_what_there_is(tmp_path: Path) -> None:
    from ..support.commands import run_replay

    trace = record(ToyEngine(SHAPES["full"], seed=0, forwards=5), tmp_path / "t.arrow")
    assert run_replay(trace, "--no-report", "--checks", "none").exit_code == 0
    assert run_replay(trace, "--no-report", "--checks", "input_not_truth,input_not_sampled").exit_code == 0
    wrong = run_replay(trace, "--no-report", "--checks", "nonsense")
    assert wrong.exit_code == 2
    assert "input_not_truth" in wrong.output
