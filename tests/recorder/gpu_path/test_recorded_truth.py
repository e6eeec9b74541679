"""The scheduler's tokens as they grow: whose row it is, what is told again, and what is not kept alive."""

import gc
import weakref

import numpy as np
from kvcanary.kernels.constants import UNKNOWN_TOKEN
from kvcanary.recorder.capture.device.frame_decoder import RecordedTruth
from kvcanary.recorder.engines.common.requests import TokenList
from kvcanary.recorder.engines.sglang.requests import TokenLists
from kvcanary.recorder.trace.header import StateTable

from .two_recorders import Tokens


def book():
    return RecordedTruth(StateTable(name="truth", rows=4, width=8))


def told(found):
    return [found[f"truth_{name}"].tolist() for name in ("lens", "row", "start", "tokens")]


def test_only_what_is_new_is_told_until_the_row_is_anothers():
    truth, first = book(), Tokens([5, 6])
    rows = np.array([2, 0])
    assert told(truth.changes(rows, [first], [2])) == [[2, 0], [2], [0], [5, 6]]
    first.all += [7]
    assert told(truth.changes(rows, [first], [3])) == [[3, 0], [2], [2], [7]]
    assert told(truth.changes(rows, [Tokens([5, 6, 7])], [3])) == [[3, 0], [2], [0], [5, 6, 7]]


def test_one_new_token_each_is_the_same_from_whoever_keeps_them():
    kept, alone = TokenList(), Tokens([5, 6, 7])
    kept.begin([5, 6])
    lists = TokenLists([5], [6])
    embedded = TokenLists([0], [6], (True, False))
    rows = np.array([1, 2, 3])
    for requests in ([kept, lists, embedded], [alone, kept, lists]):  # one has no single tokens to give
        truth = book()
        truth.changes(rows, requests, [1, 1, 1])
        assert told(truth.changes(rows, requests, [2, 2, 2])) == [[2, 2, 2], [1, 2, 3], [1, 1, 1], [6, 6, 6]]
    assert [kept.token(1), kept.token(2), lists.token(0), lists.token(1), lists.token(2)] == [6, None, 5, 6, None]
    assert embedded.token(0) == UNKNOWN_TOKEN
    lists.output.clear()  # it was taken back meanwhile
    truth = book()
    truth.changes(rows, [kept, lists, embedded], [1, 1, 1])
    assert told(truth.changes(rows, [kept, lists, embedded], [2, 2, 2]))[0] == [2, 1, 2]


def test_a_token_that_is_taken_back_while_it_is_asked_for_is_not_told():
    class TakenBack(list[int]):
        def __len__(self) -> int:
            return super().__len__() + 1  # as it was a moment ago

    truth, rows = book(), np.array([1])
    request = TokenLists([5], TakenBack())
    truth.changes(rows, [request], [1])
    assert told(truth.changes(rows, [request], [2])) == [[1], [], [], []]


def test_tokens_that_are_gone_by_now_are_not_told():
    truth, request = book(), Tokens([5, 6, 7])
    rows = np.array([1])
    truth.changes(rows, [request], [2])
    del request.all[2:]
    assert told(truth.changes(rows, [request], [3])) == [[2], [], [], []]
    request.all += [8]
    assert told(truth.changes(rows, [request], [3])) == [[3], [1], [2], [8]]


def test_a_request_that_is_over_is_not_kept_alive():
    truth, request = book(), Tokens([5])
    truth.changes(np.array([1]), [request], [1])
    gone = weakref.ref(request)
    del request
    gc.collect()
    assert gone() is None
    assert told(truth.changes(np.array([1]), [Tokens([9])], [1])) == [[1], [1], [0], [9]]
