"""A token of -1 is unknown and judged by nothing, and of a token beyond 32 bits those are judged that a table holds."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.capture.forward_input import ForwardInput, TruthTokens
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import Oracle, PoolGroup, StateTable, TraceHeader
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.settings import ReplaySettings

from ..support.both_ways import check
from .on_device.same import replay_both

pytestmark = pytest.mark.usefixtures("pass_from_the_start")

IMAGE = (1 << 61) + 12345  # a placeholder of an image
PROMPT, NEW = [11, 12, 13, 14], [21, 22, 23, 24]

Change = Callable[[list[int]], list[int]]


def record(
    path: Path, *, fed: Change, believed: Change, sampled: Change = list, oracle: bool = False, again: bool = False
) -> None:
    """Two requests, the second of which starts from the first's prompt; what is fed and believed is changed.

    With `again`, the second has the first's name and row, and another prompt where the first sampled.
    """
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=64, halves=("K",)),),
        tables=(StateTable(rows=4, width=32),),
        truth_table=StateTable(name="truth", rows=4, width=32),
        oracle=Oracle(vocab_size=9) if oracle else None,
    )
    recorder = Recorder(path, header, kv_watch_every=0)
    table = np.zeros((4, 32), np.int32)
    for row, slots in ((1, [4, 5, 6, 7, 8, 9, 10]), (2, [4, 5, 6, 17, 18, 19, 20])):
        tokens = PROMPT + NEW
        ends = [0 if row == 1 else 3, 4, 5, 6, 7]
        if again:
            ends = [0, 4, 5] if row == 1 else [3, 7]
            tokens = tokens if row == 1 else [*PROMPT[:3], 31, 32, 33, 34, 35]
            row = 1
        recorder.request(request_id=row, name=str(row), prompt_len=4)
        recorder.request_status(request_id=row, status="admitted", row=row)
        table[row, : len(slots)] = slots
        for begin, end in pairwise(ends):
            recorder.before_forward(
                ForwardInput(
                    mode="decode" if end - begin == 1 and begin >= 4 else "extend",
                    req_pool_indices=[row],
                    request_ids=[row],
                    prefix_lens=[begin],
                    extend_lens=[end - begin],
                    input_ids=fed(tokens)[begin:end],
                    positions=list(range(begin, end)),
                    out_cache_loc=(slots[begin:end],),
                    reads=(table,),
                    truth=TruthTokens(flat=believed(tokens)[:end], lens=[end]),
                )
            )
            recorder.after_forward(sampled_tokens=sampled(tokens)[end : end + 1], sampled_lens=[1])
        recorder.request_status(request_id=row, status="finished", row=row)
    recorder.close()
    assert recorder.stats().off == "closed"


def found(path: Path, folder: Path) -> Summary:
    """What stepwise and the default executor find."""
    (answer,) = check([path], folder / "cpu", incidents=False)
    return answer.summary


def put(token: int, *places: int) -> Change:
    return lambda tokens: [token if at in places else t for at, t in enumerate(tokens)]


@pytest.mark.parametrize(
    ("fed", "believed", "sampled"),
    [
        (put(-1, 0, 1, 2, 3), put(-1, 0, 1, 2, 3), list),  # a prompt of embeddings
        (put(-1, 1, 5), list, list),  # unknown where it is fed: stored as it is
        (list, put(-1, 1, 5), list),
        (list, put(-1, 5), put(-1, 5)),
        (put(9, 5), put(-1, 5), put(-1, 5)),
        (put(IMAGE, 1, 2), put(IMAGE, 1, 2), list),
        (put(IMAGE, 1, 2), put(IMAGE + (1 << 40), 1, 2), list),  # the table cannot tell these apart
    ],
)
def test_a_healthy_engine(fed: Change, believed: Change, sampled: Change, tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    record(path, fed=fed, believed=believed, sampled=sampled)
    summary = found(path, tmp_path)
    assert (summary.violations, summary.findings) == (0, 0)


@pytest.mark.parametrize("fed", [put(9, 1), put(IMAGE, 1)])
@pytest.mark.parametrize("believed", [list, put(IMAGE + 1, 1)])
def test_another_token_is_found(fed: Change, believed: Change, tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    record(path, fed=fed, believed=believed)
    summary = found(path, tmp_path)
    assert summary.violations > 0
    assert summary.findings_by_kind["input_not_truth"] == 1
    assert summary.findings_by_kind["hit_differs"] == 1


def test_an_id_that_comes_again_in_the_same_row(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    record(path, fed=list, believed=list, again=True)
    summary = found(path, tmp_path)
    assert (summary.violations, summary.findings) == (0, 0)


def test_the_oracle_foretells_no_unknown_token(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    record(path, fed=put(-1, 4, 5, 6), believed=list, oracle=True)
    assert found(path, tmp_path).violations == 0


@pytest.mark.parametrize("believed", [list, put(-1, 1)])
def test_a_device_agrees(believed: Change, tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    record(path, fed=put(-1, 0, 5), believed=lambda tokens: put(9, 2)(believed(tokens)), sampled=put(-1, 5))
    ((summary, _),) = replay_both([path], tmp_path, "interpreter", ReplaySettings(checks=()))
    assert summary.violations == summary.violations_by_reason["VERIFY_TOKEN"] > 0
