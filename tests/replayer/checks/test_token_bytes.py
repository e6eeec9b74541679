"""Equal tokens have equal V in a first layer: what differs from that is found, what is rounding or follows from more is not."""

import numpy as np
import pytest
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.analysis.shrink.parts import EventCopies, Part, views_of
from kvcanary.analysis.shrink.proof import write_part
from kvcanary.replayer.run.replay import ReplaySettings, replay
from kvcanary.replayer.run.streams import SegmentStream

from ...support.places import DATA

CLEAN = DATA / "corpus" / "vllm-clean-llama-salts.arrow"
FORWARD = 20  # a decode of several requests, late enough for their tokens to have come before
V = 1  # its stream: 16 bytes a token, behind those of K


@pytest.fixture(scope="module")
def recorded():
    """A clean run's header and events."""
    stream, copies = SegmentStream([CLEAN]), EventCopies()
    return stream.header, [copies.copy(view) for view, _ in views_of(stream.stream())]


def values(event):
    """A forward's V, `[T, 4] float32`, to be changed."""
    tokens = len(event.ints["input_ids"])
    event.bytes["kv_bytes"] = event.bytes["kv_bytes"].copy()
    return event.bytes["kv_bytes"].view(np.float32).reshape(2, tokens, 4)[V]


def judged(recorded, tmp_path, change, **settings):
    """Replay a changed copy; return its findings by kind, its violations and its incidents."""
    header, events = recorded
    copies = [type(event)(**{name: getattr(event, name) for name in event.__struct_fields__}) for event in events]
    for event in copies:
        event.bytes, event.ints = dict(event.bytes), dict(event.ints)
        change(event)
    trace, report = tmp_path / "t.arrow", tmp_path / "t.report"
    report.mkdir()
    write_part(Part(header, copies, []), trace)
    summary = replay(trace, settings=ReplaySettings(**settings), report=report)
    rows = find_incidents(report, [trace]).rows if summary.findings else []
    return summary.findings_by_kind, summary.violations, rows


def of_other_weights(event):
    """All that a forward computes is computed with weights that have been replaced."""
    if event.kind == "forward" and event.scalars["forward"] == FORWARD:
        values(event)[:] *= 0.5


@pytest.mark.parametrize("executor", ["interval", "stepwise"])
def test_tokens_of_other_weights_are_found_in_their_forward_and_nothing_else(recorded, tmp_path, executor):
    found, violations, rows = judged(recorded, tmp_path, of_other_weights, executor=executor)
    assert list(found) == ["token_bytes"] and violations == 0
    assert {row["kind"] for row in rows} == {"computed_with_other_weights"}
    assert rows[0]["first_forward"] == FORWARD and "other bytes than request" in rows[0]["sentence"]


def rounded(event):
    if event.kind == "forward":
        values(event)[:] *= 1 + 1e-6 * (event.scalars["forward"] % 5)


def followed_by_more(event):
    if event.kind == "forward":
        values(event)[:] *= (1 + event.ints["positions"] % 7)[:, None]


def undeclared(event):
    of_other_weights(event)
    for name in [name for name in event.ints if name.startswith("identity_")]:
        del event.ints[name]


def of_media(event):
    of_other_weights(event)
    if event.kind == "request" and "identity_kind" in event.ints:
        event.ints["identity_hash"] = np.where(event.ints["identity_kind"] == 3, 7, event.ints["identity_hash"])


def of_adapters(event):
    """Every second request has an adapter of its own, and other V."""
    if event.kind == "request" and event.scalars["request_id"] % 2:
        event.ints["identity_hash"] = np.where(event.ints["identity_kind"] == 0, 7, event.ints["identity_hash"])
    if event.kind == "forward":
        owners = np.repeat(event.ints["request_ids"] % 2, event.ints["extend_lens"])
        values(event)[: len(owners)] *= (1 + owners)[:, None]


@pytest.mark.parametrize("change", [rounded, followed_by_more, undeclared, of_media, of_adapters])
def test_what_may_differ_is_not_found(recorded, tmp_path, change):
    assert judged(recorded, tmp_path, change, checks=("token_bytes",))[:2] == ({}, 0)


def test_tokens_of_another_adapter_are_found(recorded, tmp_path):
    def mixed_up(event):
        of_adapters(event)
        if event.kind == "forward" and event.scalars["forward"] == FORWARD:
            values(event)[:] *= 3  # no request's own

    found, violations, _ = judged(recorded, tmp_path, mixed_up, checks=("token_bytes",))
    assert list(found) == ["token_bytes"] and violations == 0
