"""What is observed of a first sign says the branch, whichever rules there are."""

from collections import Counter
from types import SimpleNamespace

import pytest
from kvcanary.analysis.incidents.cluster import Cluster
from kvcanary.analysis.incidents.facts import Begin, Fact, Facts, Rewrite, SlotFacts
from kvcanary.analysis.incidents.ranking import rank
from kvcanary.analysis.incidents.seen.evidence import Held, evidence_of
from kvcanary.analysis.incidents.seen.likely import branch_of
from kvcanary.analysis.incidents.sign import POSITION, TOKEN, Sign

READER, OTHER, EVENT = 7, 8, 60
GROUP = SimpleNamespace(
    name="kv", lut=-1, runner=0, page_size=8, window=0, num_slots=225, table=0, rows=8, reads_before_write=False
)


def _sign(position, slot, **more):
    place = {"kind": "", "bits": 0, "event": EVENT, "forward": 9, "mode": "decode", "runner": 0, "group": 0}
    return Sign(**{**place, "request_id": READER, "request": "", "row": 3, "position": position, "slot": slot, **more})


def _cluster(signs, histories, **facts):
    header = SimpleNamespace(groups=(GROUP,), slot_history="complete", engine=SimpleNamespace(name="nano"))
    known = Facts(header=header, begins={READER: Begin(event=6, forward=0, prefix_len=0, extend_len=20)})
    for slot, history in histories.items():
        known.slots[0, slot] = SlotFacts(EVENT)
        for event, what, request in history:
            known.slots[0, slot].add(Fact(event=event, what=what, request_id=request))
    for name, values in facts.items():
        getattr(known, name).update(values)
    kinds = Counter(s.kind for s in signs if s.kind)
    return Cluster(signs=signs, kinds=kinds, reasons=Counter(s.bits for s in signs if s.bits), facts=known)


@pytest.mark.parametrize(("by", "had"), [(-1, False), (-1, True), (READER, True)])
def test_a_slot_that_is_free_again_was_lost_whoever_gave_it_back(by, had):
    """Another that `had` it before may have given it back a second time."""
    sign = _sign(16, 145, kind="read_after_free", cause="free", detail="reads a slot that is free since event 57")
    before = [(40, "alloc", OTHER), (50, "free", OTHER)] if had else []
    history = {145: [*before, (54, "alloc", READER), (55, "written", READER), (57, "free", by)]}
    cluster = _cluster([sign], history, wrote={(READER, 16): [(55, 145)]}, given={READER: [(54, 0, 24)]})
    seen = evidence_of(cluster)
    assert seen.held is (Held.FREED if by < 0 else Held.GAVE_UP)
    assert branch_of(cluster, seen).branch == "allocation"
    kind, diagnosis = rank(cluster).kinds[0]
    unsure = by < 0 and had
    assert (kind, 0.45 <= diagnosis.score < 0.7 if unsure else diagnosis.score >= 0.9) == ("free_too_early", True)


def _row_now_names(slots, stored):
    """What a request reads that wrote positions 16 to 18 to slots 100 to 102, behind a change of its row in this event."""
    signs = [
        _sign(16 + i, slot, bits=POSITION | TOKEN, expected_token=40 + i, stored_token=t, stored_position=p)
        for i, (slot, (writer, p, t)) in enumerate(zip(slots, stored, strict=True))
    ]
    signs = [
        Sign(**{n: getattr(s, n) for n in s.__slots__} | {"writer_request_id": stored[i][0], "writer_event": 30})
        for i, s in enumerate(signs)
    ]
    late = _sign(24, 130, kind="attention_slots", detail="attention got slot 130, this forward writes 131")
    histories = {slot: [(20, "alloc", stored[i][0]), (30, "written", stored[i][0])] for i, slot in enumerate(slots)}
    return _cluster(
        [*signs, late],
        {**histories, 130: [(20, "alloc", OTHER)]},
        wrote={(READER, 16 + i): [(30, 100 + i)] for i in range(3)},
        rewrites={READER: [Rewrite(event=EVENT, first_position=0, count=24, length=24)]},
        given={READER: [(20, 0, 32)]},
        prefixes={(EVENT, READER): 24},
    )


@pytest.mark.parametrize(
    ("slots", "stored"),
    [
        ((102, 101, 100), [(READER, 18, 42), (READER, 17, 41), (READER, 16, 40)]),
        ((57, 58, 59), [(OTHER, 16, 5), (OTHER, 17, 6), (OTHER, 18, 9)]),
    ],
    ids=["in another order", "another's row"],
)
def test_a_row_that_was_overwritten_is_wrong_also_where_the_new_token_went_elsewhere(slots, stored):
    cluster = _row_now_names(slots, stored)
    assert branch_of(cluster, evidence_of(cluster)).branch == "table"
    assert rank(cluster).kinds[0][0] == "req_to_token"


def test_what_the_evidence_excludes_stands_behind_what_it_leaves():
    """A request's row names what another wrote and it was never given: not what the cache had, whatever its tokens are."""
    signs = [
        _sign(i, 36 + i, bits=TOKEN, mode="extend", expected_token=40 + i, stored_token=i, stored_position=i)
        for i in range(3)
    ]
    histories = {36 + i: [(11, "alloc", OTHER), (14, "written", OTHER)] for i in range(3)}
    cluster = _cluster(signs, histories, given={READER: [(50, 0, 32)]}, prefixes={(EVENT, READER): 20})
    assert branch_of(cluster, evidence_of(cluster)).branch == "table"
    kinds = [kind for kind, _ in rank(cluster).kinds]
    assert kinds[0] == "req_to_token"
    assert "tokens_truncated_hash_kept" in kinds
