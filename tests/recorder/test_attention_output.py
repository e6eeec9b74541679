"""What positions attention read, by what came out of it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcanary.recorder.capture.attention_output import (
    MAX_SEARCHES,
    AttentionCall,
    OutputChecks,
    RequestSlots,
    requests_of,
)

SLOTS, KV_HEADS, HEADS, DIM = 128, 2, 4, 16
Reads = Callable[[int, int, int, int], tuple[int, int, int]]


def told(request: int, start: int, end: int, _position: int) -> tuple[int, int, int]:
    """Read what is to be read: of request `request` the positions from `start` to before `end`."""
    return request, start, end


class Engine:
    """Computes attention as a kernel would, and over other positions if `reads` says so."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, cap: float = 0.0, size: float = 1.0) -> None:
        self.random, self.cap = np.random.default_rng(seed), cap
        torch.manual_seed(seed)
        self.keys, self.values = ((size * torch.randn(SLOTS, KV_HEADS, DIM)).to(dtype) for _ in range(2))

    def call(
        self, lens: list[tuple[int, int]], reads: Reads = told, window: int = 0
    ) -> tuple[AttentionCall, list[RequestSlots]]:
        prefix, extend = (np.array(part, np.int64) for part in zip(*lens, strict=True))
        slots = self.random.permutation(SLOTS)[: int((prefix + extend).sum())]
        requests = requests_of(slots, prefix, extend)
        query = torch.randn(int(extend.sum()), HEADS, DIM).to(self.keys.dtype)
        output = torch.zeros_like(query)
        for r, one in enumerate(requests):
            for token in range(int(extend[r])):
                position = one.prefix + token
                start = max(position - window, 0) if window else 0
                other, low, end = reads(r, start, position + 1, position)
                rows = torch.from_numpy(requests[other].slots[low:end])
                for head in range(HEADS):
                    own = query[one.first_token + token, head].float()
                    scores = self.keys[rows, head * KV_HEADS // HEADS].float() @ own / math.sqrt(DIM)
                    scores = self.cap * (scores / self.cap).tanh() if self.cap else scores
                    mean = scores.softmax(0) @ self.values[rows, head * KV_HEADS // HEADS].float()
                    output[one.first_token + token, head] = mean.to(output.dtype)
        return AttentionCall(query, output, 1 / math.sqrt(DIM), self.cap), requests

    def read(self, slots: Any, head: int) -> tuple[Any, Any]:
        at = torch.from_numpy(slots)
        return self.keys[at, head], self.values[at, head]


def found(
    engine: Engine,
    lens: list[tuple[int, int]],
    reads: Reads = told,
    window: int = 0,
    checks: OutputChecks | None = None,
) -> Any:
    checks = checks or OutputChecks()
    call, requests = engine.call(lens, reads, window)
    checks.look(call, [requests], engine.read, KV_HEADS, group=0, layer=3, windows=(window,))
    return checks.take()


LENS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    lens=LENS,
    window=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    cap=st.sampled_from([0.0, 2.0]),
    size=st.sampled_from([1.0, 1e-6]),  # of 16 bits the last is but a few steps
)
def test_what_is_read_as_it_ought_to_be_is_right(
    seed: int, lens: list[tuple[int, int]], window: int, dtype: torch.dtype, cap: float, size: float
) -> None:
    wrong, compared = found(Engine(seed, dtype, cap, size), lens, window=window)
    assert wrong == []
    assert compared == sum(len({0, 0 % extend, extend - 1}) for _, extend in lens if extend)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), prefix=st.integers(8, 40), less=st.integers(1, 4), window=st.sampled_from([0, 6]))
def test_a_run_that_begins_or_ends_elsewhere_is_told(seed: int, prefix: int, less: int, window: int) -> None:
    (read,), _ = found(Engine(seed), [(prefix, 1)], lambda r, start, end, _: (r, start + less, end), window)
    first = max(prefix - window, 0) if window else 0
    assert (read.start, read.start + read.length, read.slots) == (first + less, prefix + 1, None)
    (read,), _ = found(Engine(seed), [(prefix, 1)], lambda r, start, end, _: (r, start, end - less), window)
    assert (read.start, read.start + read.length) == (first, prefix + 1 - less)
    if window:
        (read,), _ = found(Engine(seed), [(prefix, 1)], lambda r, _start, end, _: (r, 0, end), window)
        assert (read.start, read.start + read.length) == (0, prefix + 1)


def test_what_is_to_come_is_seen_in_the_tokens_before_it() -> None:
    """A chunk that is masked as if all its tokens came last: of the tokens that are looked at all but the last are wrong."""
    wrong, compared = found(Engine(1), [(10, 5)], lambda r, start, _end, _: (r, start, 15))
    assert compared == 2
    assert [(one.position, one.start, one.length) for one in wrong] == [(10, 0, 15)]


def test_another_requests_positions_are_told_with_their_slots() -> None:
    engine = Engine(2)
    call, requests = engine.call(
        [(9, 1), (12, 1)],
        lambda _r, _start, end, _position: (1, 0, end),
    )
    checks = OutputChecks()
    checks.look(call, [requests], engine.read, KV_HEADS, group=0, layer=3, windows=(0,))
    (read,), _ = checks.take()
    assert (read.request, read.position, read.start, read.length) == (0, 9, 0, 10)
    assert read.slots.tolist() == requests[1].slots[:10].tolist()


def test_what_no_run_explains_is_unexplained_and_no_number_says_nothing() -> None:
    engine = Engine(3)
    call, requests = engine.call([(9, 1), (12, 1)])
    call.output[0] *= -1
    call.output[1] = torch.nan
    checks = OutputChecks()
    checks.look(call, [requests], engine.read, KV_HEADS, group=2, layer=3, windows=(0,))
    (read,), compared = checks.take()
    assert (read.group, read.layer, read.request, read.length, compared) == (2, 3, 0, -1, 2)


def test_a_second_numbering_and_a_second_window_may_be_right_as_well() -> None:
    engine = Engine(4)
    call, requests = engine.call([(9, 2)], window=3)
    others = [RequestSlots(one.first_token, one.prefix, (one.slots + 1) % SLOTS) for one in requests]
    for ways, windows, right in (([others, requests], (3,), True), ([requests], (0, 3), True), ([others], (3,), False)):
        checks = OutputChecks()
        checks.look(call, ways, engine.read, KV_HEADS, group=0, layer=0, windows=windows)
        assert (checks.take()[0] == []) is right


def test_heads_and_tokens_move_on_from_forward_to_forward() -> None:
    engine, checks = Engine(5), OutputChecks()
    seen = set()
    for _ in range(8):
        call, requests = engine.call([(3, 5)])
        call.output[2:4, 3] += 1  # two tokens in one head
        checks.look(call, [requests], engine.read, KV_HEADS, group=0, layer=0, windows=(0,))
        seen |= {one.position for one in checks.take()[0]}
    assert seen == {5, 6}  # both, in the forwards that come to that head


@pytest.mark.parametrize("layers", [1, 4])
def test_no_more_than_so_many_positions_are_looked_at_and_layers_take_turns(layers: int) -> None:
    engine, checks = Engine(6), OutputChecks(most_positions=25)
    call, requests = engine.call([(19, 1)])
    seen = []
    for _ in range(1 + layers):
        for layer in range(layers):
            before = checks._compared
            checks.look(call, [requests], engine.read, KV_HEADS, group=0, layer=layer, windows=(0,))
            seen += [layer] * (checks._compared - before)
        checks.take()
    assert seen == [0, *([0] if layers == 1 else [3, 2, 1, 0])]


def test_a_forward_that_is_wrong_everywhere_is_searched_so_often_only() -> None:
    wrong, compared = found(Engine(7), [(2, 1)] * 30, lambda r, start, end, _: (r, start, end - 1))
    assert (len(wrong), compared) == (MAX_SEARCHES, 30)


@pytest.mark.parametrize(("every", "looked"), [(1, [0, 1, 2, 3, 4]), (3, [0, 3]), (0, [])])
def test_of_so_many_forwards_one_is_looked_at(every: int, looked: list[int]) -> None:
    engine, checks = Engine(8), OutputChecks(every)
    found_in = []
    for forward in range(5):
        call, requests = engine.call([(4, 1)])
        for layer in (0, 1):
            assert checks.wanted() == (forward in looked)
            checks.look(call, [requests], engine.read, KV_HEADS, group=0, layer=layer, windows=(0,))
        found_in += [forward] * bool(checks.take()[1])
        checks.take()  # between two forwards
    assert found_in == looked
