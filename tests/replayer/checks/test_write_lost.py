"""A write that leaves another token's bytes in its slot."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.capture.privacy import Privacy
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.replayer.run.replay import ReplaySettings, replay

SLOTS, SIZE = 64, 32
STREAMS = tuple(KvStream(half=half, layer=0, bytes_per_token=SIZE, capture_bytes=16) for half in "KV")


class Engine:
    """Writes tokens into slots of its choice; `kv[half]` `[slots, 32]` is what is there after the forward."""

    def __init__(self, path, lut=None, dtype="", **options):
        self.path = path
        self.luts = () if lut is None else (lut,)
        group = PoolGroup(
            name="full",
            num_slots=SLOTS,
            halves=("K", "V"),
            streams=tuple(replace(stream, dtype=dtype) for stream in STREAMS),
            lut=-1 if lut is None else 0,
        )
        header = TraceHeader(
            groups=(group,), tables=(StateTable(rows=4, width=16),), lut_lens=tuple(len(one) for one in self.luts)
        )
        self.kv = [np.zeros((SLOTS, SIZE), np.uint8) for _ in STREAMS]
        sources = {
            (0, i): KvSource(tensor=kv, page_size=1, bytes_per_token=SIZE, read_bytes=SIZE)
            for i, kv in enumerate(self.kv)
        }
        self.recorder = Recorder(path, header, kv_sources=sources, kv_watch_every=0, **options)
        self.table = np.zeros((4, 16), np.int32)

    def write(self, slot, token, key, value, *, request=7, row=1, failed=False):
        """A new request of one token, which leaves `key` and `value` in every byte of the slot."""
        self.table[row, 0] = slot
        one = np.ones(1, np.int64)
        self.recorder.before_forward(
            ForwardInput(
                mode="extend",
                req_pool_indices=one * row,
                request_ids=one * request,
                prefix_lens=one * 0,
                extend_lens=one,
                input_ids=one * token,
                positions=one * 0,
                out_cache_loc=(one * slot,),
                reads=(self.table,),
                luts=self.luts,
            )
        )
        slot = self.luts[0][slot] if self.luts else slot
        self.kv[0][slot], self.kv[1][slot] = key, value
        self.recorder.after_forward(failed=failed)

    def found(self, tmp_path):
        self.recorder.close()
        replay(self.path, settings=ReplaySettings(checks=("write_lost",)), report=tmp_path)
        return pq.read_table(tmp_path / "findings.parquet").to_pylist()


@pytest.mark.parametrize(
    ("dtype", "stayed"),
    [("bfloat16", 2), ("bfloat16", 1), ("float32", 1), ("float8_e5m2", 4), ("float8_e4m3fn", 3), ("", 7)],
)
def test_k_that_stayed_where_v_has_hardly_changed_is_no_lost_write(dtype, stayed, tmp_path):
    """As with random weights, of which K and V are little but their biases: the same positions have the same K."""
    engine = Engine(tmp_path / "trace.arrow", dtype=dtype)
    size = {"float32": 4, "bfloat16": 2, "": 2}.get(dtype, 1)
    before, after = np.arange(1, SIZE + 1, dtype=np.uint8), np.arange(101, 101 + SIZE, dtype=np.uint8)
    after[: stayed * size] = before[: stayed * size]
    engine.write(5, 100, 3, before)
    engine.write(5, 200, 3, after, request=8)
    assert bool(engine.found(tmp_path)) == (not dtype or stayed * size < 4)  # of 16 bytes a quarter


@pytest.mark.parametrize(("value", "lost"), [(7, 1), (9, 0)])
def test_of_hashed_bytes_nobody_knows_how_many_numbers_changed(value, lost, tmp_path):
    """K that stayed says nothing where V, of which no number can be read, has changed; where V stayed, too, nothing was written."""
    engine = Engine(tmp_path / "trace.arrow", dtype="bfloat16", privacy=Privacy(b"0123456789abcdef"))
    engine.write(5, 100, 3, 7)
    engine.write(5, 200, 3, value, request=8)
    assert len(engine.found(tmp_path)) == lost


def test_k_that_stayed_is_no_witness_even_where_v_has_hardly_changed(tmp_path):
    """Else a write that is lost as a whole would pass for the token's own bytes."""
    engine = Engine(tmp_path / "trace.arrow", dtype="bfloat16")
    before, after = np.arange(1, SIZE + 1, dtype=np.uint8), np.arange(101, 101 + SIZE, dtype=np.uint8)
    after[:4] = before[:4]
    engine.write(5, 100, 3, before)
    engine.write(5, 200, 3, after, request=8)
    engine.write(6, 100, 3, 77, request=9)
    engine.write(6, 200, 3, 77, request=10)
    assert [(row["forward"], row["slot"]) for row in engine.found(tmp_path)] == [(3, 6)]


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path / "trace.arrow")


@pytest.mark.parametrize(("key", "value"), [(3, 4), (3, 9), (9, 4)])
def test_bytes_of_another_token_are_told(key, value, engine, tmp_path):
    """Of K, of V, or of both."""
    engine.write(5, 100, 3, 4)
    engine.write(5, 200, key, value, request=8)
    (row,) = engine.found(tmp_path)
    assert (row["kind"], row["forward"], row["request_id"], row["slot"], row["position"]) == ("write_lost", 1, 8, 5, 0)
    assert row["detail"] == "wrote token 200, the bytes are still those of token 100, written in event 0"
    assert row["evidence"] == "[0, 1]"


@pytest.mark.parametrize(
    "second",
    [
        {"slot": 5, "token": 200, "key": 8, "value": 9},  # both are new
        {"slot": 5, "token": 100, "key": 3, "value": 4},  # the same token again
        {"slot": 6, "token": 200, "key": 3, "value": 4},  # nobody has written there
        {"slot": 0, "token": 200, "key": 3, "value": 4},  # padding
        {"slot": 5, "token": 200, "key": 3, "value": 4, "row": 0},  # a padding row
    ],
)
def test_what_is_right_is_not(second, engine, tmp_path):
    engine.write(0, 90, 3, 4)
    engine.write(5, 100, 3, 4)
    engine.write(**second, request=8)
    assert engine.found(tmp_path) == []


def test_zeros_may_stay_zeros(engine, tmp_path):
    engine.write(5, 100, 0, 4)
    engine.write(5, 200, 0, 9)
    assert engine.found(tmp_path) == []


def test_what_a_loss_may_have_written_is_not_judged(engine, tmp_path):
    engine.write(5, 100, 3, 4)
    engine.recorder.lost("a test says so")
    engine.write(5, 200, 3, 4)
    assert engine.found(tmp_path) == []


@pytest.mark.parametrize("executor", ["interval", "stepwise"])
def test_what_a_forward_wrote_that_failed_is_unknown(executor, engine, tmp_path):
    """Nor is a later write of the bytes that were there before compared with the token that was to come between."""
    engine.write(5, 100, 3, 4)
    engine.write(5, 200, 3, 4, request=8, failed=True)
    engine.write(5, 300, 3, 4, request=9)
    engine.write(6, 100, 3, 4, request=10)
    engine.write(6, 200, 3, 4, request=11)
    engine.recorder.close()
    settings = ReplaySettings(checks=("write_lost",), executor=executor)
    summary = replay(engine.path, settings=settings, report=tmp_path)
    (row,) = pq.read_table(tmp_path / "findings.parquet").to_pylist()
    assert (row["forward"], row["request_id"]) == (4, 11)
    (ended,) = [row for row in summary.coverage if row.what == "ended"]
    assert (ended.watched, ended.total, ended.words) == (4, 5, "what forwards wrote that failed in 1 of 5 forwards")


@pytest.mark.parametrize("executor", ["interval", "stepwise"])
def test_tokens_of_one_embedding_have_the_same_bytes(executor, engine, tmp_path):
    """Dummy weights that each rank draws alike: found by a hunt on two ranks of vLLM."""
    engine.write(4, 100, 3, 4)
    engine.write(5, 100, 3, 4)
    engine.write(6, 420, 9, 4)
    engine.write(5, 420, 8, 4, request=8)  # V is its own: it is in slot 6
    engine.write(4, 420, 3, 4, request=9)  # K too, where the other token stood
    engine.write(7, 200, 5, 6, request=10)
    engine.write(7, 300, 5, 7, request=11)  # K of 200: nobody has it of 300
    engine.recorder.close()
    settings = ReplaySettings(checks=("write_lost",), executor=executor)
    replay(engine.path, settings=settings, report=tmp_path)
    (row,) = pq.read_table(tmp_path / "findings.parquet").to_pylist()
    assert (row["request_id"], row["slot"]) == (11, 7)


def test_what_a_later_forward_of_the_batch_writes_to_another_slot_says_it_too(engine, tmp_path):
    engine.write(5, 100, 3, 4)
    engine.write(5, 420, 8, 4, request=8)
    engine.write(6, 420, 9, 4, request=9)
    assert engine.found(tmp_path) == []


@pytest.mark.parametrize(("dtype", "found"), [("float8_e4m3fn", 0), ("float32", 1)])
def test_zeros_of_8_bits_have_a_sign(dtype, found, tmp_path):
    """Dummy weights in an 8-bit cache leave nothing but signs."""
    engine = Engine(tmp_path / "signs.arrow", dtype=dtype)
    engine.write(5, 100, 128, 1)
    engine.write(5, 200, 128, 2)
    assert len(engine.found(tmp_path)) == found


@pytest.mark.usefixtures("pass_from_the_start")
@pytest.mark.parametrize("executor", ["interval", "stepwise"])
@pytest.mark.parametrize("options", [{}, {"flush_bytes": 1}])
def test_a_write_that_changed_nothing_is_no_witness_for_another(executor, options, tmp_path):
    """A kernel that skips a token each time leaves it in several slots with another's bytes; in one batch of events, or not."""
    engine = Engine(tmp_path / "again.arrow", **options)
    for slot in (3, 4, 5):
        engine.write(slot, 100, 3, 4)
    for slot in (3, 4, 5):
        engine.write(slot, 200, 3, 4, request=slot)
    engine.recorder.close()
    settings = ReplaySettings(checks=("write_lost",), executor=executor)
    replay(engine.path, settings=settings, report=tmp_path)
    rows = pq.read_table(tmp_path / "findings.parquet").to_pylist()
    assert [(row["forward"], row["slot"]) for row in rows] == [(3, 3), (4, 4), (5, 5)]


def test_a_pool_that_numbers_its_slots_otherwise_has_no_witness_in_the_write_itself(tmp_path):
    """Slots of a window's pool are found by a table, and what a forward names are those of the other pool."""
    lut = np.roll(np.arange(SLOTS), -1)
    engine = Engine(tmp_path / "lut.arrow", lut=lut)
    engine.write(5, 100, 3, 4)
    engine.write(5, 200, 3, 4, request=8)
    (row,) = engine.found(tmp_path)
    assert (row["forward"], row["slot"]) == (1, 6)


@pytest.mark.parametrize("executor", ["interval", "stepwise"])
@pytest.mark.parametrize(("tokens_a_row", "lost"), [(2, 1), (4, 0)])
def test_bytes_that_many_tokens_have_tell_none_from_another(tokens_a_row, lost, executor, engine, tmp_path):
    """Random weights with biases: V of 16 bits is the bias's for many a token."""
    for number in range(40):
        engine.write(10 + number, 100 + number % (10 * tokens_a_row), 100 + number, 20 + number % 10)
    engine.write(5, 300, 60, 4)
    engine.write(5, 400, 61, 4, request=8)
    engine.recorder.close()
    summary = replay(engine.path, settings=ReplaySettings(checks=("write_lost",), executor=executor), report=None)
    assert summary.findings_by_kind.get("write_lost", 0) == lost


def test_one_row_of_bytes_in_most_slots_tells_nothing_though_no_write_changes_it(engine, tmp_path):
    """Small random weights in 8 bits: V is the bias's for every token, so that no slot is a witness once each was written twice."""
    for number in range(40):
        engine.write(10 + number, 100 + number, 100 + number, 4)
    for number in range(40):
        engine.write(10 + number, 150 + number, 150 + number, 4)
    engine.write(10, 300, 150, 4)
    assert engine.found(tmp_path) == []
