"""Prefill and decode as engines of their own, joined by rooms."""

import pytest
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.pd_pair import Link, PairSettings, PdPair
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS

from ...support.engines.simulated_engines import assert_books_balance, assert_clean_pair, judge_pair

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

WORKLOAD = RandomWorkload(
    requests=25, prompt_tokens=60, output_tokens=15, max_tokens=200, arrival_rate=200.0, sharing=0.8, fork_rate=0.2
)
SHAPES = {
    "mha": {"sweep_interval": 5},
    "mla": {"shape": "mla", "page_size": 1, "num_pages": 900, "overlap": True},
    "swa": {"shape": "swa", "window": 16, "chunk_tokens": 32},
    "dsv4": {"shape": "dsv4", "window": 16},
    "eagle": {"eagle": True},
    "eagle_swa": {"eagle": True, "shape": "swa", "window": 16},
    "tight": {"num_pages": 60},
}


def run(folder, changes, settings=None, workload=WORKLOAD) -> PdPair:
    config = EngineConfig(**{"page_size": 4, "num_pages": 300, "max_running": 6, **changes})
    with PdPair(config, workload, folder, settings=settings) as pair:
        pair.run()
    return pair


def transfers(path):
    return [view for view in read_trace(path) if view.kind == "transfer"]


@pytest.mark.parametrize("shape", SHAPES)
def test_clean(shape, tmp_path):
    pair = run(tmp_path, SHAPES[shape], PairSettings(failure_rate=0.2))
    assert pair.decode.counters.finished > 20
    assert pair.prefill.counters.failed_transfers > 0
    assert_clean_pair(pair)


def test_the_two_sides_meet_by_room(tmp_path):
    pair = run(tmp_path, {})
    rooms = []
    for path, role in ((pair.prefill_path, "prefill"), (pair.decode_path, "decode")):
        with TraceReader(path) as reader:
            assert reader.header.role == role
        requests = [view for view in read_trace(path) if view.kind == "request"]
        rooms.append([view.scalar("room") for view in requests])
        assert len({view.scalar("request_id") for view in requests}) == len(requests)
        assert {view.scalar("room") for view in transfers(path)} <= set(rooms[-1])
    assert rooms[0] == rooms[1]
    assert min(rooms[0]) >= 0
    sent, received = (
        [v.ints("slot_start").tolist() for v in transfers(p)] for p in (pair.prefill_path, pair.decode_path)
    )
    assert sent != received
    assert all(view.scalar("num_bytes") > 0 for view in transfers(pair.decode_path) if view.scalar("status") == "end")


def test_transfers_take_their_time_and_overlap_one_another(tmp_path):
    pair = run(tmp_path, {}, PairSettings(min_steps=3, max_steps=6))
    under_way, most, forwards = set(), 0, 0
    for view in read_trace(pair.prefill_path):
        if view.kind == "transfer":
            (under_way.add if view.scalar("status") == "start" else under_way.remove)(view.scalar("room"))
            most = max(most, len(under_way))
        if view.kind == "forward" and view.ints("request_ids").size:
            forwards += bool(under_way)
    assert not under_way
    assert most > 1
    assert forwards > 5


def test_a_window_sends_what_is_still_read(tmp_path):
    pair = run(tmp_path, {"shape": "swa", "window": 16})
    lengths = {}
    for view in transfers(pair.decode_path):
        key = view.scalar("room"), int(view.ints("slot_group")[0])
        lengths[key] = (int(view.ints("prefix_lens")[0]), int(view.ints("slot_count").sum()))
    assert {start for (_, group), (start, _) in lengths.items() if group == 0} == {0}
    for (room, group), (start, count) in lengths.items():
        if group == 1:
            whole = lengths[room, 0][1]
            assert start + count == whole
            assert start == max(0, whole - 16) // 4 * 4


def test_no_retry_left_aborts_both_sides(tmp_path):
    pair = run(tmp_path, {}, PairSettings(failure_rate=1.0, retries=1))
    assert pair.prefill.counters.aborted == pair.decode.counters.aborted == pair.prefill.counters.requests
    assert pair.prefill.counters.failed_transfers == 2 * pair.prefill.counters.requests
    prefill, decode = judge_pair(pair)
    assert prefill.verdict.value == "clean"
    assert decode.first_finding is None  # and nothing to check: no request ever ran there
    for engine in (pair.prefill, pair.decode):
        assert_books_balance(engine.recorder.path)


def test_neighbours_overwritten_are_seen(tmp_path):
    class WrongStride(Link):
        def land(self, part):
            super().land(part)
            pool = self.decode.memory.pools[part.group]
            pool.stream_bytes(0)[part.dst[1::2]] = pool.stream_bytes(0)[part.dst[: part.dst.size // 2 * 2 : 2]]

    config = EngineConfig(page_size=4, num_pages=300)
    with PdPair(config, WORKLOAD, tmp_path) as pair:
        pair.link.__class__ = WrongStride
        pair.run()
    prefill, decode = judge_pair(pair)
    assert prefill.verdict.value == "clean"
    assert decode.verdict.value == "corrupt"


def test_same_seed_same_events(tmp_path):
    def events(folder, seed):
        pair = run(folder, {"seed": seed}, PairSettings(failure_rate=0.3))
        return [
            {name: view.scalar(name) for name in SCALARS if name != "time_ns"}
            | {name: view.ints(name).tolist() for name in INT_LISTS}
            | {name: view.bytes(name).tobytes() for name in BYTE_LISTS}
            for path in (pair.prefill_path, pair.decode_path)
            for view in read_trace(path)
        ]

    first = events(tmp_path / "a", 4)
    assert events(tmp_path / "b", 4) == first
    assert events(tmp_path / "c", 5) != first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_steps": 0}, "min_steps is 0, expected `int` >= 1"),
        ({"min_steps": 6}, "transfers take 6 to 5 steps"),
        ({"failure_rate": 1.5}, "failure_rate is 1.5"),
        ({"retries": -1}, "retries is -1"),
    ],
)
def test_settings_say_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        PairSettings(**changes)
