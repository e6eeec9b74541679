"""Which recordings of a folder are ranks of one engine."""

from pathlib import Path

import pytest
from kvcanary.recorder.trace.header import PoolGroup, Ranks, StateTable, TraceHeader
from kvcanary.recorder.trace.recordings import Recording
from kvcanary.replayer.workers.jobs import ranks_together, replayed_together


def folder(*told: str, tp_size: int = 2) -> list[Recording]:
    """Recordings in the order in which they began, each told as run id (or -) and rank."""
    found = []
    for number, (run, rank) in enumerate(one.split(":") for one in told):
        header = TraceHeader(
            groups=(PoolGroup(name="full", num_slots=8),),
            tables=(StateTable(rows=2, width=8),),
            ranks=Ranks(tp_rank=int(rank), tp_size=tp_size),
            run_id="" if run == "-" else run,
            created_ns=number + 1,
        )
        found.append(Recording(paths=(Path(f"{number}.arrow"),), header=header))
    return found


@pytest.mark.parametrize(
    ("told", "together"),
    [
        (("-:0", "-:1"), [[0, 1]]),
        (("-:1", "-:0", "-:0", "-:1"), [[1, 0], [2, 3]]),  # one after another, by time
        (("a:0", "b:1", "a:1", "b:0"), [[0, 2], [3, 1]]),  # two servers at once
        (("a:0", "b:1"), [[0, 1]]),  # one server on two machines
        (("a:0", "a:1", "b:1", "-:0"), [[0, 1], [3, 2]]),
        (("a:0", "b:0", "a:0", "b:1"), [[1, 3]]),
    ],
)
def test_an_id_tells_servers_apart_where_all_ranks_are_there(told: tuple[str, ...], together: list[list[int]]) -> None:
    assert sorted(ranks_together(folder(*told))) == sorted(together)


def test_ranks_of_two_machines_are_not_torn_apart() -> None:
    assert ranks_together(folder("a:0", "a:1", "b:2", "b:3", tp_size=4)) == [[0, 1, 2, 3]]


def test_sides_that_were_hashed_with_different_salts_are_not_compared() -> None:
    def side(role: str, salt_id: str) -> Recording:
        header = TraceHeader(
            groups=(PoolGroup(name="full", num_slots=8),),
            tables=(StateTable(rows=2, width=8),),
            role=role,
            tokens="hashed" if salt_id else "plain",
            salt_id=salt_id,
        )
        return Recording(paths=(Path(f"{role}.arrow"),), header=header)

    assert replayed_together([side("prefill", "aa"), side("decode", "aa")]) == [[0, 1]]
    assert replayed_together([side("prefill", "aa"), side("decode", "bb")]) == [[0], [1]]
    assert replayed_together([side("prefill", ""), side("decode", "bb")]) == [[0], [1]]
