"""One request computed again: whether the cache, the compute or the input is at fault, on the engine's real bytes."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from kvcanary.analysis.shrink.parts import EventCopies, Part, views_of
from kvcanary.analysis.shrink.proof import write_part
from kvcanary.recorder.trace.header import Ranks
from kvcanary.recorder.trace.schema import LOGPROB_BITS, LOGPROB_KINDS
from kvcanary.replayer.cli.rerun import rerun_command
from kvcanary.replayer.model import request_walk
from kvcanary.replayer.model.logprobs import compare
from kvcanary.replayer.model.request_walk import RequestWalk, SampledLogprob
from kvcanary.replayer.model.rerun import Differs, Model, Rerun
from kvcanary.replayer.run.streams import SegmentStream

from ..support.places import DATA

BEHIND = "they are of what was sampled from, behind temperature or penalties"


def ran(checkpoint, trace, request):
    """Run the command; return its exit code and what it found."""
    done = CliRunner().invoke(
        rerun_command, ["--json", str(DATA / trace), "--request", request, "--model", str(checkpoint)]
    )
    return done.exit_code, json.loads(done.stdout)


def test_a_request_that_hit_the_prefix_cache_is_what_the_model_gives(checkpoint):
    code, found = ran(checkpoint, "clean_llama.arrow", "late-repeat")
    assert (code, found["fault"], found["first"]) == (0, "agrees", None)
    assert (found["tokens"], found["compared"], found["layers"]) == (61, 154, {"0": 154})


@pytest.mark.parametrize(
    ("trace", "request_name", "fault", "forward", "position", "words"),
    [
        ("kv_flip.arrow", "long", "cache", 21, 21, "changed after forward 0, without a write"),
        ("table_swap.arrow", "long", "cache", 18, 40, "the block table has slot 608 there, and had 720"),
        ("free_too_early.arrow", "short", "cache", 22, 0, "was written since by long, in forward 21"),
        ("token_swap.arrow", "short", "input", 15, 23, "was fed token 48 at position 23, the request has 490"),
        ("position_plus_one.arrow", "shared-b", "input", 22, 71, "was given position 72 for position 71"),
    ],
)
def test_what_was_done_to_the_engine_is_named(checkpoint, trace, request_name, fault, forward, position, words):
    code, found = ran(checkpoint, trace, request_name)
    first = found["first"]
    assert (code, found["fault"], first["forward"], first["position"]) == (1, fault, forward, position)
    assert words in first["words"]


def test_weights_that_are_others_are_the_compute_s_fault(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"] *= 2
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    code, found = ran(tmp_path, "clean_llama.arrow", "short")
    assert (code, found["fault"], found["first"]["half"], found["first"]["layer"]) == (1, "compute", "V", 0)
    assert found["warm"] == found["differing"] > 40


def test_positions_for_which_the_checkpoint_gives_nan_are_not_compared(checkpoint_with_nan):
    code, found = ran(checkpoint_with_nan, "clean_llama.arrow", "long")
    assert (code, found["fault"]) == (0, "agrees") and any("NaN" in said for said in found["not_compared"])


def test_chunks_matter_where_the_rotary_embedding_goes_by_the_length(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope, "max_position_embeddings": 16}))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    tokens, off = np.arange(3, 51), {}
    for folder in (checkpoint, tmp_path):
        model = Model(folder, "float32")
        model.compute(tokens, np.array([0]))
        cold, tolerance = model.rows(0, "K", Ranks())
        model.compute(tokens, np.array([0, 12, 20]))
        off[folder] = (np.abs(model.rows(0, "K", Ranks())[0] - cold).max(axis=1) > tolerance).any()
    assert off == {checkpoint: False, tmp_path: True}


@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        ({7: "0"}, 0, "0"),
        ({7: "short"}, 2, "both named short"),
        ({7: "nobody's"}, 2, "no forward of a request nobody's"),
    ],
)
def test_a_name_goes_before_a_number_and_two_of_one_name_are_refused(checkpoint, tmp_path, names, code, said):
    stream, copies = SegmentStream([DATA / "clean_llama.arrow"]), EventCopies()
    events = [copies.copy(view) for view, _ in views_of(stream.stream())]
    for event in events:
        if event.kind == "request" and event.scalars["request_id"] in names:
            event.scalars["name"] = names[event.scalars["request_id"]]
        elif event.kind == "forward" and "nobody's" in names.values():
            event.ints["request_ids"] = np.full_like(event.ints["request_ids"], -1)
    write_part(Part(stream.header, events, []), tmp_path / "t.arrow")
    asked = [str(tmp_path / "t.arrow"), "--json", "--request", names[7], "--model", str(checkpoint)]
    done = CliRunner().invoke(rerun_command, asked)
    found = json.loads(done.stdout)
    assert done.exit_code == code and said in found.get("request", found.get("error"))
    assert code or found["tokens"] > 50  # late-fresh, and not the nine of number 0


@pytest.mark.parametrize(
    ("kind", "off", "code", "compared", "words"),
    [
        ("raw", 0.0, 0, 16, ""),
        (
            "raw",
            0.5,
            1,
            16,
            "all 154 pieces of K and V agree, so the damage is in what was not captured: other layers, other bytes of a slot",
        ),
        ("processed", 0.5, 0, 0, ""),
    ],
)
def test_log_probabilities_say_what_was_not_captured(checkpoint, tmp_path, kind, off, code, compared, words):
    forwards = with_logprobs(checkpoint, tmp_path / "t.arrow", kind, off)
    got, found = ran(checkpoint, tmp_path / "t.arrow", "late-repeat")
    assert (got, found["fault"], found["logprobs"]) == (code, "elsewhere" if code else "agrees", compared)
    assert found["not_compared"] == ["log-probabilities of 16 tokens: " + BEHIND] * (kind == "processed")
    if code:
        first = found["first_logprob"]
        assert (first["forward"], found["logprobs_differing"], found["warm"]) == (forwards[4], 12, 12)
        assert first["words"].startswith(words) and first["recorded"] == pytest.approx(
            first["computed"] - off, abs=1e-4
        )
        shown = CliRunner().invoke(
            rerun_command, [str(tmp_path / "t.arrow"), "--request", "late-repeat", "--model", str(checkpoint)]
        )
        assert shown.exit_code == 1 and "ELSEWHERE" in shown.stdout and "12 differ" in shown.stdout


def test_without_a_head_k_and_v_are_compared_all_the_same(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    with_logprobs(checkpoint, tmp_path / "t.arrow", "raw", 0.0)
    weights = load_file(checkpoint / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    code, found = ran(tmp_path, tmp_path / "t.arrow", "late-repeat")
    assert (code, found["fault"], found["compared"], found["logprobs"]) == (0, "agrees", 154, 0)
    assert any("log-probabilities" in said and "lm_head.weight" in said for said in found["not_compared"])


def with_logprobs(checkpoint, target, kind, off):
    """Write the clean trace with log-probabilities of a request's tokens, from the fifth on `off` too low; return its forwards."""
    path = DATA / "clean_llama.arrow"
    stream, copies, model = SegmentStream([path]), EventCopies(), Model(checkpoint, "float32", head=True)
    walk = RequestWalk(stream.header, "late-repeat")
    walk.walk([path])
    tokens = walk.tokens()
    model.compute(tokens, np.zeros(1, np.int64), np.arange(len(tokens)))
    events, forwards = [copies.copy(view) for view, _ in views_of(stream.stream())], []
    for event in (e for e in events if "sampled_tokens" in e.ints):
        lens, ids = event.ints["sampled_lens"], event.ints["request_ids"].tolist()
        values = np.full(lens.sum(), np.nan, np.float32)
        r = ids.index(walk.request_id) if walk.request_id in ids else -1
        if r >= 0 and lens[r]:
            forwards.append(event.scalars["forward"])
            at, end = lens[:r].sum(), event.ints["prefix_lens"][r] + event.ints["extend_lens"][r]
            values[at] = model.logprobs[0][end - 1, event.ints["sampled_tokens"][at]] - off * (len(forwards) > 4)
        event.ints["sampled_logprobs"] = values.view(np.uint32) | np.int64(LOGPROB_KINDS.index(kind)) << LOGPROB_BITS
    write_part(Part(stream.header, events, []), target)
    return forwards


def test_drafts_that_were_rejected_are_no_part_of_the_request():
    path = DATA / "sglang" / "kv_used_eagle_h200.arrow"
    walk = RequestWalk(SegmentStream([path]).header, "4767288543121971238")
    walk.walk([path])
    tokens, written = walk.tokens(), []
    for _ in range(2):
        written.append(sorted(p for seen in walk.seen if seen.wrote for p in seen.positions.tolist()))
        walk.leave_out_rejected(tokens)
    assert len(written[0]) > len(tokens) and written[1] == list(range(len(tokens)))


def test_log_probabilities_of_a_model_that_gives_nan_say_nothing():
    full = np.log(np.full((3, 4), 0.25, np.float32))
    low = full.copy()
    low[1] = np.nan
    sampled = [SampledLogprob(n, n, n + 1, 2, (), float(full[n, 2]), 1) for n in range(3)]
    found = compare(sampled, np.arange(3), full, low)
    assert (found.compared, found.unknown, found.differing) == (2, 1, ())


def test_what_is_no_number_is_null_in_json():
    place = {"event": 1, "forward": 1, "layer": 0, "position": 0, "half": "K", "group": 0, "slot": 1, "words": ""}
    found = Rerun(request="a", tokens=1, forwards=1, layers={0: 1}, first=Differs(**place, off=float("inf")))
    said = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (said["first"]["off"], said["layers"], said["logprob_tolerance"]) == (None, {"0": 1}, 0.0)


def test_a_request_that_is_not_there_is_said(checkpoint):
    asked = [str(DATA / "clean_llama.arrow"), "--request", "nobody", "--model", str(checkpoint)]
    done = CliRunner().invoke(rerun_command, asked)
    assert done.exit_code == 2 and "no forward of a request nobody" in done.stderr


@pytest.mark.parametrize("trace", ["clean_llama.arrow", "kv_flip.arrow", "free_too_early.arrow"])
def test_events_behind_a_request_s_last_are_left_alone_and_nothing_else_is_other(trace, monkeypatch):
    def walked(name):
        walk = RequestWalk(SegmentStream([DATA / trace]).header, name)
        applied, apply = [], walk.apply
        monkeypatch.setattr(walk, "apply", lambda view: (applied.append(view.number), apply(view)))
        walk.walk([DATA / trace])
        return walk, applied

    numbers = [view.number for item in SegmentStream([DATA / trace]).stream() for view in item]
    for name in ("short", "long"):
        late, applied = walked(name)
        assert applied == numbers[: len(applied)] and applied[-1] >= late.seen[-1].event
        with monkeypatch.context() as patch:
            patch.setattr(request_walk, "_MOST_WAITING_BYTES", -1)
            at_once, all_applied = walked(name)
        assert all_applied == numbers and len(applied) < len(numbers)
        for one, other in zip(late.seen, at_once.seen, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        assert late.fed == at_once.fed and late.logprobs == at_once.logprobs
