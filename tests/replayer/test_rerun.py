"""One request computed again: whether the cache, the compute or the input is at fault, on the engine's real bytes."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from kvcanary.analysis.shrink.parts import EventCopies, Part, views_of
from kvcanary.analysis.shrink.proof import write_part
from kvcanary.recorder.trace.header import Ranks
from kvcanary.replayer.cli.rerun import rerun_command
from kvcanary.replayer.model.rerun import Model
from kvcanary.replayer.run.streams import SegmentStream

from ..support.places import DATA


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


@pytest.mark.parametrize(("names", "code", "said"), [({7: "0"}, 0, "0"), ({7: "short"}, 2, "both named short")])
def test_a_name_goes_before_a_number_and_two_of_one_name_are_refused(checkpoint, tmp_path, names, code, said):
    stream, copies = SegmentStream([DATA / "clean_llama.arrow"]), EventCopies()
    events = [copies.copy(view) for view, _ in views_of(stream.stream())]
    for event in events:
        if event.kind == "request" and event.scalars["request_id"] in names:
            event.scalars["name"] = names[event.scalars["request_id"]]
    write_part(Part(stream.header, events, []), tmp_path / "t.arrow")
    asked = [str(tmp_path / "t.arrow"), "--json", "--request", names[7], "--model", str(checkpoint)]
    done = CliRunner().invoke(rerun_command, asked)
    found = json.loads(done.stdout)
    assert done.exit_code == code and said in found.get("request", found.get("error"))
    assert code or found["tokens"] > 50  # late-fresh, and not the nine of number 0


def test_a_request_that_is_not_there_is_said(checkpoint):
    asked = [str(DATA / "clean_llama.arrow"), "--request", "nobody", "--model", str(checkpoint)]
    done = CliRunner().invoke(rerun_command, asked)
    assert done.exit_code == 2 and "no forward of a request nobody" in done.stderr
