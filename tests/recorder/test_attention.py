"""What attention got, as the recorder takes it down: lengths as told, slots where they are others than the table's."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture.changes import RowRuns, run_differences
from kvcanary.recorder.capture.attention import indexed_read, paged_read, row_read
from kvcanary.recorder.capture.forward_input import AttentionInput, ForwardInput, OutputRead, TableRead
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import PoolGroup, Runner, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import ATTENTION_LENS, ATTENTION_SLOTS

HEADER = TraceHeader(groups=(PoolGroup(name="full", num_slots=32),), tables=(StateTable(rows=4, width=16),))
SWA = TraceHeader(
    groups=(
        PoolGroup(name="full", num_slots=32),
        PoolGroup(name="swa", kind="swa", window=2, lut=0, num_slots=16),
    ),
    tables=(StateTable(rows=4, width=16),),
    lut_lens=(32,),
)
COLUMNS = ("attention_group", "attention_request", "attention_start", "attention_count", "attention_slots")


def _table() -> np.ndarray:
    table = np.zeros((4, 16), np.int32)
    table[1, :5] = [10, 11, 12, 13, 14]
    table[2, :3] = [20, 21, 22]
    return table


def _two_requests(**changes: Any) -> ForwardInput:
    """Row 1 decodes position 5 into slot 15, row 2 adds positions 3 and 4 in slots 23 and 24, then padding."""
    fields: dict[str, Any] = {
        "mode": "mixed",
        "req_pool_indices": [1, 2, 0],
        "request_ids": [1, 2, -1],
        "prefix_lens": [5, 3, 7],
        "extend_lens": [1, 2, 1],
        "input_ids": [5, 6, 7, 0],
        "positions": [5, 3, 4, 0],
        "out_cache_loc": ([15, 23, 24, 0],),
        "reads": (_table(),),
    }
    return ForwardInput(**(fields | changes))


def _recorded(path: Path, forward: ForwardInput, *told: AttentionInput, header: TraceHeader = HEADER) -> Any:
    with Recorder(path, header) as recorder:
        recorder.before_forward(forward)
        for attention in told:
            recorder.attention(attention)
        recorder.after_forward()
        assert recorder.stats().off == "", recorder.stats().off
    return next(event for event in read_trace(path) if event.kind == "forward")


def _runs(event: Any) -> list[list[int]]:
    return [event.ints(name).tolist() for name in COLUMNS]


def _healthy() -> TableRead:
    return TableRead(starts=[0, 0, 0], counts=[6, 5, 1], slots=[10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24, 9])


def test_nothing_told_is_not_watched(tmp_path: Path) -> None:
    event = _recorded(tmp_path / "t.arrow", _two_requests())
    assert event.scalar("attention_watched") == 0
    assert event.ints("attention_seq_lens").size == 0


def test_lengths_are_recorded_as_they_came(tmp_path: Path) -> None:
    told = AttentionInput(seq_lens=torch.tensor([6, 4, 1], dtype=torch.int32), query_lens=[1, -7, 1])
    event = _recorded(tmp_path / "t.arrow", _two_requests(), told)
    assert event.scalar("attention_watched") == ATTENTION_LENS
    assert event.ints("attention_seq_lens").tolist() == [6, 4, 1]
    assert event.ints("attention_query_lens").tolist() == [1, -1, 1]


def test_query_lens_may_be_unknown(tmp_path: Path) -> None:
    event = _recorded(tmp_path / "t.arrow", _two_requests(attention=AttentionInput(seq_lens=[6, 5, 1])))
    assert event.scalar("attention_watched") == ATTENTION_LENS
    assert event.ints("attention_query_lens").tolist() == [-1, -1, -1]


def test_slots_of_a_healthy_forward_leave_nothing_but_the_mark(tmp_path: Path) -> None:
    event = _recorded(tmp_path / "t.arrow", _two_requests(), AttentionInput(slots=(_healthy(),)))
    assert event.scalar("attention_watched") == ATTENTION_SLOTS
    assert _runs(event) == [[], [], [], [], []]


def test_only_the_slots_that_differ_are_recorded(tmp_path: Path) -> None:
    read = _healthy()
    read.slots[1:3] = [99, 98]  # positions 1 and 2 of row 1, which it reads
    read.slots[10] = 3  # position 4 of row 2, which it writes
    read.slots[11] = 3  # padding
    event = _recorded(tmp_path / "t.arrow", _two_requests(), AttentionInput(slots=(read,)))
    assert _runs(event) == [[0, 0], [0, 1], [1, 4], [2, 1], [99, 98, 3]]


def test_positions_that_the_forward_neither_reads_nor_writes_are_passed_over(tmp_path: Path) -> None:
    read = TableRead(starts=[4, 0, 0], counts=[4, 0, 0], slots=[14, 15, 77, 78])
    none_written = _two_requests(out_cache_loc=([-1, -1, -1, 0],))
    assert _runs(_recorded(tmp_path / "a.arrow", _two_requests(), AttentionInput(slots=(read,))))[4] == []
    assert _runs(_recorded(tmp_path / "b.arrow", none_written, AttentionInput(slots=(read,))))[4] == []


def test_a_second_look_adds_to_the_first(tmp_path: Path) -> None:
    late = _healthy()
    late.slots[0] = 31
    told = (AttentionInput(seq_lens=[6, 5, 1], slots=(_healthy(),)), AttentionInput(slots=(late,)))
    event = _recorded(tmp_path / "t.arrow", _two_requests(), *told)
    assert event.scalar("attention_watched") == ATTENTION_LENS | ATTENTION_SLOTS
    assert _runs(event) == [[0], [0], [0], [1], [31]]


def test_a_sliding_window_is_held_in_its_own_numbering(tmp_path: Path) -> None:
    lut = np.zeros(32, np.int64)
    lut[[13, 14, 15]] = [3, 4, 5]
    forward = _two_requests(
        req_pool_indices=[1],
        request_ids=[1],
        prefix_lens=[5],
        extend_lens=[1],
        input_ids=[5],
        positions=[5],
        out_cache_loc=([15],),
        luts=(lut,),
    )
    full = TableRead(starts=[0], counts=[6], slots=[10, 11, 12, 13, 14, 15])
    windows = [TableRead(starts=[2], counts=[4], slots=slots) for slots in ([0, 3, 4, 5], [9, 3, 7, 8])]
    right = _recorded(tmp_path / "r.arrow", forward, AttentionInput(slots=(full, windows[0])), header=SWA)
    assert _runs(right) == [[], [], [], [], []]
    assert right.scalar("attention_watched") == ATTENTION_SLOTS
    # Position 2 lies before the window of 2: nobody reads it.
    wrong = _recorded(tmp_path / "w.arrow", forward, AttentionInput(slots=(None, windows[1])), header=SWA)
    assert _runs(wrong) == [[1, 1], [0, 0], [4, 5], [1, 1], [7, 8]]
    assert wrong.scalar("attention_watched") == 0  # of one group alone


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (AttentionInput(seq_lens=[6]), "AttentionInput.seq_lens has length 1, expected 3"),
        (AttentionInput(slots=()), ""),
        (AttentionInput(slots=(None, None)), "AttentionInput.slots has length 2, expected 1"),
        (AttentionInput(slots=(TableRead(starts=[0], counts=[1, 1, 1], slots=[1, 2, 3]),)), "starts has length 1"),
        (AttentionInput(slots=(TableRead(starts=[0] * 3, counts=[1] * 3, slots=[1]),)), "slots has length 1"),
    ],
)
def test_what_does_not_fit_switches_the_recorder_off(tmp_path: Path, told: AttentionInput, message: str) -> None:
    with Recorder(tmp_path / "t.arrow", HEADER) as recorder:
        recorder.before_forward(_two_requests())
        recorder.attention(told)
        assert message in recorder.stats().off
        assert bool(message) == bool(recorder.stats().off)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_paged_read_gives_the_slot_of_each_position(block_size: int, kind: Any) -> None:
    rng = np.random.default_rng(block_size)
    blocks = rng.integers(0, 50, (5, 6)).astype(np.int32)
    blocks[3, 1] = -1
    starts, ends = np.array([0, 2, 5, 1, 4]), np.array([0, 7, 6, 6 * block_size + 2, 3])
    read = paged_read(kind(blocks), block_size, ends, starts=starts)
    expected = []
    for r, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for position in range(start, end):
            there = position // block_size < 6 and blocks[r, position // block_size] >= 0
            at = blocks[r, position // block_size] * block_size + position % block_size if there else -1
            expected.append(int(at))
    assert read.slots.tolist() == expected
    assert read.counts.tolist() == np.maximum(ends - starts, 0).tolist()


def test_page_indices_and_rows_of_a_table_are_read_likewise() -> None:
    read = indexed_read(torch.tensor([2, 4, 4, 5]), torch.arange(100, 110), starts=[3, 0, 0])
    assert (read.counts.tolist(), list(read.slots), read.starts) == ([2, 0, 1], [102, 103, 104], [3, 0, 0])
    rows = row_read(_table(), [2, 1], [3, 17], starts=[1, 14])
    assert (rows.counts.tolist(), rows.slots.tolist()) == ([2, 3], [21, 22, 0, 0, -1])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("seed", range(6))
def test_run_differences_are_those_of_a_dictionary(backend: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bs = 40
    sides = []
    for _ in range(2):
        counts = rng.integers(-2, 9, bs)
        sides.append((rng.integers(-3, 12, bs), counts, rng.integers(-1, 4, int(np.maximum(counts, 0).sum()))))
    (starts, _, _), (held_starts, _, _) = sides
    requests = np.arange(bs)
    got = run_differences(RowRuns(requests, *sides[0]), RowRuns(requests, *sides[1]), backend=backend)
    told, at = [], 0
    for request, start, count in zip(got.rows, got.starts, got.counts, strict=True):
        told += [(int(request), int(start) + i, int(got.values[at + i])) for i in range(count)]
        at += count
    known = [_cells(*side) for side in sides]
    expected = [
        (r, p, v) for (r, p), v in known[0].items() if min(starts[r], held_starts[r]) >= 0
        and known[1].get((r, p), -1) >= 0 and known[1][r, p] != v
    ]  # fmt: skip
    assert told == expected
    assert expected


def _cells(starts: np.ndarray, counts: np.ndarray, values: np.ndarray) -> dict[tuple[int, int], int]:
    left = iter(values.tolist())
    return {
        (r, int(start) + i): next(left)
        for r, (start, count) in enumerate(zip(starts, counts, strict=True))
        for i in range(max(int(count), 0))
    }


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_starts_at_the_ends_of_int64_hold_nothing(backend: str) -> None:
    one, end = np.ones(1, np.int64), np.iinfo(np.int64).max
    for start in (end, end - 1, 1 << 62, -end - 1, -1):
        given, held = (RowRuns(0 * one, start * one, 2 * one, np.array(values)) for values in ([1, 2], [3, 4]))
        near = held._replace(starts=0 * one)
        for pair in ((given, held), (given, near), (near, held)):
            assert [part.size for part in run_differences(*pair, backend=backend)] == [0] * 4, start


def test_differences_of_more_values_than_there_are_are_refused() -> None:
    one, few = np.ones(1, np.int64), np.zeros(1, np.int64)
    whole, short = RowRuns(one, few, one, one), RowRuns(one, few, 5 * one, one)
    for pair in ((whole, short), (short, whole)):
        with pytest.raises(ValueError, match="counts ask for 5 values, there are 1"):
            run_differences(*pair)


def test_how_far_back_a_window_is_seen_to_look_is_held_against_it(tmp_path: Path) -> None:
    """Of a window of 2, rows with 5 and 3 tokens in the cache; the last is padding."""

    def found(name: str, *counts: list[int]) -> tuple[int, list[list[int]]]:
        forward = _two_requests(luts=(np.arange(32),))
        told = [AttentionInput(prefix_counts={1: torch.tensor(one)}) for one in counts]
        event = _recorded(tmp_path / name, forward, *told, header=SWA)
        columns = [event.ints(f"window_{part}").tolist() for part in ("group", "request", "start", "count")]
        return event.scalar("window_watched"), columns

    assert found("nothing told") == (0, [[], [], [], []])
    assert found("healthy", [2, 2, 9]) == (1, [[], [], [], []])
    assert found("more and less", [3, 0, 0]) == (1, [[1, 1], [0, 1], [2, 3], [3, 0]])
    assert found("not known of one", [5, -1, 2]) == (0, [[1], [0], [0], [5]])


def test_of_tokens_behind_the_first_too_it_is_seen_how_far_back_they_look(tmp_path: Path) -> None:
    """Of a window of 2, a token at position 5, and of another request those at 3 and 4; of each the first wrong one is told."""

    def found(name: str, counts: list[int]) -> list[list[int]]:
        forward = _two_requests(luts=(np.arange(32),))
        event = _recorded(tmp_path / name, forward, AttentionInput(token_counts={1: counts}), header=SWA)
        return [event.ints(f"window_{part}").tolist() for part in ("group", "request", "start", "count")]

    assert found("healthy", [2, 2, 2]) == [[], [], [], []]
    assert found("one behind the first", [2, 2, 4]) == [[1], [1], [0], [4]]
    assert found("the first of two", [-1, 1, 3]) == [[1], [1], [2], [1]]
    assert found("nothing", [0, -1, 2]) == [[1], [0], [5], [0]]


def _output(request: int, position: int, start: int, length: int, slots: Any = None, group: int = 0) -> OutputRead:
    return OutputRead(group, 3, request, position, start, length, slots)


@pytest.mark.parametrize(
    ("read", "windows", "lens", "slots", "unexplained"),
    [
        (_output(0, 5, 2, 4), [0, 0, 2, 3], [], [], []),  # less before its token
        (_output(1, 4, 0, 4), [], [-1, 4, -1], [], []),  # as if it ended one earlier
        (_output(1, 3, 0, 5), [], [-1, 6, -1], [], []),  # ... or later
        (_output(1, 4, 1, 3), [0, 1, 1, 3], [-1, 4, -1], [], []),
        (_output(1, 3, 0, 4, np.array([10, 11, 12, 13])), [], [], [10, 11, 12, 13], []),  # another request's
        (_output(1, 4, 0, -1), [], [], [], [0, 1, 4, 3]),  # nobody knows what
    ],
)
def test_what_outputs_show_is_told_as_what_attention_was_seen_to_read(
    tmp_path: Path, read: OutputRead, windows: list[int], lens: list[int], slots: list[int], unexplained: list[int]
) -> None:
    given = AttentionInput(outputs=(read, _output(read.request, 4, 0, -1)), outputs_compared=5)
    event = _recorded(tmp_path / "t.arrow", _two_requests(), given)
    assert event.scalar("outputs_watched") == 5
    assert [
        n for name in ("group", "request", "start", "count") for n in event.ints(f"window_{name}").tolist()
    ] == windows
    assert event.ints("attention_seq_lens").tolist() == lens
    assert event.scalar("attention_watched") == 0
    assert event.ints("attention_slots").tolist() == slots
    columns = ("output_group", "output_request", "output_position", "output_layer")
    assert [n for name in columns for n in event.ints(name).tolist()] == unexplained


@pytest.mark.parametrize("known", [{"token_counts": {0: [5, 1, 1]}}, {"seq_lens": [6, 4, -1]}])
def test_what_is_known_of_a_request_already_is_not_told_again(tmp_path: Path, known: dict[str, Any]) -> None:
    told = AttentionInput(outputs=(_output(1, 4, 3, 2), _output(1, 3, 1, 3), _output(1, 3, 0, -1)), **known)
    event = _recorded(tmp_path / "t.arrow", _two_requests(), told)
    assert event.ints("window_request").tolist() == [1] * ("token_counts" in known)
    assert event.ints("output_request").tolist() == []


@pytest.mark.parametrize(("request_", "group"), [(3, 0), (-1, 0), (0, 1), (0, 2), (0, -1)])
def test_outputs_of_no_request_of_the_forward_are_refused(tmp_path: Path, request_: int, group: int) -> None:
    draft = PoolGroup(name="draft", num_slots=32, runner=1)
    header = dataclasses.replace(HEADER, groups=(*HEADER.groups, draft), runners=(Runner(), Runner(name="draft")))
    with Recorder(tmp_path / "t.arrow", header, strict=True) as recorder:
        for number in (1, 2):
            recorder.request(request_id=number, name=str(number))
        recorder.before_forward(_two_requests())
        with pytest.raises(ValueError, match=r"AttentionInput\.outputs"):
            recorder.attention(AttentionInput(outputs=(_output(request_, 0, 0, 1, group=group),)))
