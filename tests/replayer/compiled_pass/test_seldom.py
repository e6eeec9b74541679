"""What an engine seldom says, and the pass must know all the same: each history held against stepwise replay."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvcanary.kernels.ops.oracle.reference import oracle_tokens
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import Oracle
from kvcanary.replayer.lab.trial import Trial, run_trial

from ...support.both_ways import check
from ...support.raw_traces import cut
from ...support.short_histories import HEADER, both, forward, ints, slot_event

pytestmark = pytest.mark.usefixtures("pass_from_the_start")

DAMAGED, SOUND = 5, 6


@pytest.mark.parametrize("damaged", [DAMAGED, -1])
def test_padding_that_bears_the_name_of_who_was_reported(damaged: int, tmp_path: Path) -> None:
    """To the checks a request whose id stands in a batch, be it on the padding row, ran and was not wrong."""
    reads_freed = forward([1], [damaged], [2], [0], [], [])
    found = both(
        [
            slot_event("alloc", range(1, 4), DAMAGED),
            slot_event("alloc", range(4, 14), SOUND),
            forward([2], [SOUND], [0], [1], [7], [4]),
            forward([1], [damaged], [0], [2], [7, 8], [1, 2]),
            slot_event("free", range(1, 2), -1),
            reads_freed,
            forward([2, 0], [SOUND, damaged], [1, 0], [1, 1], [8, 0], [5, 0]),
            reads_freed,
        ],
        tmp_path,
    )
    assert found.summary.findings_by_kind["read_after_free"] == 2


def test_a_request_that_is_told_of_anew_while_the_lane_rests(tmp_path: Path) -> None:
    """Its room, and so its tokens, are others from then on; the pass rests behind two events that it could not take."""
    header = replace(HEADER, oracle=Oracle(vocab_size=50))
    tokens = np.empty(4, np.int64)
    oracle_tokens(request_ids=np.full(4, SOUND), positions=np.arange(4), vocab_size=50, out=tokens)
    own = tokens.tolist()
    reads_freed = forward([1], [DAMAGED], [2], [0], [], [])

    def told(room: int) -> TraceEvent:
        return TraceEvent(kind="request", scalars={"request_id": SOUND, "name": "r", "prompt_len": 1, "room": room})

    found = both(
        [
            told(-1),
            slot_event("alloc", range(1, 4), DAMAGED),
            slot_event("alloc", range(4, 14), SOUND),
            forward([2], [SOUND], [0], [1], own[:1], [4]),
            forward([1], [DAMAGED], [0], [2], [7, 8], [1, 2]),
            slot_event("free", range(1, 2), -1),
            *[reads_freed] * 3,
            told(9),
            *[TraceEvent(kind="status", scalars={"status": "admitted", "request_id": 77})] * 3,
            *[forward([2], [SOUND], [at], [1], own[at : at + 1], [4 + at]) for at in (1, 2, 3)],
        ],
        tmp_path,
        header,
    )
    assert found.summary.violations_by_reason["WRITE_TOKEN"] == 6


def test_who_ran_before_a_segment_is_counted_in_it(tmp_path: Path) -> None:
    (trace,) = run_trial(Trial(fault=None, config="mha_page1", seed=1), tmp_path / "t.arrow").traces
    segments = cut(trace, tmp_path / "s.arrow", seed=1, least=100, most=250)
    for number, part in enumerate([segments[1:], segments[2:], segments[3:4]]):
        (found,) = check([part], tmp_path / str(number))
        assert found.summary.requests


@pytest.mark.parametrize("run", [(0, 1), (3, 0)])
def test_more_runs_than_there_are_slots(run: tuple[int, int], tmp_path: Path) -> None:
    """Of slot 0, or of no slot: such an event is refused, though it names nothing that anybody could hold."""
    start, count = run
    columns = ints(slot_group=[0] * 70, slot_start=[start] * 70, slot_count=[count] * 70)
    found = both(
        [
            slot_event("alloc", range(1, 4), SOUND),
            forward([1], [SOUND], [0], [1], [7], [1]),
            TraceEvent(kind="alloc", scalars={"request_id": 9}, ints=columns),
            forward([1], [SOUND], [1], [1], [7], [2]),
        ],
        tmp_path,
    )
    assert found.summary.num_gaps == 1


def test_padding_with_an_absurd_prefix(tmp_path: Path) -> None:
    found = both(
        [
            slot_event("alloc", range(1, 4), SOUND),
            forward([1], [SOUND], [0], [1], [7], [1]),
            forward([1, 0], [SOUND, -1], [1, (1 << 62) + 5], [1, 0], [7], [2]),
        ],
        tmp_path,
    )
    assert found.summary.num_gaps == 1


@pytest.mark.parametrize(("between", "findings"), [([], 1), ([slot_event("alloc", range(1, 3), SOUND)], 0)])
def test_slots_given_out_anew_are_under_no_transfer(between: list[TraceEvent], findings: int, tmp_path: Path) -> None:
    """In a history with holes: the transfer's end, and that they went back, may be missing."""
    started = TraceEvent(
        kind="transfer",
        scalars={"status": "start", "mode": "receive", "request_id": SOUND, "room": 5},
        ints=ints(slot_group=[0], slot_start=[1], slot_count=[2]),
    )
    found = both(
        [started, *between, slot_event("free", range(1, 3), SOUND)], tmp_path, replace(HEADER, slot_history="")
    )
    assert found.summary.findings_by_kind.get("freed_during_transfer", 0) == findings
