"""What attention got, in SQL: lengths beside the batch's, slots that differ; nulls for traces from before there was any."""

from pathlib import Path

from kvcanary.analysis import open_traces
from kvcanary.recorder.capture.forward_input import AttentionInput, ForwardInput, TableRead
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader

from ..support.places import DATA


def test_lengths_and_slots_of_attention(tmp_path: Path) -> None:
    header = TraceHeader(groups=(PoolGroup(name="full", num_slots=32),), tables=(StateTable(rows=4, width=16),))
    with Recorder(tmp_path / "t.arrow", header) as recorder:
        recorder.before_forward(
            ForwardInput(
                mode="decode",
                req_pool_indices=[1, 2],
                request_ids=[11, 12],
                prefix_lens=[3, 1],
                extend_lens=[1, 1],
                input_ids=[1, 2],
                positions=[3, 1],
                out_cache_loc=([7, 8],),
                reads=(TableRead(starts=[0, 0], counts=[3, 1], slots=[3, 4, 5, 6]),),
            )
        )
        read = TableRead(starts=[0, 0], counts=[4, 2], slots=[3, 20, 21, 7, 6, 22])
        recorder.attention(AttentionInput(seq_lens=[4, -1], query_lens=[1, 1], slots=(read,)))
        recorder.after_forward()
    traces = [tmp_path / "t.arrow", DATA / "clean_llama.arrow"]  # one written before there were such columns
    with open_traces(*traces) as session:
        lens = session.sql("select request_id, attention_seq_len, attention_query_len from forward_requests "
                           "where trace = 't.arrow' or trace = 't' order by batch_index").to_pylist()  # fmt: skip
        assert [tuple(row.values()) for row in lens] == [(11, 4, 1), (12, None, 1)]
        slots = session.sql(
            "select request_id, pool_group, position, slot from attention_slots order by all"
        ).to_pylist()
        assert [tuple(row.values()) for row in slots] == [(11, 0, 1, 20), (11, 0, 2, 21), (12, 0, 1, 22)]
        (old,) = session.sql("select count(*) as n, count(attention_seq_len) as told from forward_requests "
                             "where trace like 'clean%'").to_pylist()  # fmt: skip
        assert old["n"] > 0
        assert old["told"] == 0
