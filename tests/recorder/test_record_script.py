"""data/record.py: what it records is the same each time and judged as its README says."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ..support.engines.documented_engine import contents, judged
from ..support.places import DATA

TRACES = sorted(DATA.glob("*.arrow"))


@pytest.fixture(scope="module")
def here() -> Iterator[click.Command]:
    """The script's command in this process, where the engine is imported already."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DATA))
        yield importlib.import_module("record").main
    for name in {"record", "driver", "faults"} - before:
        sys.modules.pop(name, None)


@pytest.mark.long
def test_a_recording_can_be_repeated(here: click.Command, tmp_path: Path) -> None:
    command = [sys.executable, str(DATA / "record.py"), "kv_flip", "-o", str(tmp_path / "one")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "57 forwards" in done.stdout
    again = CliRunner().invoke(here, ["kv_flip", "-o", str(tmp_path / "two")])
    assert again.exit_code == 0, again.output
    assert contents(tmp_path / "one" / "kv_flip.arrow") == contents(tmp_path / "two" / "kv_flip.arrow")


def test_an_unknown_scenario_is_refused(here: click.Command, tmp_path: Path) -> None:
    done = CliRunner().invoke(here, ["sunshine", "-o", str(tmp_path)])
    assert done.exit_code == 2
    assert "sunshine" in done.stderr


def test_every_trace_is_described() -> None:
    text = (DATA / "README.md").read_text(encoding="utf-8")
    assert len(TRACES) >= 9
    assert [path.stem for path in TRACES if f"`{path.stem}`" not in text] == []
    assert sum(path.stat().st_size for path in TRACES) < 2_000_000


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_the_verdict_names_what_was_injected(path: Path) -> None:
    summary = judged(path)
    assert summary.complete
    assert (summary.gaps, summary.losses) == ([], [])
    # Swapped inputs contradict what was sampled and what the scheduler has, for both requests; a block freed too early
    # is given to another request, and its first owner goes on reading what was never written for that one.
    findings = {
        "token_swap": {"input_not_sampled": 2, "input_not_truth": 2},
        "free_too_early": {"hit_never_written": 8},
    }
    assert summary.findings_by_kind == findings.get(path.stem, {})
    if path.stem.startswith("clean_"):
        assert summary.violations == 0
        return
    (mark,) = summary.marks
    truth = mark["labels"]
    first = summary.first_violation
    assert first is not None
    # A swapped token is read by the forward after; a block freed too early is written by a later request.
    late = {"token_swap": 1, "free_too_early": 1}.get(path.stem, 0)
    assert first["forward"] == truth["forward"] + late, json.dumps(first)
    assert first["request"] in (truth["request"], truth.get("other"))
    pairs = [(truth["slot"], truth["position"])]
    if path.stem == "token_swap":
        assert set(summary.requests_hit.values()) == {truth["request"], truth["other"]}
        assert {first["stored_token"], first["expected_token"]} == {truth["token"], truth["instead_of"]}
    else:
        assert (first["slot"], first["expected_position"]) in pairs
        assert list(summary.requests_hit.values()) == [truth["request"]]
