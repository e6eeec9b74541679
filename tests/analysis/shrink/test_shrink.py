"""Shrinking: the same incident out of far less, nothing of the prompts, and no part of a clean trace that is not clean."""

import json
import random
import re

import pytest
from kvcanary.analysis.shrink.cutting import Cutter
from kvcanary.analysis.shrink.parts import ADDED_EVENT, members_of, views_of
from kvcanary.analysis.shrink.proof import show, show_part
from kvcanary.analysis.shrink.shrink import shrink
from kvcanary.cli import main
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial
from kvcanary.replayer.run.replay import ReplaySettings, replay
from kvcanary.replayer.run.streams import SegmentStream

from ...support.places import DATA

BROKEN = DATA / "corpus" / "vllm-same_block_twice.arrow"
CLEAN = DATA / "corpus" / "vllm-clean-llama.arrow"


def held(trace):
    """All tokens, and all texts, that a trace holds."""
    with TraceReader(trace) as reader:
        batches = list(reader.stream())
        tokens = {
            t for batch in batches for name in ("input_ids", "sampled_tokens") for t in batch.values(name).tolist()
        }
        texts = {text for batch in batches for name in ("name", "peer", "labels") for text in batch.strings(name)}
        return tokens - {-1}, texts - {""}, reader.header


def test_one_incident_out_of_far_less_and_nothing_of_the_prompts(tmp_path):
    small = tmp_path / "small.arrow"
    result = shrink([BROKEN], small, seconds=1)  # those who wrote and read the slots come first, and are few
    assert result.after.events < result.before.events / 4 and result.after.requests < result.before.requests
    [whole], [part] = (show([path]).incidents for path in (BROKEN, small))
    same = ("kind", "branch", "first_forward", "mode")
    assert {name: whole[name] for name in same} == {name: part[name] for name in same}
    tokens, texts, header = held(small)
    assert not tokens & held(BROKEN)[0]
    assert texts and all(text.startswith("R") for text in texts)
    assert header.shrunk.events == result.before.events and header.tokens == "hashed"
    summary = show([small]).summary
    assert "kvcanary shrink" in " ".join(row.words for row in summary.coverage)
    assert all("kvcanary shrink" in doubt for doubt in summary.doubts if "lost while recording" in doubt)


def test_what_an_output_shows_goes_with_its_request(tmp_path):
    whole = DATA / "corpus" / "sglang-captured_step_goes_through_the_rows_by_the_widest_stride.arrow"
    shrink([whole], tmp_path / "small.arrow", seconds=1)
    kinds = [show([path]).summary.findings_by_kind for path in (whole, tmp_path / "small.arrow")]
    assert kinds[1].keys() == {"attention_output"} <= kinds[0].keys()
    with TraceReader(tmp_path / "small.arrow") as reader:
        outputs = [event.ints("output_request").tolist() for batch in reader.stream() for event in batch]
    assert [0] in outputs  # the only one of its batch that is left, another number before


@pytest.mark.parametrize(
    ("trace", "seed"),
    [
        *((CLEAN, seed) for seed in range(3)),
        (DATA / "corpus" / "transformers-clean-offload.arrow", 0),  # a chain behind an unknown prefix
        (DATA / "corpus" / "transformers-clean-offload-page16.arrow", 2),  # loaded from a host tier that is unknown
    ],
)
def test_no_part_of_a_clean_trace_shows_anything(tmp_path, trace, seed):
    stream, chance = SegmentStream([trace]), random.Random(seed)
    whole = Cutter(stream.header, lambda *_: True, None).cut(views_of(stream.stream()))
    kept = {(n, m): chance.random() < 0.8 for view, n in whole.views() for m in members_of(view)}
    part = Cutter(stream.header, lambda number, member, _: kept.get((number, member), True), None).cut(whole.views())
    shown = show_part(part, tmp_path)
    assert set(part.numbers) - {ADDED_EVENT} < set(whole.numbers)
    assert (shown.violations, shown.findings, shown.summary.gaps) == ([], [], [])
    stepwise = replay(tmp_path / "part.arrow", settings=ReplaySettings(executor="stepwise"), report=None)
    assert (stepwise.violations, stepwise.findings) == (0, 0)
    assert stepwise.unknown_entries == shown.summary.unknown_entries


@pytest.mark.parametrize("fault", ["nan_written", "late_layer_overwritten"])
def test_what_is_known_of_layers_behind_the_first_stays(fault, tmp_path):
    (trace,) = run_trial(Trial(fault=FAULTS[fault], config="layers", seed=0), tmp_path / "whole").traces
    small = tmp_path / "small.arrow"
    shrink([trace], small, seconds=1)
    for [whole], [part] in [(show([path]).incidents for path in (trace, small))]:
        layers = [re.search("[KV] (of|in) layer [0-9]", incident["sentence"])[0] for incident in (whole, part)]
        assert layers[0] == layers[1] and whole["kind"] == part["kind"]


def test_who_was_computed_with_anothers_adapter_needs_no_bytes(tmp_path):
    trace = DATA / "corpus" / "vllm-adapters_in_another_order_than_the_tokens.arrow"
    found = shrink([trace], tmp_path / "small.arrow", seconds=5)
    assert found.incident["kind"] == "computed_with_other_weights"
    summary = replay(tmp_path / "small.arrow", settings=ReplaySettings(), report=None)
    assert (summary.findings_by_kind, summary.requests) == ({"computed_otherwise": 1}, 1)


def test_interrupted_it_keeps_the_smallest_so_far(tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    result = shrink([BROKEN], tmp_path / "small.arrow", on_trial=interrupt)
    assert result.stopped == "interrupted" and show([tmp_path / "small.arrow"]).incidents


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([CLEAN, "-o", "new.arrow"], 125, "no incident, so there is nothing to shrink"),
        ([BROKEN, "-o", "new.arrow", "--incident", "9"], 2, "has 1 incident(s), no number 9"),
        ([BROKEN, "-o", "there.arrow"], 2, "exists; pass --force"),
        (["none.arrow"], 2, "none.arrow"),
        ([BROKEN, "-o", "no/new.arrow"], 2, "its folder does not exist"),
    ],
)
def test_what_cannot_be_shrunk_is_said(tmp_path, monkeypatch, capsys, arguments, code, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.arrow").touch()
    with pytest.raises(SystemExit) as end:
        main(["shrink", "--json", *map(str, arguments)])
    assert end.value.code == code and says in json.loads(capsys.readouterr().out)["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["there.arrow"]
