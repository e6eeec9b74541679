"""What the recorder takes of recurrent state: hashes of bytes, keyed if tokens are hashed; a split forward's slots."""

import dataclasses

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.forward_input import ForwardInput, TableRead
from kvcanary.recorder.capture.privacy import Privacy
from kvcanary.recorder.capture.reading_order import in_reading_order
from kvcanary.recorder.capture.recurrent import RecurrentCapture, StateAccess
from kvcanary.recorder.trace.header import PoolGroup, StatePool, StateTable, TraceHeader

HEADER = TraceHeader(
    groups=(PoolGroup(name="full", num_slots=8),),
    tables=(StateTable(rows=4, width=8),),
    states=(StatePool(name="mamba", num_slots=3, hashed_bytes=8),),
)


def hash_of(part: object, slot: int = 1, privacy: Privacy | None = None) -> int:
    capture = RecurrentCapture(HEADER, {0: [part]}, privacy)
    capture.begin(0, np.array([1]), (StateAccess(reads=[slot], writes=[slot]),))
    columns = capture.end()
    (before,), (after,) = (columns[f"recurrent_{name}"].tolist() for name in ("before", "after"))
    assert before == after != 0
    return int(after)


@pytest.mark.parametrize(
    "part", [np.arange(12, dtype=np.float32).reshape(3, 4), torch.arange(12).reshape(3, 2, 2).to(torch.bfloat16)]
)
def test_the_leading_bytes_of_a_slot_are_hashed(part) -> None:
    clone = part.clone() if isinstance(part, torch.Tensor) else part.copy()
    strided = clone.repeat(2, 0)[::2] if isinstance(clone, np.ndarray) else clone.transpose(0, 1).contiguous()
    strided = strided if isinstance(strided, np.ndarray) else strided.transpose(0, 1)
    assert hash_of(part) == hash_of(clone) == hash_of(strided)
    clone.reshape(-1)[0] += 1  # another slot's
    assert hash_of(part) == hash_of(clone)
    clone[1].reshape(-1)[0] += 1
    assert hash_of(part) != hash_of(clone)


@pytest.mark.parametrize("number", range(6))
def test_of_a_window_what_its_newest_token_brought_is_hashed(number: int) -> None:
    """Which of two tokens comes last must show, however wide they are: what stands behind the first says nothing of it."""
    pool = dataclasses.replace(HEADER.states[0], from_end=True)
    window = torch.zeros(3, 2, 3, dtype=torch.int32)  # 2 tokens of 12 bytes, of which 8 are hashed
    capture = RecurrentCapture(dataclasses.replace(HEADER, states=(pool,)), {0: [window]}, None)
    capture.begin(0, np.array([1]), (StateAccess(reads=[1], writes=[1]),))
    window[1].view(-1)[number] = 7
    columns = capture.end()
    assert (columns["recurrent_before"] != columns["recurrent_after"]).tolist() == [number > 3]


def test_hashes_are_keyed_where_tokens_are_hashed() -> None:
    part = np.arange(12, dtype=np.float32).reshape(3, 4)
    keyed = [hash_of(part, privacy=Privacy(bytes([salt]) * 16)) for salt in (1, 1, 2)]
    assert keyed[0] == keyed[1] != keyed[2]
    assert hash_of(part) not in keyed


def test_padding_and_a_request_that_begins_read_nothing() -> None:
    capture = RecurrentCapture(HEADER, {}, None)
    capture.begin(0, np.array([2, 0, 3]), (StateAccess(reads=[-1, 1, 2], writes=[1, 1, 2]),))
    columns = capture.end()
    assert columns["recurrent_request"].tolist() == [0, 2]
    assert columns["recurrent_source"].tolist() == [-1, 2]
    assert columns["recurrent_after"].tolist() == [0, 0]


def test_what_the_first_layer_is_given_replaces_what_was_told_before() -> None:
    part = np.arange(12, dtype=np.float32).reshape(3, 4)
    capture = RecurrentCapture(HEADER, {0: [part]}, None)
    capture.note("clear", 0, [2], [])
    capture.begin(0, np.array([1]), (StateAccess(reads=[-1], writes=[1]),))
    capture.given(0, np.array([1]), (StateAccess(reads=[2], writes=[2]),))
    columns = capture.end()
    clear, step = range(2)
    assert columns["recurrent_op"].tolist() == [0, 2]  # the clear is kept
    assert (columns["recurrent_source"][step], columns["recurrent_slot"][step]) == (2, 2)
    assert columns["recurrent_before"][step] == columns["recurrent_after"][clear] != 0


def test_of_a_split_forward_each_part_has_its_own_requests_slots() -> None:
    given = ForwardInput(
        mode="extend",
        req_pool_indices=[1, 2],
        request_ids=[1, 2],
        prefix_lens=[0, 2],
        extend_lens=[2, 1],
        input_ids=[5, 6, 7],
        positions=[0, 1, 2],
        out_cache_loc=(np.array([1, 2, 3]),),
        reads=(TableRead(starts=[0, 0], counts=[0, 2], slots=[1, 2]),),
        states=(StateAccess(reads=[-1, 1], writes=[2, 1]), None),
    )
    parts = [part.states for part, _ in in_reading_order(given)]
    found = [[None if one is None else (list(one.reads), list(one.writes), one.ran) for one in part] for part in parts]
    assert found == [[([-1], [2], False), None], [([1], [1], True), None]]


def test_what_a_forward_read_before_it_was_told_is_not_hashed() -> None:
    capture = RecurrentCapture(HEADER, {0: [np.ones((3, 2))]}, None)
    capture.begin(0, np.array([1]), (StateAccess(reads=[1], writes=[1], ran=True),))
    columns = capture.end()
    assert (columns["recurrent_before"].tolist(), columns["recurrent_after"].all()) == ([0], True)


@pytest.mark.parametrize("privacy", [None, Privacy(bytes(16))], ids=["plain", "hashed"])
def test_the_header_says_what_a_slot_of_zeros_is(privacy: Privacy | None) -> None:
    part = np.arange(12, dtype=np.float32).reshape(3, 4)
    (pool,) = RecurrentCapture(HEADER, {0: [part]}, privacy).with_zeros()
    assert pool.zeros not in (0, hash_of(part, privacy=privacy))
    part[1] = 0
    assert pool.zeros == hash_of(part, privacy=privacy)
    assert RecurrentCapture(HEADER, {}, privacy).with_zeros() == HEADER.states, "nobody reads their bytes"
