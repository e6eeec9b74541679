"""The recorder's contract with an engine: any arrays, any shapes, and what it says of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.forward_input import BlockTable, ForwardInput, TableRead, TruthTokens
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader, read_trace

from ..support.engines.documented_engine import a_forward, contents, judged, run_requests, toy_engine

ARRAYS = ("req_pool_indices", "request_ids", "prefix_lens", "extend_lens", "input_ids", "positions")


def _strided(values: Any, dtype: Any) -> np.ndarray:
    buffer = np.zeros((np.size(values), 3), dtype)
    buffer[:, 1] = values
    return buffer[:, 1]


KINDS = {
    "int64": lambda values: np.array(values, np.int64),
    "int32": lambda values: np.array(values, np.int32),
    "strided": lambda values: _strided(values, np.int32),
    "torch int64": lambda values: torch.tensor(np.array(values, np.int64)),
    "torch int32": lambda values: torch.tensor(np.array(values, np.int32)),
    "torch strided": lambda values: torch.from_numpy(_strided(values, np.int64).copy())[:, None].repeat(1, 2)[:, 0],
    "torch 2-D": lambda values: torch.tensor(np.array(values, np.int32))[None, :],
    "list": lambda values: np.array(values).tolist(),
}


class Converting:
    """Hands everything on as another kind of array, and overwrites those buffers as soon as the call is back."""

    def __init__(self, recorder: Recorder, kind: str, *, read: str = "table") -> None:
        self._recorder, self._convert, self._read, self._lent = recorder, KINDS[kind], read, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)

    def _lend(self, values: Any) -> Any:
        self._lent.append(self._convert(values))
        return self._lent[-1]

    def _poison(self) -> None:
        for lent in self._lent:
            if isinstance(lent, list):
                lent[:] = [-99] * len(lent)
            else:
                lent[...] = -99
        self._lent.clear()

    def before_forward(self, told: ForwardInput) -> None:
        (table,) = told.reads
        read: Any = table
        if self._read == "rows":
            prefix = np.asarray(told.prefix_lens)
            slots = [table[row, :p] for row, p in zip(told.req_pool_indices, prefix, strict=True)]
            read = TableRead(
                starts=self._lend(np.zeros_like(prefix)),
                counts=self._lend(prefix),
                slots=self._lend(np.concatenate(slots)),
            )
        elif self._read == "blocks":
            read = BlockTable(blocks=table[told.req_pool_indices].copy(), block_size=1)
        elif self._read == "torch":
            read = torch.from_numpy(table.copy())
        assert told.truth is not None
        self._recorder.before_forward(
            ForwardInput(
                mode=told.mode,
                out_cache_loc=(self._lend(told.out_cache_loc[0]),),
                reads=(read,),
                truth=TruthTokens(flat=self._lend(told.truth.flat), lens=self._lend(told.truth.lens)),
                **{name: self._lend(getattr(told, name)) for name in ARRAYS},
            )
        )
        self._poison()

    def after_forward(self, *, sampled_tokens: Any, sampled_lens: Any) -> None:
        self._recorder.after_forward(sampled_tokens=self._lend(sampled_tokens), sampled_lens=self._lend(sampled_lens))
        self._poison()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the engine records when it hands over what it has."""
    path = tmp_path_factory.mktemp("plain") / "trace.arrow"
    engine = toy_engine(path)
    run_requests(engine)
    engine.recorder.close()
    assert judged(path).violations == 0
    return contents(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", ["table", "rows", "blocks", "torch"])
def test_any_kind_of_array_gives_the_same_trace(
    tmp_path: Path, plain: list[dict[str, Any]], kind: str, read: str
) -> None:
    path = tmp_path / "trace.arrow"
    engine = toy_engine(path, lambda recorder: Converting(recorder, kind, read=read))
    run_requests(engine)
    engine.recorder.close()
    assert engine.recorder.stats().off == "closed"
    assert contents(path) == plain


def test_the_reference_backend_gives_the_same_trace(tmp_path: Path, plain: list[dict[str, Any]]) -> None:
    engine = toy_engine(tmp_path / "trace.arrow", backend="reference")
    run_requests(engine)
    engine.recorder.close()
    assert contents(tmp_path / "trace.arrow") == plain


def test_healthy_forwards_carry_no_table_changes(plain: list[dict[str, Any]]) -> None:
    forwards = [event for event in plain if event["kind"] == "forward"]
    assert len(forwards) > 20
    assert not any(event["table_row"] or event["kv_change_slot"] for event in forwards)
    # Nor truth changes past the prompt: sampled tokens are taken over by both sides.
    for event in forwards:
        if event["mode"] == "decode":
            assert event["truth_row"] == []


# ---- construction and the end ----


def test_a_header_without_its_sources_is_refused(tmp_path: Path) -> None:
    stream = KvStream(half="K", bytes_per_token=32, capture_bytes=16)
    group = PoolGroup(name="full", num_slots=4, streams=(stream,))
    header = TraceHeader(groups=(group,), tables=(StateTable(rows=2, width=4),))
    source = KvSource(tensor=np.zeros((4, 48), np.uint8), page_size=1, bytes_per_token=48, read_bytes=16)
    with pytest.raises(ValueError, match=r"kv_sources has \(group, stream\) keys \[\]"):
        Recorder(tmp_path / "a.arrow", header)
    with pytest.raises(ValueError, match="48 bytes a token, the header says 32"):
        Recorder(tmp_path / "a.arrow", header, kv_sources={(0, 0): source})
    with pytest.raises(ValueError, match="kv_watch_every is -1"):
        Recorder(tmp_path / "a.arrow", header, kv_watch_every=-1)
    assert not (tmp_path / "a.arrow").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.arrow").write_text("precious")
    with pytest.raises(TraceError):
        toy_engine(tmp_path / "trace.arrow")
    assert (tmp_path / "trace.arrow").read_text() == "precious"


def test_the_header_says_how_it_was_captured(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow", kv_watch_every=3, compression="zstd")
    engine.recorder.close()
    with TraceReader(tmp_path / "trace.arrow") as reader:
        capture = reader.header.capture
        assert (capture.kv_watch_every, capture.truth_tokens, capture.compression) == (3, True, "zstd")
        assert reader.header.trace_id
        assert reader.header.created_ns > 1_700_000_000_000_000_000


def test_close_is_final_and_may_be_repeated(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    with engine.recorder as recorder:
        engine.add(1, "one", [3, 4], 4)
        engine.step()
        recorder.before_forward(a_forward())
    recorder.close()
    recorder.mark("too late")
    events = list(read_trace(tmp_path / "trace.arrow"))
    assert [event.kind for event in events] == ["request", "forward", "forward"]
    assert "ended during this forward" in events[-1].scalar("note")


def test_a_forward_without_an_end_is_said(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    engine.recorder.before_forward(a_forward())
    engine.recorder.before_forward(a_forward())
    engine.recorder.after_forward(note="the model raised")
    engine.recorder.close()
    notes = [event.scalar("note") for event in read_trace(tmp_path / "trace.arrow")]
    assert notes == ["the engine did not call after_forward()", "the model raised"]


def test_times_never_run_backwards(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    run_requests(engine)
    engine.recorder.close()
    times = [event.time_ns for event in read_trace(tmp_path / "trace.arrow")]
    assert times == sorted(times)


# ---- shapes ----


@pytest.mark.parametrize("truth", [None, TruthTokens(flat=[], lens=[])])
def test_an_empty_batch(tmp_path: Path, truth: TruthTokens | None) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    nothing: dict[str, Any] = dict.fromkeys(ARRAYS, ())
    engine.recorder.before_forward(a_forward(mode="idle", out_cache_loc=((),), truth=truth, **nothing))
    engine.recorder.after_forward(sampled_tokens=[], sampled_lens=[])
    engine.recorder.close()
    (event,) = read_trace(tmp_path / "trace.arrow")
    assert event.scalar("mode") == "idle"
    assert judged(tmp_path / "trace.arrow").forwards == 1


def test_padding_rows_and_tokens_come_last_and_change_nothing(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    table = np.zeros((5, 64), np.int32)
    for forward, (ids, locs) in enumerate([([5, 6, 0, 0], [1, 2, 0, 0]), ([7, 0, 0], [3, 0, 0])]):
        new = 2 - forward
        engine.recorder.before_forward(
            a_forward(
                req_pool_indices=[1, 0, 0],
                request_ids=[1, -1, -1],
                prefix_lens=[2 * forward, 9, 0],
                extend_lens=[new, 1, 1],
                input_ids=ids,
                positions=[*range(2 * forward, 2 * forward + new), 0, 0],
                out_cache_loc=(locs,),
                reads=(table,),
                truth=TruthTokens(flat=[5, 6, 7][: 2 + forward], lens=[2 + forward, 0, 0]),
            )
        )
        engine.recorder.after_forward(sampled_tokens=[7, 1, 1], sampled_lens=[1, 1, 1])
        table[1, :3] = [1, 2, 3]
    state = engine.recorder.state
    engine.recorder.close()
    assert not state.tables.req_to_token[0][0].any()
    assert not state.tables.truth[0].any()
    assert [event["table_row"] for event in contents(tmp_path / "trace.arrow")] == [[], []]
    summary = judged(tmp_path / "trace.arrow")
    assert (summary.violations, summary.findings, summary.verified) == (0, 0, 8)


def test_slots_rows_and_positions_beyond_everything_are_recorded_as_said(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    big = np.iinfo(np.int64).max
    told = a_forward(
        req_pool_indices=[1, 77, -3],
        request_ids=[1, 2, 3],
        prefix_lens=[63, 5, 2],
        extend_lens=[3, 1, 1],
        input_ids=[1, 2, big, 4, 5],
        positions=[63, -1, big, 0, 1],
        out_cache_loc=([big, -7, 1 << 40, 129, 3],),
        truth=TruthTokens(flat=[1, big, 3], lens=[1, 1, 1]),
    )
    for _ in range(2):
        engine.recorder.before_forward(told)
        said = {"sampled_logprobs": [-1.5, None, -np.inf], "logprobs_kind": "processed"}
        engine.recorder.after_forward(sampled_tokens=[big, 1, 1], sampled_lens=[1, 1, 1], **said)
    assert engine.recorder.stats().off == ""
    engine.recorder.close()
    first, second = contents(tmp_path / "trace.arrow")
    said = np.array(first["sampled_logprobs"])
    np.testing.assert_array_equal((said & 0xFFFFFFFF).astype(np.uint32).view(np.float32), [-1.5, np.nan, -np.inf])
    assert set((said >> 32).tolist()) == {2}
    assert first["out_cache_loc"] == second["out_cache_loc"] == [big, -7, 1 << 40, 129, 3]
    assert first["input_ids"][2] == big
    assert first["kv_bytes"][: 4 * 16] == [0] * 64  # none of these four slots exists
    judged(tmp_path / "trace.arrow")


def test_a_table_swap_is_a_run_of_changes_and_so_is_its_repair(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    engine.add(1, "one", [3, 4, 5, 6, 7, 8], 8)
    engine.add(2, "two", [9, 8, 7, 6, 5, 4], 8)
    engine.step()
    engine.step()
    saved = engine.req_to_token[1, 2:4].copy()
    engine.req_to_token[1, 2:4] = engine.req_to_token[2, 2:4]
    engine.step()
    engine.req_to_token[1, 2:4] = saved
    engine.step()
    engine.recorder.close()
    forwards = [event for event in contents(tmp_path / "trace.arrow") if event["kind"] == "forward"]
    runs = [list(zip(f["table_row"], f["table_start"], f["table_count"], strict=True)) for f in forwards]
    assert runs == [[], [], [(1, 2, 2)], [(1, 2, 2)]]
    assert forwards[3]["table_slots"] == saved.tolist()
    summary = judged(tmp_path / "trace.arrow")
    assert summary.violations > 0
    assert summary.first_violation["forward"] == 2
