"""What a first layer wrote is held against the checkpoint that ran: here the engine's real bytes, and the model it had."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.analysis.shrink.parts import EventCopies, Part, views_of
from kvcanary.analysis.shrink.proof import write_part
from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.trace.header import Ranks
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.model.first_layer import first_layer
from kvcanary.replayer.run.replay import ReplaySettings, replay
from kvcanary.replayer.run.streams import SegmentStream

from ...support.places import DATA

CLEAN = DATA / "clean_llama.arrow"
FORWARD = 20
K, V = 0, 1
ADAPTER = 0


@pytest.fixture(scope="module")
def recorded():
    stream, copies = SegmentStream([CLEAN]), EventCopies()
    return stream.header, [copies.copy(view) for view, _ in views_of(stream.stream())]


def judged(recorded, checkpoint, tmp_path, change):
    """Replay a changed copy; return its summary."""
    header, events = recorded
    copies = [type(event)(**{name: getattr(event, name) for name in event.__struct_fields__}) for event in events]
    for event in copies:
        event.bytes, event.ints = dict(event.bytes), dict(event.ints)
        if event.kind == "forward":
            event.bytes["kv_bytes"] = event.bytes["kv_bytes"].copy()
            rows = event.bytes["kv_bytes"].view(np.float32).reshape(2, len(event.ints["input_ids"]), 4)
            change(event, rows)
    trace, report = tmp_path / "t.arrow", tmp_path / "t.report"
    report.mkdir()
    write_part(Part(header, copies, []), trace)
    return replay(trace, settings=ReplaySettings(model=str(checkpoint)), report=report), trace


def expected(checkpoint, half, event, *, tokens=0, positions=0):
    layer = first_layer(str(checkpoint), "float32")
    at = event.ints["positions"] + positions
    return layer.expected(half, (event.ints["input_ids"] + tokens) % 512, at, Ranks(), 4).values


def test_what_the_model_wrote_is_what_it_gives(recorded, checkpoint, tmp_path):
    summary, _ = judged(recorded, checkpoint, tmp_path, lambda event, rows: None)
    assert summary.verdict.value == "clean"
    assert summary.model_bytes == {"written": 902, "compared": 902}
    assert not [row for row in summary.coverage if row.what == "model" and row.words]


def test_one_token_s_bytes_in_another_s_place_are_named(recorded, checkpoint, tmp_path):
    def swapped(event, rows):
        if event.scalars["forward"] == FORWARD:
            rows[V][1] = expected(checkpoint, "V", event, tokens=3)[1]

    summary, trace = judged(recorded, checkpoint, tmp_path, swapped)
    finding = summary.first_finding
    assert summary.findings_by_kind == {"model_bytes": 1} and finding["forward"] == FORWARD
    assert finding["cause"] == "holds_other_token"
    assert finding["token"] == (finding["expected_token"] + 3) % 512
    rows = find_incidents(tmp_path / "t.report", [trace]).rows
    assert [row["kind"] for row in rows] == ["not_of_the_model"] and "is that of token" in rows[0]["sentence"]


def test_a_token_for_which_the_checkpoint_gives_nan_is_unknown_and_the_others_are_told_apart(
    recorded, checkpoint, checkpoint_with_nan, tmp_path
):
    def swapped(event, rows):
        if event.scalars["forward"] == FORWARD:
            rows[V][1] = expected(checkpoint, "V", event, tokens=3)[1]

    summary, _ = judged(recorded, checkpoint_with_nan, tmp_path, swapped)
    assert summary.findings_by_kind == {"model_bytes": 1} and summary.first_finding["cause"] == "holds_other_token"
    counts = summary.model_bytes
    assert counts["compared"] + counts["the checkpoint gives NaN or infinity for them"] == 902 > counts["compared"]


@pytest.mark.parametrize("forwards", [[FORWARD], range(1000)])
def test_another_position_is_named_also_if_all_of_k_is_off_by_it(recorded, checkpoint, tmp_path, forwards):
    def ahead(event, rows):
        if event.scalars["forward"] in forwards:
            rows[K] = expected(checkpoint, "K", event, positions=1)

    summary, _ = judged(recorded, checkpoint, tmp_path, ahead)
    finding = summary.first_finding
    assert set(summary.findings_by_kind) == {"model_bytes"} and finding["cause"] == "holds_other_position"
    assert f"that of position {finding['position'] + 1}, and not of {finding['position']}" in finding["detail"]


@pytest.mark.parametrize("half", [K, V])
def test_bytes_of_no_token_are_found_in_few_forwards_and_not_judged_in_all(recorded, checkpoint, tmp_path, half):
    def halved(event, rows):
        if event.scalars["forward"] in forwards:
            rows[half] *= 0.5

    forwards = [FORWARD]
    (tmp_path / "few").mkdir()
    summary, _ = judged(recorded, checkpoint, tmp_path / "few", halved)
    assert set(summary.findings_by_kind) == {"model_bytes"} and summary.first_finding["cause"] == "no_token"
    forwards = range(1000)
    summary, _ = judged(recorded, checkpoint, tmp_path, halved)
    # Without V nothing tells what ran; with it, K may be of another rotary embedding.
    assert summary.findings == 0 and summary.model_bytes.get("compared", 0) == (451 if half == K else 0)
    assert summary.verdict.value == ("clean" if half == K else "inconclusive")


def test_requests_with_an_adapter_are_not_compared(recorded, checkpoint, tmp_path):
    _, events = recorded
    lora = {"identity_kind": ADAPTER, "identity_start": 0, "identity_count": 0, "identity_hash": 77}
    named = [e for e in events if e.kind == "request"]
    before = [dict(event.ints) for event in named]
    for event in named:
        event.ints.update({name: np.array([value]) for name, value in lora.items()})
    try:
        summary, _ = judged(recorded, checkpoint, tmp_path, lambda event, rows: rows[V].__imul__(0.5))
    finally:
        for event, ints in zip(named, before, strict=True):
            event.ints = ints
    assert named and summary.findings == 0 and not summary.model_bytes.get("compared")


def test_a_rank_s_slice_is_that_of_its_heads(checkpoint):
    layer, tokens, at = first_layer(str(checkpoint), "float32"), np.arange(5), np.arange(5)
    whole = layer.expected("K", tokens, at, Ranks(), 40).values
    assert whole.shape == (5, 32)  # MLA's rows are wider in a pool
    for ranks in (Ranks(tp_rank=1, tp_size=2), Ranks(tp_rank=1, tp_size=4)):
        assert layer.nearest_token("V", layer.expected("V", tokens, at, ranks, 16).values[3], 3, ranks) == 3
    assert (layer.expected("K", tokens, at, Ranks(tp_rank=1, tp_size=2), 16).values == whole[:, 16:]).all()
    # Fewer heads than ranks: each is held by several.
    assert (layer.expected("K", tokens, at, Ranks(tp_rank=3, tp_size=4), 16).values == whole[:, 16:]).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"model_type": "nobody_knows", "architectures": []}, "no model that transformers knows"),
        ({"model_type": "qwen3"}, "the checkpoint has no"),
    ],
)
def test_what_cannot_be_computed_is_refused_in_a_sentence(checkpoint, tmp_path, changes, said):
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    with pytest.raises(TraceError, match=said):
        first_layer(str(tmp_path), "float32")
    done = CliRunner().invoke(replay_command, ["--no-report", "--model", str(tmp_path), str(CLEAN)])
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.output


def test_a_folder_without_a_checkpoint_is_wrong_usage(tmp_path):
    done = CliRunner().invoke(replay_command, ["--model", str(tmp_path), str(CLEAN)])
    assert done.exit_code == 2 and "no folder with a config.json" in done.stderr
