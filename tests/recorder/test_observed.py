"""The page that says where each column comes from: no column is left out, and it is up to date."""

from pathlib import Path

import pytest
from kvcanary.recorder.engines.common.observed import EVERY, USES, How, missing, with_recorder
from kvcanary.recorder.engines.common.observed_page import ADAPTERS, observed_page
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import BYTE_LISTS, EVENT_KINDS, INT_LISTS, SCALARS

ROOT = Path(__file__).parent.parent.parent
TRACES = ("clean_hybrid.arrow", "sglang/kv_used_eagle_h200.arrow", "vllm/clean_hybrid_vllm.arrow")


def test_every_kind_and_every_column_of_the_schema_is_used_somewhere() -> None:
    assert set(USES) == set(EVENT_KINDS)
    used = {column for columns in USES.values() for column in columns} | set(EVERY)
    assert used == {*SCALARS, *INT_LISTS, *BYTE_LISTS}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_column_of_every_event_stands_in_an_adapters_table_once(adapter: str) -> None:
    assert missing(with_recorder(ADAPTERS[adapter])) == []


def test_a_column_that_is_left_out_shows() -> None:
    assert "forward.positions" in missing(
        {"forward": {("input_ids",): next(iter(ADAPTERS["vLLM"]["forward"].values()))}}
    )


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "internals" / "observed.md").read_text(encoding="utf-8")
    assert page == observed_page(), "run python docs/generate/observed_page.py"


@pytest.mark.parametrize(
    "trace", [*TRACES, *sorted(f"simulated/{path.name}" for path in (ROOT / "data/simulated").glob("*.arrow"))]
)
def test_traces_use_no_column_beyond_those_named(trace: str) -> None:
    for view in read_trace(ROOT / "data" / trace):
        used = {name for name, (_, default) in SCALARS.items() if view.scalar(name) != default} - set(EVERY)
        used |= {name for name in INT_LISTS if len(view.ints(name))}
        used |= {name for name in BYTE_LISTS if len(view.bytes(name))}
        assert used <= {*USES[view.kind]}, (view.kind, used - {*USES[view.kind]})


@pytest.mark.parametrize(
    ("adapter", "trace"),
    [("transformers", TRACES[0]), ("SGLang on a GPU", TRACES[1]), ("vLLM", TRACES[2])],
)
def test_what_is_not_recorded_is_in_no_trace_of_the_engine(adapter: str, trace: str) -> None:
    absent = {
        (kind, column)
        for kind, entries in with_recorder(ADAPTERS[adapter]).items()
        for columns, source in entries.items()
        if source.how is How.ABSENT
        for column in columns
        if column in INT_LISTS or column in BYTE_LISTS
    }
    for view in read_trace(ROOT / "data" / trace):
        for name in (column for kind, column in absent if kind == view.kind):
            values = view.ints(name) if name in INT_LISTS else view.bytes(name)
            assert set(values.tolist()) <= {-1}, (view.kind, name)
