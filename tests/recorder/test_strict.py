"""A strict recorder: a wrong call raises and says which field it was and what was expected."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.forward_input import BlockTable, TruthTokens
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.reader import read_trace

from ..support.engines.documented_engine import a_forward, judged, run_requests, toy_engine

# What is called on a recorder that knows request 1: the message.
WRONG: dict[str, tuple[Callable[[Recorder], Any], str]] = {
    "twice": (
        lambda r: [r.before_forward(a_forward()), r.before_forward(a_forward())],
        r"before_forward: after_forward\(\) was not called for forward 0",
    ),
    "after alone": (lambda r: r.after_forward(), "after_forward without before_forward"),
    "sampled later": (
        lambda r: [
            r.before_forward(a_forward()),
            r.after_forward(),
            r.sampled(forward=0, sampled_tokens=[4, 5], sampled_lens=[1, 1]),
        ],
        "sampled_lens has length 2, expected 1: all of forward 0, padding too",
    ),
    "closed": (lambda r: [r.close(), r.mark("late")], r"mark\(\) was called, but the recorder is off: closed"),
    "floats": (
        lambda r: r.before_forward(a_forward(positions=[0.0, 1.5])),
        "positions holds float64 values, expected integers",
    ),
    "torch floats": (
        lambda r: r.before_forward(a_forward(out_cache_loc=(torch.tensor([1.0, 2.0]),))),
        "out_cache_loc holds float32 values, expected integers",
    ),
    "mode": (lambda r: r.before_forward(a_forward(mode="prefill")), "mode is 'prefill', expected one of extend, "),
    "row": (
        lambda r: r.before_forward(a_forward(req_pool_indices=[5])),
        r"req_pool_indices are \[5\], expected 0 .* to 4",
    ),
    "prefix": (
        lambda r: r.before_forward(a_forward(prefix_lens=[-1])),
        r"prefix_lens are \[-1\], expected none below 0",
    ),
    "request": (lambda r: r.before_forward(a_forward(request_ids=[8])), r"request_ids has \[8\], of which request\(\)"),
    "id": (lambda r: r.request(request_id="seven"), "request_id is 'seven', expected an integer"),  # type: ignore[arg-type]
    "group": (lambda r: r.slots("free", group=3, slots=[1]), r"group is \[3\], the header has 1"),
    "status": (
        lambda r: r.request_status(request_id=1, status="done"),  # type: ignore[arg-type]
        "status is 'done', expected 'admitted', 'retracted', 'finished', 'aborted'",
    ),
    "no blocks": (
        lambda r: r.before_forward(a_forward(prefix_lens=[2], reads=(BlockTable(blocks=None, block_size=4),))),
        r"BlockTable.blocks is None, expected \[bs, max_blocks\]",
    ),
    "few blocks": (
        lambda r: r.before_forward(
            a_forward(prefix_lens=[2], reads=(BlockTable(blocks=np.zeros((0, 3)), block_size=4),))
        ),
        r"BlockTable.blocks has shape \[0, 3\], expected \[1, max_blocks\]",
    ),
    "many rows": (
        lambda r: r.before_forward(
            a_forward(
                req_pool_indices=None, request_ids=[1, 2, 3, 4, 5], prefix_lens=[0] * 5, extend_lens=[0] * 4 + [2]
            )
        ),
        "a forward of 5 requests, the tables have 4 rows beside row 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_was_expected(tmp_path: Path, name: str) -> None:
    call, message = WRONG[name]
    recorder = toy_engine(tmp_path / "trace.arrow", strict=True).recorder
    recorder.request(request_id=1, name="one")
    with pytest.raises(ValueError, match=message):
        call(recorder)
    recorder.close()


def test_a_healthy_engine_notices_nothing(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow", strict=True)
    run_requests(engine)
    engine.recorder.close()
    summary = judged(tmp_path / "trace.arrow")
    assert (summary.violations, summary.findings, summary.losses) == (0, 0, [])


def test_truth_that_the_header_has_no_table_for(tmp_path: Path) -> None:
    made = toy_engine(tmp_path / "one.arrow").recorder
    header = dataclasses.replace(
        made.header,
        truth_table=None,
        groups=tuple(dataclasses.replace(group, streams=()) for group in made.header.groups),
    )
    with Recorder(tmp_path / "trace.arrow", header, strict=True) as recorder:
        recorder.request(request_id=1)
        with pytest.raises(ValueError, match="the header has no truth_table"):
            recorder.before_forward(a_forward(truth=TruthTokens(flat=[5, 6], lens=[2])))
    made.close()


def test_in_production_a_second_before_forward_is_noted_and_a_late_call_does_nothing(tmp_path: Path) -> None:
    recorder = toy_engine(tmp_path / "trace.arrow").recorder
    recorder.before_forward(a_forward())
    recorder.before_forward(a_forward())
    recorder.close()
    recorder.mark("late")
    notes = [event.scalar("note") for event in read_trace(tmp_path / "trace.arrow") if event.kind == "forward"]
    assert notes == ["the engine did not call after_forward()", "recording ended during this forward"]


def test_a_forked_child_is_nobodys_wrong_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = toy_engine(tmp_path / "trace.arrow", strict=True).recorder
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        recorder.mark("of a child")
        recorder.after_forward()
    recorder.close()
    assert not any(event.kind == "mark" for event in read_trace(tmp_path / "trace.arrow"))
