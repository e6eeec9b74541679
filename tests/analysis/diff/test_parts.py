"""The parts: KV bytes as values, canonical names against a slow definition, headers that cannot be compared."""

import dataclasses
import math

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.analysis.diff.comparability import beyond, largest_difference, plan_comparison, values_of
from kvcanary.analysis.diff.names import ROOT, SlotNames, token_words, weights
from kvcanary.analysis.diff.pairing import pair_requests
from kvcanary.analysis.diff.settings import DiffSettings, NotComparableError
from kvcanary.recorder.trace.header import KvStream, ModelInfo, Oracle, PoolGroup, Ranks, StateTable, TraceHeader

MASK = (1 << 64) - 1


@pytest.mark.parametrize(
    ("dtype", "data", "expected"),
    [
        ("fp32", np.array([1.5, -2.0], "<f4"), [1.5, -2.0]),
        ("fp16", np.array([1.5, -2.0, 65504.0], "<f2"), [1.5, -2.0, 65504.0]),
        ("bf16", np.array([0x3FC0, 0xC000, 0x7F80], "<u2"), [1.5, -2.0, math.inf]),
        ("fp8_e5m2", np.array([0x3E, 0xC0, 0x7B], np.uint8), [1.5, -2.0, 57344.0]),
        ("fp8_e4m3", np.array([0x3C, 0xC0, 0x7E, 0x01], np.uint8), [1.5, -2.0, 448.0, 2.0**-9]),
    ],
)
def test_bytes_are_values(dtype, data, expected):
    assert values_of(data.view(np.uint8)[None], dtype).tolist() == [expected]


def test_every_e4m3_code_has_its_value():
    values = values_of(np.arange(256, dtype=np.uint8)[None], "fp8_e4m3")[0]
    assert np.isnan(values[[127, 255]]).all()
    assert np.array_equal(values[1:127], np.sort(values[1:127]))
    assert np.array_equal(values[129:255], -values[1:127])


def test_a_tolerance_is_absolute_and_relative():
    a = np.array([[1.0, 100.0], [0.0, 0.0], [np.nan, 1.0], [np.nan, 1.0]], "<f4")
    b = np.array([[1.01, 100.9], [0.02, 0.0], [np.nan, 1.0], [1.0, 1.0]], "<f4")
    sides = (a.view(np.uint8), b.view(np.uint8))
    assert beyond(*sides, "fp32", 0.01).tolist() == [False, True, False, True]
    assert largest_difference(*(side[1:2] for side in sides), "fp32") == pytest.approx(0.02)
    assert largest_difference(*(side[3:] for side in sides), "fp32") == math.inf


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 1e30])
def test_an_infinity_is_near_to_itself_alone(tolerance):
    inf = math.inf
    a = np.array([[inf], [-inf], [1.0], [inf], [inf]], "<f4").view(np.uint8)
    b = np.array([[inf], [-inf], [inf], [1.0], [-inf]], "<f4").view(np.uint8)
    assert beyond(a, b, "fp32", tolerance).tolist() == [False, False, True, True, True]


def test_what_is_equal_is_not_far_apart():
    a = np.array([[math.inf, math.nan, 1.0]], "<f4").view(np.uint8)
    b = np.array([[math.inf, math.nan, 1.5]], "<f4").view(np.uint8)
    assert largest_difference(a, b, "fp32") == 0.5


def known(side, requests):
    """Return what fills the facts with requests `(id, name, prompt)` that came one after another; no name: the request is not told."""
    statements = []
    for number, (request, name, prompt) in enumerate(requests):
        if name:
            statements.append(f"insert into {side}_requests values ({request}, '{name}', -1, 4, {number})")
        statements.append(f"insert into {side}_prompts values ({request}, {prompt}, {number})")
        statements.append(f"insert into {side}_batches values ({request}, {number})")
    return statements


PAIRINGS = [
    # of equal prompts those of one name, the others in their order
    ([(1, "x", 7), (2, "y", 7), (3, "z", 7)], [(8, "y", 7), (9, "w", 7), (6, "x", 7)], True, [(1, 6), (2, 8), (3, 9)]),
    ([(1, "x", 7), (2, "y", 7)], [(8, "v", 7), (9, "w", 7)], True, [(1, 8), (2, 9)]),
    ([(1, "x", 7), (2, "y", 7)], [(8, "v", 7)], True, [(1, 8)]),
    # which of the two was lost?
    ([(1, "x", 7), (2, "y", 7)], [(8, "", 7)], False, []),
    ([(1, "x", 7), (2, "y", 8)], [(8, "", 7)], False, [(1, 8)]),
]


@pytest.mark.parametrize(("a", "b", "whole", "expected"), PAIRINGS)
def test_requests_of_equal_prompts(a, b, whole, expected):
    with duckdb.connect() as connection:
        for side, requests in (("a", a), ("b", b)):
            connection.execute(
                f"create table {side}_requests (request_id bigint, name varchar, room bigint, prompt_len bigint, event bigint)"
            )
            connection.execute(f"create table {side}_prompts (request_id bigint, prompt_hash bigint, event bigint)")
            connection.execute(f"create table {side}_batches (request_id bigint, event bigint)")
            for statement in known(side, requests):
                connection.execute(statement)
        settings = DiffSettings(align="prompt")
        if expected:
            pair_requests(connection, settings, hand_over=False, whole=whole, hashed=False)
        else:
            with pytest.raises(NotComparableError):
                pair_requests(connection, settings, hand_over=False, whole=whole, hashed=False)
        assert connection.execute("select a_id, b_id from pairs order by a_id").fetchall() == expected


@given(st.data())
def test_names_and_fingerprints_are_what_they_are_defined_to_be(data):
    width, num_slots = 12, 30
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    names = SlotNames(num_slots, 0, 4, width)
    bs = data.draw(st.integers(1, 3))
    prefix = rng.integers(0, 8, bs)
    extend = rng.integers(1, 5, bs)
    window = int(data.draw(st.sampled_from([0, 3])))
    table = rng.integers(1, num_slots, (4, width)).astype(np.int32)
    names.names[:] = rng.integers(10, 1 << 60, num_slots).astype(np.uint64)
    rows, ids = np.arange(1, bs + 1), np.arange(bs) + 100
    for row, length in zip(rows, prefix, strict=True):
        names.trust(int(row), table[row, :length].astype(np.int64), 0)
        if length and rng.random() < 0.5:  # one of the slots read has been written by somebody since
            names.names[table[row, rng.integers(length)]] += np.uint64(1)
    tokens, fed = rng.integers(0, 99, extend.sum()), rng.integers(0, 99, extend.sum())
    words = token_words(tokens, fed)
    found = names.read(rows, ids, prefix, extend, words, table=table, lut=None, window=window, upto=None, written=None)
    at = 0
    for r in range(bs):
        stored = [int(names.names[table[rows[r], q]]) for q in range(prefix[r])]
        own = [int(names.own[rows[r], q]) for q in range(prefix[r])]
        name = stored[-1] if prefix[r] else int(ROOT)
        low = max(0, int(prefix[r]) - window) if window else 0
        wrong = [q for q in range(low, prefix[r]) if stored[q] != own[q]]
        assert found.wrong[r] == (wrong[0] if wrong else -1)
        for p in range(prefix[r], prefix[r] + extend[r]):
            first = max(0, p - window) if window else 0
            factor = [int(w) for w in weights(np.arange(len(stored)))]
            assert int(found.reads[at]) == sum(s * w for s, w in list(zip(stored, factor, strict=True))[first:]) & MASK
            assert int(found.misreads[at]) == sum(stored[q] * factor[q] for q in wrong if q >= first) & MASK
            name = (name + int(words[at])) & MASK
            assert int(found.names[at]) == name
            stored.append(name)
            at += 1


HEADER = TraceHeader(
    groups=(PoolGroup(name="full", num_slots=9, streams=(KvStream(half="K", bytes_per_token=64, capture_bytes=16),)),),
    tables=(StateTable(rows=2, width=9),),
    model=ModelInfo(name="m", dtype="bfloat16"),
)


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"model": ModelInfo(name="n", dtype="bfloat16")}, {}, "--any-model"),
        ({"tokens": "hashed"}, {}, "plain, those of B hashed"),
        (
            {"groups": (dataclasses.replace(HEADER.groups[0], kind="swa", window=4),)},
            {},
            "no pool group of the same kind",
        ),
        ({"ranks": Ranks(tp_rank=1, tp_size=2)}, {"kv_tolerance": 0.1}, "other heads or layers"),
        (
            {"groups": (dataclasses.replace(HEADER.groups[0], streams=()),)},
            {"kv_tolerance": 0.1},
            "B holds no KV bytes",
        ),
    ],
)
def test_headers_that_cannot_be_compared(changes, settings, words):
    with pytest.raises(NotComparableError, match=words):
        plan_comparison(HEADER, dataclasses.replace(HEADER, **changes), DiffSettings(**settings))


def test_vocabularies_that_differ():
    sides = [dataclasses.replace(HEADER, oracle=Oracle(vocab_size=size)) for size in (100, 200)]
    with pytest.raises(NotComparableError, match="not the same vocabulary"):
        plan_comparison(*sides, DiffSettings())


def test_what_is_left_out_is_noted():
    rank = dataclasses.replace(HEADER, ranks=Ranks(tp_rank=1, tp_size=2))
    plan = plan_comparison(dataclasses.replace(HEADER, ranks=Ranks(tp_size=2)), rank, DiffSettings())
    assert not plan.kv
    assert any("tp 0/2" in note for note in plan.notes)
    hashed = dataclasses.replace(HEADER, tokens="hashed")
    assert any("same salt" in note for note in plan_comparison(hashed, hashed, DiffSettings()).notes)
    wide = dataclasses.replace(HEADER.groups[0], streams=(KvStream(half="K", bytes_per_token=64, capture_bytes=64),))
    both = plan_comparison(HEADER, dataclasses.replace(HEADER, groups=(wide,)), DiffSettings())
    assert both.kv
    assert both.groups[0][0].capture_bytes == (16,)
