"""Hits on KV of another adapter, salt, weights or media: found in every way of replaying, and nothing undeclared judged."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from kvcanary.recorder.capture.privacy import IdentityValue
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.checks import CHECK_NAMES
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ...support.raw_traces import cut, read_raw, write_raw
from .scene import Part, Scene, decode, told

SLOTS = (1, 2, 3, 4)


def value(**kinds: str) -> list[IdentityValue]:
    return [IdentityValue(kind, text) for kind, text in kinds.items()]


def media(*parts: tuple[str, int, int]) -> list[IdentityValue]:
    return [IdentityValue("media", text, start, count) for text, start, count in (*parts, ("", 0, 0))]


def scene(path: Path, first: list[IdentityValue], second: list[IdentityValue], *, again: bool = False) -> Scene:
    """Request 1 computes four tokens and hands them to the cache; request 2 hits them and goes on."""
    found = Scene(path)
    found.request(1, first)
    found.request(2, second)
    found.start(1, 1, SLOTS)
    found.alloc(1, SLOTS, "cached")
    found.alloc(1, (5,))
    if again:
        found.request(1, second)
    found.forward(decode(1, 1, 4, 5), mode="decode")
    found.free(1, (5,))
    found.status(1, "finished", 1)
    found.tokens[2] = found.token(1)
    found.status(2, "admitted", 2)
    found.alloc(2, SLOTS, "shared")
    found.alloc(2, (6, 7))
    found.table[2, :4] = SLOTS
    found.forward(Part(request=2, row=2, prefix=4, slots=(6,)))
    found.forward(decode(2, 2, 5, 7), mode="decode")
    return found


@pytest.mark.parametrize(
    ("first", "second", "cause", "count", "slot"),
    [
        (value(adapter="a"), value(adapter="b"), "other_adapter", 4, 1),
        (value(adapter="a", salt=""), value(adapter="", salt=""), "other_adapter", 4, 1),
        (value(adapter="", salt="x"), value(adapter="", salt="y"), "other_salt", 4, 1),
        (value(weights="1"), value(weights="2"), "other_weights", 4, 1),
        (media(("cat", 1, 2)), media(("dog", 1, 2)), "other_media", 3, 2),
        (media(("cat", 1, 2)), media(), "other_media", 3, 2),
        (value(adapter="a"), value(adapter="a"), "", 0, 0),
        (value(adapter="a"), value(salt="a"), "", 0, 0),  # neither says of itself what the other says
        (value(adapter="a"), [], "", 0, 0),
        (media(("cat", 1, 2), ("dog", 8, 2)), media(("cat", 1, 2)), "", 0, 0),  # behind what is shared
    ],
)
def test_a_hit_is_held_against_what_both_declare(
    tmp_path: Path, first, second, cause: str, count: int, slot: int
) -> None:
    rows = scene(tmp_path / "t.arrow", first, second).judge("identity")
    assert [(row["cause"], row["request_id"], row["count"], row["slot"]) for row in rows] == [
        (cause, 2, count, slot)
    ] * bool(cause)


def test_what_a_request_is_later_does_not_change_what_it_wrote(tmp_path: Path) -> None:
    old, new = value(weights="1"), value(weights="2")
    assert told(scene(tmp_path / "a.arrow", old, new, again=True).judge("identity"))[0][1] == 2
    assert scene(tmp_path / "b.arrow", old, old, again=True).judge("identity") == []


def found_by_all(folder: Path) -> list[str]:
    """Return the kinds of what each way of replaying finds, which is the same."""
    found = []
    for executor in ("stepwise", "interval"):
        report = folder / executor
        report.mkdir()
        replay(folder / "t.arrow", settings=ReplaySettings(checks=CHECK_NAMES, executor=executor), report=report)
        found.append(pq.read_table(report / "findings.parquet").to_pylist())
    assert found[0] == found[1]
    return [row["kind"] for row in found[0]]


@pytest.mark.usefixtures("pass_from_the_start")
@pytest.mark.parametrize("differ", [True, False])
def test_every_way_of_replaying_finds_it(tmp_path: Path, differ: bool) -> None:
    scene(tmp_path / "t.arrow", value(adapter="a"), value(adapter="b" if differ else "a")).recorder.close()
    assert found_by_all(tmp_path) == ["identity"] * differ


def test_names_are_kept_private_and_told_apart(tmp_path: Path) -> None:
    scene(tmp_path / "t.arrow", value(adapter="a", salt=""), value(adapter="b", salt="")).recorder.close()
    told_of = [
        view.ints("identity_hash").tolist() for view in read_trace(tmp_path / "t.arrow") if view.kind == "request"
    ]
    assert told_of[0][0] not in (0, told_of[1][0])
    assert [hashes[1] for hashes in told_of] == [0, 0]


@pytest.mark.parametrize(("first", "again"), [(value(adapter="a"), False), (value(weights="1"), True)])
def test_a_segment_alone_knows_what_was_declared_before_it(tmp_path: Path, first, again: bool) -> None:
    scene(tmp_path / "t.arrow", first, value(adapter="b", weights="2"), again=again).recorder.close()
    segments = cut(tmp_path / "t.arrow", tmp_path / "cut.arrow", seed=1, least=11, most=12)
    summary = replay(segments[1], settings=ReplaySettings(checks=("identity",)), report=None)
    assert summary.findings_by_kind == {"identity": 1}


def computed(path: Path, *adapters: str) -> Scene:
    """Two requests decode side by side; the second is computed with these adapters, one forward each, "own" for its own."""
    found = Scene(path)
    for request in (1, 2):
        found.request(request, value(adapter="a" if request == 1 else ""))
        found.start(request, request, (10 * request,))
    for n, adapter in enumerate(adapters, 1):
        for request in (1, 2):
            found.alloc(request, (10 * request + n,))
        other = [] if adapter == "own" else [IdentityValue("adapter", adapter, 1, 1)]
        parts = (decode(request, request, n, 10 * request + n) for request in (1, 2))
        found.forward(*parts, mode="decode", identity=other)
    return found


def test_a_request_that_is_computed_with_anothers_adapter_is_found(tmp_path: Path) -> None:
    rows = computed(tmp_path / "t.arrow", "own", "a", "a", "own", "b", "").judge("computed_otherwise")
    said = [(row["forward"], row["request_id"], row["detail"]) for row in rows]
    other, none = "with another LoRA adapter than its own", "without its LoRA adapter"
    assert said == [
        (3, 2, f"computed one token of 1 {other}"),
        (6, 2, f"computed one token of 1 {other}"),
        (7, 2, f"computed one token of 1 {none}"),
    ]


@pytest.mark.usefixtures("pass_from_the_start")
def test_every_way_of_replaying_finds_what_was_computed_otherwise(tmp_path: Path) -> None:
    computed(tmp_path / "t.arrow", "own", "own", "a", "own").recorder.close()
    assert found_by_all(tmp_path) == ["computed_otherwise"]


@pytest.mark.parametrize("request_number", [-1, 2, 1 << 40])
def test_a_request_that_there_is_not_is_a_gap(tmp_path: Path, request_number: int) -> None:
    computed(tmp_path / "t.arrow", "a").recorder.close()
    header, events = read_raw(tmp_path / "t.arrow")
    wrong = next(event for event in events if event.kind == "forward" and "identity_start" in event.ints)
    wrong.ints["identity_start"][0] = request_number
    summary = replay(write_raw(tmp_path / "bad.arrow", header, events), settings=ReplaySettings(), report=None)
    assert summary.num_gaps == 1
    assert "identity_start names a request" in summary.gaps[0]
