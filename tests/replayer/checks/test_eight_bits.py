"""Caches of 8 bits: torch's own float8 and int8 values, times a scale, against the checkpoint; without a scale nothing is said of them."""

import numpy as np
import pytest
import torch
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import KvStream, ModelInfo, PoolGroup, Ranks, StateTable, TraceHeader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.model.first_layer import first_layer
from kvcanary.replayer.model.rerun import rerun
from kvcanary.replayer.run.replay import ReplaySettings, replay

LENGTH, WIDTH, AT = 40, 32, 17
KINDS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def stored(values, dtype, scale):
    scaled = torch.from_numpy(values) / scale
    if dtype == "int8":
        scaled = scaled.round()
    return scaled.clamp(-KINDS[dtype], KINDS[dtype]).to(getattr(torch, dtype)).view(torch.uint8).numpy()


def judged(checkpoint, tmp_path, dtype, *, scale, said, changed=None):
    """Replay four requests whose K and V lie in a cache of 8 bits."""
    path = recorded(checkpoint, tmp_path, dtype, scale=scale, said=said, changed=changed)
    return replay(path, settings=ReplaySettings(model=str(checkpoint)))


def recorded(checkpoint, tmp_path, dtype, *, scale, said, changed=None):
    """Record four requests whose K and V lie in a cache of 8 bits; `said` is the scale that the recording has."""
    streams = [
        KvStream(half=half, bytes_per_token=WIDTH, capture_bytes=WIDTH, dtype=dtype, scale=said) for half in "KV"
    ]
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=4 * LENGTH + 1, streams=tuple(streams)),),
        tables=(StateTable(rows=5, width=LENGTH),),
        model=ModelInfo(dtype="float32"),
    )
    layer, at = first_layer(str(checkpoint), "float32"), np.arange(LENGTH)
    path = tmp_path / "t.arrow"
    with TraceWriter(path, header, compression="none") as writer:
        for number in range(4):
            fed = np.random.default_rng(number).integers(3, 500, LENGTH)
            ran = fed.copy()
            if number == 2 and changed is not None:
                ran[AT] += changed
            rows = [layer.expected(half, ran, at, Ranks(), WIDTH).values for half in "KV"]
            data = [stored(one, dtype, scale).ravel() for one in rows]
            ints = {
                "req_pool_indices": [number + 1],
                "request_ids": [number],
                "prefix_lens": [0],
                "extend_lens": [LENGTH],
            }
            columns = {"input_ids": fed, "positions": at, "out_cache_loc": at + number * LENGTH + 1}
            writer.append(
                TraceEvent(
                    kind="forward",
                    scalars={"forward": number, "mode": "extend"},
                    ints={**{name: np.array(one) for name, one in ints.items()}, **columns},
                    bytes={"kv_bytes": np.concatenate(data)},
                )
            )
    return path


@pytest.mark.parametrize("scale", [1.0, 0.01, 0.002])
@pytest.mark.parametrize("dtype", KINDS)
def test_values_times_their_scale_are_the_model_s(checkpoint, tmp_path, dtype, scale):
    scale = 0.05 * scale if dtype == "int8" else scale
    summary = judged(checkpoint, tmp_path, dtype, scale=scale, said=scale)
    assert summary.verdict.value == "clean"
    assert summary.model_bytes == {"written": 8 * LENGTH, "compared": 8 * LENGTH}


@pytest.mark.parametrize("dtype", KINDS)
def test_another_token_is_named(checkpoint, tmp_path, dtype):
    scale = 0.002 if dtype == "int8" else 0.01
    summary = judged(checkpoint, tmp_path, dtype, scale=scale, said=scale, changed=1)
    finding = summary.first_finding
    assert summary.findings_by_kind == {"model_bytes": 1}
    assert (finding["forward"], finding["position"], finding["cause"]) == (2, AT, "holds_other_token")
    assert finding["token"] == finding["expected_token"] + 1


@pytest.mark.parametrize("said", [0.0, 0.01])
def test_a_scale_that_nobody_knows_or_that_is_not_the_one_is_never_a_finding(checkpoint, tmp_path, said):
    summary = judged(checkpoint, tmp_path, "float8_e4m3fn", scale=0.5, said=said, changed=1)
    assert summary.findings == 0 and not summary.model_bytes.get("compared")
    assert any(row.what == "model" and row.words for row in summary.coverage)


@pytest.mark.parametrize("dtype", KINDS)
def test_a_request_computed_again_agrees_with_values_times_their_scale(checkpoint, tmp_path, dtype):
    path = recorded(checkpoint, tmp_path, dtype, scale=0.002, said=0.002, changed=1)
    clean, wrong = (rerun([path], request, checkpoint) for request in "12")
    assert (clean.fault, clean.compared, clean.not_compared) == ("agrees", 2 * LENGTH, [])
    assert (wrong.fault, wrong.first.position, wrong.compared) == ("compute", AT, 2 * LENGTH)


def test_a_request_is_not_held_against_values_without_a_scale(checkpoint, tmp_path):
    path = recorded(checkpoint, tmp_path, "float8_e4m3fn", scale=0.5, said=0.0, changed=1)
    found = rerun([path], "2", checkpoint)
    assert (found.compared, found.fault) == (0, "agrees") and "by what they are scaled" in found.not_compared[0]
