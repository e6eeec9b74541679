"""Loads beside the forwards whose ends differ, played event by event: which hop lied, by check and by incident."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.analysis.incidents.seen.evidence import Filled, evidence_of
from kvcanary.kernels.ops.end_hash.reference import end_hashes
from kvcanary.recorder.capture.host_arrays import CopyEnds
from kvcanary.recorder.capture.privacy import Privacy
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.replayer.run.replay import ReplaySettings, replay

PAGE = 4
STORE, LOAD, SEEN, MOVE = (
    {"dst_tier": 1},
    {"src_tier": 1},
    {"src_tier": 1, "dst_tier": 1},
    {"src_tier": 1, "dst_tier": 1},
)
ROWS = np.arange(64, dtype=np.uint8).reshape(1, -1)
RIGHT, OTHER = int(end_hashes([ROWS])[0]), int(end_hashes([ROWS + 1])[0])
TURNED, EMPTY = int(end_hashes([ROWS.reshape(2, 32)[::-1].reshape(1, 64)])[0]), int(end_hashes([ROWS * 0])[0])


class Copies:
    """Pages of 4 slots that go to a storage and come back; each end is a hash, 0 for one that was not read."""

    def __init__(self, path: Path, privacy: Privacy | None = None) -> None:
        group = PoolGroup(name="full", num_slots=64, host_num_slots=64, page_size=PAGE)
        header = TraceHeader(groups=(group,), tables=(StateTable(rows=8, width=32),))
        self.path = path
        self.recorder = Recorder(path, header, privacy=privacy)
        self.recorder.request(request_id=7)

    def copy(self, src: int, dst: int, ends: tuple[int, ...], count: int = PAGE, landed: int = -1, **tiers) -> None:
        hashes = [np.array([value], np.int64) for value in (*ends, 0)[:3]]
        ends = CopyEnds(*hashes, landed=np.array([landed], np.int64)) if ends else None
        self.recorder.kv_copy(group=0, src=[src], dst=[dst], count=[count], request_id=7, ends=ends, **tiers)

    def found(self, folder: Path) -> tuple[list[tuple[str, str, int]], list[str]]:
        self.recorder.close()
        folder.mkdir()
        replay(self.path, settings=ReplaySettings(), report=folder)
        rows = pq.read_table(folder / "findings.parquet").to_pylist()
        incidents = find_incidents(folder, [self.path]).rows if rows else []
        return [(row["kind"], row["cause"], row["slot"]) for row in rows], [row["kind"] for row in incidents]


@pytest.fixture(params=[False, True], ids=["plain", "hashed"])
def copies(request, tmp_path):
    return Copies(tmp_path / "t.arrow", Privacy(bytes(range(32))) if request.param else None)


CASES = {
    "healthy": ([(8, 4, (RIGHT, 0), STORE), (4, 4, (0, RIGHT), SEEN), (4, 12, (RIGHT, RIGHT, OTHER), LOAD)], [], []),
    "not read": ([(8, 4, (0, 0), STORE), (4, 12, (RIGHT, 0), LOAD), (4, 16, (0, RIGHT), LOAD)], [], []),
    "stored wrong": (
        [(8, 4, (RIGHT, OTHER), STORE), (4, 12, (OTHER, OTHER), LOAD)],
        [("copy_differs", "stored_wrong", 8), ("copy_differs", "stored_wrong", 12)],
        ["stored_wrong"],
    ),
    "changed in the storage": (
        [(8, 4, (RIGHT, RIGHT), STORE), (4, 12, (OTHER, OTHER), LOAD)],
        [("copy_differs", "changed_in_store", 12)],
        ["stored_wrong"],
    ),
    "changed in the first page of the storage": (
        [(8, 0, (RIGHT, RIGHT), STORE), (0, 12, (OTHER, OTHER), LOAD)],
        [("copy_differs", "changed_in_store", 12)],
        ["stored_wrong"],
    ),
    "another stored in its place": (
        [(8, 4, (RIGHT, RIGHT), STORE), (20, 8, (OTHER, OTHER), STORE), (4, 12, (OTHER, OTHER), LOAD)],
        [("copy_differs", "stored_over", 12)],
        ["host_copy_overwritten"],
    ),
    "another stored in its place while it was loaded": (
        [(8, 4, (RIGHT, RIGHT), STORE), (20, 4, (OTHER, OTHER), STORE), (4, 12, (RIGHT, OTHER), LOAD)],
        [("copy_differs", "stored_over", 12)],
        ["host_copy_overwritten"],
    ),
    "another order": (
        [(8, 4, (RIGHT, RIGHT), STORE), (4, 12, (RIGHT, TURNED, EMPTY), LOAD)],
        [("copy_differs", "other_order", 12)],
        ["layout_misread"],
    ),
    "a storage that is not read": (
        [(8, 4, (RIGHT, 0), STORE), (4, 12, (0, OTHER, EMPTY), LOAD)],
        [("copy_differs", "loaded_wrong", 12)],
        ["failed_load_counted_loaded"],
    ),
    "another page": (
        [(8, 4, (RIGHT, RIGHT), STORE), (20, 8, (OTHER, OTHER), STORE), (4, 12, (RIGHT, OTHER, EMPTY), LOAD)],
        [("copy_differs", "loaded_another", 12)],
        ["load_of_other_prefix"],
    ),
    "nothing landed": (
        [(4, 12, (RIGHT, EMPTY, EMPTY), LOAD)],
        [("copy_differs", "nothing_landed", 12)],
        ["failed_load_counted_loaded"],
    ),
    "nothing landed, or where it came from": (
        [(8, 4, (RIGHT, RIGHT), STORE), (4, 12, (RIGHT, EMPTY, EMPTY), LOAD)],
        [("copy_differs", "not_landed_here", 12)],
        ["failed_load_counted_loaded"],
    ),
    "nothing landed, and what it came from is filled anew": (
        [(8, 4, (RIGHT, RIGHT), STORE), (20, 8, (0, 0), LOAD), (4, 12, (RIGHT, EMPTY, EMPTY), LOAD)],
        [("copy_differs", "nothing_landed", 12)],
        ["failed_load_counted_loaded"],
    ),
    "two to one": (
        [(8, 4, (RIGHT, 0), STORE), (20, 4, (OTHER, 0), STORE)],
        [("copy_differs", "two_to_one", 20)],
        ["host_copy_overwritten"],
    ),
    "two to one after another, the first of which is over and was not read": (
        [
            *((8, 4, (RIGHT, 0), STORE), (4, 4, (0, 0), SEEN), (20, 4, (OTHER, 0), STORE), (4, 4, (0, OTHER), SEEN)),
            (4, 12, (OTHER, OTHER), LOAD),
        ],
        [],
        [],
    ),
    "stored over by a store that nobody looked at": (
        [(8, 4, (RIGHT, RIGHT), STORE), (20, 4, (), STORE), (4, 12, (OTHER, OTHER), LOAD)],
        [],
        [],
    ),
    "stored over by one that nobody looked at, whose store had not ended": (
        [(8, 4, (RIGHT, 0), STORE), (20, 4, (), STORE), (16, 4, (OTHER, OTHER), STORE)],
        [],
        [],
    ),
    "moved, and nobody looked": (
        [
            *((8, 4, (RIGHT, RIGHT), STORE), (4, 40, (), MOVE), (16, 4, (OTHER, OTHER), STORE), (40, 4, (), MOVE)),
            *((4, 12, (RIGHT, RIGHT), LOAD), (4, 12, (OTHER, OTHER), LOAD)),
        ],
        [("copy_differs", "changed_in_store", 12)],
        ["stored_wrong"],
    ),
    "moved": (
        [
            (8, 4, (RIGHT, RIGHT), STORE),
            (4, 40, (RIGHT, 0), MOVE),
            (40, 8, (0, RIGHT), MOVE),
            (8, 12, (RIGHT, RIGHT), LOAD),
        ],
        [],
        [],
    ),
    "moved, and not read": (
        [(8, 4, (RIGHT, 0), STORE), (4, 40, (0, 0), MOVE), (40, 8, (0, 0), MOVE), (8, 12, (RIGHT, RIGHT), LOAD)],
        [],
        [],
    ),
    "moved from where nobody has stored": (
        [(8, 4, (RIGHT, RIGHT), STORE), (40, 4, (0, OTHER), MOVE), (4, 12, (OTHER, OTHER), LOAD)],
        [],
        [],
    ),
    "damaged behind a move": (
        [
            (8, 4, (RIGHT, RIGHT), STORE),
            (4, 40, (RIGHT, 0), MOVE),
            (40, 8, (0, OTHER), MOVE),
            (8, 12, (OTHER, OTHER), LOAD),
        ],
        [("copy_differs", "changed_in_store", 12)],
        ["stored_wrong"],
    ),
    "another came back of a move": (
        [
            *((8, 4, (RIGHT, RIGHT), STORE), (20, 16, (OTHER, OTHER), STORE)),
            *((4, 40, (RIGHT, 0), MOVE), (16, 44, (OTHER, 0), MOVE), (40, 8, (0, OTHER), MOVE)),
            (8, 12, (OTHER, OTHER), LOAD),
        ],
        [("copy_differs", "loaded_another", 12)],
        ["load_of_other_prefix"],
    ),
    "nothing came back of a move": (
        [
            *((8, 4, (RIGHT, RIGHT), STORE), (20, 16, (OTHER, OTHER), STORE)),
            *((4, 40, (RIGHT, 0), MOVE), (40, 16, (0, OTHER), MOVE)),
            (16, 12, (OTHER, OTHER), LOAD),
        ],
        [("copy_differs", "nothing_landed", 12)],
        ["failed_load_counted_loaded"],
    ),
    "stored wrong, and moved": (
        [
            (8, 4, (RIGHT, 0), STORE),
            (4, 4, (0, OTHER), SEEN),
            (4, 40, (OTHER, 0), MOVE),
            (40, 8, (0, OTHER), MOVE),
            (8, 12, (OTHER, OTHER), LOAD),
        ],
        [("copy_differs", "stored_wrong", 8), ("copy_differs", "stored_wrong", 12)],
        ["stored_wrong"],
    ),
    "one after the other": ([(8, 4, (RIGHT, RIGHT), STORE), (20, 4, (OTHER, OTHER), STORE)], [], []),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(3)
def test_the_hop_that_lied_is_named(copies: Copies, tmp_path: Path, case: str) -> None:
    made, findings, incidents = CASES[case]
    for src, dst, ends, tiers in made:
        copies.copy(src, dst, ends, 0 if tiers is SEEN else PAGE, **tiers)
    assert copies.found(tmp_path / "r") == (findings, incidents)


def test_a_load_that_lands_elsewhere(copies: Copies, tmp_path: Path) -> None:
    copies.copy(4, 12, (RIGHT, EMPTY, EMPTY), landed=24, **LOAD)
    copies.copy(4, 16, (RIGHT, RIGHT, EMPTY), landed=16, **LOAD)  # to slots that are not its request's
    findings, incidents = copies.found(tmp_path / "r")
    assert {(slot, cause) for _, cause, slot in findings} == {(slot, "landed_elsewhere") for slot in (12, 16, 24)}
    assert incidents == ["load_landed_elsewhere"]


@pytest.mark.parametrize("first", [False, True], ids=["behind it", "before it"])
def test_a_slot_that_another_load_filled_is_not_where_a_load_landed(
    copies: Copies, tmp_path: Path, first: bool
) -> None:
    loads = [(12, (RIGHT, EMPTY, EMPTY), 24), (24, (RIGHT, RIGHT, OTHER), -1)]
    for dst, ends, landed in loads[:: -1 if first else 1]:
        copies.copy(4, dst, ends, landed=landed, **LOAD)
    findings, incidents = copies.found(tmp_path / "r")
    assert findings == [("copy_differs", "nothing_landed", 12)]
    assert incidents == ["failed_load_counted_loaded"]


def test_a_slot_that_another_load_was_to_fill_otherwise_is(copies: Copies, tmp_path: Path) -> None:
    copies.copy(4, 12, (RIGHT, EMPTY, EMPTY), landed=24, **LOAD)
    copies.copy(8, 24, (OTHER, RIGHT, EMPTY), **LOAD)
    findings, incidents = copies.found(tmp_path / "r")
    assert {slot for _, cause, slot in findings if cause == "landed_elsewhere"} == {12, 24}
    assert incidents == ["load_landed_elsewhere"]


@pytest.mark.parametrize("filled", [False, True])
def test_a_load_of_what_nobody_knows_that_changes_nothing(copies: Copies, tmp_path: Path, filled: bool) -> None:
    """What lay there may be the same bytes, if anything ever did."""
    if filled:
        copies.copy(20, 12, ())
    copies.copy(0, 12, (0, EMPTY, EMPTY), 0, **LOAD)
    findings, incidents = copies.found(tmp_path / "r")
    assert findings == ([] if filled else [("copy_differs", "nothing_landed", 12)])
    assert incidents == ([] if filled else ["failed_load_counted_loaded"])


def test_what_a_load_is_judged_for_it_has_filled(copies: Copies, tmp_path: Path) -> None:
    copies.copy(4, 12, (RIGHT, OTHER, EMPTY), **LOAD)
    copies.found(tmp_path / "r")
    (lead,) = find_incidents(tmp_path / "r", [copies.path]).leads
    assert evidence_of(lead.cluster).filled is Filled.LOAD


def test_a_load_whose_pages_are_shifted(copies: Copies, tmp_path: Path) -> None:
    there, here, before, landed = (
        np.array(ends) for ends in ([RIGHT, OTHER], [EMPTY, RIGHT], [EMPTY, EMPTY], [-1, -1])
    )
    ends = CopyEnds(there, here, before, landed=landed)
    copies.recorder.kv_copy(group=0, src=[4, 8], dst=[12, 16], count=[PAGE, PAGE], request_id=7, ends=ends, **LOAD)
    findings, incidents = copies.found(tmp_path / "r")
    assert {(slot, cause) for _, cause, slot in findings} == {(12, "nothing_landed"), (16, "landed_elsewhere")}
    assert incidents == ["load_landed_elsewhere"]


def test_a_load_that_took_the_pages_behind(copies: Copies, tmp_path: Path) -> None:
    """The first slot held what it gets before, by chance; that the other got another page as well says where it is from."""
    third = int(end_hashes([ROWS + 2])[0])
    for src, dst, held in ((8, 4, RIGHT), (20, 8, OTHER), (24, 20, third)):
        copies.copy(src, dst, (held, held), **STORE)
    ends = CopyEnds(*map(np.array, ([RIGHT, OTHER], [OTHER, third], [OTHER, EMPTY], [-1, -1])))
    copies.recorder.kv_copy(group=0, src=[4, 8], dst=[12, 16], count=[PAGE, PAGE], request_id=7, ends=ends, **LOAD)
    findings, incidents = copies.found(tmp_path / "r")
    assert {(slot, cause) for _, cause, slot in findings} == {(12, "loaded_another"), (16, "loaded_another")}
    assert incidents == ["load_of_other_prefix"]


@pytest.mark.parametrize("held", [EMPTY, OTHER], ids=["nothing", "a part"])
@pytest.mark.parametrize("count", [0, PAGE], ids=["seen", "loaded anew"])
def test_a_load_that_lands_late(copies: Copies, tmp_path: Path, count: int, held: int) -> None:
    copies.copy(4, 12, (RIGHT, held, EMPTY), **LOAD)
    copies.copy(4, 12, (RIGHT, RIGHT, EMPTY), count, **LOAD)
    findings, incidents = copies.found(tmp_path / "r")
    assert (("load_landed_late", "", 12) in findings) == (not count)
    assert incidents == ["failed_load_counted_loaded" if count else "read_before_landed"]


def test_hashes_of_ends() -> None:
    """Another order changes the upper half alone, also over layers; other bytes change both; one page is like many."""
    rng = np.random.default_rng(3)
    one, two = (rng.integers(0, 256, (5, 48), dtype=np.uint8) for _ in range(2))
    found, swapped = end_hashes([one, two]), end_hashes([two, one])
    assert (found & 0xFFFFFFFF == swapped & 0xFFFFFFFF).all() and (found != swapped).all()
    assert end_hashes([one[2:3], two[2:3]]) == found[2]
    changed = one.copy()
    changed[:, 7] ^= 1
    assert (end_hashes([changed, two]) & 0xFFFFFFFF != found & 0xFFFFFFFF).all()
    assert len(set(found.tolist())) == 5 and end_hashes([one[:, :3]]).all()
